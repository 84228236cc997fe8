"""Binds a setting that names a function to that function and its options.

The functions of the objective are plain functions in tables. Their parameters after the first are their options,
validated by the annotations. An option is a setting like any other: `algo.loss.cap=5`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_type_hints

import pydantic

from vlrl.config.base import Named, refuse_bool
from vlrl.config.registry import resolve
from vlrl.errors import ConfigError, did_you_mean

_FINITE = pydantic.ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass(frozen=True, eq=False)
class Bound:
    """A function of the objective with its options bound: a call passes only the inputs."""

    name: str
    function: Any  # The function. If the name refers to a class, an instance created with the options.
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()  # inputs that the function needs; see inputs.requires

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments, **self.options)

    @property
    def prepare(self) -> Callable[[Any], Mapping[str, Any]] | None:
        """The function's `prepare` for a whole optimizer step, with its options bound; None for most functions."""
        prepare = getattr(self.function, "prepare", None)
        if prepare is None:
            return None
        wanted = inspect.signature(prepare).parameters
        return partial(prepare, **{k: v for k, v in self.options.items() if k in wanted})

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; {} for a plain function."""
        return self.function.state_dict() if hasattr(self.function, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.function.load_state_dict(state)


def bind(setting: str, named: Named, table: Mapping[str, Any], skip: int = 1, arguments: tuple[Any, ...] = (),
         **shared: Any) -> Bound:
    """Looks up the function or class that a setting names, in `table` or in user code, and returns it with its options
    bound. The options are the parameters after the first `skip`.

    A class is instantiated with `arguments` and then its options. `shared` are settings that several functions
    understand (algo.clip_low): a value other than None is passed to a function that has a parameter of this name,
    unless the option itself is set. Raises ConfigError, which names the setting, if the name or an option is unknown,
    an option is missing or has the wrong type, or a class rejects its options."""
    function = resolve(setting, named.name, table)
    known = parameters(function, len(arguments) if inspect.isclass(function) else skip)
    given = {**{k: v for k, v in shared.items() if v is not None and k in known}, **named.options}
    for option, value in named.options.items():
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"{setting}.{option}={value!r}: '{named.name}' has no option '{option}'."
                              f"{did_you_mean(option, known)} Its options: {listed}.")
    options = {k: _checked(f"{setting}.{k}", known[k][0], v) for k, v in given.items()}
    lacking = [k for k, (_, default) in known.items() if default is inspect.Parameter.empty and k not in options]
    if lacking:
        raise ConfigError(f"{setting}={named.name!r} needs a value for {setting}.{lacking[0]}: set this option")
    defaults = {k: default for k, (_, default) in known.items()}
    requires = frozenset(what.format(**{**defaults, **options}) for what in getattr(function, "requires", ()))
    if not inspect.isclass(function):
        return Bound(named.name, function, options, requires)
    try:
        return Bound(named.name, function(*arguments, **options), {}, requires)
    except ValueError as error:
        raise ConfigError(f"{setting}={named.name!r}: {error}") from None


def options_of(setting: str, name: str, table: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The options of the function or class that a setting names: {option: (annotation, default)}."""
    function = resolve(setting, name, table)
    return parameters(function, 0 if inspect.isclass(function) else 1)


def parameters(function: Callable[..., Any], skip: int = 1) -> dict[str, tuple[Any, Any]]:
    """The options of a function or class: {name: (annotation, default)} of the parameters after the first `skip`."""
    hints = _hints(function.__init__ if inspect.isclass(function) else function)
    listed = list(inspect.signature(function).parameters.values())
    named = [p for p in listed[skip:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: (hints.get(p.name, Any), p.default) for p in named}


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # own code whose annotations are imported for type checkers only
        return {}


def _checked(setting: str, kind: Any, value: Any) -> Any:
    try:
        config = None if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) else _FINITE
        return pydantic.TypeAdapter(kind, config=config).validate_python(refuse_bool(kind, value))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{setting}={value!r}: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"{setting}={value!r}: {error}") from None
