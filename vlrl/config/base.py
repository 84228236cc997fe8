"""Building blocks of the settings: number types with bounds, the strict base class, and functions chosen by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_serializer, model_validator

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Base class of a section of settings. Unknown names of settings are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return refuse_bool(cls.model_fields[info.field_name or ""].annotation, value)

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) of each setting of this section that has no effect with this config."""
        return iter(())


class MethodSettings(Settings):
    """Base class of the settings of a method, which are a section of the config (config/sections.py). Its properties
    tell code outside the method what the method needs."""

    @property
    def active(self) -> bool:
        """Whether the method is active. A method whose section may be null is active if the section is not null."""
        return True

    def problem(self, config: Any) -> str:
        """Returns why the method cannot be combined with other settings of `config`, with a remedy; "" if it can."""
        return ""

    @property
    def functions(self) -> Sequence[tuple[str, Named, Mapping[str, Any]]]:
        """The functions of the method that may depend on which answers are correct. Each is a tuple (name of its
        setting, value of this setting, table of known functions)."""
        return ()

    @property
    def adds_members(self) -> bool:
        """Whether the method adds rollouts to a group that were sampled under another prompt than the group's."""
        return False

    @property
    def other_weights(self) -> bool:
        """Whether the method samples some rollouts with weights other than those of the current policy."""
        return False

    @property
    def without_zero(self) -> tuple[str, str] | None:
        """None if the method can be used with train.sharding=zero2 and zero3. Otherwise a tuple (setting that cannot be
        used with them, remedy)."""
        return None


class Named(BaseModel):
    """A function chosen by name, with options: `cispo`, or `{name: cispo, cap: 5}`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, Mapping | Named):
            return value
        if isinstance(value, str):
            return {"name": value}
        raise ValueError("give a name, or a mapping with 'name' and its options")

    @model_serializer
    def _short(self) -> Any:
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by name."""
        return dict(self.model_extra or {})


Names = Annotated[tuple[Named, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def refuse_bool(kind: Any, value: Any) -> Any:
    """Returns `value` unchanged. Raises ValueError if it is or contains a bool although the annotation `kind` expects
    numbers: pydantic would read true as 1, but `steps=true` or `betas: [true, false]` are mistakes."""
    kinds = _kinds(kind)
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    if kinds & {int, float} and bool not in kinds and any(isinstance(v, bool) for v in values):
        raise ValueError("give a number, not true or false")
    return value


def _kinds(kind: Any) -> set[Any]:
    if isinstance(kind, type) and not get_args(kind):
        return {kind}
    return {leaf for part in get_args(kind) for leaf in _kinds(part)}
