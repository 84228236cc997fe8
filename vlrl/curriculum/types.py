"""A draw of a prompt and its outcome: what the GroupSource and a sampler exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Draw:
    """One draw of a sample from the training split."""

    index: int
    """Index in the training split."""
    visit: int
    """How often the sample had been drawn before this draw."""
    group_size: int | None = None
    """Number of completions; None = rollout.group_size."""
    max_new_tokens: int | None = None
    """Token limit of a completion; None = rollout.max_new_tokens."""
    max_turns: int | None = None
    """Maximum number of actions of an episode; None = episode.max_turns."""
    weight: float = 1.0
    """Factor on the loss of the group, in addition to the `weight` of the sample's row."""
    knobs: tuple[tuple[str, float], ...] = ()
    """The difficulty settings as (name, value) pairs, for a task that generates samples: the sample is
    `task.generate(index, knobs)`."""
    fields: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Fields that the curriculum's stage overrides in the sample; they must be in Task.stage_fields."""


@dataclass(frozen=True)
class Outcome:
    """The result of a draw. `rewards` has one reward per completion (None = unscorable). If the prompt was rejected,
    `rewards` is empty."""

    draw: Draw
    rewards: tuple[float | None, ...]
    passed: tuple[bool | None, ...] = ()
    """Whether each completion is correct (Task.correct); None = unknown."""
    surprise: float = 0.0
    """Mean over the completions of sqrt(sum over tokens of (1 - p(token))^2), where p is the probability under the
    weights that sampled the completion. The sampler gvm uses this mean in place of the gradient norm."""
    is_episode: bool = False
    """Whether the completions are episodes."""
    teaches: bool | None = None
    """Whether any completion has a nonzero advantage under algo.advantage; None if that is not known from the group
    alone."""

    @cached_property
    def scored(self) -> tuple[float, ...]:
        """The rewards of the scorable completions."""
        return tuple(r for r in self.rewards if r is not None)

    @property
    def _known(self) -> list[bool]:
        return [p for p in self.passed if p is not None]

    @property
    def failed(self) -> bool:
        """Whether some completion is known to be wrong and no completion is known to be correct."""
        return bool(self._known) and not any(self._known)

    @property
    def mixed(self) -> bool:
        """Whether the group has a training signal: a nonzero advantage or, if that is unknown, rewards that differ at
        all."""
        return len(set(self.scored)) > 1 if self.teaches is None else self.teaches

    @property
    def reward(self) -> float:
        """Mean reward; nan without any reward."""
        return sum(self.scored) / len(self.scored) if self.scored else float("nan")

    @property
    def pass_rate(self) -> float:
        """Share of correct completions among those known to be correct or wrong, in [0, 1]; nan if none is known."""
        return sum(self._known) / len(self._known) if self._known else float("nan")

    def advantage(self, scale: bool = True) -> float:
        """Mean |A| of the completions, A = reward - group mean; with `scale` divided by the group's standard deviation,
        as in GRPO.

        The standard deviation is without Bessel's correction. 0 where all rewards are equal; nan without any reward."""
        if not self.mixed:
            return 0.0 if self.scored else float("nan")
        mean, count = self.reward, len(self.scored)
        away = [abs(r - mean) for r in self.scored]
        spread = math.sqrt(sum(a * a for a in away) / count) if scale else 1.0
        return sum(away) / count / spread if spread else 0.0
