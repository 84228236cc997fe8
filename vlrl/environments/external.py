"""Creates the environment that `environment.name` selects.

    outside = resolved(config.environment)          # an ExternalEnvironment; ConfigError for an unusable name
    outside.environment(task, sample)               # a new Environment
    outside.tools()                                 # the tools of an MCP server; () for other environments"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlrl.config.registry import resolve
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments.tools import Tool
from vlrl.environments.validation import checked_names, checked_variables
from vlrl.errors import ConfigError, did_you_mean
from vlrl.task.base import Task
from vlrl.task.environment import Environment, has_own_environment
from vlrl.types import Observation, Sample, Step

_SHARE = 0.75
"""The time limit of a call to a server, as a fraction of environment.step_s or reset_s. The call must end before the
worker process is killed, because then all other episodes of this process would have to be replayed."""
Make = Callable[..., Environment]


@dataclass(frozen=True)
class EnvironmentKind:
    """A kind of external environment, selected by the word before the first colon of environment.name."""

    package: str  # the Python package that this kind requires
    extra: str  # the extra of vlrl that installs the package
    make: Callable[[Sequence[str], Mapping[str, Any]], Make]
    """Takes (addresses, options), and returns a function that creates environments. That function takes the names of
    the reward parts, step_s and reset_s. Raises ConfigError for invalid addresses or options."""
    tools: Callable[[Sequence[str], Mapping[str, Any], float], Sequence[Tool]] = lambda addresses, options, seconds: ()
    several: bool = False  # whether several addresses can be given


def _gym(addresses: Sequence[str], options: Mapping[str, Any]) -> Make:
    from vlrl.environments import gym

    if "parts" in options:
        raise ConfigError(f"environment.options.parts={options['parts']!r} is not an option: the parts are set by "
                          "task.rewards")
    gym.check(addresses[0])
    if "actions" in options:
        checked_names(options["actions"], "environment.options.actions")
    return lambda parts, step_s, reset_s: gym.GymEnvironment(addresses[0], parts=parts, **options)


def _openenv(addresses: Sequence[str], options: Mapping[str, Any]) -> Make:
    from vlrl.environments import openenv

    checked_options(options, openenv.OpenEnv.__init__, _GIVEN)
    checked_names(options.get("images", ()), "environment.options.images")
    return partial(openenv.OpenEnv, [*map(openenv.checked_url, addresses)], **options)


def _mcp(addresses: Sequence[str], options: Mapping[str, Any]) -> Make:
    from vlrl.environments import mcp

    checked_options(options, mcp.McpEnvironment.__init__, _GIVEN)
    checked_names(options.get("tools", ()), "environment.options.tools")
    checked_variables(options.get("environment", ()), "environment.options.environment")
    return partial(mcp.McpEnvironment, mcp.checked_addresses(addresses), **options)


def _mcp_tools(addresses: Sequence[str], options: Mapping[str, Any], seconds: float) -> Sequence[Tool]:
    from vlrl.environments import mcp

    own = {name: value for name, value in options.items() if name != "goal"}
    return mcp.mcp_tools(addresses, seconds=seconds, **own)


_GIVEN = ("parts", "step_s", "reset_s")  # arguments that vlrl sets, so they cannot be set as options
KINDS = {"gym": EnvironmentKind("gymnasium", "gym", _gym),
         "openenv": EnvironmentKind("websockets", "openenv", _openenv, several=True),
         "mcp": EnvironmentKind("mcp", "mcp", _mcp, _mcp_tools, several=True)}


@dataclass
class ExternalEnvironment:
    """The environment that `environment.name` selects for a task."""

    name: str
    make: Callable[[Task, Sample], Environment]
    tools: Callable[[], Sequence[Tool]] = lambda: ()
    """Returns an MCP server's tools, requested once per process. Raises ConfigError if the server does not respond."""

    def environment(self, task: Task, sample: Sample) -> Environment:
        """Creates the environment for an episode of a sample. If the sample's row has an integer `seed`, the
        environment is reset with this seed instead of the group's seed."""
        world = self.make(task, sample)
        seed = sample.get("seed")
        return SeededEnvironment(world, seed) if type(seed) is int and isinstance(world, Environment) else world


class SeededEnvironment(Environment):
    """An environment that is always reset with the seed of its sample, instead of the group's seed."""

    def __init__(self, environment: Environment, seed: int):
        self.inner, self.seed = environment, seed

    def reset(self, seed: int) -> Observation:
        return self.inner.reset(self.seed)

    def step(self, action: str) -> Step:
        return self.inner.step(action)

    def close(self) -> None:
        self.inner.close()


def attach(task: Task, settings: EnvironmentSettings) -> None:
    """Gives a task the external environment that `environment.name` selects. Raises ConfigError if the task has its own
    environment, or if the name is invalid."""
    name = _printable(settings.name)
    if len(task.members) > 1:
        raise ConfigError(f"environment.name={name!r} cannot be used with several tasks, because it is unclear which "
                          "of them needs the environment. Define environment(self, sample) in that task instead "
                          "(docs/environments.md)")
    if has_own_environment(task):
        raise ConfigError(f"environment.name={name!r}: task '{task.name}' has its own environment or tools, so this "
                          "setting would have no effect. Remove the setting, or choose a task without an environment "
                          "and tools (task=world)")
    task.outside = resolved(settings)


def resolved(settings: EnvironmentSettings) -> ExternalEnvironment:
    """Creates the ExternalEnvironment that `environment.name` selects. Raises ConfigError for an invalid name, address
    or option, and for a missing package."""
    shown_name, options = _printable(settings.name), dict(settings.options)
    kinds = [name.partition(":")[0] for name in settings.name]
    kind = KINDS.get(kinds[0])
    if kind is None:
        if len(settings.name) > 1:
            raise ConfigError(f"environment.name={shown_name!r}: only servers can have several addresses "
                              f"({_servers()})")
        factory = resolve("environment.name", shown_name, {f"{name}:": None for name in KINDS})
        return ExternalEnvironment(shown_name, lambda task, sample: factory(sample, **options))
    if len(settings.name) > 1 and (not kind.several or len(set(kinds)) > 1):
        raise ConfigError(f"environment.name={shown_name!r}: several addresses must all be servers of one kind "
                          f"({_servers()})")
    if importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"environment.name={shown_name!r} needs the package {kind.package}: pip install "
                          f"'vlrl[{kind.extra}]'")
    addresses = [name.partition(":")[2].strip() for name in settings.name]
    if not all(addresses):
        raise ConfigError(f"environment.name={shown_name!r} has no address after {kinds[0]}:")
    make = kind.make(addresses, options)
    step_s, reset_s = _SHARE * settings.step_s, _SHARE * settings.reset_s
    return ExternalEnvironment(
        shown_name, lambda task, sample: make(parts=(*task.weights,), step_s=step_s, reset_s=reset_s),
        partial(kind.tools, addresses, options, reset_s))


def checked_options(options: Mapping[str, Any], function: Callable[..., Any], given: Sequence[str] = ()) -> None:
    """Raises ConfigError unless every option is a keyword-only argument of `function`. The arguments in `given` are not
    allowed either, because vlrl sets them itself."""
    known = [name for name, p in inspect.signature(function).parameters.items()
             if p.kind == p.KEYWORD_ONLY and name not in given]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"environment.options.{unknown}={options[unknown]!r} is not known."
                          f"{did_you_mean(unknown, known)} Known: {', '.join(known)}")


def _servers() -> str:
    return " and ".join(f"{name}:" for name, kind in KINDS.items() if kind.several)


def _printable(given: Sequence[str]) -> str:
    return ", ".join(re.sub(r"//[^/\s]*@", "//...@", name) for name in given)
