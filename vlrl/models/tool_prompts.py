"""Writes tools, tool calls and results in the format of Qwen's chat templates, for models whose template lacks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.models.chat_template import Message, Template, text_part
from vlrl.task.tool_calls import CLOSE, OPEN, calls_of
from vlrl.types import Observation

RESULT = ("<tool_response>", "</tool_response>")
_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within """ + f"""{OPEN}{CLOSE} XML tags:
{OPEN}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{CLOSE}"""


def in_system(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with an added system prompt that lists the tools and explains how to call them."""
    instructions = _TOLD.format("\n".join(map(json.dumps, tools)))
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": [text_part(instructions)]}, *messages]
    own = messages[0]["content"]
    parts = [text_part(own)] if isinstance(own, str) else own
    return [{**messages[0], "content": [*parts, text_part("\n\n" + instructions)]}, *messages[1:]]


def results(observation: Observation, by_role: bool, in_place: bool) -> list[Message]:
    """Returns the turns that show the results of tool calls. With `by_role`, each result is one turn of role tool;
    otherwise all results are one user turn. `in_place`: whether the template keeps media between the texts of a
    turn. Without `in_place`, the media come before the text of the user turn."""
    if by_role:
        return [{"role": "tool", "content": [*_media(r), text_part(_quoted(r.text))]} for r in observation.results]
    begin, end = RESULT
    parts = []
    for i, result in enumerate(observation.results):
        parts += [text_part("\n" * bool(i) + begin + "\n"), *_media(result),
                  text_part(f"{_quoted(result.text)}\n{end}")]
    if not in_place:
        text = "".join(part.get("text", "") for part in parts)
        parts = [*(part for part in parts if part["type"] != "text"), text_part(text)]
    return [{"role": "user", "content": parts}]


def _media(result: Observation) -> list[Message]:
    return [{"type": media.kind} for media in result.media]


def _quoted(text: str) -> str:
    for tag in RESULT:
        text = text.replace(tag, f"{tag[0]} {tag[1:]}")
    return text


# --- what a template does ---------------------------------------------------------------------------------------------

_NAME = "stands_in_for_a_tool"
_ASKED = {"role": "user", "content": [text_part("x")]}
_ANSWERED = {"role": "assistant", "content": [text_part("y")]}


def writes_calls(template: Template) -> bool:
    """Whether a chat template shows tools, and writes tool calls in the format that vlrl parses."""
    call = {"type": "function", "function": {"name": _NAME, "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
    try:
        text = template([_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[tool])
        shown = _NAME in template([_ASKED], tools=[tool])
    except Exception:  # whatever a template's code raises
        return False
    return shown and any(c.name == _NAME and c.arguments == {"a": 1} for c in calls_of(text))


def keeps_results(template: Template) -> bool:
    """Whether a chat template has turns of role tool, and shows images in them as it does in user turns."""
    def added(role: str) -> int:
        alone, pictured = ([*parts, text_part(_NAME)] for parts in ([], [{"type": "image"}]))
        texts = [template([_ASKED, _ANSWERED, {"role": role, "content": parts}]) for parts in (alone, pictured)]
        return len(texts[1]) - len(texts[0]) if all(_NAME in text for text in texts) else 0

    try:
        return 0 < added("user") == added("tool")
    except Exception:  # whatever a template's code raises
        return False


def strips_thinking(template: Template) -> bool:
    """Whether a chat template drops the thinking of earlier turns once a user turn follows."""
    try:
        said = {"role": "assistant", "content": [text_part(f"<think>\n{_NAME}\n</think>\n\ny")]}
        return _NAME not in template([_ASKED, said, _ASKED])
    except Exception:  # whatever a template's code raises
        return False
