"""Turn limit of training episodes that grows up to episode.max_turns: the setting `episode.horizon`.

    horizon = Horizon(config.episode)
    horizon.within(draws, step)             # the draws of a step, with the turn limit of that step
    horizon.observe(outcomes)               # after the step: its outcomes

With short episodes first, the policy learns short solutions before it tries longer ones: TTI (arXiv 2506.07976), which
raises the horizon per iteration by adding or multiplying. Works with any sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.algo.named import bind
from vlrl.config.episodes import EpisodeSettings
from vlrl.config.registry import Table
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.task.environment import has_environment

HORIZONS = Table({
    "add": "vlrl.methods.curricula.horizons:add",
    "multiply": "vlrl.methods.curricula.horizons:multiply",
    "success": "vlrl.methods.curricula.horizons:Success",
})
"""The rules that episode.horizon can name. A rule maps the number of a step (from 0) to a turn limit. A rule that
learns from outcomes also has `observe`, `state_dict` and `load_state_dict`."""


class Horizon:
    """Computes the turn limit of each step by the rule that `episode.horizon` names (null = always episode.max_turns).
    Raises ConfigError for an unknown name or option."""

    def __init__(self, settings: EpisodeSettings):
        self.most = settings.max_turns
        self.rule = bind("episode.horizon", settings.horizon, HORIZONS) if settings.horizon else None
        self.latest = 0
        """The largest turn limit of the last step's episodes."""

    def at(self, step: int) -> int:
        """The turn limit of a step, from 1 to episode.max_turns. Raises ConfigError if a user's own rule returns
        anything but a whole number."""
        if self.rule is None:
            return self.most
        turns = self.rule(step)
        if isinstance(turns, bool) or not isinstance(turns, (int, np.integer)):
            raise ConfigError(f"episode.horizon={self.rule.name!r} returned {turns!r} at step {step}: it must return a "
                              "whole number of turns")
        return min(max(int(turns), 1), self.most)

    def within(self, draws: Sequence[Draw], step: int) -> list[Draw]:
        """Returns the draws with Draw.max_turns set to the turn limit of the step."""
        turns = self.at(step)
        return [*draws] if turns == self.most else [replace(draw, max_turns=turns) for draw in draws]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Passes the outcomes of a step's episodes to the rule, if the rule learns; outcomes of single answers are
        ignored."""
        acted = [o for o in outcomes if o.is_episode]
        self.latest = max((o.draw.max_turns or self.most for o in acted), default=self.latest)
        if self.rule is not None and hasattr(self.rule.function, "observe"):
            self.rule.function.observe(acted)

    def metrics(self) -> dict[str, float]:
        return {"episode/horizon": float(self.latest)} if self.rule is not None and self.latest else {}

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict() if self.rule else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rule and hasattr(self.rule.function, "load_state_dict"):
            self.rule.load_state_dict(state)


def check(settings: EpisodeSettings, task: Task) -> None:
    """Raises ConfigError if `episode.horizon` has no effect: the task has no environment, or the first turn limit is
    not below episode.max_turns."""
    if settings.horizon is None:
        return
    given = f"episode.horizon={settings.horizon.name!r}"
    if not has_environment(task):
        raise ConfigError(f"{given}: task '{task.name}' has no environment and no tools, so its answers have no turns: "
                          "set episode.horizon=null")
    first = Horizon(settings).at(0)
    if first >= settings.max_turns:
        raise ConfigError(f"{given} begins with {first} turns, which is not below episode.max_turns="
                          f"{settings.max_turns}, so it would never shorten an episode: lower episode.horizon.start, "
                          "raise episode.max_turns, or set episode.horizon=null")
