"""Lets a function of the objective declare when it has no effect, so that the run can report the setting with the
reason.

    @reads("outcome", alone={})           depends on which answers are correct, not on the reward (or advantage)
    @idle("alpha is 0", alpha=0)          has no effect with these options
    @idle_when(rule)                      has no effect where rule(use) returns a reason

Users' own functions have no such declarations. training/inert.py evaluates the declarations."""

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
    """A setting that has no effect in this run, with its value and the reason."""

    setting: str
    value: Any
    reason: str
    usual: bool = False  # Whether the value is the default or clearly intended. Then only dry runs report it.

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else short(self.value)
        return f"inert: {self.setting}={value} ({self.reason})"


@dataclass(frozen=True, eq=False)
class FunctionUse:
    """A function of the objective that the setting `setting` names: the function's name and options (`named`), its
    `table`, and the config and the task of the run."""

    config: Config
    task: Task | None
    setting: str
    named: Named
    table: Mapping[str, Any]

    @property
    def own(self) -> bool:
        """Whether the function is user code (module:name or path/file.py:name)."""
        return ":" in self.named.name

    @cached_property
    def function(self) -> Any:
        """The function's entry in `table`. None for user code, and for unknown names, which are reported elsewhere."""
        return self.table.get(self.named.name)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values of the function's options, including defaults."""
        known = parameters(self.function, 0) if self.function else {}
        return {option: default for option, (_, default) in known.items()} | self.named.options

    @property
    def by_reward(self) -> bool:
        """Whether the option `correct` is set without `part`, so that an answer is correct if its reward exceeds
        `correct`."""
        return self.named.options.get("correct") is not None and not self.named.options.get("part")

    @property
    def one_turn(self) -> str:
        """Returns the beginning of a message: "task 'x' has no environment, so every answer is one turn and this acts
        as". Returns "" if the task has an environment or is unknown."""
        if self.task is None or has_environment(self.task):
            return ""
        return f"task '{self.task.name}' has no environment, so every answer is one turn and this acts as"

    def reads(self, what: str) -> bool:
        """Whether the function may read the input `what`; see the decorator `reads` for its values."""
        return self.own or what in getattr(self.function, "reads", ())

    def in_place_of(self, what: str) -> str:
        """Returns a message saying that the function reads which answers are correct, not `what` ("reward" or
        "advantage"). Returns "" if the function may read `what`."""
        alone = getattr(self.function, "alone", None)
        if alone is None or self.by_reward or any(self.named.options.get(key) != value for key, value in alone.items()):
            return ""
        given = " and ".join(f"{key}={str(value).lower()}" for key, value in alone.items())
        return (f"{self.setting}={self.named.name}{given and f' with {given}'} reads which answers are right, not the "
                f"{what}")

    @property
    def idle(self) -> str:
        """The reason why the function has no effect; "" if it may have an effect."""
        return next(filter(None, (rule(self) for rule in getattr(self.function, "idle_when", ()))), "")


def reads(*what: str, alone: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Decorator that declares that a function reads something other than its usual inputs.

    `what` may contain "outcome" (which answers are correct), "reward" (for a function of algo.batch) and "sign" (the
    sign of the advantage, for a function of algo.weights). alone: option values with which the function reads "outcome"
    instead of the reward (a policy term: instead of the advantage). alone={}: it does so with any options. The option
    `correct` is an exception, because it compares the reward with a limit."""
    def mark(function: Any) -> Any:
        function.reads, function.alone = frozenset(what), alone
        return function
    return mark


def idle_when(rule: Callable[[FunctionUse], str]) -> Callable[[Any], Any]:
    """Decorator that declares a rule: `rule(use)` returns the reason why the function has no effect, or ""."""
    def mark(function: Any) -> Any:
        function.idle_when = (*getattr(function, "idle_when", ()), rule)
        return function
    return mark


def idle(why: str, **options: Any) -> Callable[[Any], Any]:
    """Decorator that declares that a function has no effect if its options have the given values. why: the reason."""
    return idle_when(lambda use: why if all(use.values.get(key) == value for key, value in options.items()) else "")


def short(value: Any) -> Any:
    """Returns a setting's value as text for a message: of a Named (a function's name with options) only the name."""
    if isinstance(value, tuple):
        return f"[{', '.join(str(short(one)) for one in value)}]"
    return value.name if isinstance(value, Named) else value
