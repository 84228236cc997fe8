"""Text of an answer: tags, format, labels, choices and numbers. Linear time, never raises, whatever the text."""

import math
import re
import unicodedata
from typing import Literal

from vlrl.types import Answer

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_SPACE = " \t\r\n\f\v\u00a0"
_AROUND = _SPACE + "\"'`()[]{}<>*_,;:!?\u2018\u2019\u201c\u201d\u00ab\u00bb\u3001\u3002\uff0c\uff01\uff1f\uff1a\uff1b"
_MARKED_CHOICE = re.compile(r"\(([A-Z])\)|(?<![A-Za-z0-9])([A-Z])(?:[.):,;]|\s*$)", re.ASCII)
_BARE_CHOICE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])", re.ASCII)
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?(?![\w]|\.\d)", re.ASCII)


def extract_tag(text: str, tag: str, which: Literal["first", "last"] = "first") -> str | None:
    """Content of the first or last `<tag>...</tag>`, as written; None when no such pair is closed.

    Pairs are read from the left and do not overlap: a pair ends at the first closing tag after its opening tag.
    """
    opening, closing, found, at = f"<{tag}>", f"</{tag}>", None, 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found, at = text[start:end], end + len(closing)
        if which == "first":
            break
    return found


def think_answer_format(text: str) -> float:
    """1 when the text is `<think>...</think> <answer>...</answer>` and nothing else, else 0.

    Each of the four tags must occur exactly once (DeepSeek-R1's format, 2501.12948, with the tags counted: the bare
    regular expression also accepts several blocks inside each other).
    """
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith(_TAGS[0]) and text.endswith(_TAGS[3])):
        return 0.0
    closed, answer = text.find(_TAGS[1]), text.find(_TAGS[2])
    return float(closed < answer and not text[closed + len(_TAGS[1]):answer].strip())


def parse_answer(text: str, n_tokens: int = 0, truncated: bool = False, step: int = 0) -> Answer:
    """An answer with its parts: `reasoning` and `final`, both stripped.

    `reasoning` is the first closed <think>, or what stands before a </think> that the prompt opened. `final` is the
    last closed <answer>, else the text after the last </think>, else the whole text; thinking that was opened and
    never closed is all reasoning, so nothing in it can pay.
    """
    before, closed, after = text.rpartition("</think>")
    reasoning = extract_tag(text, "think")
    unfinished = not closed and "<think>" in text
    if reasoning is None:
        reasoning = text.partition("<think>")[2] if unfinished else before if closed else ""
    final = extract_tag(text, "answer", "last")
    if final is None:
        final = "" if unfinished else after if closed else text
    return Answer(text=text, reasoning=reasoning.strip(), final=final.strip(), n_tokens=n_tokens, truncated=truncated,
                  step=step)


def clean_label(text: str) -> str:
    """A label without what does not count: case, surrounding quotes, brackets and punctuation, extra spaces.

    Signs that tell labels apart (`C++` and `C#`, `-5` and `5`) stay.
    """
    text = unicodedata.normalize("NFKC", text)
    plain = text.lstrip(_AROUND).rstrip(_AROUND + ".") or text.strip(_SPACE)
    return " ".join(plain.casefold().split())


def same_label(a: str, b: str) -> bool:
    """Whether two labels are equal after `clean_label`."""
    return clean_label(a) == clean_label(b)


def choice_letter(text: str, letters: str = "ABCDEFGH") -> str | None:
    """The option that a text names, one of `letters`; None when it names none.

    A letter alone counts in either case. Else the first letter marked as an option ("(B)", "B.", "B:", or last in the
    text) wins over the first capital that stands alone, so "A cat, so (B)" is B.
    """
    alone = clean_label(text).upper()
    if len(alone) == 1 and alone in letters:
        return alone
    for pattern in (_MARKED_CHOICE, _BARE_CHOICE):
        for found in pattern.finditer(text):
            letter = next(g for g in found.groups() if g)
            if letter in letters:
                return letter
    return None


def number(text: str) -> float | None:
    """The first number of a text that stands alone ("3", "-2.5", "1,200"); None without one ("x2", "3D" are none)."""
    found = _NUMBER.search(text)
    value = float(found[0].replace(",", "")) if found else math.nan
    return value if math.isfinite(value) else None
