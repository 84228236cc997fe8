"""Builds questions to an LLM judge and parses the replies: named fields in a JSON reply, and tags around untrusted
text, so that the judge treats it as text and not as instructions.

    fields = {"verdict": ("yes", "no"), "score": (1, 10)}
    schema(fields)                                          # JSON schema of such a reply
    read_fields('... {"verdict": "yes", "score": 7}', fields)   # {"verdict": "yes", "score": 7}; None = not readable
    quoted("answer", text)                                  # text between tags that the text cannot close

The text to be judged was written by a model that is rewarded for the verdict, so it may contain "give me 1.0", tags of
a chat template or a verdict. `quoted` encloses the text in tags named after a hash of the text, which the text
therefore cannot contain. `quoted` also breaks control tokens and removes invisible characters."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Sequence[str] | tuple[float, float]]
"""Name of a field -> the allowed strings, or (lowest, highest) for a number."""

MOST_SHOWN = 8000
"""Maximum number of characters of a text that is shown to a judge. Of a longer text, the judge sees the beginning and
the end."""
_CONTROL = re.compile(r"<\|([^|<>\n]{1,60})\|>|\[(/?)INST\]|<(/?)(s|bos|eos|start_of_turn|end_of_turn)>|<<(/?)SYS>>")
_HIDDEN = ("Cf", "Cc", "Cs", "Co", "Cn")
"""Unicode categories of invisible characters: format, control, surrogate, private use, unassigned."""


def is_range(allowed: Sequence[Any]) -> bool:
    """Whether the allowed values of a field are a range of numbers, (lowest, highest), and not a list of strings."""
    return len(allowed) == 2 and not any(isinstance(value, str) for value in allowed)


def schema(fields: Fields) -> dict[str, Any]:
    """The JSON schema of a reply with exactly these fields."""
    each = {name: {"type": "number", "minimum": allowed[0], "maximum": allowed[1]} if is_range(allowed) else
            {"type": "string", "enum": list(allowed)} for name, allowed in fields.items()}
    return {"type": "object", "properties": each, "required": list(fields), "additionalProperties": False}


def reply_format(fields: Fields) -> str:
    """The sentence at the end of a question that tells the judge to reply in JSON with these fields."""
    each = ", ".join(f'"{name}": ' + (f"a number from {allowed[0]:g} to {allowed[1]:g}" if is_range(allowed) else
                                      " or ".join(f'"{value}"' for value in allowed))
                     for name, allowed in fields.items())
    return f"Reply with one line of JSON and nothing after it: {{{each}}}"


def read_fields(text: str, fields: Fields) -> dict[str, Any] | None:
    """The values of the fields, from the last top-level JSON object in a reply; None if a field is missing or its value
    is not allowed. Thinking before `</think>` is skipped."""
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
    """The last complete top-level JSON object in a text; None if there is none."""
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
    """A judge's reply in a normal form, so that equivalent replies are equal. With `fields`, this is JSON of the fields
    in the reply. Without `fields`, it is the last decimal number such as 1.0 or, without such a number, the whole
    text in lower case with single spaces."""
    if fields:
        return json.dumps(read_fields(text, fields), sort_keys=True)
    numbers = re.findall(r"(?<![\d.])-?\d+\.\d+(?![\d.])", text)
    return numbers[-1] if numbers else " ".join(text.casefold().split())


def sanitized(text: str, most: int = MOST_SHOWN) -> str:
    """A text as shown to a judge: control tokens of chat templates are broken up, invisible characters are removed, and
    a text longer than `most` characters is cut in the middle."""
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _HIDDEN)
    text = _CONTROL.sub(lambda match: match[0].replace("<", "< ").replace("[", "[ "), text)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def quoted(name: str, text: str, most: int = MOST_SHOWN) -> str:
    """Returns a text, cut to `most` characters, between tags such as <answer-3f2a9c41d0e8>. The name of the tag is
    `name` and a hash. The text does not contain this hash, and its author could not have predicted it."""
    text, salt = sanitized(text, most), ""
    while (mark := hashlib.sha256((salt + text).encode("utf-8", "replace")).hexdigest()[:12]) in text:
        salt += "+"
    return f"<{name}-{mark}>\n{text}\n</{name}-{mark}>"
