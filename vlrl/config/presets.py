"""Presets: files of configs/algorithms, curricula and stages that lie on any config, and what each says of itself.

    preset:
      for: recall.yaml                              # a shipped config on which it is its paper's method
      needs: {episodes: its credit is by turn}      # what a config has to give (NEEDS), and why
      cost: a pass of the reference                 # beside the run without it
      paper: arXiv 2505.10978

The loader takes this section out of the settings and notes the name of the file in `presets`, so that a run can say
what its presets need and its config does not give (tools/machine/needs.py).
"""

from __future__ import annotations

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
"""Folder of configs -> kind of the presets in it."""
NEEDS = {
    "episodes": "a task with an environment",
    "answers": "a task of single answers",
    "tasks": "several tasks",
    "parts": "so many reward parts that count",
    "part": "a reward part of this name",
    "prompt": "a prompt that holds this text",
    "gate": "task.combine=gate:...",
    "field": "rows with this field",
    "setting": "this setting",
    "reasoning": "given solutions that reason before their final answer",
    "mismatch": "an engine other than hf, 16 bits, or weights that are older than those that train",
    "reference_reward": "a reward that asks the reference",
    "knobs": "a task that makes its samples by difficulty",
    "tokens": "rollout.max_new_tokens of at least so many",
    "writes": "answers that hold this; settings cannot tell",
    "unbuilt": "what this version does not have",
}
"""First word of a need -> what it asks for; the words behind it say which."""
_WITHOUT_WORDS = {"episodes", "answers", "tasks", "gate", "mismatch", "reference_reward", "knobs", "reasoning"}
MOVED = {"algorithms/rorecomp_buffer.yaml": "algorithms/rorecomp.yaml, which has the buffer"}
"""Presets of earlier versions -> where what they set is now."""


class Header(Settings):
    """The section `preset` of a file."""

    task: str = Field(alias="for", min_length=1)
    needs: dict[str, str] = {}
    cost: str = Field(min_length=1)
    paper: str = Field(min_length=1)

    @field_validator("needs")
    @classmethod
    def _known(cls, needs: dict[str, str]) -> dict[str, str]:
        for need in needs:
            word, _, which = need.partition(" ")
            if word not in NEEDS:
                raise ValueError(f"the need {need!r} is not known.{did_you_mean(word, NEEDS)} Known: "
                                 f"{', '.join(NEEDS)}")
            if bool(which) == (word in _WITHOUT_WORDS):
                raise ValueError(f"the need {word!r} takes {'no word' if which else 'a word'} behind it: "
                                 f"{NEEDS[word]}")
            if word in ("parts", "tokens") and not which.isdecimal():
                raise ValueError(f"the need {need!r} takes a number")
        return needs


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A row of `vlrl presets`."""

    name: str
    kind: str
    task: str
    needs: dict[str, str]
    cost: str
    paper: str

    def row(self) -> dict[str, Any]:
        out = asdict(self)
        return {"name": out.pop("name"), "kind": out.pop("kind"), "for": out.pop("task"), **out}


def taken(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings of a file, with its section `preset` replaced by its name in `presets`. Raises ConfigError
    for a section that says something else than a Header.
    """
    out = dict(tree)
    if SECTION in out:
        _checked(out.pop(SECTION), path)
        out["presets"] = [*out.get("presets", []), name_of(path)]
    return out


def name_of(path: Path) -> str:
    """Returns what a preset is called: the file, relative to the shipped configs where it is one."""
    home = (vlrl.HOME / "configs").resolve()
    path = path.resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)


def of(name: str) -> Preset | None:
    """Returns a preset by the name that `presets` has of it; None where the file is gone, or is none any more."""
    path = vlrl.HOME / "configs" / name
    if not path.is_file():
        return None
    tree = parse(path.read_text(encoding="utf-8"))
    if not isinstance(tree, Mapping) or SECTION not in tree:
        return None
    header = _checked(tree[SECTION], path)
    return Preset(name=path.stem, kind=KINDS.get(path.parent.name, path.parent.name), task=header.task,
                  needs=header.needs, cost=header.cost, paper=header.paper)


def shipped() -> list[Preset]:
    """Returns every preset that comes with vlrl, by kind and name."""
    files = [path for folder in KINDS for path in sorted((vlrl.HOME / "configs" / folder).glob("*.yaml"))]
    return [preset for path in files if (preset := of(name_of(path)))]


def moved(name: str) -> str:
    """Returns words for a preset that an earlier version had; "" for any other name."""
    return next((f" It is {now} now." for old, now in MOVED.items() if f"/{name}".endswith(f"/{old}")), "")


def _checked(section: Any, path: Path) -> Header:
    try:
        return Header.model_validate(section)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        at = ".".join([SECTION, *map(str, first["loc"])])
        raise ConfigError(f"{path}: {at}={first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}. A "
                          "preset says for, needs, cost and paper") from None
