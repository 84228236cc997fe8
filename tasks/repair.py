"""Repair: the question of another task, feedback of its verifier on a wrong answer, and another attempt.

`task.base` names the base task, which asks the question and scores the answers; `task.base_settings` are its settings.
The feedback on a wrong attempt describes each reward part in words (right, partly right, wrong) and reveals nothing
about the target, as in self-debugging (2304.05128), but with a verifier instead of a test. A right attempt ends the
episode. The reward is the reward of the last attempt; `task.rewards.improvement` adds the gain over the attempts, like
the bonus of SCoRe on the second attempt (2409.12917)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, load
from vlrl.task.environment import Environment, has_environment
from vlrl.types import Answer, Observation, Parts, Sample, Step

WORDS = ("wrong", "partly right", "right")
_ASKING = ("prompt", "prompts", "system")  # settings of every task that are passed on to the base task


@dataclass(frozen=True)
class JudgedAttempt:
    """An attempt scored by the base task."""

    parts: Parts
    reward: float | None
    """The base task's reward; None if the attempt cannot be scored."""
    correct: bool | None


def _attempt(action: str, step: int = 0) -> Answer:
    opened: str = getattr(action, "opened", "")
    return parse_answer(action.removeprefix(opened), step=step, opened=opened)


class RepairEnvironment(Environment):
    """Scores one attempt per turn with the base task and returns feedback, until an attempt is right or no attempts are
    left."""

    def __init__(self, task: Repair, sample: Sample):
        self.task, self.sample, self.count = task, sample, 0

    def reset(self, seed: int) -> Observation:
        self.count = 0
        return Observation()

    def step(self, action: str) -> Step:
        self.count += 1
        attempt = self.task.judged(self.sample, _attempt(action))
        done = bool(attempt.correct) or attempt.reward is None or self.count >= self.task.attempts
        said = self.task.feedback(attempt)
        return Step(Observation("" if done else said), done=done, state=f"{self.count}: {said}",
                    info={"parts": attempt.parts, "reward": attempt.reward})


class Repair(Task):
    """Answer again after feedback of a verifier. Reward parts: `final` and `first`, the base task's rewards of the last
    and of the first attempt; `improvement`, their difference; `solved`, whether the last attempt is correct, 0 or 1."""

    rewards = {"final": 1.0, "improvement": 0.0, "first": 0.0, "solved": 0.0}
    outcome = {"solved": 1.0}
    base: str = "digits"
    """Base task, which asks and scores each answer alone. A name, path/file.py:Class or module:Class. Its episodes must
    have a single answer."""
    base_settings: dict[str, Any] = {}
    """Settings of the base task, such as {drawn: true}."""
    attempts: Annotated[int, Field(ge=2, le=8)] = 2
    """Maximum number of attempts. episode.max_turns must be at least this number."""
    message: Literal["parts", "verdict"] = "parts"
    """Feedback on a wrong attempt. parts: how right each reward part is; verdict: only that the attempt is wrong."""

    def __init__(self, **settings: Any):
        asking = {name: settings.pop(name) for name in _ASKING if name in settings}
        super().__init__(**settings)
        self._other = load(self.base, {**self.base_settings, **asking})
        if has_environment(self._other):
            raise ConfigError(f"task.base={self.base}: episodes of this task have several turns already, but repair "
                              "takes a task with one answer. Choose a base task such as grounding or digits")

    @property
    def other(self) -> Task:
        """The base task, with the seed, the data and the coordinate convention of the repair task."""
        self._other.seed, self._other.data, self._other.coordinates = self.seed, self.data, self.coordinates
        return self._other

    def samples(self, split: str) -> Sequence[Sample]:
        split_samples = self.other.samples(split)
        if len(split_samples):
            self._refuse_parts_of_groups(split_samples[0])
        return split_samples

    def _refuse_parts_of_groups(self, sample: Sample) -> None:
        missing = [part for part in self.other.weights if part not in self.other.score(sample, Answer(text=""))]
        paid = [part for part in missing if any(weight for weight in _weights(self.other.weights[part]))]
        if paid:
            raise ConfigError(f"task.base={self.base}: its part '{paid[0]}' compares the answers of a group or needs a "
                              "service, so an attempt cannot be scored alone. Set the weight of the part to 0 with "
                              f"task.base_settings={{rewards: {{{paid[0]}: 0}}}}, or choose another base task")

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        return self.other.sample_from_row(row, root)

    @property
    def templates(self) -> tuple[str, ...]:
        return self.other.templates

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        return self.other.messages(sample)

    def environment(self, sample: Sample) -> Environment:
        return RepairEnvironment(self, sample)

    def judged(self, sample: Sample, answer: Answer) -> JudgedAttempt:
        """Scores an answer with the base task alone, without the other answers of its group."""
        parts = {name: None if value is None else float(value)
                 for name, value in self.other.score(sample, answer).items()}
        known = {name: value for name, value in parts.items() if value is not None}
        if len(known) < len(parts):
            return JudgedAttempt(parts, None, None)
        weights = {name: weight for name, weight in self.other.weights_at(answer.step).items() if name in known}
        return JudgedAttempt(parts, self.other.combine(known, weights), self.other.correct(sample, answer, parts))

    def feedback(self, attempt: JudgedAttempt) -> str:
        """The feedback on an attempt, without any information about the target. With task.message=parts, each rewarded
        part of a wrong attempt is described as right, partly right or wrong."""
        if attempt.correct:
            return "That is right."
        if self.message == "verdict":
            return "That is not right. Answer again."
        weights, best = self.other.weights_at(0), self.other.best_parts
        levels = [f"{name}: {level(value or 0.0, weights[name], best.get(name, 1.0))}"
                  for name, value in attempt.parts.items() if weights.get(name)]
        return f"That is not right. {'; '.join(levels)}. Answer again."

    def score(self, sample: Sample, answer: Answer) -> Parts:
        """The reward parts of an episode. The first and the last attempt are scored again to compute them. An answer
        without turns is a single attempt."""
        final = first = self.judged(sample, replace(answer, turns=()))
        if len(answer.turns) > 1:
            first = self.judged(sample, _attempt(answer.turns[0].action, answer.step))
        gained = None if final.reward is None or first.reward is None else final.reward - first.reward
        return {"final": final.reward, "first": first.reward, "improvement": gained,
                "solved": None if final.reward is None else float(bool(final.correct))}

    def parse(self, sample: Sample, answer: Answer) -> Any:
        return self.other.parse(sample, answer)

    def target(self, sample: Sample) -> Any:
        return self.other.target(sample)

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        return self.other.overlay(sample, parsed)

    def oracle(self, sample: Sample) -> str | None:
        return self.other.oracle(sample)

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        right = self.oracle(sample)
        return None if right is None else [right]

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        return self.other.cheats(sample)

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an episode: `attempts`, the number of attempts, and `repaired`, whether an attempt after the first
        one was right."""
        attempt_count = max(1, len(answer.turns))
        return {"attempts": float(attempt_count), "repaired": float(attempt_count > 1 and parts.get("solved") == 1)}


def level(value: float, weight: float, best: float) -> str:
    """Describes in words how right a reward part is: "right" at its best value, "wrong" at 0 or less, "partly right"
    between these. For a part with a negative weight, 0 is the best value and a higher value is "wrong"."""
    if weight < 0:
        return WORDS[2] if value <= 0 else WORDS[0]
    return WORDS[2] if value >= best - 1e-6 else WORDS[0] if value <= 0 else WORDS[1]


def _weights(weight: Any) -> list[float]:
    return [weight] if isinstance(weight, (int, float)) else [value for _, value in weight]
