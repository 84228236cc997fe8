"""A visit to a prompt, and what became of it: what travels between the group source and a sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Draw:
    """One visit to one sample."""

    index: int
    """Place in the training split."""
    visit: int
    """How often the sample was drawn before."""
    group_size: int | None = None
    """Answers; None = rollout.group_size."""
    max_new_tokens: int | None = None
    """Most tokens of an answer; None = rollout.max_new_tokens."""
    max_turns: int | None = None
    """Most actions of an episode; None = episode.max_turns."""
    weight: float = 1.0
    """Factor on the loss of its group, beside that of the row."""
    knobs: tuple[tuple[str, float], ...] = ()
    """For a task that makes its samples: the sample is `task.generate(index, knobs)`."""
    fields: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Fields of the sample that the stage sets; of those that its task lets stages set (Task.stage_fields)."""


@dataclass(frozen=True)
class Outcome:
    """What became of a draw: the rewards of its group, None = unscorable; empty = the prompt was rejected."""

    draw: Draw
    rewards: tuple[float | None, ...]
    passed: tuple[bool | None, ...] = ()
    """Whether each answer is correct (Task.correct); None where that is not known."""
    surprise: float = 0.0
    """Mean over the answers of sqrt(sum over tokens of (1 - p(token))^2), p by the sampler: what gvm takes for the norm
    of the gradient."""
    acted: bool = False
    """Whether its answers are episodes."""
    teaches: bool | None = None
    """Whether the advantage of the run differs from 0 for any answer; None where a group alone does not say it."""

    @cached_property
    def scored(self) -> tuple[float, ...]:
        """The rewards that there are."""
        return tuple(r for r in self.rewards if r is not None)

    @property
    def failed(self) -> bool:
        """Whether answers are known to be wrong, and none to be correct."""
        known = [p for p in self.passed if p is not None]
        return bool(known) and not any(known)

    @property
    def mixed(self) -> bool:
        """Whether the group teaches something: by the advantage, or else where its raw rewards differ. Exact."""
        return len(set(self.scored)) > 1 if self.teaches is None else self.teaches

    @property
    def reward(self) -> float:
        """Mean reward; nan without any."""
        return sum(self.scored) / len(self.scored) if self.scored else float("nan")

    @property
    def pass_rate(self) -> float:
        """Share of the answers known to be correct or wrong that are correct, in [0, 1]; nan without any."""
        known = [p for p in self.passed if p is not None]
        return sum(known) / len(known) if known else float("nan")

    def advantage(self, scale: bool = True) -> float:
        """Returns the mean |A| of the answers, A = reward - mean of the group, divided by its standard deviation (over
        n) with `scale`, as in GRPO; 0 where all rewards are equal; nan without any reward.
        """
        if not self.mixed:
            return 0.0 if self.scored else float("nan")
        mean, count = self.reward, len(self.scored)
        away = [abs(r - mean) for r in self.scored]
        spread = math.sqrt(sum(a * a for a in away) / count) if scale else 1.0
        return sum(away) / count / spread if spread else 0.0
