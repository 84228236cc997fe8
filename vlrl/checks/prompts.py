"""Rules of what a sample's messages show and ask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlrl.checks.rule import Found
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data.row_media import named_media, unshown_advice, unshown_columns, unshown_problem
from vlrl.task import Task, task_messages
from vlrl.types import Sample

_PLACEHOLDER = re.compile(r"(?<![\w\\])\{(\w+)\}")  # {label}, not \boxed{label}


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the texts of chat messages, those of the system and of examples included, a line each."""
    contents = [[{"text": m["content"]}] if isinstance(m["content"], str) else m["content"] for m in messages]
    return "\n".join(part["text"] for content in contents for part in content
                     if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def media_problems(task: Task, sample: Sample) -> Iterator[Found]:
    """Yields what a row names, or a sample has, and the prompt does not show."""
    missing = unshown_problem(sample, FIELDS, MEDIA_FIELDS)
    if missing:
        yield Found(missing, id=sample.id)
    else:
        for column in unshown_columns(sample, FIELDS, MEDIA_FIELDS)[:1]:
            yield Found(f"the prompt does not show all media of the row, {named_media(sample.row, column)}: "
                          f"{unshown_advice(column, MEDIA_FIELDS)}", id=sample.id, level="warning")
    placed = [part.get("type") for m in task_messages(task, sample) if not isinstance(m["content"], str)
              for part in m["content"] if part.get("type") != "text"]
    has = [media.kind for media in sample.media]
    if placed != has:
        yield Found(f"its messages show {placed}, but the sample has {has}: every image and video "
                      'once, in order, as {"type": "image"} or {"type": "video"}', id=sample.id)


def placeholder_problems(task: Task, sample: Sample, text: str) -> Iterator[Found]:
    """Yields the {placeholders} of a sample's template that its row does not fill and `text`, its prompt, still has."""
    for name in dict.fromkeys(_PLACEHOLDER.findall(sample.prompt or task.templates[0])):
        if name not in sample.row and f"{{{name}}}" in text:
            yield Found(f"the prompt asks for {{{name}}}, which the row does not have (it has "
                          f"{', '.join(map(str, sample.row)) or 'no field'}): give the rows that field, or write "
                          f"{{ {name} }} for the braces themselves", id=sample.id)
