"""Rules of the fields `answer_type`, `options`, `plan` and `trajectory`, imported only for rows with such a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlrl.data.formats.choices import option_letter, options_of
from vlrl.data.values import short
from vlrl.errors import DataError, did_you_mean
from vlrl.rewards.answers import one_number
from vlrl.rewards.chart import count
from vlrl.rewards.codes import is_code
from vlrl.rewards.driving import HEADS, trajectory_problem

ANSWER_TYPES = ("choice", "number", "count", "text", "yes_no", "math", "chart", "ocr", "regression", "span",
                "span+choice", "track")
_NUMERIC = ("number", "count", "regression")


def answer_type_problem(row: Mapping[str, Any]) -> str | None:
    kind = row["answer_type"]
    if kind not in ANSWER_TYPES:
        return (f"answer_type={short(kind)} is not known.{did_you_mean(str(kind), ANSWER_TYPES)} Known: "
                f"{', '.join(ANSWER_TYPES)}")
    needed, answer = {"span": "spans", "track": "tracks"}.get(kind, "answer"), row.get("answer")
    if row.get(needed) is None and answer is None:
        return f"answer_type={kind} needs the field {needed!r}"
    if kind in _NUMERIC:
        read = count if kind == "count" else one_number
        accepted = [str(value) for value in (answer if isinstance(answer, list) else [answer])]
        if not any(read(text) is not None or is_code(text) for text in accepted):  # a code is compared as text
            return f"answer={short(answer)} must be a number, as answer_type={kind} says"
    return None


def options_problem(row: Mapping[str, Any]) -> str | None:
    given = row["options"]
    if not isinstance(given, list) or len(given) < 2 or not all(
            isinstance(v, (str, int, float)) and str(v).strip() for v in given):
        return f"options={short(given)} must be a list of at least two strings"
    if row.get("answer") is None or row.get("answer_type", "choice") not in ("choice", "span+choice"):
        return None
    try:
        answer = row["answer"]
        answer = ", ".join(map(str, answer)) if isinstance(answer, list) else answer
        option_letter(answer, options_of({"options": given}))
    except DataError as error:
        return str(error)
    return None


def plan_problem(row: Mapping[str, Any]) -> str | None:
    given = row["plan"]
    if not isinstance(given, Mapping):
        return f"plan={short(given)} must be {{\"speed\": ..., \"path\": ...}}"
    for head, known in HEADS.items():
        words = given.get(head)
        several = words if isinstance(words, list) else [words]
        wrong = next((w for w in several if w not in known), None) if several else words
        if wrong is not None or not several or words is None:
            return (f"plan.{head}={short(words)} must be one of {', '.join(known)}, or a list of them."
                    f"{did_you_mean(str(wrong), known)}")
    return None


def trajectory_field_problem(row: Mapping[str, Any]) -> str | None:
    problem = trajectory_problem(row["trajectory"])
    return f"trajectory={short(row['trajectory'])}: {problem}" if problem else None
