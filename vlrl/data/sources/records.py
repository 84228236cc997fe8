"""Reads the records of a file or folder of any kind."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlrl.data.embedded import SpillFile, spill
from vlrl.data.sources.files import FileRecord, file_records, shallow
from vlrl.data.sources.folders import folder_records
from vlrl.errors import DataError
from vlrl.store.files import cache_folder

log = logging.getLogger(__name__)


def records(path: Path, is_record: Callable[[Mapping[str, Any]], Any] = lambda document: False,
            cache: str = "") -> list[FileRecord]:
    """Returns the records of a file or folder. Embedded media are moved to a file in the folder `cache`, to save
    memory.

    `is_record(document)` decides whether a .json file with a single object is itself a record, and not a list of
    records under some key. Raises DataError if the path cannot be read as a whole."""
    entries = folder_records(path) if os.path.isdir(path) else file_records(path, is_record)
    folder = cache_folder(cache)
    try:
        file = SpillFile(folder)
    except OSError as error:
        log.warning("media inside rows are held in memory, because %s cannot be written: %s. Set data.cache to another "
                    "folder", folder, error.strerror or error)
        return [one._replace(record=shallow(one.record)) for one in entries]
    try:
        return [one._replace(record=record if isinstance(record := shallow(one.record), DataError) else spill(
            record, file)) for one in entries]
    except OSError as error:
        raise DataError(f"{path}: the media inside its rows do not fit on the disk of the cache: "
                        f"{error.strerror or error}. Set data.cache (XDG_CACHE_HOME) to a larger disk") from None
