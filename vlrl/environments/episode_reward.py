"""Reward parts of external environments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlrl.environments.arguments import checked_names
from vlrl.environments.validation import ProtocolError
from vlrl.rewards.scalar import finite_number, truth_value

PARTS = ("return", "success")
"""Default parts; `progress` and `illegal` are the others."""
SUCCESS = ("is_success", "success")
"""Names under which an environment may report success."""
_PROGRESS = ("progress", "progression")


class EpisodeReward:
    """The reward parts of an episode: raw rewards add up to `return`; `success` is 1 on the turn that reaches it;
    `progress` is the increase of the completed share, so the turns add up to the final share (BALROG, arXiv
    2411.13543); `illegal` is 1 for an invalid action.

    parts: the ones to give. goal: the return from which an episode counts as a success; None = as the environment
    reports (`success` or `is_success`), else whether it ended with a positive reward.
    """

    def __init__(self, parts: Collection[str], goal: float | None):
        self.parts, self.goal = checked_names(parts, "parts"), goal
        self.total, self.progress, self.succeeded = 0.0, 0.0, False

    def illegal(self) -> dict[str, float]:
        """The parts of an action that never reached the environment."""
        return self._named({"return": 0.0, "success": 0.0, "progress": 0.0, "illegal": 1.0})

    def step(self, reward: Any, ended: bool, info: Mapping[str, Any]) -> dict[str, float]:
        """The parts of a turn. ended: by itself, not by a limit. Raises ProtocolError if the reward is no number."""
        value = number(reward, "reward")
        self.total += value
        before, had = self.progress, self.succeeded
        self.succeeded = had or self._succeeded(value, ended, info)
        given = next((info[name] for name in _PROGRESS if info.get(name) is not None), None)
        if given is not None:
            self.progress = min(1.0, max(0.0, number(given, "progress")))
        elif self.succeeded:
            self.progress = 1.0
        return self._named({"return": value, "success": float(self.succeeded and not had),
                            "progress": self.progress - before, "illegal": 0.0})

    def _succeeded(self, reward: float, ended: bool, info: Mapping[str, Any]) -> bool:
        if self.goal is not None:
            return ended and self.total >= self.goal
        success = next((info[name] for name in SUCCESS if info.get(name) is not None), None)
        if success is not None:
            return bool(number(success, "success") > 0)
        return ended and reward > 0

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if name in self.parts}


def number(value: Any, what: str) -> float:
    """A finite number, also of numpy; None counts as 0. Raises ProtocolError."""
    result, problem = finite_number(value)
    if problem:
        raise ProtocolError(f"its {what} is {str(value)[:60]!r}, no finite number")
    return 0.0 if result is None else result


def truth(value: Any, what: str) -> bool:
    """A boolean; None counts as false. Raises ProtocolError for a string, whatever it says."""
    result = False if value is None else truth_value(value)
    if result is None:
        raise ProtocolError(f"its {what} is {str(value)[:60]!r}, expected true or false")
    return result
