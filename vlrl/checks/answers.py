"""Rules of the perfect answer: it earns the maximum, and the prompt asks for the tags that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlrl.checks.finding import shorten
from vlrl.checks.rule import CheckedRow, Context, Found
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
"""Share of the maximum that a perfect answer may miss: boxes and times are rounded when they are written."""
_LENGTHS = (1, 64, 256, 1024)
_JUNK = ("", "junk", "<think>x</think><answer>junk</answer>")
_TAG = re.compile(r"</(\w+)>")
_UNASKED = ("think",)
"""Tags that reasoning models write by themselves."""
_IN_PIXELS = ("boxes", "box", "points", "action", "point", "coordinate")
_CENTIMETRES = ("trajectory",)  # with metres, which answers give to two decimals


def part_weights(task: Task) -> dict[str, float]:
    """Returns the weight of every part; of a schedule the value that is largest in size."""
    return {name: float(w) if isinstance(w, (int, float)) else max((v for _, v in w), key=abs)
            for name, w in task.weights.items()}


def earned_in_full(row: CheckedRow, context: Context) -> Iterator[Found]:
    """A perfect answer to a row that does not get the full reward."""
    task, sample = context.task, row.sample
    if task is None or sample is None or any(f.kind == "field" for f in row.findings):
        return
    try:
        text = task_oracle(task, sample)
        row.unlabelled = text is None
        problems = [] if text is None else list(oracle_problems(task, sample, text, 1e-6))
        if problems:  # a recipe whose answers are whole numbers cannot hit a box between them
            whole = replace(sample, row=_whole(sample.row))
            problems = list(oracle_problems(task, whole, task_oracle(task, whole) or "", 1e-6))
        yield from problems
    except (DataError, TaskError) as error:
        yield Found(str(error))
    except (Exception, SystemExit) as error:  # a task's own code may trip over a row in any way
        yield Found(f"the perfect answer cannot be scored: {failure(error)}")


def oracle_problems(task: Task, sample: Sample, text: str, rounding: float = ROUNDING) -> Iterator[Found]:
    """Yields that `text`, the perfect answer, cannot be scored, or misses more than a share of the maximum."""
    (scored,) = score_group(task, sample, [answer_of(text)], 0)
    if scored.error:
        yield Found(f"scoring the perfect answer {shorten(text)} fails: {scored.error}", id=sample.id)
    else:
        yield from OracleScore(task, sample, text).problems(text, rounding)


def format_problems(reward: Callable[[str], float], sample: Sample, oracle: str, prompt: str) -> Iterator[Found]:
    """Yields the tags that `prompt` does not mention and without which the perfect answer earns less `reward`."""
    most = reward(oracle)
    tags: list[str] = [*_TAG.findall(oracle), *(["\\boxed"] if "\\boxed{" in oracle else [])]
    for tag in dict.fromkeys(tags):
        if is_mentioned(tag, prompt):
            continue
        less = reward(without_tag(oracle, tag))
        if less < most - 1e-6:
            shown = "\\boxed{}" if tag == "\\boxed" else f"<{tag}>"
            yield Found(f"`score` pays the perfect answer {shorten(oracle)} {most:.3g}, and {less:.3g} without "
                        f"{shown}, which the prompt never mentions: no model can know. Ask for {shown} in the task's "
                        "prompt or system prompt", id=sample.id,
                        level="error" if tag not in _UNASKED and less < most / 2 else "warning")


def is_mentioned(tag: str, prompt: str) -> bool:
    """Whether a prompt says to use a tag: `<answer>`, "answer tags", "the tag answer"; or \\boxed."""
    if tag == "\\boxed":
        return "boxed" in prompt.lower()
    name = re.escape(tag)
    written, before = rf"</?{name}\b|\b{name}>", rf"\b{name}[^\w.]{{1,4}}(xml\W)?(tag|element|block)"
    after = rf"\b(tags?|elements?|blocks?)[^\w.]{{1,4}}(\w+[^\w.]{{1,6}}){{0,4}}{name}\b"
    return re.search(f"{written}|{before}|{after}", prompt, re.I) is not None


def without_tag(text: str, tag: str) -> str:
    """Returns a text whose pairs of a tag, or \\boxed{}, are gone; what stood in them stays."""
    if tag == "\\boxed":
        return re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text).replace("\\boxed", "")
    return re.sub(rf"</?{re.escape(tag)}>", "", text)


class OracleScore:
    """The parts of a perfect answer that `score` gives by itself, and what they can be at most."""

    def __init__(self, task: Task, sample: Sample, text: str):
        self.task, self.sample, self.weights = task, sample, part_weights(task)
        self._grouped = self._of_group(text)
        self.parts = self._scored(answer_of(text))

    def problems(self, text: str, rounding: float) -> Iterator[Found]:
        """Yields that the perfect answer earns less than the maximum, with its parts."""
        best = {name: (self.weights[name] > 0) * self.task.best_parts.get(name, 1.0) for name in self.parts}
        most, low = self._combine(best), self._low()
        known = {name: best[name] if name in low and self._is_open(name, text) else value
                 for name, value in self.parts.items()}
        if self.parts and self._combine(known) < most - max(rounding * abs(most), 1e-6):
            listed = ", ".join(f"{name} {value:.4g}" for name, value in self.parts.items())
            yield Found(f"the perfect answer {shorten(text)} earns {self._combine(self.parts):.4g}, the maximum is "
                        f"{most:.4g} ({listed}): `oracle`, `score` and the row do not agree. See `vlrl tasks check`, "
                        "and `vlrl data check` for the rows", id=self.sample.id)

    def reward(self, text: str, opened: str = "") -> float:
        """Returns what these parts pay for any text, whose beginning may be `opened`; 0 where scoring it fails."""
        try:
            scored = self._scored(answer_of(completion_for(text, opened), opened))
            return self._combine({k: v for k, v in scored.items() if k in self.parts})
        except (Exception, SystemExit):  # text of the model: scoring stores it and goes on
            return 0.0

    def _low(self) -> list[str]:
        return [name for name, value in self.parts.items() if value * self.weights[name] < max(self.weights[name], 0)]

    def _is_open(self, name: str, text: str) -> bool:
        """Returns whether a part has another maximum than 1: it depends on the length of an answer, or goes below 0."""
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
                if value is not None and name in self.weights and name not in self._grouped}

    def _combine(self, parts: Mapping[str, float]) -> float:
        return float(self.task.combine(parts, self.weights))

    def _of_group(self, text: str) -> set[str]:
        if type(self.task).score_group is Task.score_group:
            return set()
        try:
            together = self.task.score_group(self.sample, [answer_of(text)], Services())
            return {name for parts in together for name in parts}
        except (Exception, SystemExit):  # it needs a service, or variants
            return set()


def answer_of(text: str, opened: str = "") -> Answer:
    """Returns a text as the loop hands it to a task."""
    return parse_answer(text, n_tokens=max(1, len(text) // 4), opened=opened)


@contextmanager
def original_pixels(task: Task) -> Iterator[None]:
    """Coordinates are not converted meanwhile: rounding to a model's convention is no fault of a task or row."""
    own, task.coordinates = task.coordinates, Coordinates()
    try:
        yield
    finally:
        task.coordinates = own


def _whole(value: Any, field: str = "") -> Any:
    """Returns a row with the numbers of its boxes and points rounded to whole pixels, of its way-points to
    centimetres.
    """
    if isinstance(value, Mapping):
        return {k: _whole(v, k) if k in (*_IN_PIXELS, *_CENTIMETRES) else v for k, v in value.items()}
    if isinstance(value, list):
        return [_whole(v, field) for v in value]
    return round(value, 2 if field in _CENTIMETRES else None) if is_number(value) else value
