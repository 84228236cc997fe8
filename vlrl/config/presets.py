"""Presets: files in configs/algorithms, curricula and stages that extend any config, with a header that describes them.

    preset:
      for: recall.yaml                              # a shipped config that, with the preset, is the paper's method
      idea: compares turns that began in one state  # what the method does, in one line
      needs: {episodes: its credit is by turn}      # what a config must provide (NEEDS), and why
      cost: a pass of the reference                 # compared with the run without the preset
      paper: arXiv 2505.10978

The loader removes this section from the settings and adds the name of the file to `presets`, so that a run can report
needs of its presets that its config does not meet (tools/machine/needs.py)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field, field_validator

import vlrl
from vlrl.config.base import Settings
from vlrl.config.yaml_text import parse
from vlrl.errors import ConfigError, did_you_mean

SECTION = "preset"
KINDS = {"algorithms": "algorithm", "curricula": "curriculum", "stages": "stages"}
"""Folder in configs/ -> kind of the presets in this folder."""
NEEDS = {
    "episodes": "a task with an environment",
    "answers": "a task of single answers",
    "tasks": "several tasks",
    "parts": "this many reward parts with a weight",
    "part": "a reward part of this name",
    "prompt": "a prompt that holds this text",
    "gate": "task.combine=gate:...",
    "field": "rows with this field",
    "setting": "this setting",
    "reasoning": "given solutions that reason before their final answer",
    "mismatch": "an engine other than hf, 16 bits, or completions sampled by older weights",
    "reference_reward": "a reward that uses the reference policy",
    "knobs": "a task that generates samples by difficulty",
    "tokens": "rollout.max_new_tokens of at least this number",
    "writes": "answers that contain this, which settings cannot show",
    "unbuilt": "something that this version does not have",
}
"""First word of a need (a key of `needs`) -> description of the requirement. A second word is the need's argument."""
_WITHOUT_WORDS = {"episodes", "answers", "tasks", "gate", "mismatch", "reference_reward", "knobs", "reasoning"}
MOVED = {"algorithms/rorecomp_buffer.yaml": "algorithms/rorecomp.yaml, which has the buffer"}
"""Name of a preset in an earlier version -> name of the preset that replaces it."""


class Header(Settings):
    """The section `preset` in the file of a preset, which describes the preset."""

    task: str = Field(alias="for", min_length=1)
    idea: str = ""
    needs: dict[str, str] = {}
    cost: str = Field(min_length=1)
    paper: str = Field(min_length=1)

    @field_validator("needs")
    @classmethod
    def _known(cls, needs: dict[str, str]) -> dict[str, str]:
        for need in needs:
            word, _, which = need.partition(" ")
            if word not in NEEDS:
                raise ValueError(f"`needs` has the unknown entry {need!r}.{did_you_mean(word, NEEDS)} Known: "
                                 f"{', '.join(NEEDS)}")
            if bool(which) == (word in _WITHOUT_WORDS):
                raise ValueError(f"`needs: {word}` takes {'no argument' if which else 'an argument'}: "
                                 f"{NEEDS[word]}")
            if word in ("parts", "tokens") and not which.isdecimal():
                raise ValueError(f"`needs: {need}` takes a number, e.g. '{word} 2'")
        return needs


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A preset with its description, as listed by `vlrl presets`."""

    name: str
    kind: str
    task: str
    idea: str
    needs: dict[str, str]
    cost: str
    paper: str

    def row(self) -> dict[str, Any]:
        out = asdict(self)
        return {"name": out.pop("name"), "kind": out.pop("kind"), "for": out.pop("task"), **out}


def extract_preset(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings of a file without the section `preset`, and with the file's name added to `presets`. Raises
    ConfigError if the section is not a valid Header."""
    out = dict(tree)
    if SECTION in out:
        _checked(out.pop(SECTION), path)
        out["presets"] = [*out.get("presets", []), name_of(path)]
    return out


def name_of(path: Path) -> str:
    """The name of a preset: the path of its file, relative to configs/ for a preset that comes with vlrl."""
    home = (vlrl.HOME / "configs").resolve()
    path = path.resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)


def find_preset(name: str) -> Preset | None:
    """The preset with this name, written as in the setting `presets`; None if there is no such file or preset."""
    path = vlrl.HOME / "configs" / name
    if not path.is_file():
        return None
    tree = parse(path.read_text(encoding="utf-8"))
    if not isinstance(tree, Mapping) or SECTION not in tree:
        return None
    header = _checked(tree[SECTION], path)
    return Preset(name=path.stem, kind=KINDS.get(path.parent.name, path.parent.name), task=header.task,
                  idea=header.idea, needs=header.needs, cost=header.cost, paper=header.paper)


def shipped() -> list[Preset]:
    """All presets that come with vlrl, sorted by kind and name."""
    files = [path for folder in KINDS for path in sorted((vlrl.HOME / "configs" / folder).glob("*.yaml"))]
    return [preset for path in files if (preset := find_preset(name_of(path)))]


def moved_hint(name: str) -> str:
    """Text to append to a message about a preset that has been renamed: the new name. Returns "" for any other name."""
    return next((f" It is now {now}." for old, now in MOVED.items() if f"/{name}".endswith(f"/{old}")), "")


def _checked(section: Any, path: Path) -> Header:
    try:
        return Header.model_validate(section)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        at = ".".join([SECTION, *map(str, first["loc"])])
        raise ConfigError(f"{path}: {at}={first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}. A "
                          "preset has the fields 'for', 'idea', 'needs', 'cost' and 'paper'") from None
