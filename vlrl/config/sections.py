"""Sections of the config that belong to methods: the only list of methods. No torch.

A method is a folder with `settings.py`, which defines a MethodSettings and imports no torch, and the method itself
(algo/method.py). SECTIONS names both as strings. The settings are imported if the config sets the section or the
section's default is not null; the method is imported if its section is active.

    forget: Annotated[SerializeAsAny[MethodSettings], section("rollout.forget")] = Field(default_factory=...)

Hooks are called, and gradients added, in the order of SECTIONS."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from vlrl.config.base import MethodSettings
from vlrl.config.registry import Table


class Entry(NamedTuple):
    """A method: its settings class and its implementation, each as "module:name"."""

    settings: str
    method: str
    places: tuple[str, ...] = ()
    """Settings of the method that do not change any result, such as addresses and timeouts. They may change when a run
    is resumed."""


SECTIONS = {
    "algo.critic": Entry("vlrl.methods.critic.settings:CriticSettings", "vlrl.methods.critic.method:CriticValues"),
    "algo.guided": Entry("vlrl.methods.second_attempts.settings:GuidedSettings",
                         "vlrl.methods.second_attempts.method:SecondAttempts"),
    "algo.demonstrations": Entry("vlrl.methods.demonstrations.settings:DemonstrationSettings",
                                 "vlrl.methods.demonstrations.draw:Demonstrations"),
    "algo.stored": Entry("vlrl.methods.replay.settings:StoredSettings", "vlrl.methods.replay.draw:Replay"),
    "algo.distillation": Entry("vlrl.methods.distillation.settings:DistillationSettings",
                               "vlrl.methods.distillation.method:Distillation",
                               ("server", "key_file", "timeout_s", "retries")),
    "rollout.forget": Entry("vlrl.methods.eepo.settings:ForgetSettings", "vlrl.methods.eepo.method:SampleThenForget"),
    "rollout.branch": Entry("vlrl.methods.tree.settings:BranchSettings", "vlrl.methods.tree.method:TreeRollouts"),
}
_SETTINGS = Table({name: entry.settings for name, entry in SECTIONS.items()})
METHODS = Table({name: entry.method for name, entry in SECTIONS.items()})
"""Section of the config -> class that implements the method of this section."""
GUIDED, REPLACED = VARIANTS = ("guided", "replaced")
"""Values of `variant` for rollouts of algo.guided: a second attempt; a rollout that a second attempt has replaced."""
GIVEN = Table({
    "nodes": "vlrl.methods.tree.settings:without_nodes",
    "values": "vlrl.methods.critic.settings:without_values",
})
"""Data that a method provides and an advantage may require (algo.inputs.requires) -> function of (config, name of the
advantage). The function returns why the data are unavailable, or ""."""

PAIRS = "bradley_terry"
"""The value of algo.loss that trains a reward model on pairs of answers."""

HEADS = Table({
    "algo.critic": "vlrl.methods.critic.gae:of_run",
    f"algo.loss={PAIRS}": "vlrl.methods.preferences.loss:of_run",
})
"""Section, or value of algo.loss, that needs a separate head on the model (models/heads.py) -> function of (config,
width, device) that makes this head."""
WITHOUT_HEAD = {
    "algo.critic": "algo.critic=null and an advantage without a critic, such as algo.advantage=grpo",
    f"algo.loss={PAIRS}": "another algo.loss",
}
"""Key of HEADS -> settings to use instead, with which no head is needed. Used in messages."""


def head_of(config: Any) -> str:
    """The key in HEADS of the head that a config needs; "" if no head is needed."""
    asking = (*(name for name, _ in active(config)), f"algo.loss={config.algo.loss.name}")
    return next((name for name in asking if name in HEADS), "")


class SectionMarker:
    """Annotation of a Config field that is the section of a method. The method's settings class validates the field."""

    def __init__(self, name: str):
        self.name = name

    @property
    def model(self) -> type[MethodSettings]:
        return _SETTINGS[self.name]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._checked, handler(source))

    def _checked(self, value: Any, otherwise: Callable[[Any], Any]) -> Any:
        return otherwise(value) if value is None else self.model.model_validate(value)


section = SectionMarker


def default_of(name: str) -> Callable[[], MethodSettings]:
    """Returns a function that makes the default settings of a method whose section is never null."""
    return lambda: _SETTINGS[name]()


def model_of(info: FieldInfo) -> type[MethodSettings] | None:
    """The settings class of a method, if the field `info` is the section of this method; None for other fields."""
    return next((one.model for one in info.metadata if isinstance(one, SectionMarker)), None)


def active(config: Any) -> Iterator[tuple[str, MethodSettings]]:
    """Yields (section, settings) of the active methods, in the order of SECTIONS."""
    for name in SECTIONS:
        settings = config
        for field in name.split("."):
            settings = getattr(settings, field, None)
        if isinstance(settings, MethodSettings) and settings.active:
            yield name, settings
