"""Sections of the config that belong to a method: the only list of methods. No torch.

A method lies in a folder of its own: `settings.py`, a MethodSettings without torch, and the method itself
(algo/method.py). Both are texts here. The settings are imported when the config sets the section, or where its default
is not null; the method is, when its section is active.

    forget: Annotated[SerializeAsAny[MethodSettings], section("rollout.forget")] = Field(default_factory=...)

The order is that in which hooks are called and gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from vlrl.config.base import MethodSettings
from vlrl.config.registry import Table


class Entry(NamedTuple):
    """Where a section's settings and its method are, as `module:name`."""

    settings: str
    method: str
    places: tuple[str, ...] = ()
    """Settings of it that say where and how long, and change no result: they may differ on resume."""


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
"""Section -> the class of its method."""
GUIDED, REPLACED = VARIANTS = ("guided", "replaced")
"""Names that answers of methods have among the variants of a sample: that of a second attempt (algo.guided), and of an
answer whose place in the group one has taken."""
GIVEN = Table({
    "nodes": "vlrl.methods.tree.settings:without_nodes",
    "values": "vlrl.methods.critic.settings:without_values",
})
"""What an advantage may require of a method (algo.inputs.requires) -> (config, advantage's name) -> why that is not
there; "" where it is."""

PAIRS = "bradley_terry"
"""The loss of a run that learns to score answers from pairs of them."""

HEADS = Table({
    "algo.critic": "vlrl.methods.critic.gae:of_run",
    f"algo.loss={PAIRS}": "vlrl.methods.preferences.head:of_run",
})
"""Section, or function of the objective, -> (config, width, device) -> the head that it learns with (models/heads.py).
"""
WITHOUT_HEAD = {
    "algo.critic": "algo.critic=null and an advantage without a critic, such as algo.advantage=grpo",
    f"algo.loss={PAIRS}": "another algo.loss",
}
"""Key of HEADS -> the settings that ask for no head."""


def head_of(config: Any) -> str:
    """Returns what asks for a head, as HEADS names it; "" where nothing does."""
    asking = (*(name for name, _ in active(config)), f"algo.loss={config.algo.loss.name}")
    return next((name for name in asking if name in HEADS), "")


class SectionMarker:
    """What says in a field's annotation whose section it is; the values are checked by that section's settings."""

    def __init__(self, name: str):
        self.name = name

    @property
    def model(self) -> type[MethodSettings]:
        return _SETTINGS[self.name]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._checked, handler(source))

    def _checked(self, value: Any, otherwise: Callable[[Any], Any]) -> Any:
        """Null, where it is allowed, is left to the annotation."""
        return otherwise(value) if value is None else self.model.model_validate(value)


section = SectionMarker


def default_of(name: str) -> Callable[[], MethodSettings]:
    """Returns what makes the default of a section that is never null."""
    return lambda: _SETTINGS[name]()


def model_of(info: FieldInfo) -> type[MethodSettings] | None:
    """Returns the settings of a field that is a section of a method; None for others."""
    return next((one.model for one in info.metadata if isinstance(one, SectionMarker)), None)


def active(config: Any) -> Iterator[tuple[str, MethodSettings]]:
    """Yields the sections that are in use, with their settings, in the order of SECTIONS."""
    for name in SECTIONS:
        settings = config
        for field in name.split("."):
            settings = getattr(settings, field, None)
        if isinstance(settings, MethodSettings) and settings.active:
            yield name, settings
