"""What a judge is asked and what it says: fields of a JSON reply, and text of others shown so that it stays text. Pure.

    fields = {"verdict": ("yes", "no"), "score": (1, 10)}
    schema(fields)                                          # JSON schema of such a reply
    read_fields('... {"verdict": "yes", "score": 7}', fields)   # {"verdict": "yes", "score": 7}; None = not readable
    quoted("answer", text)                                  # text between marks that it cannot close

What is judged was written by a model that is paid for the verdict, so it may hold "give me 1.0", tags of a chat
template or a verdict of its own. `quoted` puts it between marks that are a hash of the text itself, which the text
therefore cannot hold, and takes the force from control tokens and signs that do not show.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Sequence[str] | tuple[float, float]]
"""Name -> the texts that are allowed, or the lowest and the highest number."""

MOST_SHOWN = 8000
"""Characters of a text that a judge is shown; of a longer one the beginning and the end."""
_CONTROL = re.compile(r"<\|([^|<>\n]{1,60})\|>|\[(/?)INST\]|<(/?)(s|bos|eos|start_of_turn|end_of_turn)>|<<(/?)SYS>>")
_HIDDEN = ("Cf", "Cc", "Cs", "Co", "Cn")
"""Unicode classes of signs that do not show: format, control, surrogate, private use, unassigned."""


def is_range(allowed: Sequence[Any]) -> bool:
    """Returns whether a field is a number between two others."""
    return len(allowed) == 2 and not any(isinstance(value, str) for value in allowed)


def schema(fields: Fields) -> dict[str, Any]:
    """Returns the JSON schema of a reply with these fields and no others."""
    each = {name: {"type": "number", "minimum": allowed[0], "maximum": allowed[1]} if is_range(allowed) else
            {"type": "string", "enum": list(allowed)} for name, allowed in fields.items()}
    return {"type": "object", "properties": each, "required": list(fields), "additionalProperties": False}


def reply_format(fields: Fields) -> str:
    """Returns what a question says of the reply it wants."""
    each = ", ".join(f'"{name}": ' + (f"a number from {allowed[0]:g} to {allowed[1]:g}" if is_range(allowed) else
                                      " or ".join(f'"{value}"' for value in allowed))
                     for name, allowed in fields.items())
    return f"Reply with one line of JSON and nothing after it: {{{each}}}"


def read_fields(text: str, fields: Fields) -> dict[str, Any] | None:
    """Returns the fields of the last JSON object in a text that is none of another one; None where it lacks one, or
    has another value than is allowed. A thinking part before `</think>` is passed over.
    """
    entries = last_object(text.rpartition("</think>")[2])
    if entries is None:
        return None
    out: dict[str, Any] = {}
    for name, allowed in fields.items():
        value = _allowed(entries.get(name), allowed)
        if value is None:
            return None
        out[name] = value
    return out


def _allowed(value: Any, allowed: Sequence[Any]) -> Any:
    if is_range(allowed):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and allowed[0] <= value <= allowed[1]
        return value if fits and math.isfinite(value) else None
    plain = value.strip().casefold() if isinstance(value, str) else None
    return next((known for known in allowed if known.casefold() == plain), None)


def last_object(text: str) -> dict[str, Any] | None:
    """Returns the last whole JSON object of a text, none that lies in another one."""
    decoder, at, last = json.JSONDecoder(), 0, None
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        last = value if isinstance(value, dict) else last
    return last


def canonical_verdict(text: str, fields: Fields | None = None) -> str:
    """Returns what two replies have in common that say the same: their fields, else their last number of the form
    1.0, else the text itself.
    """
    if fields:
        return json.dumps(read_fields(text, fields), sort_keys=True)
    numbers = re.findall(r"(?<![\d.])-?\d+\.\d+(?![\d.])", text)
    return numbers[-1] if numbers else " ".join(text.casefold().split())


def sanitized(text: str, most: int = MOST_SHOWN) -> str:
    """Returns a text as a judge may see it: control tokens of chat templates broken, signs that do not show left out,
    and of one that is longer than `most` characters its beginning and its end.
    """
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _HIDDEN)
    text = _CONTROL.sub(lambda match: match[0].replace("<", "< ").replace("[", "[ "), text)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def quoted(name: str, text: str, most: int = MOST_SHOWN) -> str:
    """Returns a text between marks such as <answer-3f2a9c41d0e8> that it does not hold, and cannot have foreseen."""
    text, salt = sanitized(text, most), ""
    while (mark := hashlib.sha256((salt + text).encode("utf-8", "replace")).hexdigest()[:12]) in text:
        salt += "+"
    return f"<{name}-{mark}>\n{text}\n</{name}-{mark}>"
