"""Callbacks of a run, given to `vlrl.train(..., callbacks=[...])`.

    class Watch(Callback):
        def on_evaluation(self, run, step, record):
            self.good = record["accuracy"] > 0.9
        def stop(self, run):
            return getattr(self, "good", False)

They are called on the main process only; an error that a callback raises ends the run like any other error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.errors import ConfigError


class Callback:
    """Base class of callbacks, with methods that do nothing. `run` is the vlrl.Run of the run folder, whose tables and
    rollouts can be read while the run goes on."""

    def on_step(self, run: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after each training step with its number, from 0, and its line of metrics.jsonl."""

    def on_evaluation(self, run: Any, step: int, record: Mapping[str, Any]) -> None:
        """Called after each evaluation of a split with the number of completed steps and its line of eval.jsonl."""

    def stop(self, run: Any) -> bool:
        """Whether to end the run. Asked after each step; the run then saves, evaluates and ends as finished."""
        return False


class _OnStep(Callback):
    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def on_step(self, run: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._function(run, step, metrics)


def checked(callbacks: Sequence[Any]) -> tuple[Any, ...]:
    """The callbacks as objects with the methods of Callback. A function is called after each step; an object may lack
    some of the methods. Raises ConfigError for anything else."""
    out = []
    for one in callbacks:
        own = [name for name in _METHODS if callable(getattr(one, name, None))]
        if isinstance(one, type) or not (own or callable(one)):
            raise ConfigError(f"callbacks={one!r}: a callback is an object with some of the methods "
                              f"{', '.join(_METHODS)} (vlrl.Callback), or a function (run, step, metrics)")
        out.append(one if own else _OnStep(one))
    return tuple(out)


_METHODS = ("on_step", "on_evaluation", "stop")


def call(callbacks: Sequence[Any], name: str, *arguments: Any) -> list[Any]:
    """Calls the method `name` of each callback that has it. Returns the results."""
    return [getattr(one, name)(*arguments) for one in callbacks if hasattr(one, name)]
