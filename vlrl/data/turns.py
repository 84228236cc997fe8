"""Row fields that surround the question: earlier turns, tools, and the placeholders that position images and videos.

    {"id": 1, "images": ["a.png", "b.png"], "turns": [{"role": "user", "content": "<image>Colour?"},
     {"role": "assistant", "content": "red"}], "question": "<image>And this?", "answer": "blue"}"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from vlrl.data.values import short, unpacked
from vlrl.errors import DataError
from vlrl.types import Record

log = logging.getLogger(__name__)

MARK = re.compile(r"<(image|video)>")
"""Matches the placeholder of an image or video in the text of a turn or question."""
_FOLLOWS = {None: ("user",), "user": ("assistant",), "assistant": ("user",), "call": ("tool",),
            "tool": ("tool", "assistant")}


def marks_of(row: Record) -> list[str]:
    """Returns the kind ("image" or "video") of each media placeholder in a row's turns and question, in order."""
    texts = [*(str(turn.get("content") or "") for turn in turns_of(row)), str(row.get("question") or "")]
    return [kind for text in texts for kind in MARK.findall(text)]


def turns_of(row: Record) -> list[Record]:
    return [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]


def check_turns(row: Record, kinds: Sequence[str]) -> None:
    """Raises DataError if a row's turns are malformed or out of order, or call tools although the row has none.

    The placeholders must also match the row's media; `kinds` lists the kind ("image" or "video") of each medium."""
    turns, before = row.get("turns") or [], None
    if not isinstance(turns, list):
        raise DataError(f'turns={short(turns)} must be a list of {{"role": ..., "content": ...}}')
    for turn in turns:
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), str) or role not in _FOLLOWS[before]:
            raise DataError(f"the turn {short(turn)} must be {{\"role\": {' or '.join(_FOLLOWS[before])}, \"content\": "
                            "a string}: user and assistant alternate, the user first, the assistant last")
        if role == "tool" or turn.get("tool_calls"):
            _check_call(row, turn)
        elif not turn["content"].strip():
            raise DataError(f"the turn {short(turn)} is empty")
        before = "call" if turn.get("tool_calls") else role
    if before not in (None, "assistant"):
        raise DataError("the last of `turns` must be the assistant's; the question that follows belongs in `question`")
    _check_marks(row, kinds, [kind for turn in turns for kind in MARK.findall(turn["content"])])


def _check_marks(row: Record, media_kinds: Sequence[str], in_turns: Sequence[str]) -> None:
    """Raises DataError if the placeholders of a row do not match its media. `in_turns` are the placeholders in turns,
    which stand for the first media.

    The question must have one placeholder for each further image or video, or none. In a question without placeholders,
    the prompt shows these media first."""
    marks = marks_of(row)
    in_question, rest = len(marks) - len(in_turns), len(media_kinds) - len(in_turns)
    if rest < 0 or in_question not in (0, rest):
        raise DataError(f"turns and question have placeholders for {len(marks)} images or videos, but the row has "
                        f"{len(media_kinds)}: write one <image> or <video> per image or video (a question without "
                        "placeholders shows the remaining media first)")
    if in_question and len(set(media_kinds)) > 1 and sorted(marks) != sorted(media_kinds):
        raise DataError(f"turns and question have placeholders for {', '.join(marks)}, but the row has "
                        f"{', '.join(media_kinds)}")


def _check_call(row: Record, turn: Record) -> None:
    if not row.get("tools"):
        raise DataError(f"the conversation has a tool turn, {short(turn)}, but the record has no `tools`")
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) and isinstance(
            call.get("function"), Mapping) and isinstance(call["function"].get("name"), str) for call in calls):
        raise DataError(f"tool_calls={short(calls)} must be a list of {{\"function\": {{\"name\", \"arguments\"}}}}")


def media_in_order(media: Sequence[Any], row: Record) -> tuple[Any, ...]:
    """Returns images and videos in the order of the row's placeholders; unchanged if media and placeholders do not
    match."""
    left = {kind: iter([m for m in media if m.kind == kind]) for kind in ("image", "video")}
    marks = marks_of(row)
    if sorted(marks) != sorted(m.kind for m in media):
        return tuple(media)
    return tuple(next(left[kind]) for kind in marks)


def are_tools(tools: Any) -> bool:
    return isinstance(tools, list) and bool(tools) and all(isinstance(unpacked(tool), Mapping) for tool in tools)


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Returns the tools of a row in the form that chat templates take.

    Also accepts bare function definitions (LLaMA-Factory) and JSON strings (TRL). Raises DataError for other values."""
    if not are_tools(tools):
        raise DataError(f'tools={short(tools)} must be a list of {{"type": "function", "function": {{"name", ...}}}}')
    functions = [unpacked(tool) for tool in tools]
    functions = [dict(tool) if "function" in tool else {"type": "function", "function": {
        k: v for k, v in tool.items() if k != "type"}} for tool in functions]
    nameless = next((tool for tool in functions if not isinstance(tool["function"], Mapping) or not isinstance(
        tool["function"].get("name"), str)), None)
    if nameless:
        raise DataError(f"the tool {short(nameless)} has no name")
    return functions


def check_tools(row: Record) -> None:
    """Raises DataError for malformed `tools` or `environment`. For a row with an `environment`, warns once that no task
    reads this field."""
    if row.get("tools") is not None:
        tools_of(row["tools"])
    if row.get("environment") is not None:
        if not isinstance(row["environment"], Mapping):
            raise DataError(f"environment={short(row['environment'])} must be an object of settings")
        _warn_unread()


@cache
def _warn_unread() -> None:
    log.warning("rows have an `environment`: it is kept in the sample, but no task reads it, and each prompt is "
                "answered in a single turn")
