"""Rules of the fields of a row about its images and videos, and of the media files themselves."""

from __future__ import annotations

from collections.abc import Iterator

from vlrl.checks.fields import length_problem
from vlrl.checks.rule import CheckedRow, Context
from vlrl.data import FIELDS, MEDIA_FIELDS, box_problems
from vlrl.data.row_media import unshown_problem
from vlrl.rewards.boxes import is_number

_SIDES = ("width", "height")
_BOX_FIELDS = ("boxes", "box", "points", "action", "tracks")


def not_shown(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message if the row names media that its sample does not show."""
    problem = unshown_problem(row.sample, FIELDS, MEDIA_FIELDS, row.root) if row.sample else ""
    if problem:
        yield problem


def unusable(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message for each media file that is missing, broken or above a limit."""
    for file in row.files:
        if file.problem and not any("video_end=" in f.message for f in row.findings):  # a cut without a frame
            yield file.problem


def other_size(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message if the row's width and height differ from the size of its first image."""
    size, stated = row.files[0].size if row.files else None, tuple(row.row.get(side) for side in _SIDES)
    if size and all(map(is_number, stated)) and stated != size:
        yield (f"width and height are {stated[0]}x{stated[1]} pixels, but {row.files[0].name} has {size[0]}x{size[1]} "
               "(EXIF orientation applied), and boxes and points refer to the image as it is shown: correct the row, "
               "or save the file without its orientation")


def refused(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message for each image whose size the model's processor rejects."""
    for file in row.files:
        problem = context.refusal(file.size) if file.size else ""
        if problem:
            yield f"{file.name}: {problem}: crop or pad it, or leave the row out"


def turned(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message if an image has an EXIF orientation and the row has boxes or points. Such coordinates may refer
    to the stored or to the rotated image."""
    file = row.files[0] if row.files else None
    if file is None or file.orientation == 1 or not file.size or not any(row.row.get(name) for name in _BOX_FIELDS):
        return
    if any(f.rule == "size" for f in row.findings):
        return
    yield (f"{file.name} has the EXIF orientation {file.orientation} and is shown rotated, with "
           f"{file.size[0]}x{file.size[1]} pixels; boxes and points are read as positions in the rotated image. Look "
           "at an example: if its boxes were drawn on the stored image, save the files without the orientation")


def other_length(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message if the row's duration or a span contradicts the duration of the video."""
    for file in row.files:
        if file.seconds and not any(f.kind in ("row", "field") for f in row.findings):
            problem = length_problem(row.row, file.seconds, file.name, file.start, file.end)
            if problem:
                yield problem


def boxes(row: CheckedRow, context: Context) -> Iterator[str]:
    """Yields a message for each box or point that has swapped corners or lies outside the image."""
    size = row.files[0].size if row.files else None
    for problem in box_problems(row.row, size or tuple(row.row.get(side) for side in _SIDES)):
        if not any(problem.partition(" must ")[0] in f.message for f in row.findings):  # the task may report it too
            yield problem
