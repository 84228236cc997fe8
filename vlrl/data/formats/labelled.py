"""Converts images with a class name to canonical rows: tables, folders of classes, CoOp's splits, CLS-RL."""

from __future__ import annotations

from typing import Any

from vlrl.data.formats.annotated import LABEL
from vlrl.data.formats.grounding import MOST_LABELS
from vlrl.data.sources.fields import IMAGE, VIDEO, RecordSource, has, media, meta, pick, record_id
from vlrl.data.sources.reading import Placed
from vlrl.data.values import short
from vlrl.errors import DataError
from vlrl.types import Record, Row

LABELS = ("labels", "tags", "classes")
_ASKED = ("question", "answer", "instruction", "problem", "solution", "expression", "query", "prompt", "conversations",
          "messages", "boxes", "objects", "annotations", "responses", "chosen")


def is_labelled(record: Record) -> bool:
    """Whether a record has an image and a class in a field with a common name, but no question.

    A record with `id`, `image` and `label` is excluded: it is a canonical row."""
    own = {"id", "image", "label"} <= record.keys()
    return not own and has(record, *IMAGE) and has(record, *LABEL, *LABELS) and not has(record, *_ASKED, *VIDEO)


def labelled(record: Record, source: RecordSource) -> list[Row]:
    """Converts an image with one class to a row with `label`, or an image with several classes to a row with `multi`.

    A class number is stored as `class_id`. `choose_from_all` later sets `labels` to the classes of the file."""
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
