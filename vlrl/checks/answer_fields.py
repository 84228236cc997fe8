"""Rules of what a row says about its answer: `answer_type` and `options`."""

from __future__ import annotations

from typing import Any

from vlrl.data.formats.choices import option_letter, options_of
from vlrl.data.values import short
from vlrl.errors import DataError, did_you_mean
from vlrl.rewards.answers import one_number
from vlrl.rewards.chart import count
from vlrl.rewards.codes import is_code
from vlrl.types import Record

ANSWER_TYPES = ("choice", "number", "count", "text", "yes_no", "math", "chart", "ocr", "regression", "span",
                "span+choice", "track")
_NUMERIC = ("number", "count", "regression")


def answer_type(row: Record) -> str | None:
    kind = row["answer_type"]
    if kind not in ANSWER_TYPES:
        return (f"answer_type={short(kind)} is not known.{did_you_mean(str(kind), ANSWER_TYPES)} Known: "
                f"{', '.join(ANSWER_TYPES)}")
    needed = {"span": "spans", "track": "tracks"}.get(kind, "answer")
    if row.get(needed) is None and row.get("answer") is None:
        return f"answer_type={kind} needs the field {needed!r}"
    if kind in _NUMERIC and not _is_numeric(row.get("answer"), kind):
        return f"answer={short(row.get('answer'))} must be a number, as answer_type={kind} says"
    return None


def _is_numeric(value: Any, kind: str) -> bool:
    """Returns whether one of the right answers is a number of this type, or a code, which is compared as it is written.
    """
    several, read = value if isinstance(value, list) else [value], count if kind == "count" else one_number
    return any(read(str(v)) is not None or is_code(str(v)) for v in several)


def options(row: Record) -> str | None:
    given = row["options"]
    if not isinstance(given, list) or len(given) < 2 or not all(
            isinstance(v, (str, int, float)) and str(v).strip() for v in given):
        return f"options={short(given)} must be a list of at least two texts"
    if row.get("answer") is None or row.get("answer_type", "choice") not in ("choice", "span+choice"):
        return None
    try:
        answer = row["answer"]
        answer = ", ".join(map(str, answer)) if isinstance(answer, list) else answer
        option_letter(answer, options_of({"options": given}))
    except DataError as error:
        return str(error)
    return None
