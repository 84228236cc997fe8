"""The first samples before a run: what would train on nonsense in silence stops it, with the row and the way out.

Of a few samples the messages are made and the task's perfect answer is scored, without model, processor and torch:

- media that a row names are in its prompt, and no `{placeholder}` is left in it;
- the task scores at all, and nothing raises on the perfect answer;
- the perfect answer earns the maximum of the parts that `score` gives by itself: parts of a group and of absent
  services, parts that depend on an answer's length, and parts that fall below 0 have a maximum that it need not reach;
- tags without which the perfect answer pays less are mentioned in the prompt.

`vlrl tasks check`, `--dry-run` and `train` share these checks. What is not certain is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from vlrl.config.registry import prints_aside
from vlrl.config.schema import Config, LimitsSettings
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data import media as loader
from vlrl.data.row_media import named, unshown, unshown_problem, way_out
from vlrl.data.video_sampling import VideoSampling
from vlrl.errors import DataError, TaskError, VlrlError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, task_messages, task_oracle
from vlrl.task.environment import has_environment
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.types import Answer, Coordinates, Sample

FIRST = 4
"""Samples of each task that are looked at; of several prompt templates at least one each."""
ROUNDING = 0.05
"""Share of the maximum that a perfect answer may miss: boxes and times are rounded when they are written."""
_MOST_VISITS = 8
_LENGTHS = (1, 64, 256, 1024)
_JUNK = ("", "junk", "<think>x</think><answer>junk</answer>")
_PLACEHOLDER = re.compile(r"(?<![\w\\])\{(\w+)\}")  # {label}, not \boxed{label}
_TAG = re.compile(r"</(\w+)>")
_UNASKED = ("think",)
"""Tags that reasoning models write by themselves."""
_FRAMES = VideoSampling(fps=1.0, max_frames=2)  # for a clip's width and height


@dataclass(frozen=True)
class Problem:
    """What is wrong with a task or one of its samples."""

    kind: str
    """media, prompt, tag, oracle, or task; one of each kind is printed."""
    text: str
    sample: str = ""
    """Id of the sample; "" for a fault of the task itself."""
    stops: bool = True
    """False: a warning, for it may be meant."""

    def __str__(self) -> str:
        is_named = not self.sample or repr(self.sample) in self.text
        return self.text if is_named else f"sample {self.sample!r}: {self.text}"


@prints_aside()
def check(task: Task, samples: Sequence[Sample], config: Config, scored: bool = True) -> list[str]:
    """Checks the first samples of a task, or of each task of a mixture; returns the warnings.

    `scored` = False leaves out what concerns rewards, for supervised fine-tuning. With `run.checks=warn` everything is
    a warning; with `data.quarantine` what is wrong with some of the samples alone is one.

    Raises TaskError listing what stops the run.
    """
    warnings: list[str] = []
    stops: list[Problem] = []
    for own, firsts in _by_task(task, samples, config.data.quarantine):
        findings = list(dict.fromkeys(problems(own, firsts, config.limits, scored)))
        bad = {p.sample for p in findings if p.stops}
        spared = config.data.quarantine and "" not in bad and len(bad) < len(firsts)
        strict = config.run.checks == "stop" and not spared
        stops += [p for p in findings if p.stops and strict]
        warnings += _listed(own, [p for p in findings if not (p.stops and strict)])
        if stops:
            raise TaskError("\n".join([*_listed(own, stops), "If this is meant, run.checks=warn trains all the same."]))
    return warnings


def _by_task(task: Task, samples: Sequence[Sample], quarantine: bool) -> Iterator[tuple[Task, list[Sample]]]:
    """Yields each task with its first samples; those of a mixture take turns at its beginning."""
    firsts: dict[int, tuple[Task, list[Sample]]] = {}
    for i in range(min(len(samples), FIRST * len(task.members))):
        try:
            sample = samples[i]
        except DataError:  # a row that is read only now
            if not quarantine:
                raise
            continue
        own = task.of(sample)
        firsts.setdefault(id(own), (own, []))[1].append(sample)
    yield from firsts.values()


def _listed(task: Task, findings: Sequence[Problem]) -> list[str]:
    """Returns the first problem of each kind, and how many more samples have it."""
    kinds: dict[str, list[Problem]] = {}
    for problem in findings:
        kinds.setdefault(problem.kind, []).append(problem)
    name = f"task '{task.name}': "
    return [name + str(same[0]).removeprefix(name)
            + (f" (and {len(same) - 1} more of the first samples)" if len(same) > 1 else "")
            for same in kinds.values()]


def problems(task: Task, samples: Sequence[Sample], limits: LimitsSettings, scored: bool = True) -> Iterator[Problem]:
    """Yields what is wrong with a task and with its `samples`, under the task's templates in turn."""
    acts = has_environment(task)
    if scored and not _pays_turns(task):
        yield from _unscored(task)
        scored = _is_scored(task)
    count = min(max(len(samples), len(task.templates)), _MOST_VISITS) if samples else 0
    for sample, template, _ in zip(cycle(samples), cycle(task.templates), range(count), strict=False):
        sample = replace(sample, prompt=template)
        try:
            text = prompt_text(task_messages(task, sample))
            yield from media_problems(task, sample)
            yield from placeholder_problems(task, sample, text)
            if scored and not acts:
                with _original_pixels(task):
                    yield from answer_problems(task, _sized(sample, limits), text)
        except VlrlError as error:
            yield Problem("oracle", str(error), sample.id)


# --- the task ---------------------------------------------------------------------------------------------------------


def _pays_turns(task: Task) -> bool:
    """Returns whether it has environments, whose turns have reward parts."""
    return type(task).environment is not Task.environment or task.outside is not None


def _is_scored(task: Task) -> bool:
    return type(task).score is not Task.score or type(task).score_group is not Task.score_group


def _unscored(task: Task) -> Iterator[Problem]:
    if not _is_scored(task):
        yield Problem("task", "it has no `score`, so every reward is 0 and nothing is learned: write "
                      "score(self, sample, answer) -> {part: number}, and name the parts in `rewards`")
    elif type(task).combine is Task.combine and not any(part_weights(task).values()):
        listed = f"every part has the weight 0 ({', '.join(task.weights)})" if task.weights else "`rewards` is empty"
        yield Problem("task", f"{listed}, so every reward is 0 and nothing is learned: give a part a weight in "
                      "`rewards`, or with task.rewards.<part>=1")


# --- the prompt -------------------------------------------------------------------------------------------------------


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the texts of chat messages, those of the system and of examples included, a line each."""
    contents = [[{"text": m["content"]}] if isinstance(m["content"], str) else m["content"] for m in messages]
    return "\n".join(part["text"] for content in contents for part in content
                     if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def media_problems(task: Task, sample: Sample) -> Iterator[Problem]:
    """Yields what a row names, or a sample has, and the prompt does not show."""
    missing = unshown_problem(sample, FIELDS, MEDIA_FIELDS)
    if missing:
        yield Problem("media", missing, sample.id)
    else:
        for column in unshown(sample, FIELDS, MEDIA_FIELDS)[:1]:
            yield Problem("media", f"the prompt does not show all media of the row, {named(sample.row, column)}: "
                          f"{way_out(column, MEDIA_FIELDS)}", sample.id, stops=False)
    placed = [part.get("type") for m in task_messages(task, sample) if not isinstance(m["content"], str)
              for part in m["content"] if part.get("type") != "text"]
    has = [media.kind for media in sample.media]
    if placed != has:
        yield Problem("media", f"its messages show {placed}, but the sample has {has}: every image and video "
                      'once, in order, as {"type": "image"} or {"type": "video"}', sample.id)


def placeholder_problems(task: Task, sample: Sample, text: str) -> Iterator[Problem]:
    """Yields the {placeholders} of a sample's template that its row does not fill and `text`, its prompt, still has."""
    for name in dict.fromkeys(_PLACEHOLDER.findall(sample.prompt or task.templates[0])):
        if name not in sample.row and f"{{{name}}}" in text:
            yield Problem("prompt", f"the prompt asks for {{{name}}}, which the row does not have (it has "
                          f"{', '.join(map(str, sample.row)) or 'no field'}): give the rows that field, or write "
                          f"{{ {name} }} for the braces themselves", sample.id)


# --- the perfect answer -----------------------------------------------------------------------------------------------


def part_weights(task: Task) -> dict[str, float]:
    """Returns the weight of every part; of a schedule the value that is largest in size."""
    return {name: float(w) if isinstance(w, (int, float)) else max((v for _, v in w), key=abs)
            for name, w in task.weights.items()}


def answer_problems(task: Task, sample: Sample, prompt: str) -> Iterator[Problem]:
    """Yields what is wrong with the perfect answer to a sample, whose row knows its width and height."""
    text = task_oracle(task, sample)
    if text is None:
        return
    (scored,) = score_group(task, sample, [_answer(text)], 0)
    if scored.error:
        yield Problem("oracle", f"scoring the perfect answer {_short(text)} fails: {scored.error}", sample.id)
        return
    own = _OwnParts(task, sample, text)
    yield from own.problems(text)
    yield from format_problems(own.reward, sample, text, prompt)


def format_problems(reward: Callable[[str], float], sample: Sample, oracle: str, prompt: str) -> Iterator[Problem]:
    """Yields the tags that `prompt` does not mention and without which the perfect answer earns less `reward`."""
    most = reward(oracle)
    tags: list[str] = [*_TAG.findall(oracle), *(["\\boxed"] if "\\boxed{" in oracle else [])]
    for tag in dict.fromkeys(tags):
        if is_mentioned(tag, prompt):
            continue
        less = reward(without_tag(oracle, tag))
        if less < most - 1e-6:
            shown = "\\boxed{}" if tag == "\\boxed" else f"<{tag}>"
            yield Problem("tag", f"`score` pays the perfect answer {_short(oracle)} {most:.3g}, and {less:.3g} without "
                          f"{shown}, which the prompt never mentions: no model can know. Ask for {shown} in the task's "
                          "prompt or system prompt", sample.id, stops=tag not in _UNASKED and less < most / 2)


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


class _OwnParts:
    """The parts of a perfect answer that `score` gives by itself, and what they can be at most."""

    def __init__(self, task: Task, sample: Sample, text: str):
        self.task, self.sample, self.weights = task, sample, part_weights(task)
        self._grouped = self._of_group(text)
        self.parts = self._scored(_answer(text))

    def problems(self, text: str) -> Iterator[Problem]:
        """Yields that the perfect answer earns less than the maximum, with its parts."""
        best = {name: (self.weights[name] > 0) * self.task.best_parts.get(name, 1.0) for name in self.parts}
        most, low = self._combine(best), self._low()
        known = {name: best[name] if name in low and self._is_open(name, text) else value
                 for name, value in self.parts.items()}
        if self.parts and self._combine(known) < most - max(ROUNDING * abs(most), 1e-6):
            listed = ", ".join(f"{name} {value:.4g}" for name, value in self.parts.items())
            yield Problem("oracle", f"the perfect answer {_short(text)} earns {self._combine(self.parts):.4g}, the "
                          f"maximum is {most:.4g} ({listed}): `oracle`, `score` and the row do not agree. See "
                          "`vlrl tasks check`, and `vlrl data check` for the rows", self.sample.id)

    def reward(self, text: str) -> float:
        """Returns what these parts pay for any text; 0 where scoring it fails."""
        try:
            return self._combine({k: v for k, v in self._scored(_answer(text)).items() if k in self.parts})
        except (Exception, SystemExit):  # text of the model: scoring stores it and goes on
            return 0.0

    def _low(self) -> list[str]:
        return [name for name, value in self.parts.items() if value * self.weights[name] < max(self.weights[name], 0)]

    def _is_open(self, name: str, text: str) -> bool:
        """Returns whether a part has another maximum than 1: it depends on the length of an answer, or goes below 0."""
        values = {self._part(name, replace(_answer(text), n_tokens=n)) for n in _LENGTHS}
        junk = [value for one in _JUNK if (value := self._part(name, _answer(one))) is not None]
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
            return {name for parts in self.task.score_group(self.sample, [_answer(text)], Services()) for name in parts}
        except (Exception, SystemExit):  # it needs a service, or variants
            return set()


def _answer(text: str) -> Answer:
    return parse_answer(text, n_tokens=max(1, len(text) // 4))


@contextmanager
def _original_pixels(task: Task) -> Iterator[None]:
    """Coordinates are not converted meanwhile: rounding to a model's convention is no fault of a task or row."""
    own, task.coordinates = task.coordinates, Coordinates()
    try:
        yield
    finally:
        task.coordinates = own


def _sized(sample: Sample, limits: LimitsSettings) -> Sample:
    """Returns the sample with width and height of its first media, as scoring gets it, where its row has none."""
    if not sample.media or {"width", "height"} <= sample.row.keys():
        return sample
    width, height = loader.load(sample.media[0], limits, _FRAMES).size
    return replace(sample, row={"width": width, "height": height, **sample.row})


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 120 else f"{shown[:80]}...{shown[-20:]}"
