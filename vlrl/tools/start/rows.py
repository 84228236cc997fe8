"""Writes rows that are Python objects to a file that a run can read, with their pictures beside it.

    path, roots = rows_file([{"image": PIL.Image, "question": "...", "answer": "..."}], "data", cache)

The names of the files are hashes of their contents, so that the same rows give the same file in every process, and a
run that is resumed finds what it began with."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlrl.errors import ConfigError
from vlrl.store.files import disk_errors, replacing, suffix_of

_PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""Modes that a PNG file stores without loss."""
_MEDIA = ("image", "images", "video", "videos")


def rows_file(source: Any, name: str, cache: Path) -> tuple[str, list[str]]:
    """Writes rows (an iterable of mappings, a datasets.Dataset, a pandas.DataFrame, a pyarrow.Table) as a .jsonl file
    below `cache`. Returns its path, and the folders of the media files that the rows name.

    `name` is the argument with the rows, for messages. Raises ConfigError naming row and column of a value that a row
    cannot hold."""
    folder = cache / "rows"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        writer, count, digest = _Writer(folder), 0, hashlib.sha256()
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", encoding="utf-8", delete=False) as file:
            try:
                for count, row in enumerate(_records(source, name), 1):
                    line = writer.line(row, f"{name}: row {count - 1}")
                    digest.update(line.encode())
                    file.write(line)
                if not count:
                    raise ConfigError(f"{name}: there are no rows in this {type(source).__name__}")
            except BaseException:
                os.unlink(file.name)
                raise
        path = folder / f"{digest.hexdigest()[:16]}.jsonl"
        os.replace(file.name, path)
    return str(path), writer.roots()


def _records(source: Any, name: str) -> Iterator[Any]:
    if hasattr(source, "to_pylist"):  # pyarrow
        return iter(source.to_pylist())
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas
        return iter(source.to_dict("records"))
    if hasattr(source, "features") and hasattr(source, "cast_column"):  # datasets
        return iter(_with_bytes(source))
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise ConfigError(f"{name}={type(source).__name__}: give the name of a file or of a data set on the Hub, or "
                          "rows as a list of dictionaries, a datasets.Dataset or another iterable of dictionaries")
    return iter(source)


def _with_bytes(source: Any) -> Any:
    """A datasets.Dataset whose pictures come as their encoded bytes, so that they are stored without decoding."""
    import datasets

    for column, feature in (source.features or {}).items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, datasets.Image):
            source = source.cast_column(column, datasets.Image(decode=False))
        elif isinstance(inner, datasets.Image):
            source = source.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return source


class _Writer:
    def __init__(self, folder: Path):
        self._folder = folder
        self._parents: set[str] = set()

    def line(self, row: Any, where: str) -> str:
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where} is a {type(row).__name__}: every row must be a dictionary of columns")
        values = {str(name): self._value(value, f"{where}, column {name!r}", str(name) in _MEDIA)
                  for name, value in row.items()}
        return json.dumps(values, ensure_ascii=False) + "\n"

    def roots(self) -> list[str]:
        """The folder that contains all media files that the rows name by path; [] if there are none."""
        return [os.path.commonpath(self._parents)] if self._parents else []

    def _value(self, value: Any, where: str, media: bool) -> Any:
        if isinstance(value, Image.Image):
            return self._stored(_encoded(value))
        if isinstance(value, (bytes, bytearray)) and media:
            return self._stored(bytes(value))
        if isinstance(value, Mapping):
            if isinstance(value.get("bytes"), bytes) and set(value) <= {"bytes", "path"}:  # as datasets and parquet
                return self._stored(value["bytes"])
            return {str(k): self._value(v, where, media) for k, v in value.items()}
        if isinstance(value, np.ndarray) and media and value.ndim == 3 and value.dtype == np.uint8:
            return self._stored(_encoded(Image.fromarray(value)))
        if isinstance(value, (np.ndarray, np.generic)):
            return self._value(value.tolist(), where, media)
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._value(v, where, media) for v in value]
        if isinstance(value, os.PathLike):
            return self._path(os.fspath(value))
        if isinstance(value, str):
            return self._path(value) if media else value
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where} holds {value}: replace it by None or a number")
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        raise ConfigError(f"{where} holds a {type(value).__name__}: a row holds texts, numbers, lists, dictionaries, "
                          "and PIL pictures")

    def _path(self, value: str) -> str:
        if not os.path.exists(value):
            return value
        self._parents.add(os.path.dirname(os.path.abspath(value)))
        return os.path.abspath(value)

    def _stored(self, data: bytes) -> str:
        name = f"{hashlib.sha256(data).hexdigest()[:32]}{suffix_of(data[:16])}"
        path = self._folder / "media" / name
        if not path.exists():
            with replacing(path, sync=False) as temporary:
                temporary.write_bytes(data)
        return f"media/{name}"


def _encoded(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    (picture if picture.mode in _PNG else picture.convert("RGB")).save(out, "PNG", compress_level=1)
    return out.getvalue()
