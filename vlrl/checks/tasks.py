"""Rules of a task by a few of its samples: what `score` gives to perfect and other answers, and the prompts.

A rule of scope "task" is `find(seen: Seen)` and yields Found: `seen.task`, `seen.visits` (its samples under its
templates in turn) and `seen.trials` (what some answers to them got) are what it looks at.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, product
from typing import Any

from vlrl.checks.answers import (
    OracleScore,
    answer_of,
    format_problems,
    oracle_problems,
    original_pixels,
    part_weights,
)
from vlrl.checks.finding import Finding, shorten
from vlrl.checks.identity import fingerprint, other_sample
from vlrl.checks.prompts import media_problems, placeholder_problems, prompt_text
from vlrl.checks.rule import Found, Rule
from vlrl.config.schema import LimitsSettings
from vlrl.data import media as loader
from vlrl.data.media import VideoSampling
from vlrl.errors import VlrlError
from vlrl.task import Task, task_messages, task_oracle
from vlrl.task.environment import has_environment
from vlrl.task.scoring import AnswerScore, score_group
from vlrl.types import Sample

BOUND = 10.0
"""Largest size of a part that its task does not name in `best_parts`."""
SECONDS = 5.0
"""After so long no further answers are tried: a slow `score` delays a run by that alone."""
_MOST_VISITS = 8
_TRIED = 4
_ANSWERS = ("", "junk", "1", "<answer>2</answer>", "<think>I look.</think><answer>no</answer>", "\\boxed{B}")
_FRAMES = VideoSampling(fps=1.0, max_frames=2)  # for a clip's width and height


@dataclass(frozen=True)
class PromptedSample:
    """A sample under one of the task's templates."""

    sample: Sample
    prompt: str
    """Text of its messages."""
    shown: Sample
    """The sample as scoring gets it, with the size of its picture."""
    oracle: str | None
    """Its perfect answer, in original pixels; None where it is not known, or nothing is scored."""
    error: str = ""
    """Why there is no prompt, picture or perfect answer."""


@dataclass(frozen=True)
class Trial:
    """What one answer to one sample got, asked twice."""

    visit: PromptedSample
    text: str
    first: AnswerScore
    again: AnswerScore


@dataclass(frozen=True)
class TaskSamples:
    """A task and a few of its samples."""

    task: Task
    samples: Sequence[Sample]
    limits: LimitsSettings
    scored: bool = True
    """False leaves out what concerns rewards."""
    again: Sequence[Sample] = ()
    """The samples once more, as far as they were asked for again."""
    every: bool = False
    """Each sample under each template, instead of a few under the templates in turn."""

    @cached_property
    def visits(self) -> list[PromptedSample]:
        """The samples under the task's templates."""
        templates = self.task.templates
        count = min(max(len(self.samples), len(templates)), _MOST_VISITS) if self.samples else 0
        in_turn = zip(cycle(templates), cycle(self.samples), range(count), strict=False)
        pairs = product(templates, self.samples) if self.every else ((t, sample) for t, sample, _ in in_turn)
        return [self._visit(replace(sample, prompt=template)) for template, sample in pairs]

    def _visit(self, sample: Sample) -> PromptedSample:
        try:
            text = prompt_text(task_messages(self.task, sample))
            if not self.rewarded:
                return PromptedSample(sample, text, sample, None)
            with original_pixels(self.task):
                shown = sized(sample, self.limits)
                return PromptedSample(sample, text, shown, task_oracle(self.task, shown))
        except VlrlError as error:
            return PromptedSample(sample, "", sample, None, str(error))

    @property
    def sound(self) -> list[PromptedSample]:
        return [visit for visit in self.visits if not visit.error]

    @property
    def rewarded(self) -> bool:
        """Whether answers are scored, by the task alone."""
        return self.scored and is_scored(self.task) and not has_environment(self.task)

    @cached_property
    def trials(self) -> list[Trial]:
        """What perfect and other answers get, as far as SECONDS reach."""
        begun, trials = time.monotonic(), list[Trial]()
        with original_pixels(self.task), warnings.catch_warnings(), suppress(VlrlError):  # which the oracle's rule says
            warnings.simplefilter("ignore")
            for visit in self.sound[:_TRIED] if self.rewarded else ():
                for text in _answers(visit):
                    if trials and time.monotonic() - begun > SECONDS:
                        return trials
                    first, again = (score_group(self.task, visit.shown, [answer_of(text)], 0)[0] for _ in range(2))
                    trials.append(Trial(visit, text, first, again))
        return trials


def _answers(visit: PromptedSample) -> list[str]:
    """Returns the perfect answer, answers that are none, and what the fields of the row say."""
    values = [str(v) for v in visit.shown.row.values() if isinstance(v, (str, int, float)) and len(str(v)) < 50][:6]
    own = [visit.oracle] if visit.oracle is not None else []
    return list(dict.fromkeys([*own, *_ANSWERS, *values, *(f"<answer>{v}</answer>" for v in values)]))


def pays_turns(task: Task) -> bool:
    """Returns whether it has environments, whose turns have reward parts."""
    return type(task).environment is not Task.environment or task.outside is not None


def is_scored(task: Task) -> bool:
    """Returns whether it has a score of its own."""
    return type(task).score is not Task.score or type(task).score_group is not Task.score_group


def sized(sample: Sample, limits: LimitsSettings) -> Sample:
    """Returns the sample with width and height of its first media, as scoring gets it, where its row has none."""
    if not sample.media or {"width", "height"} <= sample.row.keys():
        return sample
    width, height = loader.load(sample.media[0], limits, _FRAMES).size
    return replace(sample, row={"width": width, "height": height, **sample.row})


# --- rules ------------------------------------------------------------------------------------------------------------


def _nothing_paid(seen: TaskSamples) -> Iterator[Found]:
    task = seen.task
    if not seen.scored or pays_turns(task):
        return
    if not is_scored(task):
        yield Found("it has no `score`, so every reward is 0 and nothing is learned: write score(self, sample, answer) "
                    "-> {part: number}, and name the parts in `rewards`")
    elif type(task).combine is Task.combine and not any(part_weights(task).values()):
        listed = f"every part has the weight 0 ({', '.join(task.weights)})" if task.weights else "`rewards` is empty"
        yield Found(f"{listed}, so every reward is 0 and nothing is learned: give a part a weight in `rewards`, or "
                    "with task.rewards.<part>=1")


def _media(seen: TaskSamples) -> Iterator[Found]:
    for visit in seen.sound:
        yield from media_problems(seen.task, visit.sample)


def _prompt(seen: TaskSamples) -> Iterator[Found]:
    for visit in seen.sound:
        yield from placeholder_problems(seen.task, visit.sample, visit.prompt)


def _oracle(seen: TaskSamples) -> Iterator[Found]:
    for visit in seen.visits:
        if visit.error:
            yield Found(visit.error, id=visit.sample.id)
        elif visit.oracle is not None:
            yield from _guarded(seen, visit, lambda v=visit: oracle_problems(seen.task, v.shown, v.oracle or ""))


def _tag(seen: TaskSamples) -> Iterator[Found]:
    for visit in seen.sound:
        if (text := visit.oracle) is not None:
            with original_pixels(seen.task):
                try:
                    reward = OracleScore(seen.task, visit.shown, text).reward
                except (Exception, SystemExit):  # of the task's code: the rule before says so
                    continue
                yield from list(format_problems(reward, visit.shown, text, visit.prompt))


def _guarded(seen: TaskSamples, visit: PromptedSample, find: Callable[[], Iterator[Found]]) -> list[Found]:
    try:
        with original_pixels(seen.task):
            return list(find())
    except VlrlError as error:
        return [Found(str(error), id=visit.sample.id)]


def _other_samples(seen: TaskSamples) -> Iterator[Found]:
    for first, again in zip(seen.samples, seen.again, strict=False):
        with suppress(VlrlError):  # of messages: another rule says so
            if fingerprint(seen.task, first) != fingerprint(seen.task, again):
                yield Found(other_sample("when it is asked for again"), id=first.id)


def _drawn_scores(seen: TaskSamples) -> Iterator[Found]:
    for one in seen.trials:
        if problem := drawn_score(one.first.parts, one.again.parts):
            yield Found(problem, id=one.visit.sample.id, text=shorten(one.text))


def drawn_score(first: Any, again: Any) -> str:
    """Returns why the parts that one answer got twice differ, or ""."""
    return "" if repr(first) == repr(again) else (
        f"the same answer got {first} and then another score, {again}: a reward that is drawn teaches nothing, and no "
        "run can be repeated")


def _unreadable(seen: TaskSamples) -> Iterator[Found]:
    rewards = [t.first for t in seen.trials]
    if rewards and all(r.reward is None and r.error is None for r in rewards):
        names = ", ".join(name for name, value in rewards[0].parts.items() if value is None)
        yield Found(f"`score` gives None ({names}) for each of {len(rewards)} answers tried, the perfect one included "
                    "where it is known: no reward has a value and nothing is learned. None means that an answer cannot "
                    "be judged; give 0.0 for a wrong one", id=seen.trials[0].visit.sample.id)


def _constant(seen: TaskSamples) -> Iterator[Found]:
    if seen.task.needs or type(seen.task).score_group is not Task.score_group:  # which compare, or ask others
        return
    rewards = {t.first.reward for t in seen.trials}
    if len(seen.trials) > 1 and len(rewards) == 1 and (value := next(iter(rewards))) is not None:
        known = any(t.text == t.visit.oracle for t in seen.trials)
        paid = [name for name, weight in part_weights(seen.task).items() if weight > 0]
        if known or all(t.first.parts.get(name) for t in seen.trials for name in paid):  # else all may be wrong
            yield Found(f"each of {len(seen.trials)} different answers earns {value:g}: a reward that is always the "
                        "same teaches nothing", id=seen.trials[0].visit.sample.id, text=shorten(seen.trials[-1].text))


def _range(seen: TaskSamples) -> Iterator[Found]:
    for one in seen.trials:
        for name, value in one.first.parts.items():
            problem = range_problem(seen.task, name, value)
            if problem:
                yield Found(problem, id=one.visit.sample.id, text=shorten(one.text))


def range_problem(task: Task, name: str, value: Any) -> str:
    """Returns why a finite part is out of its range, or ""."""
    if value is None or not math.isfinite(value):
        return ""
    best = task.best_parts.get(name)
    if best is not None and value > best + 1e-6:
        return f"part '{name}' is {value:g}, more than the {best:g} that `best_parts` says"
    if best is None and abs(value) > BOUND:
        return (f"part '{name}' is {value:g}: a part must stay within -{BOUND:g} and {BOUND:g} whatever the text, or "
                "`best_parts` say what is the most")
    return ""


TASK_RULES: tuple[Rule, ...] = (
    Rule(name="task", scope="task", find=_nothing_paid),
    Rule(name="media", scope="task", find=_media),
    Rule(name="prompt", scope="task", find=_prompt),
    Rule(name="oracle", scope="task", find=_oracle),
    Rule(name="tag", scope="task", find=_tag),
    Rule(name="deterministic/samples", scope="task", find=_other_samples, start="warning"),
    Rule(name="deterministic", scope="task", find=_drawn_scores, start="warning"),
    Rule(name="unreadable", scope="task", find=_unreadable, start="warning"),
    Rule(name="constant", scope="task", find=_constant, start="warning"),
    Rule(name="parts", scope="task", find=_range, start="warning"),
)


def task_findings(seen: TaskSamples, *, at_start: bool = False) -> Iterator[Finding]:
    """Yields what the rules say of a task."""
    for rule in TASK_RULES:
        for found in rule.find(seen):
            level = found.level or (at_start and rule.start) or rule.level
            yield Finding(rule=rule.name, level=level, message=found.message, id=found.id, text=found.text,
                          where=f"task '{seen.task.name}'")
