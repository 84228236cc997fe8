"""Computes the reward parts of external environments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlrl.environments.validation import ProtocolError, checked_names
from vlrl.rewards.scalar import finite_number, truth_value

PARTS = ("return", "success")  # The default reward parts. `progress` and `illegal` are also available.
SUCCESS = ("is_success", "success")  # names under which an environment may report success
_PROGRESS = ("progress", "progression")


class EpisodeReward:
    """Computes the reward parts of each turn of an episode:

    - `return`: the environment's reward. The turns add up to the return of the episode.
    - `success`: 1 in the turn in which the episode becomes a success, else 0.
    - `progress`: the increase of the fraction of the task that is done. The turns add up to the final fraction
      (BALROG, arXiv 2411.13543).
    - `illegal`: 1 for an invalid action, else 0.

    parts: names of the parts to compute. goal: an episode is a success if it ends with at least this return. If `goal`
    is None, the environment's `success` or `is_success` decides; if the environment reports neither, an episode is a
    success if it ends with a positive reward."""

    def __init__(self, parts: Collection[str], goal: float | None):
        self.parts, self.goal = checked_names(parts, "parts"), goal
        self.total, self.progress, self.succeeded = 0.0, 0.0, False

    def illegal(self) -> dict[str, float]:
        """The reward parts of a turn whose action was invalid and was not sent to the environment."""
        return self._named({"return": 0.0, "success": 0.0, "progress": 0.0, "illegal": 1.0})

    def step(self, reward: Any, ended: bool, info: Mapping[str, Any]) -> dict[str, float]:
        """The reward parts of a turn. Raises ProtocolError if a value of the environment is not a number. ended:
        whether the environment ended the episode, as opposed to a time limit. info: the environment's further
        values, such as success and progress."""
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
    """Converts a value, also of a numpy type, to a finite float. None counts as 0. Raises ProtocolError for any other
    value; `what` names the value in the message."""
    result, problem = finite_number(value)
    if problem:
        raise ProtocolError(f"the environment's {what} is {str(value)[:60]!r}, not a finite number")
    return 0.0 if result is None else result


def truth(value: Any, what: str) -> bool:
    """Converts a value to a bool. None counts as false. Raises ProtocolError for any string, even "true"; `what` names
    the value in the message."""
    result = False if value is None else truth_value(value)
    if result is None:
        raise ProtocolError(f"the environment's {what} is {str(value)[:60]!r}, expected true or false")
    return result
