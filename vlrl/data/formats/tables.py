"""Converts questions about a table in text form (TabMWP, 2209.14610) to canonical rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlrl.data.formats.choices import OPTIONS, answer_fields, options_of
from vlrl.data.sources.fields import IMAGE, RecordSource, has, meta, pick, record_id, size_of, text
from vlrl.data.values import short
from vlrl.errors import DataError
from vlrl.types import Record, Row

_TYPES = {"integer_number": "number", "decimal_number": "number", "boolean_text": "text", "extractive_text": "text",
          "other_text": "text"}
"""Maps ans_type to the row's answer_type."""
_NAMES = ("tables/{}.png", "{}.png")
"""Possible file names of a table's image; {} is the id of the record."""


def table_question(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record to a row that shows the table as text before the question, and its image if the file exists."""
    question, table = text(record, "question"), _as_text(pick(record, "table"))
    title, unit = (str(record.get(name) or "").strip() for name in ("table_title", "unit"))
    asked = "\n".join(filter(None, (title, f"{table}\n", question))) + (f" (unit: {unit})" if unit else "")
    options, id = options_of(record), record_id(record, source)
    row = answer_fields(record["answer"], options, question, _TYPES.get(str(record.get("ans_type"))))
    drawn = (name.format(id) for name in _NAMES)
    image = pick(record, *IMAGE) or next((name for name in drawn if source.size(name)), None)
    shown: dict[str, Any] = {"image": source.path(image)} if isinstance(image, str) else {}
    size = size_of(record, shown, source) if shown else None
    shown |= {"width": size[0], "height": size[1]} if size else {}
    split = {"split": record["split"]} if has(record, "split") else {}
    return [{"id": id, **shown, "question": asked, **row, **split,
             **meta(record, "question", "table", "table_title", "table_for_pd", "unit", "answer", "ans_type", "split",
                    *OPTIONS)}]


def _as_text(table: Any) -> str:
    if isinstance(table, str):
        return table.strip()
    if isinstance(table, Mapping):  # WikiTableQuestions, TAT-QA
        rows = pick(table, "rows", "table", "data")
        head = pick(table, "header", "columns")
        table = [*([head] if head else []), *rows] if isinstance(rows, list) else None
    if not isinstance(table, list) or not table or not all(isinstance(line, list) for line in table):
        raise DataError(f"table={short(table)} must be a string, or a list of rows, each a list of cells")
    return "\n".join(" | ".join("" if cell is None else str(cell) for cell in line) for line in table)
