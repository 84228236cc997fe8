"""Rules of the perfect answer to a row: it must earn the maximum reward, and the prompt must ask for the tags in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlrl.checks.finding import Finding, shorten
from vlrl.checks.rule import CheckedRow, Context
from vlrl.config.registry import failure
from vlrl.data.coordinates import Coordinates
from vlrl.errors import DataError, TaskError
from vlrl.rewards.boxes import is_number
from vlrl.rewards.text import completion_for, parse_answer
from vlrl.task import Task, task_oracle
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.types import Answer, Sample

ROUNDING = 0.05
"""A perfect answer may fall short of the maximum reward by this fraction, because boxes and times are rounded when they
are written."""
_LENGTHS = (1, 64, 256, 1024)
_JUNK = ("", "junk", "<think>x</think><answer>junk</answer>")
_TAG = re.compile(r"</(\w+)>")
_UNASKED = ("think",)  # tags that reasoning models write without being asked to
_IN_PIXELS = ("boxes", "box", "points", "action", "point", "coordinate")
_IN_METRES = ("trajectory",)  # answers give two decimals


def part_weights(task: Task) -> dict[str, float]:
    """Returns {reward part: weight}. For a scheduled weight, this is the value of largest magnitude."""
    return {name: float(w) if isinstance(w, (int, float)) else max((v for _, v in w), key=abs)
            for name, w in task.weights.items()}


def oracle_below_maximum(row: CheckedRow, context: Context) -> Iterator[str | Finding]:
    """Yields a message if the perfect answer to a row cannot be scored or does not earn the maximum reward."""
    task, sample = context.task, row.sample
    if task is None or sample is None or any(f.kind == "field" for f in row.findings):
        return
    try:
        text = task_oracle(task, sample)
        row.unlabelled = text is None
        problems = [] if text is None else list(oracle_problems(task, sample, text, 1e-6))
        if problems:  # answers in whole pixels cannot match a box between them exactly
            rounded = replace(sample, row=_rounded(sample.row))
            problems = list(oracle_problems(task, rounded, task_oracle(task, rounded) or "", 1e-6))
        yield from problems
    except (DataError, TaskError) as error:
        yield str(error)
    except (Exception, SystemExit) as error:  # a task's own code may fail on a row in any way
        yield f"the perfect answer cannot be scored: {failure(error)}"


def oracle_problems(task: Task, sample: Sample, text: str, rounding: float = ROUNDING) -> Iterator[Finding]:
    """Yields a finding if `text`, the perfect answer, cannot be scored, or if its reward is below the maximum by more
    than the fraction `rounding`."""
    (scored,) = score_group(task, sample, [answer_of(text)], 0)
    if scored.error:
        yield Finding(message=f"scoring the perfect answer {shorten(text)} fails: {scored.error}", id=sample.id)
    else:
        yield from OracleScore(task, sample, text).problems(text, rounding)


def format_problems(reward: Callable[[str], float], sample: Sample, oracle: str, prompt: str) -> Iterator[Finding]:
    """Yields a finding for each tag of the perfect answer that `prompt` does not mention although the answer earns less
    without it.

    `reward(text)` returns the reward of a text, `oracle` is the perfect answer."""
    full = reward(oracle)
    tags: list[str] = [*_TAG.findall(oracle), *(["\\boxed"] if "\\boxed{" in oracle else [])]
    for tag in dict.fromkeys(tags):
        if is_mentioned(tag, prompt):
            continue
        less = reward(without_tag(oracle, tag))
        if less < full - 1e-6:
            shown = "\\boxed{}" if tag == "\\boxed" else f"<{tag}>"
            yield Finding(message=f"`score` gives the perfect answer {shorten(oracle)} a reward of {full:.3g}, but "
                                  f"{less:.3g} without {shown}, which the prompt never mentions, so a model cannot "
                                  f"know that it is needed. Ask for {shown} in the task's prompt or system "
                                  "prompt", id=sample.id,
                          level="error" if tag not in _UNASKED and less < full / 2 else "warning")


def is_mentioned(tag: str, prompt: str) -> bool:
    r"""Whether a prompt asks for a tag (by `<answer>`, "answer tags", "the tag answer" or the like), or for \boxed."""
    if tag == "\\boxed":
        return "boxed" in prompt.lower()
    name = re.escape(tag)
    written, before = rf"</?{name}\b|\b{name}>", rf"\b{name}[^\w.]{{1,4}}(xml\W)?(tag|element|block)"
    after = rf"\b(tags?|elements?|blocks?)[^\w.]{{1,4}}(\w+[^\w.]{{1,6}}){{0,4}}{name}\b"
    return re.search(f"{written}|{before}|{after}", prompt, re.I) is not None


def without_tag(text: str, tag: str) -> str:
    r"""Removes a tag (opening and closing), or \boxed{}, from a text; the enclosed text stays."""
    if tag == "\\boxed":
        return re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text).replace("\\boxed", "")
    return re.sub(rf"</?{re.escape(tag)}>", "", text)


class OracleScore:
    """Scores a perfect answer. `parts` maps each reward part that `score` returns to its value.

    Reward parts of `score_group`, which compare answers or use services, are left out, and so are `Task.added_parts`.
    """

    def __init__(self, task: Task, sample: Sample, text: str):
        self.task, self.sample, self.weights = task, sample, part_weights(task)
        self._left_out = {*self._parts_of_group(text), *task.added_parts}
        self.parts = self._scored(answer_of(text))

    def problems(self, text: str, rounding: float) -> Iterator[Finding]:
        """Yields a finding that lists the reward parts if the reward of the perfect answer `text` is below the maximum
        by more than the fraction `rounding`."""
        best = {name: (self.weights[name] > 0) * self.task.best_parts.get(name, 1.0) for name in self.parts}
        most = self._combine(best)
        known = {name: best[name] if value * self.weights[name] < max(self.weights[name], 0)
                 and self._maximum_unknown(name, text) else value for name, value in self.parts.items()}
        if self.parts and self._combine(known) < most - max(rounding * abs(most), 1e-6):
            listed = ", ".join(f"{name} {value:.4g}" for name, value in self.parts.items())
            yield Finding(message=f"the perfect answer {shorten(text)} earns {self._combine(self.parts):.4g}, but the "
                                  f"maximum is {most:.4g} ({listed}): `oracle`, `score` and the row do not agree. See "
                                  "`vlrl tasks check`, and `vlrl data check` for the rows", id=self.sample.id)

    def reward(self, text: str, opened: str = "") -> float:
        """The reward of any text, as the weighted sum of the parts that `score` returns; 0 if scoring fails.

        opened: text that the chat template puts at the start of the answer; `text` may start with it."""
        try:
            scored = self._scored(answer_of(completion_for(text, opened), opened))
            return self._combine({k: v for k, v in scored.items() if k in self.parts})
        except (Exception, SystemExit):  # text of the model: scoring stores it and goes on
            return 0.0

    def _maximum_unknown(self, name: str, text: str) -> bool:
        """Whether the maximum of the reward part `name` may differ from 1, because its value depends on the length of
        the perfect answer `text` or can be negative."""
        values = {self._part(name, replace(answer_of(text), n_tokens=n)) for n in _LENGTHS}
        junk = [value for one in _JUNK if (value := self._part(name, answer_of(one))) is not None]
        return len(values) > 1 or min(junk, default=0.0) < min(0.0, self.parts[name])

    def _part(self, name: str, answer: Answer) -> float | None:
        try:
            return self._scored(answer).get(name)
        except (Exception, SystemExit):
            return None

    def _scored(self, answer: Answer) -> dict[str, float]:
        return {name: float(value) for name, value in self.task.score(self.sample, answer).items()
                if value is not None and name in self.weights and name not in self._left_out}

    def _combine(self, parts: Mapping[str, float]) -> float:
        return float(self.task.combine(parts, self.weights))

    def _parts_of_group(self, text: str) -> set[str]:
        if type(self.task).score_group is Task.score_group:
            return set()
        try:
            scored = self.task.score_group(self.sample, [answer_of(text)], Services())
            return {name for parts in scored for name in parts}
        except (Exception, SystemExit):  # it needs a service, or variants
            return set()


def answer_of(text: str, opened: str = "") -> Answer:
    """Converts a text to the Answer that the training loop would pass to a task. `opened` is the text that the chat
    template puts at the start of the answer."""
    return parse_answer(text, n_tokens=max(1, len(text) // 4), opened=opened)


@contextmanager
def original_pixels(task: Task) -> Iterator[None]:
    """Context manager that disables the task's conversion of coordinates, because rounding to a model's convention is
    not a fault of the task or row."""
    own, task.coordinates = task.coordinates, Coordinates()
    try:
        yield
    finally:
        task.coordinates = own


def _rounded(value: Any, field: str = "") -> Any:
    """Returns a row, or the value of the row's `field`, with boxes and points rounded to whole pixels, and way-points
    to centimetres."""
    if isinstance(value, Mapping):
        return {k: _rounded(v, k) if k in (*_IN_PIXELS, *_IN_METRES) else v for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v, field) for v in value]
    return round(value, 2 if field in _IN_METRES else None) if is_number(value) else value
