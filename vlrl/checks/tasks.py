"""Rules of a task, checked on a few samples: its prompts, and how `score` rates perfect and other answers.

A rule of scope "task" is `find(samples: TaskSamples)` and yields findings. It uses `samples.task`, `samples.prompted`
(the samples, with the task's prompt templates in turn) and `samples.trials` (the scores of some answers to them)."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from vlrl.checks.identity import fingerprint, unstable_sample
from vlrl.checks.rule import Rule
from vlrl.config.schema import LimitsSettings
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data import media as loader
from vlrl.data.coordinates import Convention
from vlrl.data.media import VideoSampling
from vlrl.data.row_media import named_media, unshown_advice, unshown_columns, unshown_problem
from vlrl.errors import VlrlError, did_you_mean
from vlrl.task import Task, task_messages, task_oracle
from vlrl.task.environment import has_environment
from vlrl.task.scoring import AnswerScore, score_group
from vlrl.types import Sample

BOUND = 10.0  # largest allowed magnitude of a reward part that the task does not list in `best_parts`
SECONDS = 5.0  # time limit for trying answers, so that a slow `score` does not delay the start of a run
_MOST_PROMPTED = 8
_MOST_SCORED = 4
_TRIED = 6  # number of values of a row that are tried as answers
_ANSWERS = ("", "junk", "1", "<answer>2</answer>", "<think>I look.</think><answer>no</answer>", "\\boxed{B}")
_TAGGED = ("<answer>{}</answer>", "\\boxed{{{}}}")
_FRAMES = VideoSampling(fps=1.0, max_frames=2)  # for the width and height of a clip


@dataclass(frozen=True)
class PromptedSample:
    """A sample rendered with one of the task's prompt templates."""

    sample: Sample
    prompt: str  # the text of the sample's messages
    scored: Sample  # the sample as `score` receives it, with the size of its image
    oracle: str | None
    """The perfect answer, in original pixels. None if it is unknown, or if the task does not score single answers."""
    error: str = ""  # why the prompt, the image or the perfect answer cannot be made; "" if they can


@dataclass(frozen=True)
class Trial:
    """One answer to a sample, with two scores: the answer is scored twice, to detect scores that change."""

    prompted: PromptedSample
    text: str
    first: AnswerScore
    second: AnswerScore


@dataclass(frozen=True)
class TaskSamples:
    """A task and a few of its samples, with the prompts and scores that the rules of tasks examine."""

    task: Task
    samples: Sequence[Sample]
    limits: LimitsSettings
    scored: bool = True  # whether the rules of rewards apply
    repeated: Sequence[Sample] = ()  # the same samples, generated a second time; () if they were not generated twice
    every: bool = False
    """True if `prompted` combines each sample with each template; False if the templates are used in turn."""

    @cached_property
    def prompted(self) -> list[PromptedSample]:
        """The samples, each rendered with prompt templates of the task (see `every`)."""
        most = len(self.task.templates)
        count = min(max(len(self.samples), most), _MOST_PROMPTED) if self.samples else 0
        in_turn = zip(cycle(range(most)), cycle(self.samples), range(count), strict=False)
        pairs = product(range(most), self.samples) if self.every else ((n, sample) for n, sample, _ in in_turn)
        return [self._prompted(replace(sample, prompt=templates[n % len(templates)])) for n, sample in pairs
                for templates in (self.task.templates_for(sample),)]

    def _prompted(self, sample: Sample) -> PromptedSample:
        try:
            text = prompt_text(task_messages(self.task, sample))
            if not self.rewarded:
                return PromptedSample(sample, text, sample, None)
            with original_pixels(self.task):
                scored = with_media_size(sample, self.limits)
                return PromptedSample(sample, text, scored, task_oracle(self.task, scored))
        except VlrlError as error:
            return PromptedSample(sample, "", sample, None, str(error))

    @property
    def valid(self) -> list[PromptedSample]:
        return [one for one in self.prompted if not one.error]

    @property
    def rewarded(self) -> bool:
        """Whether the task scores single answers: it has a `score` and no environment, and rewards are checked."""
        return self.scored and has_score(self.task) and not has_environment(self.task)

    @cached_property
    def trials(self) -> list[Trial]:
        """The scores of perfect and other answers to the samples, as many as fit into the time limit SECONDS."""
        return self._trials_and_refusal[0]

    @property
    def refusal(self) -> str:
        """Why scoring refuses what the task returned for an answer, such as a value of the wrong type; "" if it does
        not."""
        return self._trials_and_refusal[1]

    @cached_property
    def _trials_and_refusal(self) -> tuple[list[Trial], str]:
        begun, trials = time.monotonic(), list[Trial]()
        with original_pixels(self.task), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in self.valid[:_MOST_SCORED] if self.rewarded else ():
                for text in answers_to(one):
                    if trials and time.monotonic() - begun > SECONDS:
                        return trials, ""
                    try:
                        first, second = (score_group(self.task, one.scored, [answer_of(text)], 0)[0] for _ in range(2))
                    except VlrlError as error:
                        return trials, str(error)
                    trials.append(Trial(one, text, first, second))
        return trials, ""


def answers_to(prompted: PromptedSample) -> list[str]:
    """Returns answers to try on a sample: the perfect answer, wrong answers, and the values of the row's fields, plain
    and in the usual tags."""
    values = [str(v) for v in prompted.scored.row.values()
              if isinstance(v, (str, int, float)) and len(str(v)) < 50][:_TRIED]
    own = [prompted.oracle] if prompted.oracle is not None else []
    tagged = (form.format(v) for form in _TAGGED for v in values)
    return list(dict.fromkeys([*own, *_ANSWERS, *values, *tagged]))


def has_score(task: Task) -> bool:
    """Whether the task defines `score` or `score_group`."""
    return type(task).score is not Task.score or type(task).score_group is not Task.score_group


def with_media_size(sample: Sample, limits: LimitsSettings) -> Sample:
    """Returns the sample as `score` receives it: the row has the width and height of the sample's first media."""
    if not sample.media or {"width", "height"} <= sample.row.keys():
        return sample
    width, height = loader.load(sample.media[0], limits, _FRAMES).size
    return replace(sample, row={"width": width, "height": height, **sample.row})


# --- rules ------------------------------------------------------------------------------------------------------------


def _no_reward(samples: TaskSamples) -> Iterator[Finding]:
    task = samples.task
    rewards_turns = type(task).environment is not Task.environment or task.outside is not None
    if not samples.scored or rewards_turns:
        return
    if not has_score(task):
        yield Finding(message="the task has no `score`, so every reward is 0 and nothing is learned: write score(self, "
                      "sample, answer) -> {part: number}, and name the parts in `rewards`")
    elif type(task).combine is Task.combine and not any(part_weights(task).values()):
        listed = f"every part has the weight 0 ({', '.join(task.weights)})" if task.weights else "`rewards` is empty"
        yield Finding(message=f"{listed}, so every reward is 0 and nothing is learned: give a part a weight in "
                      "`rewards`, or with task.rewards.<part>=1")


def _oracle(samples: TaskSamples) -> Iterator[Finding]:
    for one in samples.prompted:
        if one.error:
            yield Finding(message=one.error, id=one.sample.id)
        elif one.oracle is not None:
            try:
                with original_pixels(samples.task):
                    found = list(oracle_problems(samples.task, one.scored, one.oracle))
            except VlrlError as error:
                found = [Finding(message=str(error), id=one.sample.id)]
            yield from found


def _refused(samples: TaskSamples) -> Iterator[Finding]:
    reported = any(one.oracle is not None or one.error for one in samples.prompted)  # by the rule of the oracle
    if samples.refusal and not reported:
        yield Finding(message=samples.refusal.removeprefix(f"task '{samples.task.name}': "))


def _fails(samples: TaskSamples) -> Iterator[Finding]:
    """Finds answers whose scoring fails. If it fails for the perfect answer, the rule of the oracle reports it."""
    failed = [trial for trial in samples.trials if trial.first.error]
    if not failed or any(trial.text == trial.prompted.oracle for trial in failed):
        return
    one, count = failed[0], len(samples.trials)
    row = one.prompted.sample.row
    field = _KEY_ERROR.match(one.first.error or "")
    hint = (f" (the row has {', '.join(map(str, row))}.{did_you_mean(field[1], map(str, row))})"
            if field and field[1] not in row else "")
    many = f"each of the {count}" if len(failed) == count else f"{len(failed)} of {count}"
    yield Finding(message=f"scoring fails for {many} answers tried: {one.first.error}{hint}. A rollout whose score "
                  "fails has no reward, and the run stops if this happens to more than the share limits.score_errors: "
                  "return a number for any text", id=one.prompted.sample.id, text=shorten(one.text),
                  level="error" if len(failed) > count * max(0.5, samples.limits.score_errors) else "warning")


def _best_of(samples: TaskSamples, one: PromptedSample) -> str | None:
    """The perfect answer to a sample; if it is unknown, the answer tried that earned the most in a tag."""
    if one.oracle is not None:
        return one.oracle
    tagged = [(t.first.reward, t.text) for t in samples.trials if t.prompted is one and t.first.reward
              and t.first.reward == t.second.reward and t.text not in _ANSWERS
              and t.text.startswith(("<answer>", "\\boxed"))]
    return max(tagged, key=lambda found: found[0])[1] if tagged else None


def _tag(samples: TaskSamples) -> Iterator[Finding]:
    for one in samples.valid:
        if (text := _best_of(samples, one)) is not None:
            with original_pixels(samples.task):
                try:
                    reward = OracleScore(samples.task, one.scored, text).reward
                except (Exception, SystemExit):  # of the task's code: the oracle's rule reports it
                    continue
                found = list(format_problems(reward, one.scored, text, one.prompt))
                yield from found if one.oracle is not None else (replace(  # a guess: it may be meant
                    f, level="warning", message=f.message.replace("the perfect answer", "the answer")) for f in found)


def _changing_samples(samples: TaskSamples) -> Iterator[Finding]:
    for first, second in zip(samples.samples, samples.repeated, strict=False):
        with suppress(VlrlError):  # of messages: another rule reports it
            if fingerprint(samples.task, first) != fingerprint(samples.task, second):
                yield Finding(message=unstable_sample("when it is asked for again"), id=first.id)


def _changing_scores(samples: TaskSamples) -> Iterator[Finding]:
    for one in samples.trials:
        if problem := changing_score(one.first.parts, one.second.parts):
            yield Finding(message=problem, id=one.prompted.sample.id, text=shorten(one.text))


def changing_score(first: Any, second: Any) -> str:
    """The message about two different scores of the same answer; "" if they are equal."""
    return "" if repr(first) == repr(second) else (
        f"the same answer was scored {first} and then {second}: nothing can be learned from a random reward, and no "
        "run can be reproduced")


def _unreadable(samples: TaskSamples) -> Iterator[Finding]:
    rewards = [t.first for t in samples.trials]
    if rewards and all(r.reward is None and r.error is None for r in rewards):
        names = ", ".join(name for name, value in rewards[0].parts.items() if value is None)
        yield Finding(message=f"scoring returns None ({names}) for each of the {len(rewards)} answers tried, including "
                              "the perfect answer if it is known: no reward has a value and nothing is learned. None "
                              "means that an answer cannot be judged; return 0.0 for a wrong "
                              "answer", id=samples.trials[0].prompted.sample.id)


def _constant(samples: TaskSamples) -> Iterator[Finding]:
    task, trials = samples.task, samples.trials
    together = type(task).score_group is not Task.score_group
    if task.needs or (together and not task.plain_group):  # parts that compare answers, or ask services
        return
    rewards = {t.first.reward for t in trials}
    if len(trials) > 1 and len(rewards) == 1 and (value := next(iter(rewards))) is not None:
        oracle_tried = any(t.text == t.prompted.oracle for t in trials)
        paid = [name for name, weight in part_weights(task).items() if weight > 0]
        if oracle_tried or all(t.first.parts.get(name) for t in trials for name in paid):  # else all may be wrong
            yield Finding(message=f"each of {len(trials)} different answers earns {value:g}: nothing can be learned "
                                  "from a constant reward: a better answer must earn "
                                  "more", id=trials[0].prompted.sample.id, text=shorten(trials[-1].text),
                          level="warning" if together and _compares(samples) else "error")
        elif not any(value for t in trials for value in t.first.parts.values()):
            yield Finding(message=f"each of {len(trials)} different answers earns 0, those that repeat a value of the "
                          "row included. If one of them is right, correct the reward; else give the task an `oracle`, "
                          "and its perfect answer is checked", id=trials[0].prompted.sample.id,
                          text=shorten(trials[-1].text), level="warning")


def _compares(samples: TaskSamples) -> bool:
    """Whether `score_group` gives different rewards to a group of all answers tried, one of them twice."""
    trials = samples.trials
    own = [trial.text for trial in trials if trial.prompted is trials[0].prompted]
    with original_pixels(samples.task):
        scores = score_group(samples.task, trials[0].prompted.scored, [answer_of(text) for text in (*own, own[0])], 0)
    return len({score.reward for score in scores}) > 1


def _range(samples: TaskSamples) -> Iterator[Finding]:
    for one in samples.trials:
        for name, value in one.first.parts.items():
            if problem := range_problem(samples.task, name, value):
                yield Finding(message=problem, id=one.prompted.sample.id, text=shorten(one.text))


def range_problem(task: Task, name: str, value: Any) -> str:
    """Returns why `value`, the value of the reward part `name`, is out of range; "" if it is in range, None or not
    finite."""
    if value is None or not math.isfinite(value):
        return ""
    best = task.best_parts.get(name)
    if best is not None and value > best + 1e-6:
        return f"part '{name}' is {value:g}, more than its maximum {best:g} in `best_parts`"
    if best is None and abs(value) > BOUND:
        return (f"part '{name}' is {value:g}: a part must stay within -{BOUND:g} and {BOUND:g} for any text, or "
                "`best_parts` must give its maximum")
    return ""


def _box_units(samples: TaskSamples) -> Iterator[Finding]:
    """Finds reward functions that get boxes in the model's units while the rows have boxes in pixels."""
    task, units = samples.task, ""
    for one in samples.valid[:1] if task.unconverted else ():
        with suppress(VlrlError):  # a model that is not on this machine
            units = task.coordinates.used(one.sample) if isinstance(task.coordinates, Convention) else ""
        boxes = [text for text in map(str, one.sample.row.values()) if _FOUR.fullmatch(text.strip())]
        if boxes and units not in ("", "original"):
            yield Finding(message=f"the row has the box {shorten(boxes[0])}, and the model writes boxes as {units}, "
                                  "not in pixels of the original image. The reward function "
                                  f"{task.unconverted[0]} has no parameter `to_pixels`, a function that converts a "
                                  "box of the model to pixels "
                                  "(docs/your-reward.md)", id=one.sample.id)


_FOUR = re.compile(r"(?:<answer>)?\s*\[+\s*(?:\d+(?:\.\d+)?\s*,\s*){3}\d+(?:\.\d+)?\s*\]+\s*(?:</answer>)?")
"""Matches a list of four numbers, as a box is written."""


TASK_RULES: tuple[Rule, ...] = (
    Rule(name="task", scope="task", find=_no_reward),
    Rule(name="media", scope="task",
         find=lambda samples: (f for one in samples.valid for f in media_problems(samples.task, one.sample))),
    Rule(name="prompt", scope="task", find=lambda samples: (
        f for one in samples.valid for f in placeholder_problems(samples.task, one.sample, one.prompt))),
    Rule(name="oracle", scope="task", find=_oracle),
    Rule(name="score", scope="task", find=_refused),
    Rule(name="score/fails", scope="task", find=_fails),
    Rule(name="tag", scope="task", find=_tag),
    Rule(name="deterministic/samples", scope="task", find=_changing_samples, start="warning"),
    Rule(name="deterministic", scope="task", find=_changing_scores, start="warning"),
    Rule(name="unreadable", scope="task", find=_unreadable),
    Rule(name="constant", scope="task", find=_constant),
    Rule(name="parts", scope="task", find=_range, start="warning"),
    Rule(name="box/units", scope="task", find=_box_units, level="warning"),
)


def task_findings(samples: TaskSamples, *, at_start: bool = False) -> Iterator[Finding]:
    """Applies the rules of tasks and yields their findings."""
    for rule in TASK_RULES:
        for found in rule.find(samples):
            yield rule.finding(found, at_start, f"task '{samples.task.name}'", found.id)


_KEY_ERROR = re.compile(r"KeyError: '([^']+)'")
_PLACEHOLDER = re.compile(r"(?<![\w\\])\{(\w+)\}")  # {label}, not \boxed{label}


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of chat messages (system and few-shot examples included), joined by newlines."""
    contents = [[{"text": m["content"]}] if isinstance(m["content"], str) else m["content"] for m in messages]
    return "\n".join(part["text"] for content in contents for part in content
                     if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def media_problems(task: Task, sample: Sample) -> Iterator[Finding]:
    """Yields a message for media that the row names or the sample has, but the prompt does not show."""
    missing = unshown_problem(sample, FIELDS, MEDIA_FIELDS)
    if missing:
        yield Finding(message=missing, id=sample.id)
    else:
        for column in unshown_columns(sample, FIELDS, MEDIA_FIELDS)[:1]:
            yield Finding(message=f"the prompt does not show all media of the row, {named_media(sample.row, column)}: "
                          f"{unshown_advice(column, MEDIA_FIELDS, sample.row[column])}", id=sample.id, level="warning")
    shown = [part.get("type") for m in task_messages(task, sample) if not isinstance(m["content"], str)
             for part in m["content"] if part.get("type") != "text"]
    has = [media.kind for media in sample.media]
    if shown != has:
        yield Finding(message=f"its messages show {shown}, but the sample has {has}: every image and video once, in "
                      'order, as {"type": "image"} or {"type": "video"}', id=sample.id)


def placeholder_problems(task: Task, sample: Sample, text: str) -> Iterator[Finding]:
    """Yields a message for each placeholder of the sample's template that is still in the prompt `text`, because the
    row lacks the field."""
    for name in dict.fromkeys(_PLACEHOLDER.findall(sample.prompt or task.templates_for(sample)[0])):
        if name not in sample.row and f"{{{name}}}" in text:
            yield Finding(message=f"the prompt asks for {{{name}}}, which the row does not have (it has "
                          f"{', '.join(map(str, sample.row)) or 'no field'}).{did_you_mean(name, map(str, sample.row))}"
                          f" Correct task.prompt, give the rows that field, or write "
                          f"{{ {name} }} for literal braces", id=sample.id)
