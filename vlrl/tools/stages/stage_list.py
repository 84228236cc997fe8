"""stages.json: the stages of a run, and which of them are finished.

    {"stages": [{"name": "cold", "kind": "sft"}, {"name": "rl", "kind": "rl"}],
     "done": {"cold": {"steps": 50, "model": "/runs/two/cold/checkpoints/step-000050"}}}

Each stage has a folder, named after the stage, next to this file. The folder of a stage of kind `rounds` contains
another stages.json, which lists its rounds. Reading the file does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlrl.store.files import read_json, write_text

FILE = "stages.json"


@dataclass(frozen=True)
class StageList:
    """The stages of a run in order, and the results of the finished stages."""

    folder: Path
    stages: Sequence[tuple[str, str]] = ()  # (name, kind) of each stage
    done: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of each finished stage -> its result: `steps`, and `model` (the folder with the final weights)."""

    @property
    def folders(self) -> list[Path]:
        """The folders of the stages. Symbolic links are left out, because a link could point anywhere."""
        return [place for name, _ in self.stages if not (place := self.folder / name).is_symlink()]

    def finished(self, name: str, **result: Any) -> StageList:
        """Adds the result (`steps`, `model`) of the stage `name`, which is now finished. Writes the new list to
        stages.json and returns it."""
        return StageList(self.folder, self.stages, {**self.done, name: result}).write()

    def write(self) -> StageList:
        """Writes this list to stages.json atomically and returns the list."""
        content = {"stages": [{"name": name, "kind": kind} for name, kind in self.stages], "done": self.done}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / FILE, json.dumps(content, indent=1) + "\n")
        return self


def read_stages(folder: Path) -> StageList | None:
    """Reads stages.json of a run folder. Returns None if there is no such file, or if it cannot be read."""
    stored = read_json(folder / FILE)
    try:
        stages = [(str(one["name"]), str(one["kind"])) for one in stored["stages"]] if stored else []
        done = {str(name): dict(left) for name, left in stored["done"].items()} if stored else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    plain = all(name and "/" not in name and name not in (".", "..") for name, _ in stages)
    return StageList(folder, stages, done) if stages and plain else None
