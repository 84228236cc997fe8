"""Converts boxes and points of data files from the format in `data.boxes` to pixels, and detects a probably wrong
format.

    boxes_to_pixels({"width": 640, "height": 480, "box": [500, 250, 100, 100]}, "xywh-norm1000")
    # box [320, 120, 384, 168]"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlrl.data.values import are_shares, scaled, short, xywh
from vlrl.errors import DataError
from vlrl.rewards.boxes import is_number
from vlrl.types import Record

FORMS = ("auto", "pixels", "norm1000", "norm1", "xywh", "xywh-norm1000", "xywh-norm1")
_FULL = {"norm1000": 1000.0, "norm1": 1.0}
_THOUSAND = 1000.5
"""Upper bound of coordinates from 0 to 1000, with a tolerance because annotations are rounded."""
_FAR = 800.0
"""If all coordinates are below this number, they are taken as pixels and not as coordinates from 0 to 1000."""
_CHANCE = 0.05
"""Coordinates of at most 1000 are suspected not to be pixels if the probability that boxes in pixels all stay below
1000 by chance is less than this."""
_COMMON = 0.3
"""Boxes larger than this fraction of the image side count as this large when the probability for _CHANCE is computed,
because larger boxes are rare."""
_OUTSIDE = 0.1
"""Coordinates of at most 1000 are also suspected if more than this fraction of the boxes lie outside their images."""


def boxes_to_pixels(row: dict[str, Any], form: str) -> dict[str, Any]:
    """Returns a canonical row whose boxes and points are converted to [x1, y1, x2, y2] or [x, y] in pixels. `form` is
    the format of the boxes and points before, a value of data.boxes.

    If `form` is norm1 or xywh-norm1, boxes and points with a number above 1 are taken as pixels and not scaled. Raises
    DataError if the image size is unknown."""
    if form in ("auto", "pixels"):
        return row
    sides, full = form.startswith("xywh"), _FULL.get(form.rpartition("-")[2])

    def place(values: Any) -> Any:
        if not isinstance(values, list) or len(values) not in (2, 4) or not all(map(is_number, values)):
            return values
        corners = xywh(values) if sides and len(values) == 4 else values
        if full is None or (full == 1 and not are_shares(values)):
            return corners
        if not all(is_number(row.get(side)) for side in ("width", "height")):
            raise DataError(f"data.boxes={form}: {short(values)} cannot be converted, since the image size is "
                            "unknown; add width and height to the row, or name the folder of the images (data.root, "
                            "--root)")
        return scaled(corners, (row["width"], row["height"]), full, "box")

    new = dict(row)
    if isinstance(row.get("boxes"), list):
        new["boxes"] = [{**b, "box": place(b.get("box"))} if isinstance(b, Mapping) else b for b in row["boxes"]]
    if isinstance(row.get("points"), list):
        new["points"] = [place(point) for point in row["points"]]
    if isinstance(row.get("action"), Mapping):
        new["action"] = {k: place(v) if k in ("point", "coordinate", "box") else v for k, v in row["action"].items()}
    return new | ({"box": place(row["box"])} if "box" in row else {})


class BoxDoubt(NamedTuple):
    """A suspicion that the boxes of many rows are not corners in pixels. The message names the format that the boxes
    seem to have."""

    message: str
    row: int
    """Index of the first row that supports the suspicion."""
    sure: bool
    """Whether the boxes cannot be corners in pixels. False if corners in pixels are possible but improbable."""


def box_doubt(rows: Sequence[Record]) -> BoxDoubt | None:
    """Returns a suspicion if the boxes and points of the rows do not seem to be corners in pixels; else None."""
    places = [(n, values, (row["width"], row["height"])) for n, row in enumerate(rows)
              if is_number(row.get("width")) and is_number(row.get("height")) for values in coordinates_in(row)]
    if not places:
        return None
    turned = [n for n, v, _ in places if len(v) == 4 and (v[2] <= v[0] or v[3] <= v[1])]
    sides = bool(turned) and all(_fits(_as_corners(v), size) for _, v, size in places)
    read = [(n, _as_corners(v) if sides else v, size) for n, v, size in places]
    unit = _unit(read)
    if not sides and not unit:
        return None
    form = "-".join(filter(None, ("xywh" if sides else "", unit)))
    said = [f"{len(turned)} of {len(places)} boxes have their second corner before the first, and all lie in their "
            "images as [x, y, width, height]"] if sides else []
    wide, high = max((size for *_, size in read), key=max)
    said += [f"all {len(places)} boxes and points have coordinates of at most {'1000' if unit == 'norm1000' else '1'}, "
             f"in images of up to {wide:g}x{high:g} pixels"] if unit else []
    message = (f"{', and '.join(said)}: if this is their format, set data.boxes={form} (--boxes {form}); if they are "
               "corners in pixels, set data.boxes=pixels")
    return BoxDoubt(message, turned[0] if sides else read[0][0], unit == "norm1")


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


def _unit(found: Sequence[tuple[int, list[float], Sequence[float]]]) -> str:
    """Returns "norm1" or "norm1000" if coordinates are probably in this unit and not in pixels, else "". `found` has
    (row index, coordinates, image size) of each box or point."""
    ends = [(v[-2:], v[2] - v[0] if len(v) == 4 else 0, v[3] - v[1] if len(v) == 4 else 0, size)
            for _, v, size in found]
    if all(are_shares(v) for _, v, _ in found):
        apart = any(value != int(value) for _, v, _ in found for value in v)
        return "norm1" if apart and all(min(size) > 2 for *_, size in found) else ""
    reach = [value for end, *_ in ends for value in end]
    if max(reach) > _THOUSAND or max(reach) < _FAR or any(v < 0 for _, values, _ in found for v in values):
        return ""
    outside = sum(end[0] > size[0] + 1 or end[1] > size[1] + 1 for end, *_, size in ends)
    chance = 1.0
    for _, wide, high, size in ends:
        for own, side in ((wide, size[0]), (high, size[1])):
            if side > _THOUSAND:
                extent = min(own, _COMMON * side, 900)
                chance *= (1000 - extent) / (side - extent)
    return "norm1000" if chance < _CHANCE or outside > max(2, _OUTSIDE * len(ends)) else ""
