"""Turns rows of data files into samples. A row is a JSON object with canonical fields; media paths are relative to a
root folder.

    {"id": "7", "image": "img/7.jpg", "width": 640, "height": 480, "expression": "the red mug",
     "boxes": [{"box": [31, 40, 75, 84], "label": "mug"}]}"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from PIL import Image

from vlrl.config.registry import Table
from vlrl.data.coordinates import CONVENTIONS
from vlrl.data.embedded import EmbeddedMedia, image_items, video_items, without_bytes
from vlrl.data.media import ROOT_ONLY, MediaAccess, header, media_source, missing_file
from vlrl.data.row_media import sources_of, unshown_problem
from vlrl.data.turns import check_tools, check_turns, media_in_order
from vlrl.data.values import short
from vlrl.errors import DataError, TaskError, VlrlError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.types import Media, Sample

_SOURCES = Table({"column_hint": "vlrl.data.sources.misspelt:column_hint"})
_VIDEO = Table({"frame_times": "vlrl.data.video.sampling:frame_times"})
MEDIA_FIELDS = ("image", "images", "video")
_ABSENT = re.compile(r"(row '[^']*': )(\w+)=None ")
"""Matches a message about a field that the row lacks."""
_IN_PIXELS = ("boxes", "box", "points")
OUTSIDE = 1.0
"""How many pixels a box or point may lie outside the image, because annotations are rounded."""
_FIELDS = (
    "id difficulty category source split weight processed_size coordinates solution hints group_key meta "
    "image images video width height video_start video_end duration fps frames frame_times "
    "expression labels boxes points count mask_rle "
    "instruction box action history platform element_type "
    "question answer_type answer options spans tracks tolerance precision "
    "label synonyms multi plan speed_mps navigation trajectory obstacles responses "
    "cameras drivable ego_size to_pixels outcomes system_prompt original_id turns tools environment"
)
FIELDS = frozenset(_FIELDS.split())
"""The canonical fields of all tasks. Any other field of a row stays in the row and is also copied into the row's
`meta`."""


def sample_from_row(row: Mapping[str, Any], root: Path | None = None, access: MediaAccess = ROOT_ONLY) -> Sample:
    """Turns a canonical row into a sample. The row's `image`, `images` and `video` become the sample's media without
    being read.

    Media paths must lie under `root` or where `access` allows. Fields that are not canonical stay in the row and are
    copied into its `meta`. A weight of null becomes 1. In the sample's row, embedded media are replaced by their hash.

    Raises DataError naming the row for a missing id, an unusable media path, a difficulty outside [0, 1], a number that
    is negative or not finite, unknown `coordinates`, or text that is not Unicode."""
    sample_id = row.get("id")
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)) or sample_id == "":
        if "id" not in row and (hint := _SOURCES["column_hint"](row)):
            raise DataError(f"the fields match no known format: {short(', '.join(map(str, row)))}; {hint}")
        if row and "id" not in row and not row.keys() & FIELDS:
            raise DataError(f"the fields match no known format: {short(', '.join(map(str, row)))}. Name them as in "
                            "docs/data.md, or map them, e.g. --columns image=photo "
                            "(data.columns); every row needs an 'id' too")
        near = "" if "id" in row else f" Its fields: {short(', '.join(map(str, row)))}"
        raise DataError(f"the row has id={sample_id!r}; every row needs an 'id', a string or an integer.{near}")
    sample_id = str(sample_id)
    try:
        media = media_items(row)
        row = _with_media_hashes(row, media)
        unknown = {k: v for k, v in row.items() if k not in FIELDS}
        clean = {**row, "id": sample_id}
        if unknown:
            clean["meta"] = {**unknown, **(row.get("meta") or {})}
        _check_text(row)
        _check_values(row)
        shown = _media(row, media, root or Path.cwd(), access)
        check_turns(row, [m.kind for m in shown])
        check_tools(row)
        return Sample(id=sample_id, row=_weighted({**clean, **_size(row, shown)}), media=media_in_order(shown, row))
    except DataError as error:
        raise DataError(f"row {sample_id!r}: {error}") from None


def _size(row: Mapping[str, Any], shown: Sequence[Media]) -> dict[str, int]:
    """{width, height} from the header of the row's first image, if the row has boxes or points but no size; else {}."""
    if not shown or shown[0].kind != "image" or any(row.get(side) is not None for side in ("width", "height")) or (
            all(row.get(name) is None for name in _IN_PIXELS)):
        return {}
    source = shown[0].source
    if isinstance(source, Image.Image):
        return {"width": source.width, "height": source.height}
    known = header(source) if isinstance(source, (Path, EmbeddedMedia)) else None
    return {"width": known.size[0], "height": known.size[1]} if known else {}


def make_sample(task: Any, row: Mapping[str, Any] | DataError, root: Path) -> Sample:
    """Turns a row into a sample with `task.sample_from_row`; media files need not exist.

    If `row` is a DataError, raises it. Raises DataError naming an invalid row, and TaskError if the task does not
    return a Sample."""
    if isinstance(row, DataError):
        raise row
    try:
        sample = task.sample_from_row(row, root)
        if not isinstance(sample, Sample):
            raise TaskError(f"task '{task.name}': sample_from_row returned {type(sample).__name__}, expected a Sample")
    except DataError as error:
        raise DataError(_with_hint(str(error), task, row, root)) from error
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # task code may fail on a row in any way
        raise DataError(f"row {row.get('id')!r}: {type(error).__name__}: {error}") from error
    try:
        _check_values(sample.row)  # a task may make its samples without the function above
    except DataError as error:
        raise DataError(f"row '{sample.id}': {error}") from None
    return replace(sample, row=_weighted({k: without_bytes(v) for k, v in sample.row.items()}))


def _with_hint(message: str, task: Any, row: Mapping[str, Any], root: Path) -> str:
    """The message about a row. If it is about a field that the row lacks, also names the column that may be meant, or
    replaces it by the reason why the size of the image is unknown."""
    found = _ABSENT.match(message)
    if not found:
        return message
    if found[2] in ("width", "height"):
        with suppress(DataError):
            problem = size_problem(sample_from_row(row, root, MediaAccess.of(task.data)), root)
            return f"{found[1]}{problem}" if problem else message
    return message + _misspelt_column(found[2], row)


def _misspelt_column(field: str, row: Mapping[str, Any]) -> str:
    """Text to append to a message about a field that the row lacks: the column of a similar name, else the row's
    columns."""
    meta = row.get("meta")
    columns = [str(name) for name in {**(meta if isinstance(meta, Mapping) else {}), **row}
               if name not in ("id", "meta", field)]
    near = next(iter(get_close_matches(field, [name for name in columns if name not in FIELDS], n=1)), "")
    return (f". The column {near!r} has a similar name: rename it, or set data.columns={{{field}: {near}}}" if near
            else f". The row has {', '.join(columns) or 'no other field'}")


def checked_sample(task: Any, row: Mapping[str, Any] | DataError, root: Path) -> Sample:
    """Turns a row into a sample, and checks that its media files exist and its boxes and points lie inside the image.
    Raises DataError naming the row if the row is invalid or a check fails."""
    sample = make_sample(task, row, root)
    if problem := unshown_problem(sample, FIELDS, MEDIA_FIELDS, root):
        raise DataError(f"row '{sample.id}': {problem}")
    for path in (one for media in sample.media for one in sources_of(media)):
        if isinstance(path, Path) and (problem := missing_file(path)):
            raise DataError(f"row '{sample.id}': {problem}")
    for problem in box_problems(sample.row, (sample.get("width"), sample.get("height"))):
        raise DataError(f"row '{sample.id}': {problem}")
    return sample


def repeated_id(first: dict[str, str], id: str, where: str) -> str:
    """Returns an error message if a row with this id is already in `first`, which maps ids to the locations of their
    rows. Else adds the id with its location `where`, and returns ""."""
    if id in first:
        return f"id {id!r} is already used in {first[id]}: ids must be unique"
    first[id] = where
    return ""


def box_problems(row: Mapping[str, Any], size: Sequence[Any]) -> Iterator[str]:
    """Yields an error message for each box with swapped corners, and for each box or point outside an image of `size`
    (width, height).

    Values that are not lists of numbers are skipped, because the task checks them. If the size is unknown, only the
    corners are checked."""
    boxes = [*(entry.get("box") for entry in _listed(row, "boxes") if isinstance(entry, dict)), row.get("box")]
    for box in boxes:
        if _numbers(box, 4):
            if not (box[0] < box[2] and box[1] < box[3]):
                yield f"box {short(box)} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2{xywh_hint(box, size)}"
            elif _outside(box, size):
                yield (f"box {short(box)} extends beyond the image of {size[0]}x{size[1]} pixels"
                       f"{_norm1000(box, size)}{xywh_hint(box, size)}")
    action = row.get("action") if isinstance(row.get("action"), Mapping) else {}
    for point in (*_listed(row, "points"), action.get("point"), action.get("coordinate")):  # pyright: ignore
        if _numbers(point, 2) and _outside(point, size):
            yield f"point {short(point)} lies outside the image of {size[0]}x{size[1]} pixels"


def xywh_hint(box: Any, size: Sequence[Any]) -> str:
    """A hint for a box that fits into an image of `size` if it is [x, y, width, height]; "" for any other value."""
    if not _numbers(box, 4):
        return ""
    known = all(is_number(side) and side > 0 for side in size)
    corners = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
    fits = min(box) >= 0 and min(box[2:]) > 0 and not (known and _outside(corners, size))
    return ". If it is [x, y, width, height], set data.boxes=xywh" if fits else ""


def _norm1000(box: Sequence[float], size: Sequence[Any]) -> str:
    """A hint for a box that may be in thousandths of the image's sides."""
    return ". If coordinates run from 0 to 1000, set data.boxes=norm1000" if 0 <= min(box) <= max(box) <= 1000 else ""


def size_problem(sample: Sample, root: Path | None = None) -> str:
    """Returns why the size of a sample's first image is unknown: the row shows none, or its file is missing or not an
    image; "" if nothing is wrong with it."""
    if problem := unshown_problem(sample, FIELDS, MEDIA_FIELDS, root):
        return problem
    source = sample.media[0].source if sample.media else None
    if not isinstance(source, Path):
        return ""
    return missing_file(source) or ("" if header(source) else f"media file {source} is empty or not an image")


def _listed(row: Mapping[str, Any], field: str) -> list[Any]:
    value = row.get(field)
    return value if isinstance(value, list) else []


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(is_number, value))


def _outside(values: Any, size: Sequence[Any]) -> bool:
    if not all(is_number(side) and side > 0 for side in size):
        return False
    return any(not -OUTSIDE <= v <= size[i % 2] + OUTSIDE for i, v in enumerate(values))


def _with_media_hashes(row: Mapping[str, Any], items: Mapping[str, list[Any]]) -> dict[str, Any]:
    flat = {field: value if isinstance(row[field], (list, tuple)) else value[0] for field, value in items.items()}
    return {field: without_bytes(value) for field, value in {**row, **flat}.items()}


def media_items(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns {field: list of images or videos} of a row. An image or video is a path, an EmbeddedMedia, or a list of
    frames. Raises DataError for anything else."""
    return {field: (video_items if field == "video" else image_items)(row[field], str(row.get("id", "")))
            for field in MEDIA_FIELDS if row.get(field) is not None}


def _media(row: Mapping[str, Any], items: Mapping[str, list[Any]], root: Path, access: MediaAccess
           ) -> tuple[Media, ...]:
    images = [Media(source=media_source(path, root, access)) for field in ("image", "images")
              for path in items.get(field, ())]
    videos = items.get("video", ())
    return (*images, *(_video(row, path, times, root, access)
                       for path, times in zip(videos, _times(row, len(videos)), strict=True)))


def _video(row: Mapping[str, Any], path: Any, times: Any, root: Path, access: MediaAccess) -> Media:
    fps = row.get("fps") if isinstance(path, list) else None
    if isinstance(path, list):
        _VIDEO["frame_times"](len(path), fps, times)
    elif times is not None:
        raise DataError(f"frame_times={short(times)} belong to a video given as a list of frames, but the row's video "
                        "is a file, which has its own timestamps: remove the field, or move it into 'meta'")
    return Media(kind="video", source=media_source(path, root, access), start=row.get("video_start"),
                 end=row.get("video_end"), fps=fps, times=times)


def _times(row: Mapping[str, Any], videos: int) -> Sequence[Any]:
    given = row.get("frame_times")
    if given is None:
        return [None] * videos
    nested = isinstance(given, (list, tuple)) and given and all(isinstance(v, (list, tuple, type(None))) for v in given)
    each = given if nested else [given]
    if len(each) != videos:
        raise DataError(f"frame_times={short(given)} must be the times of a video's frames in seconds, as one list "
                        f"per video; the row has {videos} videos")
    return each


def _weighted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**row, "weight": 1.0} if row.get("weight", 1.0) is None else row


def _check_values(row: Mapping[str, Any]) -> None:
    _check_number(row, "difficulty", 1.0)
    for field in ("weight", "video_start", "video_end", "width", "height"):
        _check_number(row, field)
    if row.get("system_prompt") is not None and not isinstance(row["system_prompt"], str):
        raise DataError(f"system_prompt={short(row['system_prompt'])} must be a string")
    size, own = row.get("processed_size"), row.get("coordinates")
    if size is not None and not (isinstance(size, (list, tuple)) and len(size) == 2
                                 and all(is_number(side) and side > 0 for side in size)):
        raise DataError(f"processed_size={short(size)} must be [w, h], two positive numbers of pixels")
    if own and own not in CONVENTIONS:
        raise DataError(f"coordinates={own!r} is not a coordinate convention.{did_you_mean(str(own), CONVENTIONS)} "
                        f"Known: {', '.join(CONVENTIONS)}.")


def _check_text(row: Mapping[str, Any]) -> None:
    for field, value in row.items():
        try:
            json.dumps([field, value], ensure_ascii=False, skipkeys=True, default=str).encode()
        except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which files and tokenizers reject
            raise DataError(f"{field!r} holds text that is not Unicode: {ascii(value)[:200]}") from None


def _check_number(row: Mapping[str, Any], field: str, most: float = float("inf")) -> None:
    value = row.get(field)
    if value is not None and not (is_number(value) and 0 <= value <= most):
        limit = f"a number from 0 to {most:g}" if most < float("inf") else "a finite number of at least 0"
        raise DataError(f"{field}={short(value)} must be {limit}")
