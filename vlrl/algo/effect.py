"""What a function says of its effect, beside what it requires: a setting that changes nothing is named with the reason.

    @reads("outcome", alone={})           asks which answers are right, and reads no reward (a policy term: advantage)
    @idle("alpha is 0", alpha=0)          changes nothing with these options
    @acts(rule)                           changes nothing where rule(use) says why

Of functions that a user brings nothing is known. training/inert.py asks.
"""

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
    """Whether it is a default, or meant so: the dry run names it, the start of a run does not."""

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else short(self.value)
        return f"inert: {self.setting}={value} ({self.reason})"


@dataclass(frozen=True, eq=False)
class FunctionUse:
    """A function as a setting of a run names it."""

    config: Config
    task: Task | None
    setting: str
    named: Named
    table: Mapping[str, Any]

    @property
    def own(self) -> bool:
        """Whether a user brings it."""
        return ":" in self.named.name

    @cached_property
    def function(self) -> Any:
        """None where a user brings it, and for a name that others refuse."""
        return self.table.get(self.named.name)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Its options, defaults included."""
        known = parameters(self.function, 0) if self.function else {}
        return {option: default for option, (_, default) in known.items()} | self.named.options

    @property
    def by_reward(self) -> bool:
        """Whether a function that asks which answers are right is to judge by their reward."""
        return self.named.options.get("correct") is not None and not self.named.options.get("part")

    @property
    def one_turn(self) -> str:
        """Why every answer has one turn; "" where a task has an environment, or nothing is known of it."""
        if self.task is None or has_environment(self.task):
            return ""
        return f"task '{self.task.name}' has no environment, so every answer is one turn and this acts as"

    def reads(self, what: str) -> bool:
        """Whether it may read something."""
        return self.own or what in getattr(self.function, "reads", ())

    def in_place_of(self, what: str) -> str:
        """Why it reads which answers are right and not `what`; "" where it may read that."""
        alone = getattr(self.function, "alone", None)
        if alone is None or self.by_reward or any(self.named.options.get(key) != value for key, value in alone.items()):
            return ""
        given = " and ".join(f"{key}={str(value).lower()}" for key, value in alone.items())
        return (f"{self.setting}={self.named.name}{given and f' with {given}'} reads which answers are right, not the "
                f"{what}")

    @property
    def idle(self) -> str:
        """Why it changes nothing; "" where it may."""
        return next(filter(None, (rule(self) for rule in getattr(self.function, "idle_when", ()))), "")


def reads(*what: str, alone: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Says what a function reads that most do not: "outcome" = which answers are right, "reward" (of a batch), "sign" =
    that of the advantage (of a weight).

    alone: options with which the outcome takes the place of the reward, of a policy term that of the advantage; {} =
    with any, but `correct` that makes it a question of the reward.
    """
    def mark(function: Any) -> Any:
        function.reads, function.alone = frozenset(what), alone
        return function
    return mark


def idle_when(rule: Callable[[FunctionUse], str]) -> Callable[[Any], Any]:
    """Says when a function changes nothing: the reason, or ""."""
    def mark(function: Any) -> Any:
        function.idle_when = (*getattr(function, "idle_when", ()), rule)
        return function
    return mark


def idle(why: str, **options: Any) -> Callable[[Any], Any]:
    """Says that a function changes nothing with these values of its options."""
    return idle_when(lambda use: why if all(use.values.get(key) == value for key, value in options.items()) else "")


def short(value: Any) -> Any:
    """A value as a config says it, without the options of a name."""
    if isinstance(value, tuple):
        return f"[{', '.join(str(short(one)) for one in value)}]"
    return value.name if isinstance(value, Named) else value
