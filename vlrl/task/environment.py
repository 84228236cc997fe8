"""Environments: what a model acts in over several turns. No torch, no model name.

    class Maze(Task):
        def environment(self, sample): return MazeEnvironment(sample)

    class MazeEnvironment(Environment):
        def reset(self, seed): return Observation("Find the door.", [Media(source=self.draw())])
        def step(self, action): return Step(Observation("A wall."), {"progress": 0.0}, state=self.place)
"""

from __future__ import annotations

from typing import Any

from vlrl.config.schema import EnvironmentSettings
from vlrl.errors import ConfigError
from vlrl.types import Observation, Step

SUCCESS = "tool_success"
"""Reward part of a turn with calls, where the task's rewards name it: 1 when all of them succeeded, else 0."""


class Environment:
    """One episode's world. It lives in a process of its own, and only what it returns leaves that process."""

    def reset(self, seed: int) -> Observation:
        """Returns what follows the task's own messages; may be empty. The same for the same sample and seed."""
        return Observation()

    def step(self, action: str) -> Step:
        """Returns what an action does. Model text must never make it raise."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what it holds. Called once, also after an error."""


def has_environment(task: Any) -> bool:
    """Returns whether the task, or one of a mixture, has environments or tools, its own or those of
    `environment.name`."""
    return any(member.outside is not None for member in task.members) or has_own_environment(task)


def has_own_environment(task: Any) -> bool:
    """Returns whether the class of the task, or of one of a mixture, writes environments or tools."""
    return any({"environment", "tools"} & vars(c).keys() for member in task.members for c in type(member).__mro__[:-1]
               if c.__module__ != "vlrl.task.base")


def check_unattached(task: Any, settings: EnvironmentSettings) -> None:
    """Raises ConfigError for a task that needs an environment from outside where `environment.name` is empty, and for
    options without a name.
    """
    homeless = next((one for one in task.members if one.lives_outside), None)
    if homeless:
        raise ConfigError(f"task '{homeless.name}' acts in an environment from outside, and environment.name is "
                          "empty: say which, as environment.name=gym:FrozenLake-v1 (docs/environments.md)")
    if settings.options:
        raise ConfigError(f"environment.options={dict(settings.options)} without environment.name acts on nothing: "
                          "say which environment, or leave it out")
