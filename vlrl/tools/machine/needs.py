"""Finds the requirements of presets that a config with these presets does not meet: `find(config, task)`.

A preset lists its requirements ("needs") in its file (config/presets.py), and this module checks them. Requirements
that no setting can show, such as answers with paragraphs, are always reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlrl.config import presets
from vlrl.config.algo import SUPERVISED
from vlrl.config.preset_header import NEEDS
from vlrl.config.presets import Preset
from vlrl.config.schema import Config
from vlrl.monitoring.mismatch import samples_as_it_trains
from vlrl.rewards.text import answer_offset
from vlrl.task import Task
from vlrl.task.combine import weight_at
from vlrl.task.environment import has_environment
from vlrl.task.interface import given_answer
from vlrl.types import Sample

_OF_A_STAGE = "setting stages."


@dataclass(frozen=True)
class UnmetNeed:
    """A requirement of a preset that a config does not meet."""

    preset: str
    need: str
    why: str

    def __str__(self) -> str:
        word, _, which = self.need.partition(" ")
        return f"needs: {self.preset} needs {NEEDS[word]}{f': {which}' if which else ''} ({self.why})"


def find(config: Config, task: Task, sample: Sample | None = None) -> list[UnmetNeed]:
    """The requirements of a config's presets that the config and its task do not meet; [] for supervised fine-tuning.

    `sample` is a sample of the training split. Without it, requirements on the contents of rows count as met."""
    if config.algo.loss.name in SUPERVISED:
        return []
    run = RunContext(config, task, sample)
    found = [(name, preset) for name in config.presets if (preset := presets.find_preset(name))]
    return [one for name, preset in found for one in _unmet(name, preset, run)]


def of_stages(config: Config) -> list[UnmetNeed]:
    """The unmet requirements of the presets of a run with stages. Only requirements on settings of single stages are
    checked ("setting stages.<number>.<name>")."""
    found = [(name, preset) for name in config.presets if (preset := presets.find_preset(name))]
    return [UnmetNeed(name, need, why) for name, preset in found for need, why in preset.needs.items()
            if need.startswith(_OF_A_STAGE) and not _stage_setting(config, need.removeprefix(_OF_A_STAGE))]


def _stage_setting(config: Config, name: str) -> bool:
    place, _, rest = name.partition(".")
    value: Any = config.stages[int(place)].settings if int(place) < len(config.stages) else None
    return _is_set(value, rest)


def _is_set(value: Any, name: str) -> bool:
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return bool(value)


def _unmet(name: str, preset: Preset, run: RunContext) -> list[UnmetNeed]:
    out = []
    for need, why in preset.needs.items():
        word, _, which = need.partition(" ")
        if not CHECKS[word](run, which):
            out.append(UnmetNeed(name, need, why))
    return out


@dataclass(frozen=True, eq=False)
class RunContext:
    """The config and the task that requirements are checked against, and a sample of the training split, if any."""

    config: Config
    task: Task
    sample: Sample | None = None

    def any_task(self, meets: Callable[[Task], Any]) -> bool:
        """Whether the task, or at least one task of a mixture, meets the condition `meets`."""
        return any(meets(one) for one in self.task.members)


def _field(run: RunContext, name: str) -> bool:
    settings, sample = run.config, run.sample
    if sample is None or settings.data.difficulty:
        return True
    given = name == "category" and settings.curriculum.sampler.options.get("by", name) != name
    return given or sample.get(name) is not None


def _reasoning(run: RunContext) -> bool:
    if run.sample is None:
        return True
    text = given_answer(run.task.of(run.sample), run.sample)
    return bool(text and text[:answer_offset(text)].strip())


CHECKS: Mapping[str, Callable[[RunContext, str], bool]] = {
    "episodes": lambda s, _: s.any_task(has_environment),
    "answers": lambda s, _: not s.any_task(has_environment),
    "tasks": lambda s, _: len(s.task.members) > 1,
    "parts": lambda s, count: s.any_task(lambda one: sum(
        bool(weight_at(weight, 0)) for weight in one.weights.values()) >= int(count)),
    "part": lambda s, name: s.any_task(lambda one: name in one.weights),
    "prompt": lambda s, text: s.any_task(lambda one: any(text in words for words in (one.system, *one.templates))),
    "gate": lambda s, _: s.any_task(lambda one: one.combination.startswith("gate")),
    "field": _field,
    "setting": lambda s, name: (name.startswith("stages.")
                                or _is_set(s.config.model_dump(mode="json", by_alias=True), name)),
    "reasoning": lambda s, _: _reasoning(s),
    "mismatch": lambda s, _: not samples_as_it_trains(s.config),
    "reference_reward": lambda s, _: "reference_logprobs" in s.task.needs,
    "knobs": lambda s, _: bool(s.task.knobs),
    "tokens": lambda s, count: s.config.rollout.max_new_tokens >= int(count),
    "writes": lambda s, _: False,
    "unbuilt": lambda s, _: False,
}
"""First word of a requirement -> function of (run, rest of the requirement) that returns whether the run meets it."""
