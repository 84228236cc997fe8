"""Rules of the messages of a sample: which media they show, and whether a placeholder is left in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlrl.checks.finding import Finding
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data.row_media import named_media, unshown_advice, unshown_columns, unshown_problem
from vlrl.task import Task, task_messages
from vlrl.types import Sample

_PLACEHOLDER = re.compile(r"(?<![\w\\])\{(\w+)\}")  # {label}, not \boxed{label}


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of chat messages (system and few-shot examples included), joined by newlines."""
    contents = [[{"text": m["content"]}] if isinstance(m["content"], str) else m["content"] for m in messages]
    return "\n".join(part["text"] for content in contents for part in content
                     if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def media_problems(task: Task, sample: Sample) -> Iterator[Finding]:
    """Yields a message for media that the row names or the sample has, but the prompt does not show."""
    missing = unshown_problem(sample, FIELDS, MEDIA_FIELDS)
    if missing:
        yield Finding(message=missing, id=sample.id)
    else:
        for column in unshown_columns(sample, FIELDS, MEDIA_FIELDS)[:1]:
            yield Finding(message=f"the prompt does not show all media of the row, {named_media(sample.row, column)}: "
                          f"{unshown_advice(column, MEDIA_FIELDS)}", id=sample.id, level="warning")
    shown = [part.get("type") for m in task_messages(task, sample) if not isinstance(m["content"], str)
             for part in m["content"] if part.get("type") != "text"]
    has = [media.kind for media in sample.media]
    if shown != has:
        yield Finding(message=f"its messages show {shown}, but the sample has {has}: every image and video once, in "
                      'order, as {"type": "image"} or {"type": "video"}', id=sample.id)


def placeholder_problems(task: Task, sample: Sample, text: str) -> Iterator[Finding]:
    """Yields a message for each placeholder of the sample's template that is still in the prompt `text`, because the
    row lacks the field."""
    for name in dict.fromkeys(_PLACEHOLDER.findall(sample.prompt or task.templates[0])):
        if name not in sample.row and f"{{{name}}}" in text:
            yield Finding(message=f"the prompt asks for {{{name}}}, which the row does not have (it has "
                          f"{', '.join(map(str, sample.row)) or 'no field'}): give the rows that field, or write "
                          f"{{ {name} }} for literal braces", id=sample.id)
