"""Images and videos embedded in rows: bytes in a table cell, base64 strings, or pixel values. Imports no torch."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlrl.errors import DataError

_BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR)[\w+/=\s]{40}")
"""Matches the beginning of a base64-encoded JPEG, PNG, GIF or WebP image."""
_BEGINS = ("/9j/", "ivbo", "r0lg", "uklg", "data")  # the first four characters of these and of data URLs
_DATA_URL = re.compile(r"data:(?:image|video)/[\w.+-]{1,80};base64,", re.IGNORECASE)
MEDIA_HASH = re.compile(r"sha256:[0-9a-f]{64}")
"""Matches the hash that replaces embedded media in a sample's row."""
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"\x1aE\xdf\xa3")
_STILL = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"II*\0", b"MM\0*")  # formats of still images
_LARGE = 4096
"""Embedded media of at least this many bytes are moved to a SpillFile; smaller media stay in their row."""
_STILL_NAME = re.compile(r"\.(?:png|jpe?g|bmp|tiff?|ppm)$|^data:image/(?:png|jpe?g|bmp|tiff?);", re.IGNORECASE)


class SpillFile:
    """An unnamed temporary file that holds embedded media, so that rows in memory stay small. It vanishes with the
    process."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.descriptor, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self.descriptor)
        self._end = 0

    def put(self, data: bytes) -> EmbeddedMedia:
        """Appends the bytes of one image or video. Returns an EmbeddedMedia that refers to these bytes in the file.
        Raises OSError when the disk is full."""
        begin, rest = self._end, memoryview(data)
        while rest:
            written = os.pwrite(self.descriptor, rest, self._end)
            self._end, rest = self._end + written, rest[written:]
        return EmbeddedMedia(StoredBytes(self, begin, len(data)))


class StoredBytes(NamedTuple):
    """A byte range of a SpillFile."""

    file: SpillFile
    begin: int
    count: int


@dataclass(frozen=True, eq=False)
class EmbeddedMedia:
    """An image or video embedded in a row, used as the `source` of a Media. Objects with the same bytes are equal."""

    content: bytes | StoredBytes = field(repr=False)
    """The bytes of the image or video, or their position in a SpillFile."""
    row: str = ""
    """Id of the row that contains the image or video, for error messages."""

    @property
    def data(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        return os.pread(self.content.file.descriptor, self.content.count, self.content.begin)

    @property
    def count(self) -> int:
        """Size of the image or video in bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.count

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddedMedia) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedMedia, (self.data, self.row)  # other processes cannot read the spill file

    def __str__(self) -> str:
        return f"sha256:{self.sha256}"

    @property
    def name(self) -> str:
        """A description of this image or video for error messages."""
        whose = f"row {self.row!r}" if self.row else "the row"
        return f"media inside {whose} ({self.count} bytes, {str(self)[:23]}...)"

    @contextmanager
    def file(self) -> Iterator[Path]:
        """Context manager that yields the path of a temporary file with the bytes, for video decoders, which read only
        files. A DataError raised inside the block names the row instead of the temporary file."""
        with tempfile.NamedTemporaryFile(prefix="vlrl-") as file:
            file.write(self.data)
            file.flush()
            try:
                yield Path(file.name)
            except DataError as error:
                raise DataError(re.sub(rf"(?:media file )?{re.escape(file.name)}", self.name, str(error))) from None


def decode_base64(text: str) -> bytes | None:
    """Decodes a data URL or the bare base64 of an image to bytes; returns None for any other string. Raises DataError
    for a malformed data URL."""
    head = _DATA_URL.match(text)
    if not head and not _BASE64.match(text):
        return None
    try:
        return base64.b64decode("".join(text[head.end() if head else 0:].split()), validate=True)
    except ValueError as error:
        if not head:
            return None
        raise DataError(f"{text[:head.end()]}... is not valid base64: {error}") from None


def media_item(value: Any, row: str = "") -> Any:
    """Converts one value of a row's image or video field to an EmbeddedMedia if the value holds the content, else
    returns the path or URL.

    `value` is bytes, base64, pixel values, a path, or an object with 'bytes' or 'path'. `row` is the id of the row.
    Raises DataError for any other object, and for malformed content."""
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path") or value.get("url")
        if not data and not path:
            raise DataError(f"an object with {', '.join(map(str, value)) or 'nothing'} holds no media: it needs "
                            "'bytes' or 'path'")
        value = data or path
    if isinstance(value, EmbeddedMedia):
        return EmbeddedMedia(value.content, row)
    if is_pixels(value):
        return EmbeddedMedia(_netpbm(value), row)
    data = decode_base64(value) if isinstance(value, str) else value
    return EmbeddedMedia(bytes(data), row) if isinstance(data, (bytes, bytearray)) else value


def video_items(value: Any, row: str = "") -> list[Any]:
    """Converts a row's video field to a list of videos. Each video is a media item (see `media_item`) or a list of
    frames. A list that holds only still images is one video given as frames. `row` is the id of the row."""
    several = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, (list, tuple)) and several and all(map(_is_still, several)):
        return [[media_item(frame, row) for frame in several]]
    return [[media_item(frame, row) for frame in one] if isinstance(one, (list, tuple)) else media_item(one, row)
            for one in several]


def image_items(value: Any, row: str = "") -> list[Any]:
    """Converts a row's image field, a single image or a list of images, to a list of media items (see `media_item`).
    `row` is the id of the row."""
    several = isinstance(value, (list, tuple)) and not is_pixels(value)
    return [media_item(one, row) for one in (value if several else [value])]


def is_pixels(value: Any) -> bool:
    """Whether a value looks like a list of pixel values: [height][width] or [height][width][channels]."""
    for _ in range(2):
        value = value[0] if isinstance(value, (list, tuple)) and value else None
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(value, int)


def without_bytes(value: Any) -> Any:
    """Returns a row, or a value of a row, with media replaced by their hashes and other bytes by their length."""
    if isinstance(value, str):
        return _short(value) if value[:4].lower() in _BEGINS and len(value) > 40 else value
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Mapping):
        return {k: without_bytes(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_bytes(v) for v in value]
    if isinstance(value, (bytes, bytearray)):
        return str(EmbeddedMedia(bytes(value))) if _known(value) else f"<{len(value)} bytes>"
    return str(value) if isinstance(value, EmbeddedMedia) else value


def spill(value: Any, spill_file: SpillFile) -> Any:
    """Moves large embedded media in a value of a row into `spill_file`; returns the value with references to the file.

    Embedded media are bytes, `{"bytes": ...}` objects and base64 strings. Malformed base64 is left unchanged. Raises
    OSError when the disk is full."""
    if isinstance(value, str):
        try:
            data = decode_base64(value) if len(value) >= _LARGE and value[:4].lower() in _BEGINS else None
        except DataError:
            data = None
        return value if data is None else spill_file.put(data)
    if isinstance(value, (bytes, bytearray)):
        return spill_file.put(bytes(value)) if len(value) >= _LARGE and _known(value) else value
    if isinstance(value, dict):
        data = value.get("bytes")
        if isinstance(data, (bytes, bytearray)) and len(data) >= _LARGE:
            return spill_file.put(bytes(data))
        return {k: spill(v, spill_file) for k, v in value.items()}
    numbers = not isinstance(value, list) or not value or isinstance(value[0], (int, float)) or is_pixels(value)
    return value if numbers else [spill(v, spill_file) for v in value]


def _known(data: bytes | bytearray) -> bool:
    return data.startswith(_MAGIC) or data[4:8] == b"ftyp"


def _short(text: str) -> str:
    try:
        data = decode_base64(text)
    except DataError:
        data = b""
    return text if data is None else str(EmbeddedMedia(data))


def _is_still(item: Any) -> bool:
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    item = item.data if isinstance(item, EmbeddedMedia) else item
    if isinstance(item, (bytes, bytearray)):
        return item.startswith(_STILL)
    return bool(_STILL_NAME.search(item[:200] if item[:5] == "data:" else item)) if isinstance(
        item, str) else is_pixels(item)


def _netpbm(rows: Any) -> bytes:
    try:
        pixels = np.array(rows)
    except (ValueError, OverflowError):  # rows of different lengths, numbers beyond 64 bits
        pixels = np.zeros(0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    shape, whole = list(pixels.shape), pixels.dtype.kind in "iu" and pixels.size > 0
    if not (len(shape) == 2 or shape[2:] == [3]) or not whole or not 0 <= pixels.min() <= pixels.max() <= 255:
        raise DataError("an image given as numbers must be [height][width], or [height][width][1 or 3], of whole "
                        "numbers from 0 to 255")
    head = f"{'P5' if len(shape) == 2 else 'P6'} {shape[1]} {shape[0]} 255\n"
    return head.encode() + pixels.astype(np.uint8).tobytes()
