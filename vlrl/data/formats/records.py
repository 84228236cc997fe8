"""Files and folders -> records, whatever their kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlrl.data.formats.files import Record, file_records, shallow
from vlrl.data.formats.folders import folder_records


def records(path: Path, is_record: Callable[[Mapping[str, Any]], Any] = lambda document: False) -> list[Record]:
    """Returns the records of a file, or of a folder.

    `is_record` tells whether a .json document that is one object is a record itself, and not a list of records under
    some name. Raises DataError when the path cannot be read as a whole.
    """
    entries = folder_records(path) if os.path.isdir(path) else file_records(path, is_record)
    return [one._replace(record=shallow(one.record)) for one in entries]
