"""Renders messages with a processor's chat template, passing the content of each turn in a form that the template
supports.

Some templates expect content as a list of parts. Others print the content as it is, or read only the first part for
some roles. For each role a test turn is rendered in up to three forms: as parts, as parts with adjacent texts joined,
and as one string. The first form whose full text is rendered, without list or dictionary syntax, is used."""

from __future__ import annotations

import contextlib
import copy
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
Parts = list[dict[str, Any]]
Form = Callable[[Parts], Any]
Template = Callable[..., str]  # renders a conversation: (messages, **options) -> text

_TEXTS = ("Where is it?", "There it is.")
_KEY = "vlrl-key"
"""An extra key of a content part. If the rendered text contains this key, the template has printed the dictionary."""


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def parts_of(content: str | Sequence[Mapping[str, Any]]) -> Parts:
    """The content of a message as a list of parts."""
    return [text_part(content)] if isinstance(content, str) else [dict(part) for part in content]


def _joined(parts: Parts) -> Parts:
    out: Parts = []
    for part in parts:
        if out and part.get("type") == out[-1].get("type") == "text":
            out[-1] = {**out[-1], "text": out[-1]["text"] + part["text"]}
        else:
            out.append(part)
    return out


def _text(parts: Parts) -> str | Parts:
    return "".join(part["text"] for part in parts) if all(p.get("type") == "text" for p in parts) else parts


_FORMS: tuple[Form, ...] = (lambda parts: parts, _joined, _text)
_BEFORE = {"user": (), "system": (), "developer": (), "tool": ("user", "assistant")}
"""{role of a test turn: roles of the turns that precede the test turn}. For other roles, one user turn precedes it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context manager that raises TimeoutError after `seconds`: a template may not terminate. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the template has not terminated after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class ChatTemplate:
    """Renders messages with a processor's chat template. `options`: keyword arguments of every apply_chat_template
    call."""

    def __init__(self, processor: Any, options: Mapping[str, Any]):
        self.processor, self.options = processor, options
        self._known: dict[tuple[str, bool], tuple[Form | None, str]] = {}

    def of(self, processor: Any) -> ChatTemplate:
        """A ChatTemplate with the same options for `processor`, which must be a copy of this template's processor."""
        other = copy.copy(self)
        other.processor = processor
        return other

    def __call__(self, messages: Sequence[Message], **options: Any) -> str:
        """The rendered text of `messages`. Raises whatever error the template raises."""
        shown = [self._turn(m, m["content"], options.get("tools", ())) for m in messages]
        return self._rendered(shown, **options)

    def problem(self, role: str, tools: Sequence[Any] = ()) -> str:
        """The reason why the template cannot render a turn of `role` when `tools` are given; "" if the template can."""
        return self._form(role, tools)[1]

    def _turn(self, turn: Message, content: Any, tools: Sequence[Any] = ()) -> Message:
        form = self._form(turn["role"], tools)[0] or _FORMS[0]
        return {**turn, "content": form(parts_of(content))}

    def _form(self, role: str, tools: Sequence[Any]) -> tuple[Form | None, str]:
        key = role, bool(tools)
        if key not in self._known:
            self._known[key] = self._tried(role, {"tools": tools} if tools else {})
        return self._known[key]

    def _tried(self, role: str, options: Mapping[str, Any]) -> tuple[Form | None, str]:
        """Tries the forms of content for a turn of `role`. Returns (the first form in which the template renders the
        text of the turn and nothing else, ""), or (None, why there is no such form)."""
        before = [self._turn({"role": other}, "x") for other in _BEFORE.get(role, ("user",))]
        after = [self._turn({"role": "user"}, "x")] if role not in ("user", "tool") else []
        problem = ""
        for form in _FORMS:
            turn = {"role": role, "content": form([{**text_part(text), _KEY: _KEY} for text in _TEXTS])}
            try:
                text = self._rendered([*before, turn, *after], add_generation_prompt=True, **options)
            except TimeoutError as error:
                return None, str(error)
            except Exception as error:  # whatever a template's code raises
                lines = str(error).strip().splitlines()
                problem = problem or ": ".join([type(error).__name__, *lines[:1]])
                continue
            if _KEY not in text and _TEXTS[1] in text.partition(_TEXTS[0])[2]:
                return form, ""
            problem = problem or f"it renders {_TEXTS[0]!r} as {text[:200]!r}"
        return None, problem

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **{**self.options, **options})


# --- the beginning of the model's turn --------------------------------------------------------------------------------


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
    """Returns three rendered conversations: a question; a question and its answer; a question, its answer and another
    question. [] if the template does not render the texts of question and answer. `form` converts a text to the
    content of a turn."""
    asked, said, more = ({"role": role, "content": form(text)} for role, text in (
        ("user", _ASKED), ("assistant", _SAID), ("user", "x")))
    try:
        prompt, *answered = template([asked]), template([asked, said]), template([asked, said, more])
    except Exception:  # whatever a template's code raises
        return []
    return [prompt, *answered] if _ASKED in prompt and all(_ASKED in t and _SAID in t for t in answered) else []


def opening_text(prompt: str, beginning: str, control: Collection[str]) -> str:
    """Text at the end of a rendered `prompt` that begins the model's answer, such as "<think>"; "" if there is none.
    This text follows the last `beginning` (the header of the model's turn) and the last of the `control` tokens."""
    if not beginning or beginning not in prompt:
        return ""
    after = prompt.rpartition(beginning)[2]
    marks = [after.rfind(token) + len(token) for token in control if token in after]
    return after[max(marks, default=0):].lstrip()
