"""What an environment from outside pays, as raw reward parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlrl.environments.arguments import checked_names
from vlrl.environments.validation import ProtocolError
from vlrl.rewards.scalar import finite_number, truth_value

PARTS = ("return", "success")
"""Parts that are given where nothing else is said; `progress` and `illegal` are the others."""
SUCCESS = ("is_success", "success")
"""What an environment may say of a success by."""
_PROGRESS = ("progress", "progression")


class EpisodeReward:
    """The parts of an episode: raw rewards add up to `return`; `success` is 1 on the turn that reaches it; `progress`
    is what a turn added to the share that is done, so turns add up to the last (BALROG, arXiv 2411.13543); `illegal`
    is 1 for an action that was none.

    parts: those that are given. goal: the return from which on an episode has succeeded; None = what the environment
    says (`success` or `is_success`), else whether it ended with a reward above 0.
    """

    def __init__(self, parts: Collection[str], goal: float | None):
        self.parts, self.goal = checked_names(parts, "parts"), goal
        self.total, self.progress, self.succeeded = 0.0, 0.0, False

    def illegal(self) -> dict[str, float]:
        """Returns the parts of an action that the environment was not given."""
        return self._named({"return": 0.0, "success": 0.0, "progress": 0.0, "illegal": 1.0})

    def step(self, reward: Any, ended: bool, said: Mapping[str, Any]) -> dict[str, float]:
        """Returns the parts of a turn. `ended`: by itself, not by a limit. Raises Wrong where the reward is no number.
        """
        value = number(reward, "reward")
        self.total += value
        before, had = self.progress, self.succeeded
        self.succeeded = had or self._succeeded(value, ended, said)
        given = next((said[name] for name in _PROGRESS if said.get(name) is not None), None)
        if given is not None:
            self.progress = min(1.0, max(0.0, number(given, "progress")))
        elif self.succeeded:
            self.progress = 1.0
        return self._named({"return": value, "success": float(self.succeeded and not had),
                            "progress": self.progress - before, "illegal": 0.0})

    def _succeeded(self, reward: float, ended: bool, said: Mapping[str, Any]) -> bool:
        if self.goal is not None:
            return ended and self.total >= self.goal
        success = next((said[name] for name in SUCCESS if said.get(name) is not None), None)
        if success is not None:
            return bool(number(success, "success") > 0)
        return ended and reward > 0

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if name in self.parts}


def number(value: Any, what: str) -> float:
    """Returns a finite number, of numpy too; None counts as 0. Raises Wrong."""
    result, problem = finite_number(value)
    if problem:
        raise ProtocolError(f"its {what} is {str(value)[:60]!r}, no finite number")
    return 0.0 if result is None else result


def truth(value: Any, what: str) -> bool:
    """Returns a truth value; None counts as false. Raises Wrong for a text, whatever it says."""
    result = False if value is None else truth_value(value)
    if result is None:
        raise ProtocolError(f"its {what} is {str(value)[:60]!r}, expected true or false")
    return result
