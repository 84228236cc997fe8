"""Reads fields of records in other projects' formats: names, numbers, boxes, sizes and media paths.

A value that cannot be read raises a DataError that names the field and the value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.box_forms import BoxForm, parse_box_form
from vlrl.data.embedded import EmbeddedMedia, decode_base64, is_pixels
from vlrl.data.values import LONGEST, number, pixels, short, unpacked, xywh
from vlrl.errors import DataError
from vlrl.types import Record, Row

IMAGE = ("image", "image_path", "img_path", "img_filename", "image_filename", "image_file", "file_name", "filename",
         "img", "image_name", "screenshot", "images", "Image", "imgname", "img_name", "image_paths", "image_urls",
         "image_list", "query_image")
"""Fields that may hold the path of an image."""
VIDEO = ("video", "video_path", "video_file", "video_name", "videos", "clip", "clip_path", "vid", "videoID",
         "video_id", "video_idx", "vid_name")
"""Fields that may hold the path of a video, or its id."""
CORNERS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("x_min", "y_min", "x_max", "y_max"),
            ("left", "top", "right", "bottom"), ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"))
SIDES = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("left", "top", "width", "height"),
          ("bbox_x", "bbox_y", "bbox_w", "bbox_h"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"))
"""Groups of four columns with a box: upper left corner, width and height. (CORNERS: groups with two corners.)"""
PLACES = frozenset(name for names in (*CORNERS, *SIDES) for name in names)
_SIZES = (("width", "height"), ("image_width", "image_height"), ("img_width", "img_height"), ("img_w", "img_h"))
_PAIRS = ("image_size", "img_size", "original_size", "resolution")
_PARTS = 32  # trailing parts of an absolute path that are searched under the root
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_IMAGE_SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


@dataclass(frozen=True)
class RecordSource:
    """Context of a record: the default id of its rows, the root folder of its media, and the format of its boxes."""

    id: str = "row"
    root: Path | None = None
    roots: tuple[Path, ...] = ()
    """Additional folders (data.media_roots) in which absolute media paths may lie."""
    boxes: str = "auto"
    """Form of boxes and points in the record (data.boxes)."""

    @property
    def form(self) -> BoxForm:
        return parse_box_form(self.boxes)

    @property
    def scaled_later(self) -> bool:
        """Whether data.boxes names another unit than pixels, so that `boxes_to_pixels` scales the boxes."""
        return self.form.unit not in ("", "pixels")

    def corners(self, values: Sequence[float]) -> list[float]:
        """Converts [x, y, width, height] to corners. Returns the unchanged values if data.boxes names a layout, because
        `boxes_to_pixels` then converts them."""
        return list(values) if self.form.layout else xywh(values)

    def pixels(self, values: list[float], name: str) -> list[float]:
        """Checks that coordinates of a format that uses pixels can be pixels, unless data.boxes names their unit."""
        return values if self.scaled_later else pixels(values, name)

    def path(self, value: Any) -> Any:
        """Returns a media path of a record, relative to the root folder if possible; other values (such as bytes)
        unchanged.

        An absolute path of another machine is shortened to its longest ending that exists under the root folder; if no
        ending exists, only the leading "/" is removed. A relative path that leaves the root is unchanged, and is
        rejected when the sample is made."""
        if not isinstance(value, str):
            return value
        value = value.removeprefix("file://")
        text = value.replace("\\", "/") if "\\" in value and "/" not in value else value
        if not text.startswith("/") and not re.match(r"[A-Za-z]:/", text):
            return text
        root = os.path.realpath(self.root or Path.cwd())
        if text.startswith(f"{root}/"):
            return text[len(root) + 1:]
        if any(Path(os.path.realpath(text.replace("\0", ""))).is_relative_to(folder) for folder in self.roots):
            return text
        parts = [part for part in re.sub(r"^[A-Za-z]:", "", text).split("/") if part]
        ends = ("/".join(parts[i:]) for i in range(max(0, len(parts) - _PARTS), len(parts)))
        return next((end for end in ends if _exists(os.path.join(root, end))), "/".join(parts))

    def video(self, value: Any) -> Any:
        """Returns the path of a video. `value` is a path or an id. To an id, the suffix of the existing video file is
        added, or .mp4 if there is none."""
        path = self.path(value)
        if not isinstance(path, str) or _SUFFIX.search(path) or os.path.isdir(self._at(path)):
            return path
        return next((path + end for end in _VIDEO_SUFFIXES if _exists(self._at(path + end))), f"{path}.mp4")

    def image(self, id: Any) -> str | None:
        """Returns the path of the image with an id: an existing image file named after the id, else <id>.jpg. Returns
        None if there is no id.

        An integer id is written with 12 digits, as in COCO."""
        if isinstance(id, bool) or not isinstance(id, (str, int)) or id == "":
            return None
        path = f"{id:012d}" if isinstance(id, int) else str(self.path(id))
        if _SUFFIX.search(path):
            return path
        return next((path + end for end in _IMAGE_SUFFIXES if _exists(self._at(path + end))), f"{path}.jpg")

    def duration(self, video: Any) -> float | None:
        """Returns the duration of a video in seconds from its header; None if the file is missing or the duration
        unknown."""
        from vlrl.data.media import resolve
        from vlrl.data.video.decoders import header_duration

        if isinstance(video, (bytes, EmbeddedMedia)):
            with (EmbeddedMedia(video) if isinstance(video, bytes) else video).file() as file:
                return header_duration(file)
        try:
            file = resolve(video, self.root or Path.cwd(), self.roots)
        except DataError:
            return None
        return header_duration(file) if os.path.isfile(file) else None

    def frames(self, folder: Any) -> list[str]:
        """Returns the sorted paths of the images in a folder, relative to the root folder; [] without such a folder."""
        from vlrl.data.media import resolve

        try:
            place = resolve(folder, self.root or Path.cwd(), self.roots)
            names = sorted(os.listdir(place))
        except (OSError, ValueError, DataError):
            return []
        return [f"{folder}/{name}" for name in names if name.lower().endswith((".jpg", ".jpeg", ".png"))]

    def _at(self, path: str) -> str:
        return os.path.join(self.root or Path.cwd(), path.replace("\0", ""))

    def size(self, image: Any) -> tuple[int, int] | None:
        """Returns the width and height of an image (a path or its bytes) from its header, with EXIF orientation
        applied; None for an unreadable file."""
        from vlrl.data.media import header, resolve

        try:
            data = image.data if isinstance(image, EmbeddedMedia) else image
            found = header(data if isinstance(data, bytes) else resolve(data, self.root or Path.cwd(), self.roots))
        except DataError:  # reported when the sample is made
            return None
        return found.size if found else None


def pick(record: Record, *names: str) -> Any:
    """Returns the value of the first of the fields `names` that is neither null nor an empty string, with JSON strings
    parsed; None if no field has such a value."""
    for name in names:
        value = record.get(name)
        if value is not None and value != "":
            return unpacked(value)
    return None


def has(record: Record, *names: str) -> bool:
    """Whether any of the fields `names` has a value."""
    return any(record.get(name) is not None and record.get(name) != "" for name in names)


def text(record: Record, *names: str) -> str:
    """Returns the first non-empty string among the values of the fields `names`. Raises DataError if there is none."""
    value = next((record[name] for name in names if isinstance(record.get(name), str) and record[name].strip()), None)
    if value is None:
        given = next((f"{name}={short(record[name])}" for name in names if record.get(name) is not None), None)
        known = " or ".join(map(repr, names))
        raise DataError(f"{given} must be a string" if given else f"the row has no field {known}")
    return value.strip()


def numbers(value: Any, counts: Sequence[int], name: str) -> list[float]:
    """Converts a list, a JSON string or a string such as "1, 2, 3, 4" to a list of numbers. Raises DataError naming the
    field for anything else, and if the number of values is not in `counts`."""
    items = unpacked(value)
    if isinstance(items, str) and len(items) <= 5 * LONGEST:
        items = re.split(r"[\s,;]+", items.strip(" ()[]<>"))
    if isinstance(items, (list, tuple)) and len(items) in counts:
        values = [number(v) for v in items]
        if None not in values:
            return values  # pyright: ignore[reportReturnType]
    comma = isinstance(items, list) and any(isinstance(v, str) and re.fullmatch(r"-?\d+,\d+", v) for v in items)
    raise DataError(f"{name}={short(value)} must be {' or '.join(map(str, counts))} finite numbers"
                    + (", with a decimal point instead of a comma" if comma else ""))


def size_of(record: Record, row: Record, source: RecordSource) -> tuple[float, float] | None:
    """Returns width and height of the image, as stated by the record, or else by the image header; None if neither is
    known. Raises DataError if the record states an invalid size."""
    for names in _SIZES:
        if has(record, *names):
            sides = [number(record.get(name)) for name in names]
            return _checked_size(sides, f"{names[0]}={short(record.get(names[0]))}, {names[1]}="
                                 f"{short(record.get(names[1]))}")
    for name in _PAIRS:
        if has(record, name):
            return _checked_size(numbers(record[name], (2,), name), f"{name}={short(record[name])}")
    images = row.get("images")
    return source.size(row.get("image") or (images[0] if images else None))


def row_size(row: Record) -> tuple[float, float] | None:
    """Returns width and height of the image of a row; None if the row does not state them."""
    return (row["width"], row["height"]) if "width" in row else None


def base_fields(record: Record, source: RecordSource, *, size: bool = True) -> Row:
    """Returns the fields that every canonical row can have: id, image or images, and width and height if known. With
    size=False, width and height are left out."""
    row: Row = {"id": record_id(record, source), **media(record, source)}
    dimensions = size_of(record, row, source) if size else None
    return {**row, "width": dimensions[0], "height": dimensions[1]} if dimensions else row


def media(record: Record, source: RecordSource) -> Row:
    """Returns {"image": path}, or {"images": paths} for several images. Raises DataError if the record has no image.

    An image embedded in the record (the `{"bytes": ...}` of parquet files) stays bytes."""
    given = pick(record, *IMAGE)
    several = given if isinstance(given, (list, tuple)) and not is_pixels(given) else [given]
    paths = [source.path(image_value(item)) for item in several]
    if not paths or None in paths:
        raise DataError(f"no field holds the path of an image; known names: {', '.join(IMAGE)}")
    return {"image": paths[0]} if len(paths) == 1 else {"images": paths}


def record_id(record: Record, source: RecordSource, *names: str) -> str | int:
    """Returns the id of a row: the record's `id`, else the value of one of the fields `names`, else the default id in
    `source`."""
    for name in ("id", *names):
        own = record.get(name)
        if isinstance(own, (str, int)) and not isinstance(own, bool) and own != "":
            return own
    return source.id


def meta(record: Record, *used: str) -> Row:
    """Returns `{"meta": ...}` with the record's fields that are neither in `used` nor canonical; {} if there are no
    such fields."""
    gone = {*used, *IMAGE, *_PAIRS, *(name for names in _SIZES for name in names), "id"}
    left = {k: v for k, v in record.items() if k not in gone and v is not None and _is_plain(v)}
    return {"meta": left} if left else {}


def optional(record: Record, **names: str) -> Row:
    """Returns {canonical field: value}. The keyword arguments `names` give the field of the record from which each
    canonical field is read; fields without a value are left out."""
    return {field: record[name] for field, name in names.items() if has(record, name)}


def image_value(item: Any) -> Any:
    """Returns the path or bytes of one image; decodes base64 (as in the tables of MMBench) and data URIs."""
    if isinstance(item, str) and (data := decode_base64(item)) is not None:
        return data
    if isinstance(item, Mapping):
        data = item.get("bytes")
        return data if isinstance(data, bytes) and data else image_value(item.get("path") or item.get("url"))
    return item


def _is_plain(value: Any) -> bool:
    try:
        return len(json.dumps(value, allow_nan=False)) < 1 << 20
    except (TypeError, ValueError, RecursionError):
        return False


def _checked_size(size: Sequence[float | None], fields: str) -> tuple[float, float]:
    if any(side is None or side <= 0 for side in size):
        raise DataError(f"{fields} must be the image's width and height in pixels")
    return size[0], size[1]  # pyright: ignore[reportReturnType]


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a NUL in the path
        return False
