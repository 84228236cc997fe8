"""Finds text, such as <think>, that a chat template writes after the header of the model's turn, before the model's own
text.

This works for any model, by comparing two rendered conversations: a prompt that ends with the start of the model's
turn, and a conversation in which the model has answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

from vlrl.models.chat_template import Template, text_part

_ASKED, _SAID = "vlrl-stands-in-for-a-question", "vlrl-stands-in-for-an-answer"
_BLOCK = re.compile(r"([<\[\u25c1])([A-Za-z][\w:-]*+)([>\]\u25b7])(?=.*?\1/\2\3)", re.DOTALL)


def turn_beginning(template: Template) -> str:
    """Text that the template writes between a user's question and the model's answer: the end of the user's turn and
    the header of the model's turn. "" if unknown. A block that the template writes before an earlier answer, such as an
    empty <think></think>, is not included."""
    shown = [texts for form in (lambda text: [text_part(text)], str) if (texts := _shown(template, form))]
    if not shown:
        return ""
    prompt, *answered = min(shown, key=lambda texts: len(texts[0]))  # some templates print the parts as they are
    before = [_BLOCK.split(text.partition(_ASKED)[2].partition(_SAID)[0])[0] for text in answered]
    alike = takewhile(lambda chars: len({*chars}) == 1, zip(prompt.partition(_ASKED)[2], *before, strict=False))
    return "".join(chars[0] for chars in alike)


def _shown(template: Template, form: Callable[[str], Any]) -> list[str]:
    """Three rendered conversations: a question; a question and its answer; a question, its answer and another question.
    [] if the template does not render their texts."""
    asked, said, more = ({"role": role, "content": form(text)} for role, text in (
        ("user", _ASKED), ("assistant", _SAID), ("user", "x")))
    try:
        prompt, *answered = template([asked]), template([asked, said]), template([asked, said, more])
    except Exception:  # whatever a template's code raises
        return []
    return [prompt, *answered] if _ASKED in prompt and all(_ASKED in t and _SAID in t for t in answered) else []


def opening_text(prompt: str, beginning: str, control: Collection[str]) -> str:
    """Text in a rendered `prompt` after the last header of a turn (`beginning`), such as "<think>"; "" if it is only
    white space. Text up to the last of the `control` tokens is left out, because it is markup that the model does not
    continue."""
    if not beginning or beginning not in prompt:
        return ""
    after = prompt.rpartition(beginning)[2]
    marks = [after.rfind(token) + len(token) for token in control if token in after]
    return after[max(marks, default=0):].lstrip()
