"""Converts boxes and points of data files from the form in `data.boxes` to pixels, and detects a probably wrong form.

    boxes_to_pixels({"width": 640, "height": 480, "box": [500, 250, 100, 100]}, "xywh-norm1000")
    # box [320, 120, 384, 168]"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlrl.config.box_forms import BoxForm, parse_box_form
from vlrl.data.values import DIGITS, are_shares, number, short, tidy, xywh
from vlrl.errors import DataError
from vlrl.rewards.boxes import is_number
from vlrl.types import Record

_FULL = {"norm1000": 1000.0, "norm1": 1.0}
_THOUSAND = 1000.5
"""Upper bound of coordinates from 0 to 1000, with a tolerance because annotations are rounded."""
_FAR = 800.0
"""If all coordinates are below this number, they are taken as pixels and not as coordinates from 0 to 1000."""
_CHANCE = 0.01
"""Boxes of which none extends beyond its image are suspected not to be pixels if they all lie inside the smaller frame
of another form, and the probability that boxes in pixels do so by chance is less than this."""
_ONE_SIDED = 6
"""Such a suspicion also needs this many distances to the left or upper edge of images (at least) that are smaller than
every distance of boxes in the frame to the opposite edge: objects that avoid all four edges are not suspected."""
_COMMON = 0.3
"""Boxes larger than this fraction of the image side count as this large when the probability for _CHANCE is computed,
because larger boxes are rare."""
_CONTRADICTED = 0.1
"""The assumed form is contradicted if more than this fraction of the boxes, and more than 2, extend beyond their images
or have their second corner before the first."""
_LIMITS = (401408, 602112, 802816, 1003520, 2007040, 4014080, 12845056)
_RESIZES = (*((28, 3136, limit) for limit in _LIMITS), (32, 65536, 16777216))
"""Numbers of usual image processors: of Qwen2-VL and Qwen2.5-VL with some limits of pixels, and of Qwen3-VL."""
_REACH = 0.8
"""Boxes are only taken as pixels of resized images if one of them ends beyond this fraction of such an image."""


def resized_size(size: Sequence[float], resize: tuple[int, int, int]) -> tuple[int, int]:
    """Returns (width, height) of an image of `size` after the resizing of Qwen-VL's image processor.

    Both sides become multiples of the first number of `resize`, and the product of the sides lies between the other two
    (`smart_resize` in transformers' image_processing_qwen2_vl.py)."""
    step, least, most = resize
    width, height = (max(step, round(side / step) * step) for side in size)
    if width * height > most:
        scale = math.sqrt(size[0] * size[1] / most)
        width, height = (max(step, math.floor(side / scale / step) * step) for side in size)
    elif width * height < least:
        scale = math.sqrt(least / (size[0] * size[1]))
        width, height = (math.ceil(side * scale / step) * step for side in size)
    return int(width), int(height)


def boxes_to_pixels(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a canonical row whose boxes and points are converted to [x1, y1, x2, y2] or [x, y] in pixels. `name` is
    their form before, a value of data.boxes.

    Of the unit norm1, boxes and points with a number above 1 are taken as pixels and not scaled. Raises DataError if
    the size of the image, or of the resized image, is unknown."""
    form = parse_box_form(name)
    if form.layout != "xywh" and form.unit in ("", "pixels"):
        return row

    def place(values: Any) -> Any:
        if not isinstance(values, list) or len(values) not in (2, 4) or not all(map(is_number, values)):
            return values
        corners = xywh(values) if form.layout == "xywh" and len(values) == 4 else values
        if form.unit in ("", "pixels") or (form.unit == "norm1" and not _may_be_shares(corners)):
            return corners
        if not all(is_number(row.get(side)) and row[side] > 0 for side in ("width", "height")):
            raise DataError(f"data.boxes={name}: {short(values)} cannot be converted, since the image size is "
                            "unknown; add width and height to the row, or name the folder of the images (data.root, "
                            "--root)")
        size, frame = (row["width"], row["height"]), _frame(row, form, name)
        return [tidy(v * size[i % 2] / frame[i % 2], DIGITS) for i, v in enumerate(corners)]

    new = dict(row)
    if isinstance(row.get("boxes"), list):
        new["boxes"] = [{**b, "box": place(b.get("box"))} if isinstance(b, Mapping) else b for b in row["boxes"]]
    if isinstance(row.get("points"), list):
        new["points"] = [place(point) for point in row["points"]]
    if isinstance(row.get("action"), Mapping):
        new["action"] = {k: place(v) if k in ("point", "coordinate", "box") else v for k, v in row["action"].items()}
    return new | ({"box": place(row["box"])} if "box" in row else {})


def _may_be_shares(values: Sequence[float]) -> bool:
    """Whether coordinates are fractions of the image, or would be if they were not corners that were read as [x, y,
    width, height]."""
    return are_shares(values) or (max(values) <= 2 and any(v != int(v) for v in values))


def _frame(row: Record, form: BoxForm, name: str) -> Sequence[float]:
    """Returns the coordinates of the image's right and lower edges in a form."""
    if form.unit != "resized":
        return (_FULL[form.unit],) * 2
    if form.resize:
        return resized_size((row["width"], row["height"]), form.resize)
    stated = _stated_frame(row)
    if stated is None:
        raise DataError(f"data.boxes={name}: the row does not state the size of the resized image. Add processed_size: "
                        "[width, height] to the row, or give the numbers of the image processor, such as "
                        f"data.boxes={name}:28:3136:1003520 for multiples of 28 and 3136 to 1003520 pixels")
    return stated


def _stated_frame(row: Record) -> Sequence[float] | None:
    """Returns the size of the resized image that a row, or its `meta`, states; None if there is none."""
    meta = row.get("meta")
    for own in (row, meta if isinstance(meta, Mapping) else {}):
        for given in ([own.get("resized_width"), own.get("resized_height")], own.get("processed_size")):
            if isinstance(given, (list, tuple)) and len(given) == 2:
                sides: list[Any] = [number(side) for side in given]
                if None not in sides and min(sides) > 0:
                    return sides
    return None


class BoxDoubt(NamedTuple):
    """A suspicion that the boxes of many rows are not corners in pixels. The message names the form that the boxes seem
    to have."""

    message: str
    row: int
    """Index of the first row that supports the suspicion."""
    sure: bool = True
    """Whether the boxes contradict the form in which they were read, so that a run must not start. False if they could
    be in this form, and another one is only more probable."""


def assumed_form(formats: Iterable[str], fields: Iterable[str], name: str = "auto") -> str:
    """Returns a sentence that says in which form boxes of other projects' formats were read; "" for canonical rows,
    rows without boxes, and if data.boxes (`name`) names the form. `formats` and `fields` are the recognised formats and
    the fields of the rows."""
    foreign = any(not one.startswith(("canonical", "no known")) for one in formats)
    if name != "auto" or not foreign or not {"boxes", "box", "points"} & set(fields):
        return ""
    return ("boxes and points without a stated unit are read as pixels of the original images, and nothing in the file "
            "contradicts that. If they are pixels of resized images, set "
            "data.boxes=resized:MULTIPLE:MIN_PIXELS:MAX_PIXELS (--boxes)")


class _Box(NamedTuple):
    row: int
    values: list[float]
    """Corners or a point, as the file has them."""
    size: Sequence[float]


def box_doubt(rows: Sequence[Record], name: str = "auto") -> BoxDoubt | None:
    """Returns a suspicion if the boxes and points of the rows do not seem to be corners in pixels; else None.

    `name` is the value of data.boxes with which they were converted. Its unit and its layout are only doubted if it
    does not name them; `pixels` answers every doubt."""
    form = parse_box_form(name)
    given = [_Box(n, values, (row["width"], row["height"])) for n, row in enumerate(rows)
             if all(is_number(row.get(side)) and row[side] > 0 for side in ("width", "height"))
             for values in coordinates_in(row)]
    if not given or form.layout or name == "pixels":
        return None
    layout, reason, read = _layout(given)
    units = [] if form.unit else _units(read)
    if not layout and not units:
        return None
    said = [*filter(None, [reason]), *([_reason(read, units[0])] if units else [])]
    forms = ["-".join(filter(None, (layout, unit))) for unit in units or [form.unit]]
    sure = "norm1" in units or _many(map(_is_turned, given), given) or _many(map(_is_outside, given), given)
    return BoxDoubt(f"{', and '.join(said)}: {_ways_out(forms, form)}", read[0].row, sure)


def _ways_out(forms: Sequence[str], given: BoxForm) -> str:
    """Returns the settings that name the probable forms of boxes, and the setting that answers the doubt. `given` is
    the form in which the boxes were read."""
    choice = " or ".join(f"data.boxes={form} (--boxes {form})" for form in forms)
    numbers = ", with the numbers of the image processor that resized the images" if "resized:" in choice else ""
    right = f"xyxy-{given.unit}" if given.unit else "pixels"
    what = "corners" if given.unit else "pixels of the original images, in the layout of their format"
    return f"if this is their form, set {choice}{numbers}; if they are {what}, set data.boxes={right}"


def _layout(given: Sequence[_Box]) -> tuple[str, str, list[_Box]]:
    """Returns (layout, reason, boxes) of boxes that were read in another layout than they seem to have, with the
    corners that follow from it; ("", "", the boxes) if they may be corners."""
    boxes = [b.values for b in given if len(b.values) == 4]
    turned = sum(map(_is_turned, given))
    if turned and all(_fits(_as_corners(b.values), b.size) for b in given):
        return "xywh", (f"{turned} of {len(given)} boxes have their second corner before the first, and all lie in "
                        "their images as [x, y, width, height]"), [b._replace(values=_as_corners(b.values))
                                                                  for b in given]
    outside = sum(map(_is_outside, given))
    undone = [[v[0], v[1], v[2] - v[0], v[3] - v[1]] for v in boxes]
    if _many(map(_is_outside, given), given) and len(boxes) == len(given) and all(map(_is_ordered, undone)):
        return "xyxy", (f"{outside} of {len(boxes)} boxes extend beyond their images as [x, y, width, height], and all "
                        "can be two corners"), [b._replace(values=v) for b, v in zip(given, undone, strict=True)]
    return "", "", [*given]


def _many(contradictions: Iterable[bool], boxes: Sequence[_Box]) -> bool:
    return sum(contradictions) > max(2, _CONTRADICTED * len(boxes))


def _is_turned(box: _Box) -> bool:
    return len(box.values) == 4 and not _is_ordered(box.values)


def _is_ordered(values: Sequence[float]) -> bool:
    return values[2] > values[0] and values[3] > values[1]


def _reason(boxes: Sequence[_Box], unit: str) -> str:
    wide, high = max((b.size for b in boxes), key=max)
    if unit.startswith("resized"):
        outside = sum(_is_outside(b) for b in boxes)
        where = (f"{outside} of {len(boxes)} boxes and points extend beyond their images" if outside else
                 f"all {len(boxes)} boxes and points lie in the upper left parts of the larger images")
        return f"{where}, and all lie inside images that a processor of Qwen-VL has resized"
    return (f"all {len(boxes)} boxes and points have coordinates of at most {'1000' if unit == 'norm1000' else '1'}, "
            f"in images of up to {wide:g}x{high:g} pixels")


def coordinates_in(row: Record) -> Iterator[list[float]]:
    """Yields every box and point of a row that is a list of numbers."""
    action = row.get("action") if isinstance(row.get("action"), Mapping) else {}
    boxes = row.get("boxes") if isinstance(row.get("boxes"), list) else []
    points = row.get("points") if isinstance(row.get("points"), list) else []
    given = (*(b.get("box") for b in boxes if isinstance(b, Mapping)), row.get("box"), *points,  # pyright: ignore
             *(action.get(k) for k in ("point", "coordinate", "box")))  # pyright: ignore
    yield from (v for v in given if isinstance(v, list) and len(v) in (2, 4) and all(map(is_number, v)))


def _as_corners(values: list[float]) -> list[float]:
    return xywh(values) if len(values) == 4 else values


def _fits(corners: Sequence[float], size: Sequence[float]) -> bool:
    return all(-1 <= v <= max(size[i % 2] + 1, _THOUSAND) for i, v in enumerate(corners))


def _is_outside(box: _Box) -> bool:
    return box.values[-2] > box.size[0] + 1 or box.values[-1] > box.size[1] + 1


def _units(boxes: Sequence[_Box]) -> list[str]:
    """Returns the units that boxes and points probably have, the most probable first; [] if they may be pixels."""
    if all(are_shares(b.values) for b in boxes):
        apart = any(value != int(value) for b in boxes for value in b.values)
        return ["norm1"] if apart and all(min(b.size) > 2 for b in boxes) else []
    if any(value < 0 for b in boxes for value in b.values):
        return []
    resized = next((":".join(map(str, ("resized", *resize))) for resize in _RESIZES if _is_resized(boxes, resize)), "")
    return list(filter(None, ("norm1000" if _is_thousand(boxes) else "", resized)))


def _is_thousand(boxes: Sequence[_Box]) -> bool:
    reach = max(value for b in boxes for value in b.values[-2:])
    if not _FAR <= reach <= _THOUSAND:
        return False
    return _many(map(_is_outside, boxes), boxes) or _is_improbable(
        boxes, [(1000.0, 1000.0) if max(b.size) > _THOUSAND else b.size for b in boxes])


def _is_resized(boxes: Sequence[_Box], resize: tuple[int, int, int]) -> bool:
    frames = [resized_size(b.size, resize) for b in boxes]
    shares = [max(b.values[-2] / frame[0], b.values[-1] / frame[1]) for b, frame in zip(boxes, frames, strict=True)]
    inside = all(end <= side + 1 for b, frame in zip(boxes, frames, strict=True)
                 for end, side in zip(b.values[-2:], frame, strict=True))
    if not inside or max(shares) < _REACH:
        return False
    return any(map(_is_outside, boxes)) or _is_improbable(boxes, [
        [limit if side - limit > resize[0] else side for limit, side in zip(frame, b.size, strict=True)]
        for frame, b in zip(frames, boxes, strict=True)])  # rounding to multiples alone shows nowhere


def _is_improbable(boxes: Sequence[_Box], frames: Sequence[Sequence[float]]) -> bool:
    """Whether boxes in pixels, which all lie inside `frames`, would hardly do so by chance: neither if each may be
    anywhere in its image, nor if they avoid the right and lower edges as much as the left and upper ones."""
    mirrored = sum(side - low > limit for b, frame in zip(boxes, frames, strict=True)
                   for low, side, limit in zip(b.values, b.size, frame, strict=False))
    return mirrored >= _ONE_SIDED and _chance(boxes, frames) < _CHANCE


def _chance(boxes: Sequence[_Box], frames: Sequence[Sequence[float]]) -> float:
    """Returns the probability that boxes of these sizes, each anywhere in its image, all lie inside `frames`."""
    chance = 1.0
    for box, frame in zip(boxes, frames, strict=True):
        v = box.values
        sides = (v[2] - v[0], v[3] - v[1]) if len(v) == 4 else (0.0, 0.0)
        for own, side, limit in zip(sides, box.size, frame, strict=True):
            if side > limit:
                extent = min(own, _COMMON * side, 0.9 * limit)
                chance *= (limit - extent) / (side - extent)
    return chance
