"""Files and folders -> records, whatever their kind."""

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
    """Returns the records of a file, or of a folder; media that they hold lie in a file in the folder `cache`, so that
    memory holds one row's at a time.

    `is_record` tells whether a .json document that is one object is a record itself, and not a list of records under
    some name. Raises DataError when the path cannot be read as a whole.
    """
    entries = folder_records(path) if os.path.isdir(path) else file_records(path, is_record)
    aside = _aside(cache)
    return [one._replace(record=_light(path, shallow(one.record), aside)) for one in entries]


def _aside(cache: str) -> SpillFile | None:
    folder = cache_folder(cache)
    try:
        return SpillFile(folder)
    except OSError as error:
        log.warning("media inside rows are held in memory, for nothing can be written to %s: %s. Name another folder "
                    "with data.cache", folder, error.strerror or error)
        return None


def _light(path: Path, record: dict[str, Any] | DataError, aside: SpillFile | None) -> dict[str, Any] | DataError:
    if isinstance(record, DataError) or aside is None:
        return record
    try:
        return spill(record, aside)
    except OSError as error:
        raise DataError(f"{path}: the media inside its rows do not fit beside the cache: {error.strerror or error}. "
                        "Name a larger place with data.cache (XDG_CACHE_HOME)") from None
