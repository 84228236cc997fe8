"""Text that a chat template writes between the start of the model's turn and the model's own text, such as <think>.

Found by comparing rendered conversations, for any model: a prompt that ends with the start of a turn, and one in which
the model has answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

from vlrl.models.chat_template import Template, text_part

_ASKED, _SAID = "vlrl-stands-in-for-a-question", "vlrl-stands-in-for-an-answer"
_BLOCK = re.compile(r"([<\[\u25c1])([A-Za-z][\w:-]*+)([>\]\u25b7])(?=.*?\1/\2\3)", re.DOTALL)


def turn_beginning(template: Template) -> str:
    """Text that the template writes after a user's question before any text of the model, such as the end of that turn
    and the header of the next; "" where unknown.

    A block that it writes before an earlier answer, such as an empty <think></think>, is not included."""
    shown = [texts for form in (lambda text: [text_part(text)], str) if (texts := _shown(template, form))]
    if not shown:
        return ""
    prompt, *answered = min(shown, key=lambda texts: len(texts[0]))  # some templates print the parts as they are
    before = [_BLOCK.split(text.partition(_ASKED)[2].partition(_SAID)[0])[0] for text in answered]
    alike = takewhile(lambda chars: len({*chars}) == 1, zip(prompt.partition(_ASKED)[2], *before, strict=False))
    return "".join(chars[0] for chars in alike)


def _shown(template: Template, form: Callable[[str], Any]) -> list[str]:
    """A rendered question, and the same with an answer as the last turn and as an earlier one; [] where the texts are
    not rendered."""
    asked, said, more = ({"role": role, "content": form(text)} for role, text in (
        ("user", _ASKED), ("assistant", _SAID), ("user", "x")))
    try:
        prompt, *answered = template([asked]), template([asked, said]), template([asked, said, more])
    except Exception:  # whatever a template's code raises
        return []
    return [prompt, *answered] if _ASKED in prompt and all(_ASKED in t and _SAID in t for t in answered) else []


def opened_in(prompt: str, beginning: str, control: Collection[str]) -> str:
    """Text of a rendered `prompt` after the last `beginning` of a turn; "" for white space alone.

    `control` tokens and text before them are the template's own marks, not text that the model continues."""
    if not beginning or beginning not in prompt:
        return ""
    after = prompt.rpartition(beginning)[2]
    marks = [after.rfind(token) + len(token) for token in control if token in after]
    return after[max(marks, default=0):].lstrip()
