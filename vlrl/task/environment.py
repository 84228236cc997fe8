"""Environments, in which a model acts over several turns. Imports no torch and knows no model name.

class Maze(Task):
    def environment(self, sample): return MazeEnvironment(sample)

class MazeEnvironment(Environment):
    def reset(self, seed): return Observation("Find the door.", [Media(source=self.draw())])
    def step(self, action): return Step(Observation("A wall."), {"progress": 0.0}, state=self.place)"""

from __future__ import annotations

from typing import Any

from vlrl.config.schema import EnvironmentSettings
from vlrl.errors import ConfigError
from vlrl.types import Observation, Step

SUCCESS = "tool_success"
"""Reward part of a turn with tool calls: 1 if all calls succeeded, else 0. Exists only if `task.rewards` names it."""


class Environment:
    """The environment of one episode. It runs in a separate process; only the return values of its methods are sent to
    the training process."""

    def reset(self, seed: int) -> Observation:
        """Starts the episode and returns its first observation, which is appended to the task's chat messages and may
        be empty. The result must depend only on the sample and the seed."""
        return Observation()

    def step(self, action: str) -> Step:
        """Performs an action and returns its result. Must not raise, whatever text the model wrote."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases the resources of the environment. Called exactly once, also after an error."""


def has_environment(task: Any) -> bool:
    """Whether the task, or a task of a mixture, uses an environment or tools. These may be defined by the task's class
    or set by `environment.name`."""
    return any(member.outside is not None for member in task.members) or has_own_environment(task)


def has_own_environment(task: Any) -> bool:
    """Whether the class of the task, or of a task of a mixture, defines an environment or tools."""
    return any({"environment", "tools"} & vars(c).keys() for member in task.members for c in type(member).__mro__[:-1]
               if c.__module__ != "vlrl.task.base")


def check_unattached(task: Any, settings: EnvironmentSettings) -> None:
    """Checks the task of a run whose `environment.name` is empty. Raises ConfigError if the task needs an environment
    set by `environment.name`, or if `environment.options` are set."""
    homeless = next((one for one in task.members if one.lives_outside), None)
    if homeless:
        raise ConfigError(f"task '{homeless.name}' needs an environment, but environment.name is empty: set it, "
                          "e.g. environment.name=gym:FrozenLake-v1 (docs/environments.md)")
    if settings.options:
        raise ConfigError(f"environment.options={dict(settings.options)} without environment.name has no "
                          "effect: set environment.name, or remove environment.options")
