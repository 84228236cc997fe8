"""Rows: rows of any shape, with your own prompt and your own reward functions.

    vlrl train --data rows.jsonl --reward rewards.py:f --prompt "{question} Answer with one word."

Every column of a row can be used as {column} in `task.prompt`, and is passed to the reward functions, which are listed
in `task.parts` (docs/your-reward.md). Pictures and videos are in `image`, `images` or `video`; they come before the
text, or at the marks <image> and <video> in the text. Without `task.prompt`, the row's `prompt` is used, which may be a
list of chat messages as in TRL, or else its `question`, `problem`, `instruction` or `query`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlrl.data.row_fields import ground_truth
from vlrl.data.turns import MARK
from vlrl.errors import DataError
from vlrl.task import Task
from vlrl.task.base import marked_content
from vlrl.types import Sample

QUESTIONS = ("prompt", "question", "problem", "instruction", "query")
"""Columns with the prompt of a row, if `task.prompt` is not set; the first that a row has is used."""


class Rows(Task):
    """Rows of files or Python objects, with a prompt template and reward functions of your own."""

    row_format = "plain"

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = super().sample_from_row(row, root)
        if not any(self.templates):
            asked = next((row[name] for name in QUESTIONS if row.get(name)), None)
            if asked is None:
                raise DataError(f"row {sample.id!r}: there is no prompt: set task.prompt (--prompt), with the row's "
                                f"columns in braces, e.g. \"{{{next(iter(row))}}}\". Columns: {', '.join(row)}")
            _check_messages(sample, asked)
        return sample

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        template = sample.prompt or self.templates[0]
        name = next((name for name in QUESTIONS if sample.row.get(name)), "prompt")
        if template or not isinstance(sample.get(name), (list, tuple)):
            turns = super().messages(replace(sample, prompt=template or f"{{{name}}}"))
            return [*turns[:-1], _marked_turn(turns[-1])]
        turns = [dict(turn) for turn in sample[name]]
        if self.system and not any(turn["role"] == "system" for turn in turns):
            turns = [{"role": "system", "content": self.system}, *turns]
        return _with_media(turns, [media.kind for media in sample.media])

    def target(self, sample: Sample) -> Any:
        return ground_truth(sample.row)


def _check_messages(sample: Sample, asked: Any) -> None:
    if isinstance(asked, str):
        return
    if not isinstance(asked, (list, tuple)) or not all(
            isinstance(turn, Mapping) and isinstance(turn.get("content"), (str, list)) and turn.get("role") in
            ("system", "user", "assistant") for turn in asked):
        raise DataError(f"row {sample.id!r}: the prompt must be a text or a list of chat messages, each with the "
                        f"role system, user or assistant and a content: {str(asked)[:100]}")
    if not asked or asked[-1]["role"] != "user":
        raise DataError(f"row {sample.id!r}: the last chat message of the prompt must be the user's, because the model "
                        "answers it. Remove the assistant's answer from the prompt")


def _marked_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A message whose placeholders come before its text, with each placeholder moved to its mark in the text, if the
    text has as many marks."""
    content = turn["content"]
    texts = [part["text"] for part in content if part.get("type") == "text"]
    kinds = [part["type"] for part in content if part.get("type") != "text"]
    if len(texts) != 1 or len(MARK.findall(texts[0])) != len(kinds):
        return turn
    return {**turn, "content": marked_content(texts[0], kinds)}


def _with_media(turns: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The chat messages with a placeholder for each medium: where the messages have a mark or placeholder for each, or
    else before the text of the first user message."""
    contents = [[{"type": "text", "text": turn["content"]}] if isinstance(turn["content"], str) else turn["content"]
                for turn in turns]
    parts = [part for content in contents for part in content]
    shown = [kind for part in parts for kind in
             (MARK.findall(str(part.get("text") or "")) if part.get("type") == "text" else [part.get("type")])]
    left = list(kinds)
    if shown:
        contents = [[piece for part in content for piece in _placed(part, left)] for content in contents]
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
    contents[first] = [*({"type": kind} for kind in left if not shown), *contents[first]]
    return [{"role": turn["role"], "content": content} for turn, content in zip(turns, contents, strict=True)]


def _placed(part: Mapping[str, Any], left: list[str]) -> list[dict[str, Any]]:
    if part.get("type") != "text":
        return [{"type": left.pop(0) if left else part.get("type")}]
    return marked_content(str(part.get("text") or ""), left)
