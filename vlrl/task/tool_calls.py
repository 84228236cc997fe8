"""Parses tool calls in the text of a model: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Imports no
torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CALLS = 8
"""Maximum number of tool calls in one action that are executed; further calls are refused."""
_MOST_CALL = 20_000  # characters of a call
_MOST_NESTED = 20  # nesting depth of the arguments of a call


@dataclass(frozen=True)
class Call:
    """A parsed tool call."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """What is wrong with the call's syntax; "" if it is valid."""


def calls_of(text: str) -> list[Call]:
    """The tool calls in the text of an action, in order: each is `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`. Text before `</think>` is ignored. If the thinking is never closed, all text is ignored. If
    there are more than MOST_CALLS calls, a single Call with an error stands for the rest."""
    _, closed, said = text.rpartition("</think>")
    _, *pieces = said.split(OPEN) if closed or "<think>" not in text else ("",)
    calls = [_call(piece) for piece in pieces[:MOST_CALLS]]
    rest = len(pieces) - len(calls)
    if rest:
        calls.append(Call(error=f"{len(pieces)} calls in one turn; the last {rest} were not run, at most {MOST_CALLS} "
                                "are"))
    return calls


def _call(piece: str) -> Call:
    body, closed, _ = piece.partition(CLOSE)
    form = f'write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'
    if not closed:
        return Call(error=f"a call is not closed; {form}")
    if len(body) > _MOST_CALL:
        return Call(error=f"a call has {len(body)} characters; at most {_MOST_CALL} are read")
    try:
        request = from_json(body)
    except (ValueError, RecursionError) as error:
        return Call(error=f"a call is no JSON ({str(error)[:100]}); {form}")
    name = request.get("name") if isinstance(request, dict) else None
    if not isinstance(name, str) or not {"name", "arguments"} >= request.keys():
        return Call(error=f"a call must hold name and arguments; {form}")
    arguments = request.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(name, error=f"{name}: arguments must be an object, {{name: value}}")
    if _nests(arguments, _MOST_NESTED):
        return Call(name, error=f"{name}: arguments nest deeper than {_MOST_NESTED} levels")
    return Call(name, arguments)


def _nests(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_nests(inner, levels - 1) for inner in inside)


def from_json(text: str | bytes) -> Any:
    """Parses JSON in which all numbers must be finite. Raises ValueError or RecursionError."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number
