"""Environments: what a model acts in over several turns. No torch, no model name.

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
"""Reward part of a turn with calls, if the task's rewards name it: 1 if all calls succeeded, else 0."""


class Environment:
    """The world of one episode. It lives in its own process, and only its return values leave that process."""

    def reset(self, seed: int) -> Observation:
        """The first observation, which follows the task's own messages; may be empty. The same for the same sample and
        seed."""
        return Observation()

    def step(self, action: str) -> Step:
        """The result of an action. Must not raise on any model text."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases its resources. Called once, also after an error."""


def has_environment(task: Any) -> bool:
    """Whether the task, or one of a mixture, has environments or tools, its own or those of `environment.name`."""
    return any(member.outside is not None for member in task.members) or has_own_environment(task)


def has_own_environment(task: Any) -> bool:
    """Whether the class of the task, or of one of a mixture, defines environments or tools."""
    return any({"environment", "tools"} & vars(c).keys() for member in task.members for c in type(member).__mro__[:-1]
               if c.__module__ != "vlrl.task.base")


def check_unattached(task: Any, settings: EnvironmentSettings) -> None:
    """Raises ConfigError for a task that needs an external environment if `environment.name` is empty, and for options
    without a name."""
    homeless = next((one for one in task.members if one.lives_outside), None)
    if homeless:
        raise ConfigError(f"task '{homeless.name}' acts in an environment from outside, and environment.name is "
                          "empty: say which, as environment.name=gym:FrozenLake-v1 (docs/environments.md)")
    if settings.options:
        raise ConfigError(f"environment.options={dict(settings.options)} without environment.name acts on nothing: "
                          "say which environment, or leave it out")
