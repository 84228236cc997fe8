"""Presets: files in configs/algorithms, curricula and stages that extend any config, with a header (preset_header.py).

A preset lies in a group, a folder of its kind: configs/algorithms/ratio/gspo.yaml. Its name has no group:
algorithms/gspo.yaml. `extends` and the setting `presets` take the name, so a preset may change its group.

The loader removes the section `preset` from the settings and adds the name of the file to `presets`, so that a run can
report needs of its presets that its config does not meet (tools/machine/needs.py)."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

import vlrl
from vlrl.config.preset_header import Header, cost_in_words
from vlrl.config.yaml_text import parse
from vlrl.errors import ConfigError

SECTION = "preset"
KINDS = {"algorithms": "algorithm", "curricula": "curriculum", "stages": "stages"}
"""Folder in configs/ -> kind of the presets in this folder."""
GROUPS = {
    "algorithms/advantage": "how a reward becomes an advantage",
    "algorithms/ratio": "clips and ratios: several optimizer steps per batch",
    "algorithms/outcome": "losses that read right and wrong",
    "algorithms/length": "shorter or longer completions",
    "algorithms/exploration": "entropy, diversity and the distance to the reference",
    "algorithms/guidance": "too hard prompts: hints, demonstrations, a teacher, a search",
    "algorithms/credit": "advantages per token within one completion",
    "algorithms/turns": "episodes of several turns",
    "algorithms/offpolicy": "a sampler that differs from the trainer, older weights, stored rollouts",
    "curricula/order": "an order that is set in advance",
    "curricula/prompts": "single prompts, by what the policy did on them",
    "curricula/categories": "categories, tasks or difficulties, by what the policy did on them",
    "stages": "several stages: SFT, RL, rounds of sampling, merges",
}
"""Folder in configs/ -> what the presets in this folder change."""
MOVED = {
    "algorithms/rorecomp_buffer.yaml": "algorithms/rorecomp.yaml, which has the buffer",
    "algorithms/reinforce.yaml": "the settings algo.advantage=dr_grpo algo.loss=reinforce algo.aggregation=token_mean "
                                 "algo.kl_coef=0",
    "algorithms/entropy_bonus.yaml": "the setting algo.entropy=bonus",
    "algorithms/length_bonus.yaml": "the setting algo.shaping=[length_bonus]",
}
"""Name of a preset in an earlier version -> what replaces it: a preset, or the settings that it had."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A preset with its description, as listed by `vlrl presets`."""

    name: str
    kind: str
    group: str
    task: str
    idea: str
    needs: dict[str, str]
    sets_not: list[str]
    cost: str
    paper: str
    evidence: str

    @property
    def extends(self) -> str:
        """The name to write after `extends=`, e.g. algorithms/gspo.yaml."""
        return f"{self.group.partition('/')[0]}/{self.name}.yaml"

    def row(self) -> dict[str, Any]:
        """The preset for `vlrl presets --json`: the task as "for", the cost in words, and parts of the paper that this
        version lacks in "sets_not"."""
        out = asdict(self) | {"cost": cost_in_words(self.cost)}
        missing = {need: why for need, why in self.needs.items() if need.startswith("unbuilt ")}
        out["sets_not"] = [*self.sets_not, *(f"{need.partition(' ')[2]}: {why}" for need, why in missing.items())]
        out["needs"] = {need: why for need, why in self.needs.items() if need not in missing}
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
    """The name of a preset: the path of its file, for a preset that comes with vlrl "<folder of its kind>/<file>"."""
    home = (vlrl.HOME / "configs").resolve()
    path = path.resolve()
    if not path.is_relative_to(home):
        return str(path)
    parts = path.relative_to(home).parts
    return f"{parts[0]}/{parts[-1]}" if parts[0] in KINDS else "/".join(parts)


def preset_file(name: str) -> Path | None:
    """The file of a shipped preset, whatever group it lies in; None if there is no such preset.

    `name` ends in the folder of a kind and a file, with or without a group: "algorithms/gspo.yaml",
    "configs/algorithms/ratio/gspo.yaml", "../algorithms/gspo.yaml"."""
    parts = Path(os.path.normpath(name)).parts
    place = next((i for i, part in enumerate(parts[:-1]) if part in KINDS), None)
    if place is None or not ({*parts[:place]} <= {".."} or parts[place - 1] == "configs"):
        return None
    folder = vlrl.HOME / "configs" / parts[place]
    return next((path for path in sorted(folder.rglob("*.yaml")) if path.name == parts[-1]), None)


def find_preset(name: str) -> Preset | None:
    """The preset with this name, written as in the setting `presets`; None if there is no such file or preset."""
    path = preset_file(name)
    if path is None:
        return None
    tree = parse(path.read_text(encoding="utf-8"))
    if not isinstance(tree, Mapping) or SECTION not in tree:
        return None
    header = _checked(tree[SECTION], path)
    group = path.parent.relative_to(vlrl.HOME / "configs")
    return Preset(name=path.stem, kind=KINDS[group.parts[0]], group=group.as_posix(), **header.model_dump())


def shipped() -> list[Preset]:
    """All presets that come with vlrl, sorted by kind and name."""
    files = [path for folder in KINDS
             for path in sorted((vlrl.HOME / "configs" / folder).rglob("*.yaml"), key=lambda path: path.stem)]
    return [preset for path in files if (preset := find_preset(name_of(path)))]


def moved_hint(name: str) -> str:
    """Text to append to a message about a preset that has been renamed: the new name. Returns "" for any other name."""
    return next((f" It is now {now}." for old, now in MOVED.items() if f"/{old}".endswith(f"/{Path(name).name}")), "")


def _checked(section: Any, path: Path) -> Header:
    try:
        return Header.model_validate(section)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        at = ".".join([SECTION, *map(str, first["loc"])])
        raise ConfigError(f"{path}: {at}={first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}. A "
                          "preset has the fields 'for', 'idea', 'needs', 'sets_not', 'cost', 'paper' and "
                          "'evidence'") from None
