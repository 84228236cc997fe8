"""Records of question and answer -> canonical rows: counting as SuperCLEVR, and other texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlrl.errors import DataError
from vlrl.formats.fields import IMAGE, Source, begin, has, meta, number, short, text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ASKS_COUNT = re.compile(r"\bhow many\b|\bcount\b|\bnumber of\b", re.IGNORECASE)


def is_problem_text(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("problem"), str) and has(record, *IMAGE) and "solution" in record


def problem_text(record: Mapping[str, Any], source: Source) -> list[dict[str, Any]]:
    """`problem` and `solution` (Curr-ReFT's SuperCLEVR, R1-V): a count, a number, a letter or a text."""
    solution = record["solution"]
    if isinstance(solution, bool) or not isinstance(solution, (str, int, float)):
        raise DataError(f"solution={short(solution)} must be a text, a number or a box [x1, y1, x2, y2]")
    question = text(record, "problem")
    answer = (_ANSWER.findall(str(solution)) or [str(solution)])[-1].strip()
    value = number(answer)
    if value is not None:
        kind = "count" if isinstance(value, int) and value >= 0 and _ASKS_COUNT.search(question) else "number"
    else:
        kind = "choice" if re.fullmatch(r"\(?[A-H]\)?", answer) else "text"
    counted = {"count": value} if kind == "count" else {}
    return [{**begin(record, source), "question": question, "answer": answer if value is None else value,
             "answer_type": kind, **counted, **meta(record, "problem", "solution")}]
