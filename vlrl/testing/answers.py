"""Checks of scoring: no text makes it raise, hang or return unbounded rewards; the perfect answer earns the most."""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlrl.checks.answers import answer_of
from vlrl.checks.finding import shorten
from vlrl.checks.tasks import changing_score, prompt_text, range_problem
from vlrl.data import coordinates
from vlrl.data.coordinates import Coordinates
from vlrl.rewards.scalar import finite_number
from vlrl.task import Task, check_parts, check_shape, task_oracle
from vlrl.task.services import Services
from vlrl.testing.findings import Findings, TooSlow, full_marks, reward_of, timed
from vlrl.testing.texts import hostile_texts
from vlrl.types import Answer, Sample

SLOW = 1.0
"""Maximum CPU seconds for scoring one answer."""


def check_texts(task: Task, samples: Sequence[Sample], findings: Findings) -> None:
    """Scores unusual texts (texts.py) as answers to the first and the last sample. Very long texts are scored only for
    the first."""
    for sample in dict.fromkeys((samples[0], samples[-1])):
        prompt = ""
        with findings.guard("messages", "messages", sample.id):
            prompt = prompt_text(task.messages(sample))
        for text in hostile_texts(prompt, long=sample is samples[0]):
            if len(findings.by_rule.get("slow", ())) < 3:  # each such finding takes seconds
                try_answer(task, sample, text, findings)


def try_answer(task: Task, sample: Sample, text: str, findings: Findings) -> float | None:
    """Scores a text, and calls every other method of the task that training calls with an answer. Returns the reward,
    or None if the answer could not be scored. Errors of the other methods become findings too, although training
    catches them."""
    findings.scoring()
    answer, before = answer_of(text), json.dumps(sample.row, sort_keys=True, default=repr)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning of literal_eval and the like: the model's text, not a fault
            reward = _scored(task, sample, answer, findings)
            _check_shown(task, sample, answer, findings)
    except TooSlow:
        findings.add("slow", f"scoring this answer takes more than {SLOW:g} s of CPU time, for example because a "
                     "regular expression backtracks or the work grows with the square of the length", sample.id, text)
        return None
    if json.dumps(sample.row, sort_keys=True, default=repr) != before:
        findings.add("pure", "scoring changed the sample's row", sample.id, text)
    return reward


def _scored(task: Task, sample: Sample, answer: Answer, findings: Findings) -> float | None:
    with findings.guard("raises", "score", sample.id, answer.text):
        parts, seconds = timed(lambda: task.score(sample, answer), SLOW)
        if seconds > SLOW:
            raise TooSlow
        if problem := changing_score(parts, task.score(sample, answer)):
            findings.add("deterministic", problem, sample.id, answer.text)
        parts = _with_group_parts(task, sample, answer, parts)
        if not task.needs:  # otherwise some parts need services, which are not available here
            check_parts(task, parts)
        for name, value in parts.items():
            number, problem = finite_number(value)
            if problem := f"part '{name}' {problem}" if problem else range_problem(task, name, number):
                findings.add("parts", problem, sample.id, answer.text)
                return None
        return reward_of(task, parts)
    return None


def quick_reward(task: Task, sample: Sample, text: str, findings: Findings) -> float:
    """Returns the reward of a text, without the checks of `try_answer`. If scoring raises an error, adds a finding and
    returns 0."""
    findings.scoring()
    answer = answer_of(text)
    with findings.guard("raises", "score", sample.id, text):
        return reward_of(task, _with_group_parts(task, sample, answer, task.score(sample, answer)))
    return 0.0


def _with_group_parts(task: Task, sample: Sample, answer: Answer, parts: Any) -> dict[str, Any]:
    check_shape(task, parts, "score")
    together = [] if task.needs else task.score_group(sample, [answer], Services())
    return {**parts, **(together[0] if together else {})}


def _check_shown(task: Task, sample: Sample, answer: Answer, findings: Findings) -> None:
    with findings.guard("parse", "parse, target or overlay", sample.id, answer.text):
        (parsed, target), _ = timed(lambda: (task.parse(sample, answer), task.target(sample)), SLOW)
        for name, value in (("parse", parsed), ("target", target)):
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                findings.add("parse", f"{name} returned a value that cannot be written as JSON: {error}", sample.id,
                             answer.text)
                return
        for mark in task.overlay(sample, parsed):
            if problem := _mark_problem(mark):
                findings.add("overlay", problem, sample.id, answer.text)
    with findings.guard("metrics", "metrics", sample.id, answer.text):
        parts = task.score(sample, answer)
        for name, value in task.metrics(sample, answer, parts).items():
            if value is not None and not math.isfinite(value):
                findings.add("metrics", f"the metric {name!r} is {value}, not a finite number", sample.id, answer.text)


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and all(
        isinstance(v, (int, float)) and math.isfinite(v) for v in value)


def _is_path(at: Any) -> bool:
    return isinstance(at, (list, tuple)) and len(at) > 1 and all(_numbers(point, 2) for point in at)


def _is_track(at: Any) -> bool:
    return isinstance(at, (list, tuple)) and bool(at) and all(
        isinstance(entry, (list, tuple)) and len(entry) == 2 and _numbers(entry[1], 4)
        and (entry[0] is None or _numbers(entry[:1], 1)) for entry in at)


_MARKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "box": (partial(_numbers, count=4), "4 finite numbers"), "point": (partial(_numbers, count=2), "2 finite numbers"),
    "span": (partial(_numbers, count=2), "2 finite numbers"),
    "path": (_is_path, "a list of at least 2 points [x, y] of finite numbers"),
    "track": (_is_track, "a list of [seconds or null, [x1, y1, x2, y2]]")}
"""Kind of an overlay mark -> (function that checks the mark's `at`, description of a valid `at`)."""


def _mark_problem(mark: Any) -> str | None:
    if not isinstance(mark, Mapping) or mark.get("kind") not in _MARKS:
        return f"the kind of the mark {str(mark)[:100]} must be 'box', 'point', 'path', 'span' or 'track'"
    fits, wanted = _MARKS[mark["kind"]]
    if not fits(at := mark.get("at")):
        return f"the mark of kind {mark['kind']!r} has at={str(at)[:100]}, which must be {wanted}"
    if not isinstance(mark.get("label"), str) or not isinstance(mark.get("role"), str):
        return f"the mark {str(mark)[:100]} needs a label and a role, both strings"
    return None


def check_groups(task: Task, sample: Sample, texts: Sequence[str], findings: Findings) -> None:
    """Checks score_group on the answers `texts`: it must return one result per answer, the same results when called
    again, and results that do not depend on the order of the answers."""
    if task.needs or type(task).score_group is Task.score_group:
        return
    answers = [answer_of(text) for text in texts]
    with findings.guard("group", "score_group", sample.id):
        first = task.score_group(sample, answers, Services())
        again = task.score_group(sample, answers, Services())
        backwards = task.score_group(sample, answers[::-1], Services())
        if len(first) not in (0, len(answers)):
            findings.add("group", f"score_group returned {len(first)} results for {len(answers)} answers", sample.id)
        elif repr(first) != repr(again):
            findings.add("group", "score_group returned different parts when it was called again", sample.id)
        elif not _alike(first, backwards[::-1]):
            findings.add("group", "the parts of score_group depend on the order of the answers", sample.id)
        for parts in first:
            check_parts(task, {**dict.fromkeys(task.weights, 0.0), **parts})


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x.keys() == y.keys() and all(
        x[k] == y[k] or (x[k] is not None and y[k] is not None and math.isclose(x[k], y[k], abs_tol=1e-9)) for k in x)
        for x, y in zip(a, b, strict=True))


def oracle_of(task: Task, sample: Sample, findings: Findings) -> str | None:
    """The perfect answer to a sample; None if the task has none, or if `oracle` fails, which becomes a finding."""
    with findings.guard("oracle", "oracle", sample.id):
        text = task_oracle(task, sample)
        if text is None:
            findings.note("some samples have no perfect answer (oracle returned None)")
        return text
    return None


def check_oracle(task: Task, samples: Sequence[Sample], findings: Findings) -> None:
    """Scores the perfect answers with the task's coordinates. If the task converts coordinates, scores them in every
    coordinate convention too, and adds a finding for a convention in which they earn less."""
    used = _Spy(task.coordinates)
    own, task.coordinates = task.coordinates, used
    try:
        plain = _oracle_rewards(task, samples, findings, "")
        if not used.calls or not plain:
            return
        for name in coordinates.CONVENTIONS:
            task.coordinates = coordinates.make(name)
            resized = [_resized(s) for s in samples]
            rewards = _oracle_rewards(task, resized, findings, f" under task.coordinates={name}")
            if rewards and sum(rewards) / len(rewards) < 0.9 * sum(plain) / len(plain):
                mean, usual = sum(rewards) / len(rewards), sum(plain) / len(plain)
                findings.add("coordinates", f"under task.coordinates={name} perfect answers earn {mean:.3g} on "
                             f"average instead of {usual:.3g}: use self.coordinates.from_original in oracle and "
                             "to_original in parse")
    finally:
        task.coordinates = own


def _oracle_rewards(task: Task, samples: Sequence[Sample], findings: Findings, where: str) -> list[float]:
    rewards = []
    for sample in samples:
        text = oracle_of(task, sample, findings)
        reward = None if text is None else try_answer(task, sample, text, findings)
        if text is None or reward is None:
            continue
        rewards.append(reward)
        if where and reward <= 0 < full_marks(task):
            findings.add("oracle", f"the perfect answer earns {reward:g}{where}", sample.id, text)
    return rewards


def wrapped(text: str) -> list[str]:
    r"""Returns the text in several answer formats that prompts may ask for, such as <answer> tags or \boxed."""
    return [text, f"<answer>{text}</answer>", f"<think>I look.</think><answer>{text}</answer>", f"\\boxed{{{text}}}",
            f"<think>I look.</think><answer>\\boxed{{{text}}}</answer>", f"The answer is {text}."]


def check_best(task: Task, sample: Sample, oracle: str, others: Sequence[str], findings: Findings) -> float | None:
    """Returns the reward of the perfect answer `oracle`; None if it cannot be scored. Adds a finding if one of the
    answers `others`, or a value of the row given as an answer, earns more."""
    best = try_answer(task, sample, oracle, findings)
    if best is None or best >= full_marks(task) - 1e-6 * max(1.0, abs(full_marks(task))):
        return best
    final = answer_of(oracle).final
    labels = [str(v) for v in sample.row.values() if isinstance(v, (str, int, float)) and len(str(v)) <= 50]
    for text in dict.fromkeys([*wrapped(final), *others, *(form for label in labels for form in wrapped(label))]):
        reward = quick_reward(task, sample, text, findings)
        if reward > best + 1e-6:
            findings.add("oracle/beaten", f"the perfect answer {shorten(oracle)} earns {best:.4g} of "
                         f"at most {full_marks(task):g}, but another answer earns {reward:.4g}", sample.id, text)
            break
    return best


class _Spy(Coordinates):
    def __init__(self, inner: Coordinates):
        self.inner, self.calls = inner, 0

    @property
    def convention(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.convention

    def to_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        self.calls += 1
        return self.inner.to_original(sample, box)

    def from_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        self.calls += 1
        return self.inner.from_original(sample, box)


def _resized(sample: Sample) -> Sample:
    row = {k: v for k, v in sample.row.items() if k != "coordinates"}
    if isinstance(row.get("width"), (int, float)) and isinstance(row.get("height"), (int, float)):
        row.setdefault("processed_size", [28 * math.ceil(row["width"] / 20), 28 * math.ceil(row["height"] / 20)])
    return replace(sample, row=row)
