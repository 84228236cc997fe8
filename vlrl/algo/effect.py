"""How a function declares that it has no effect; such settings are reported with the reason.

    @reads("outcome", alone={})           reads which answers are correct instead of the reward (or advantage)
    @idle("alpha is 0", alpha=0)          has no effect with these options
    @idle_when(rule)                      has no effect where rule(use) returns a reason

Nothing is known of a user's own functions. training/inert.py evaluates the declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlrl.algo.named import parameters
from vlrl.config.base import Named
from vlrl.config.schema import Config
from vlrl.task import Task
from vlrl.task.environment import has_environment


@dataclass(frozen=True)
class Inert:
    """A setting without any effect."""

    setting: str
    value: Any
    reason: str
    usual: bool = False
    """Whether it is a default, or intended: reported by dry runs only."""

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else short(self.value)
        return f"inert: {self.setting}={value} ({self.reason})"


@dataclass(frozen=True, eq=False)
class FunctionUse:
    """A function that a setting of a run names."""

    config: Config
    task: Task | None
    setting: str
    named: Named
    table: Mapping[str, Any]

    @property
    def own(self) -> bool:
        """Whether it is the user's own."""
        return ":" in self.named.name

    @cached_property
    def function(self) -> Any:
        """None for a user's own function and for an unknown name, which is reported elsewhere."""
        return self.table.get(self.named.name)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Its options, defaults included."""
        known = parameters(self.function, 0) if self.function else {}
        return {option: default for option, (_, default) in known.items()} | self.named.options

    @property
    def by_reward(self) -> bool:
        """Whether its notion of correct is a reward above a threshold."""
        return self.named.options.get("correct") is not None and not self.named.options.get("part")

    @property
    def one_turn(self) -> str:
        """Why every completion has a single turn; "" where the task has an environment, or is unknown."""
        if self.task is None or has_environment(self.task):
            return ""
        return f"task '{self.task.name}' has no environment, so every answer is one turn and this acts as"

    def reads(self, what: str) -> bool:
        """Whether it may read `what`."""
        return self.own or what in getattr(self.function, "reads", ())

    def in_place_of(self, what: str) -> str:
        """Why it reads the outcomes and not `what`; "" where it may read `what`."""
        alone = getattr(self.function, "alone", None)
        if alone is None or self.by_reward or any(self.named.options.get(key) != value for key, value in alone.items()):
            return ""
        given = " and ".join(f"{key}={str(value).lower()}" for key, value in alone.items())
        return (f"{self.setting}={self.named.name}{given and f' with {given}'} reads which answers are right, not the "
                f"{what}")

    @property
    def idle(self) -> str:
        """Why it has no effect; "" where it may have one."""
        return next(filter(None, (rule(self) for rule in getattr(self.function, "idle_when", ()))), "")


def reads(*what: str, alone: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Declares unusual inputs of a function: "outcome" = whether answers are correct, "reward" (of a batch), "sign" =
    that of the advantage (of a weight).

    alone: options with which the outcome replaces the reward, for a policy term the advantage; {} = with any options
    except `correct`, which makes it depend on the reward."""
    def mark(function: Any) -> Any:
        function.reads, function.alone = frozenset(what), alone
        return function
    return mark


def idle_when(rule: Callable[[FunctionUse], str]) -> Callable[[Any], Any]:
    """Declares a rule that returns why the function has no effect, or ""."""
    def mark(function: Any) -> Any:
        function.idle_when = (*getattr(function, "idle_when", ()), rule)
        return function
    return mark


def idle(why: str, **options: Any) -> Callable[[Any], Any]:
    """Declares that a function has no effect with these values of its options."""
    return idle_when(lambda use: why if all(use.values.get(key) == value for key, value in options.items()) else "")


def short(value: Any) -> Any:
    """A value as written in a config, without the options of a name."""
    if isinstance(value, tuple):
        return f"[{', '.join(str(short(one)) for one in value)}]"
    return value.name if isinstance(value, Named) else value
