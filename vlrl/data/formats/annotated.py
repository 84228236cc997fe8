"""Converts custom annotations to canonical rows: Label Studio exports, tables with one box per line, lists of boxes,
and images with a class name (tables, folders of classes, CoOp's splits, CLS-RL)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.formats.grounding import EXPRESSION, MOST_LABELS
from vlrl.data.sources.fields import (
    CORNERS,
    IMAGE,
    SIDES,
    VIDEO,
    RecordSource,
    base_fields,
    has,
    media,
    meta,
    numbers,
    optional,
    pick,
    record_id,
    row_size,
    size_of,
    text,
)
from vlrl.data.sources.reading import Placed
from vlrl.data.values import are_shares, hull, number, scaled, short
from vlrl.errors import DataError
from vlrl.types import Record, Row


def is_label_studio(record: Record) -> bool:
    if isinstance(record.get("data"), Mapping):
        return isinstance(record.get("annotations"), list) or isinstance(record.get("completions"), list)
    regions = record.get("label")
    return isinstance(regions, list) and has(record, *IMAGE) and any(
        isinstance(r, Mapping) and "original_width" in r for r in regions)


def label_studio(record: Record, source: RecordSource) -> list[Row]:
    """Converts a Label Studio task to one row with the regions of its last valid annotation, in original pixels.

    Rectangles, ellipses and polygons become `boxes` (their bounding boxes); key points become `points`. `labels` are
    the labels in this task; `ask_for_all` later replaces them with the labels of the file. A region without a label
    gets an empty label."""
    data = record.get("data") if isinstance(record.get("data"), Mapping) else record
    assert isinstance(data, Mapping)
    named = {**data, **{k: _uploaded(data[k]) for k in data if isinstance(data[k], str)}, "id": record.get("id")}
    if not has(named, *IMAGE):
        named["image"] = next((v for v in named.values() if isinstance(v, str) and re.search(
            r"\.(png|jpe?g|webp|gif|bmp|tiff?|avif)$", v, re.IGNORECASE)), None)
    row = base_fields(named, source, size=False)
    regions = _regions(record)
    size = next((s for r in regions if (s := _original_size(r))), None) or size_of(named, row, source)
    if size:
        row |= {"width": size[0], "height": size[1]}
    boxes, points = [], []
    for region in regions:
        where, label = _region(region, _original_size(region) or size)
        if len(where) == 4:
            boxes.append({"box": where, "label": label})
        elif where:
            points.append(where)
    labels = list(dict.fromkeys(b["label"] for b in boxes))
    return [{**row, "labels": labels, "boxes": boxes, **({"points": points} if points else {})}]


def _uploaded(path: str) -> str:
    """Converts a path as Label Studio serves it (/data/upload/3/8-name.png, /data/local-files/?d=folder/name.png) to a
    file path."""
    return re.sub(r"^/?data/(?:local-files/\?d=|upload/)", "/", path)  # absolute: its end is searched under the root


def _regions(record: Record) -> list[Record]:
    annotations = record.get("annotations", record.get("completions"))
    if annotations is None:
        return [{"value": r, **r} for r in record["label"] if isinstance(r, Mapping)]  # the export named JSON_MIN
    counting = [a for a in annotations if isinstance(a, Mapping) and not a.get("was_cancelled")]
    if not counting:
        raise DataError("the Label Studio task has no valid annotation: it was not annotated, or all annotations were "
                        "cancelled")
    results = next((a for a in counting if a.get("ground_truth")), counting[-1]).get("result")
    return _joined([r for r in results or [] if isinstance(r, Mapping) and isinstance(r.get("value"), Mapping)])


def _joined(results: Sequence[Record]) -> list[Record]:
    """Merges the results of each region into one, because Label Studio stores the position, label and text of a region
    as separate results."""
    regions: dict[Any, Record] = {}
    for n, result in enumerate(results):
        key = result["id"] if isinstance(result.get("id"), str) else n
        before = regions.get(key, {"value": {}})
        regions[key] = {**result, **before, "value": {**result["value"], **before["value"]}}
    return list(regions.values())


def _original_size(region: Record) -> tuple[float, float] | None:
    width, height = number(region.get("original_width")), number(region.get("original_height"))
    return (width, height) if width and height and width > 0 and height > 0 else None


def _region(region: Record, size: tuple[float, float] | None) -> tuple[list[float], str]:
    """Returns (box or point in pixels, label) of a region; ([], label) if the region has another shape."""
    value = region["value"]
    label = next((str(v[0]) for k, v in value.items() if k.endswith("labels") and isinstance(v, list) and v), "")
    if has(value, "rle"):
        raise DataError(f"region {short(region.get('id'))} is a brush mask, which has no corners; export "
                        "the region as a rectangle or polygon")
    if has(value, "points") and isinstance(value["points"], list):
        corners = [numbers(p, (2,), "points") for p in value["points"]]
        return scaled(hull(corners), size, 100, "points") if corners else [], label
    if not (has(value, "x") and has(value, "y")):
        return [], label
    x, y = numbers([value["x"], value["y"]], (2,), "x, y")
    if has(value, "radiusX"):
        radii = numbers([value["radiusX"], value.get("radiusY")], (2,), "radiusX, radiusY")
        ellipse = scaled([x, y, *radii], size, 100, "x, y, radiusX, radiusY")
        return _rotated_ellipse(ellipse, number(value.get("rotation")) or 0.0), label
    if region.get("type") in ("keypointlabels", "keypoint") or not has(value, "height"):
        return scaled([x, y], size, 100, "x, y"), label
    sides = numbers([value.get("width"), value.get("height")], (2,), "width, height")
    corners = scaled([x, y, *sides], size, 100, "x, y, width, height")
    return _rotated_box(corners, number(value.get("rotation")) or 0.0), label


def _rotated_box(box: Sequence[float], degrees: float) -> list[float]:
    """The bounding box of [x, y, width, height] rotated clockwise about its upper left corner, by `degrees`."""
    x, y, width, height = box
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return hull([(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in
                 ((0, 0), (width, 0), (0, height), (width, height))])


def _rotated_ellipse(ellipse: Sequence[float], degrees: float) -> list[float]:
    """The bounding box of an ellipse [x, y, x radius, y radius] rotated about its centre, by `degrees`."""
    x, y, a, b = ellipse
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    wide, high = math.hypot(a * cos, b * sin), math.hypot(a * sin, b * cos)
    return hull([(x - wide, y - high), (x + wide, y + high)])


BOX = ("bbox", "bbox_2d", "box", "bounding_box")
LABEL = ("label", "class", "category", "class_name", "category_name", "label_name", "object", "name")
NAMED = (*EXPRESSION, "text")
INSTRUCTION = ("instruction", "command", "goal")
_CENTRES = (("x_center", "y_center"), ("x_centre", "y_centre"), ("center_x", "center_y"), ("xc", "yc"), ("cx", "cy"))
"""Column names of a box's centre, as in YOLO."""
_UNNAMED = "object"
"""The label given to boxes of a table without labels."""
ROLES = {"image": IMAGE, "label": LABEL, "expression": NAMED, "instruction": INSTRUCTION}
"""Maps each canonical field to the columns from which its value may be read."""


def is_table(record: Record) -> bool:
    """Whether a record names an image, has a box or empty columns for a box, and has no question."""
    empty = any(all(name in record for name in names) for names in (*CORNERS, *SIDES, *_CENTRES))
    known = has(record, *IMAGE) and not has(record, "question", "answer")
    return known and (empty or _box_fields(record) is not None)


def table(record: Record, source: RecordSource) -> list[Row]:
    """Converts a line of a table to a row: one box, with its label, expression or instruction.

    The box is [x1, y1, x2, y2], or [x, y, width, height] if the column names say so. If no number is above 1, the
    numbers are fractions of the image size."""
    for role, names in ROLES.items():
        if len(given := [n for n in names if has(record, n)]) > 1:
            raise DataError(f"the columns {' and '.join(given)} may each be the {role}; choose one with --columns "
                            f"{role}={given[0]}")
    fields = _box_fields(record) or _half_empty(record)
    if not fields and (middle := next((names for names in _CENTRES if has(record, *names)), ())):
        raise DataError(f"{' and '.join(middle)} are the centre of a box, which is not supported: give xmin, ymin, "
                        "xmax, ymax, or x, y, w, h from the upper left corner")
    used = (*(fields or ()), *LABEL, *NAMED, *INSTRUCTION)
    named = {k: v for k, v in record.items() if k not in (fields or ())}
    row = base_fields(named, source)
    boxes = [_table_box(record, fields, row, source)] if fields else []
    words = {role: text(record, *names) for role, names in (
        ("instruction", INSTRUCTION), ("expression", NAMED)) if has(record, *names)}
    label = str(pick(record, *LABEL)) if has(record, *LABEL) else next(iter(words.values()), _UNNAMED)
    if "instruction" in words:
        kind = optional(record, element_type="element_type", platform="platform")
        target = {"box": boxes[0]} if boxes else {}
        return [{**row, "instruction": words["instruction"], **target, **kind, **meta(record, *used, *kind)}]
    regions = [{"box": box, "label": label} for box in boxes]
    query = {"expression": words["expression"]} if words else {"labels": [label] if boxes else []}
    return [{**row, **query, "boxes": regions, **meta(record, *used)}]


def _box_fields(record: Record) -> tuple[str, ...] | None:
    """The fields that hold a record's box: a single field with four numbers, or four fields with one number each. None
    if the record has no box."""
    single = next(((name,) for name in BOX if has(record, name)), None)
    return single or next((names for names in (*CORNERS, *SIDES) if all(has(record, n) for n in names)), None)


def _half_empty(record: Record) -> tuple[str, ...] | None:
    """Returns the names of a box's four columns if some are empty and some filled, which is an error; else None."""
    return next((names for names in (*CORNERS, *SIDES) if all(n in record for n in names) and has(record, *names)
                 and not (names[2:] == ("width", "height") and not has(record, *names[:2]))), None)


def _table_box(record: Record, fields: tuple[str, ...], row: Mapping[str, Any], source: RecordSource) -> list[float]:
    name = ", ".join(fields)
    values = numbers(record[name] if len(fields) == 1 else [record[f] for f in fields], (4,), name)
    layout = str(pick(record, "bbox_format", "box_format") or "").lower()
    if fields in SIDES or layout in ("xywh", "coco"):
        values = source.corners(values)
    if source.scaled_later or not are_shares(values):
        return values
    return scaled(values, row_size(row), 1, name)


_OBJECTS = ("objects", "annotations", "shapes", "regions", "instances", "detections")


def is_box_list(record: Record) -> bool:
    return has(record, *IMAGE) and (_paired(record) is not None or bool(_listed(record)))


def box_list(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record with all boxes of an image to one row.

    Boxes come from `boxes` with `labels` of the same length, or from a list such as `objects` in which each entry has a
    box and a label. A box is [x1, y1, x2, y2] unless `bbox_format` is xywh. If no number is above 1, the numbers are
    fractions of the image size."""
    boxes, labels = _paired(record) or ([], [])
    if not isinstance(labels, list) or len(boxes) != len(labels):
        raise DataError(f"the {len(boxes)} boxes and labels={short(labels)} must be lists of the same length, with "
                        "one label per box")
    name, entries = (_listed(record) or [("boxes" if has(record, "boxes") else "bboxes", [])])[0]
    row = base_fields(record, source)
    layout = {k: record[k] for k in ("bbox_format", "box_format") if has(record, k)}
    columns = isinstance(pick(record, name), Mapping)
    if entries and not layout and columns and not source.form.layout:  # published data sets use either
        raise DataError(f"{name}={short(record[name])}: it is ambiguous whether these boxes are [x1, y1, x2, y2] or "
                        "[x, y, width, height]: set data.boxes=xyxy (--boxes xyxy) for the first, data.boxes=xywh for "
                        "the second")
    boxes = [{"box": _table_box({**entry, **layout}, _box_fields(entry) or ("box",), row, source),
              "label": str(pick(entry, *LABEL, "phrase") or "")} for entry in entries]
    labels = list(dict.fromkeys(b["label"] for b in boxes))
    return [{**row, "labels": labels, "boxes": boxes, **meta(record, name, "labels", *layout)}]


def _paired(record: Record) -> tuple[list[Any], Any] | None:
    """Returns (boxes, labels) of a record with one list of boxes and one list of labels; the lists may differ in
    length. None for other records. Canonical rows are excluded: their boxes are objects."""
    boxes, labels = pick(record, "boxes", "bboxes"), pick(record, "labels", "classes", "categories")
    plain = isinstance(boxes, list) and not any(isinstance(box, Mapping) for box in boxes)
    return (boxes, labels) if plain and labels is not None else None


def _listed(record: Record) -> list[tuple[str, list[Record]]]:
    """Returns (field name, entries) of each field with a list of objects which all have a box and a label."""
    boxes, labels = pick(record, "boxes", "bboxes"), pick(record, "labels", "classes", "categories")
    if isinstance(boxes, list) and isinstance(labels, list) and len(boxes) == len(labels) and boxes:
        field = "boxes" if has(record, "boxes") else "bboxes"
        return [(field, [{"box": box, "label": label} for box, label in zip(boxes, labels, strict=True)])]
    return [(name, entries) for name in _OBJECTS if (entries := _entries(pick(record, name))) is not None and all(
        isinstance(entry, Mapping) and _box_fields(entry) and has(entry, *LABEL, "phrase") for entry in entries)]


def _entries(value: Any) -> list[Any] | None:
    """Returns the objects of a list. An object of lists, as the library `datasets` writes it ({"bbox": [...],
    "category": [...]}), is converted to a list of objects first. None for any other value."""
    if not isinstance(value, Mapping):
        return value if isinstance(value, list) and value else None
    boxes, labels = pick(value, *BOX, "bboxes", "boxes"), pick(value, *LABEL, "labels", "categories", "classes")
    if not (isinstance(boxes, list) and isinstance(labels, list) and len(boxes) == len(labels)):
        return None
    return [{"bbox": box, "label": label} for box, label in zip(boxes, labels, strict=True)]


def ask_for_all(rows: Placed) -> Placed:
    """Sets the `labels` of each detection row to all labels of the file, so that prompts also ask for absent objects.
    If some boxes of the file have a label, rows with unlabelled boxes become errors."""
    rows = _all_or_none(rows, "")
    labels = list(dict.fromkeys(b["label"] for _, _, row in rows if not isinstance(row, DataError) and "labels" in row
                                for b in row["boxes"]))
    if not labels or len(labels) > MOST_LABELS:
        return rows
    return [(n, where, row if isinstance(row, DataError) or "labels" not in row else {**row, "labels": labels})
            for n, where, row in rows]


def _all_or_none(rows: Placed, unnamed: str) -> Placed:
    """If some boxes of the file have real labels, replaces each row that has a box labelled `unnamed` by an error."""
    labels = {b["label"] for _, _, row in rows if isinstance(row, dict) for b in row.get("boxes", ())}
    if labels == {unnamed} or unnamed not in labels:
        return rows
    return [(n, where, DataError("a box has no label, but other rows have labels") if isinstance(row, dict)
             and any(b["label"] == unnamed for b in row.get("boxes", ())) else row) for n, where, row in rows]


def one_row_per_image(rows: Placed) -> Placed:
    """Joins rows of a table that have the same image and expression into one row with all of their boxes. If some boxes
    of the file have a label, rows with unlabelled boxes become errors."""
    rows = _all_or_none(rows, _UNNAMED)
    first: dict[Any, tuple[int, str, dict[str, Any] | DataError]] = {}
    for n, where, row in rows:
        if isinstance(row, DataError) or "boxes" not in row:
            first[n] = (n, where, row)
            continue
        key = (str(row.get("image", row.get("images"))), row.get("expression"))
        if key in first:
            _, _, before = first[key]
            assert not isinstance(before, DataError)
            before["boxes"] += row["boxes"]
        else:
            first[key] = (n, where, row)
    return ask_for_all(list(first.values()))


LABELS = ("labels", "tags", "classes")
_ASKED = ("question", "answer", "instruction", "problem", "solution", "expression", "query", "prompt", "conversations",
          "messages", "boxes", "objects", "annotations", "responses", "chosen")


def is_labelled(record: Record) -> bool:
    """Whether a record has an image and a class, in fields with usual names, but no question. A record with `id`,
    `image` and `label` is excluded: it is a canonical row."""
    own = {"id", "image", "label"} <= record.keys()
    return not own and has(record, *IMAGE) and has(record, *LABEL, *LABELS) and not has(record, *_ASKED, *VIDEO)


def labelled(record: Record, source: RecordSource) -> list[Row]:
    """Converts an image with one class to a row with `label`. For an image with several classes, `label` is a list, and
    `multi` is true. A class number is stored as `class_id`. `choose_from_all` later sets `labels`."""
    given = pick(record, *LABEL)
    given = pick(record, *LABELS) if given is None else given
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(v, (str, int)) and not isinstance(v, bool) for v in several):
        raise DataError(f"label={short(given)} must be the name of a class, or a list of names")
    classes = pick(record, *LABELS)  # a class may be given by its index among these
    known = classes if isinstance(classes, list) and all(isinstance(name, str) for name in classes) else []
    several = [known[v] if isinstance(v, int) and 0 <= v < len(known) else v for v in several]
    names = [str(v).strip().replace("_", " ") if isinstance(v, str) and " " not in v else str(v).strip()
             for v in several]
    if not all(names):
        raise DataError(f"label={short(given)} must be the name of a class, not empty")
    label = {"label": names, "multi": True} if isinstance(given, list) and len(names) > 1 else {"label": names[0]}
    extra: dict[str, Any] = {"split": record["split"]} if isinstance(record.get("split"), str) else {}
    number = given if type(given) is int else record.get("class_id")
    extra |= {"class_id": number} if type(number) is int else {}
    return [{"id": record_id(record, source), **media(record, source), **label, **extra,
             **meta(record, *LABEL, *LABELS, "split", "multi", "class_id")}]


def choose_from_all(rows: Placed) -> Placed:
    """Sets the `labels` of each row to all classes of the file, if the file has 2 to MOST_LABELS classes."""
    labels = [row["label"] for _, _, row in rows if not isinstance(row, DataError)]
    names = sorted({name for label in labels for name in (label if isinstance(label, list) else [label])})
    if not 1 < len(names) <= MOST_LABELS:
        return rows
    return [(n, where, row if isinstance(row, DataError) else {**row, "labels": names}) for n, where, row in rows]
