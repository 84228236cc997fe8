"""A run's rollouts, with their pictures and the notes on them, as a data set: parquet and a card.

    exported = export(RunFolder("runs/a"), Path("a-rollouts"), steps=range(0, 100))
    push(HubTarget("org/a-rollouts", "dataset"), files_of(Path("a-rollouts")), "Rollouts of vlrl")

The folder is what the `datasets` library and the Hub read as it is: `data/*.parquet` with the features of its columns
(pictures as images), and README.md, a card that says what made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.errors import ConfigError, RunError
from vlrl.progress import Progress, no_progress
from vlrl.store import RunFolder
from vlrl.store.files import write_text
from vlrl.tools.hub.redaction import PrivateWords
from vlrl.tools.tasks.rescore import stored_steps

Notes = Mapping[tuple[str, str, int, str, int], tuple[str, str]]
"""(source, split, step, group, index) -> flag and comment."""
_TEXTS = ("sample_id", "task", "group_id", "split", "prompt", "completion", "sample", "target", "parsed", "error",
          "finish_reason", "variant", "category")
_NUMBERS = {"step": "int32", "index": "int32", "policy_step": "int32", "reward": "float64", "advantage": "float64",
            "difficulty": "float64", "correct": "bool", "truncated": "bool"}
_ADDED = ("parts", "weights", "turns", "flag", "comment")
"""Texts that are made here: the first three are JSON."""
_JSON = ("sample", "target", "parsed", "turns")
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_KINDS = {"int32": pa.int32(), "float64": pa.float64(), "bool": pa.bool_()}
SCHEMA = pa.schema({**dict.fromkeys((*_TEXTS, *_ADDED), pa.string()), **{n: _KINDS[k] for n, k in _NUMBERS.items()},
                    "images": pa.list_(_IMAGE)})
_FEATURES = {**{name: {"dtype": "string", "_type": "Value"} for name in (*_TEXTS, *_ADDED)},
             **{name: {"dtype": kind, "_type": "Value"} for name, kind in _NUMBERS.items()},
             "images": {"feature": {"_type": "Image"}, "_type": "List"}}
_TOGETHER, _GROUP_BYTES = 500, 16 << 20
"""Rollouts of a row group, and bytes of their pictures, at most."""
_CARD = """---
pretty_name: {title}
tags: [vlrl, reinforcement-learning, vision-language]
configs:
- config_name: default
  data_files:
{files}
---

# {title}

{rows} rollouts of a run of vlrl: what the model wrote, every part of its reward, and what was asked and shown.

| | |
|---|---|
| model | `{model}` |
| task | `{task}` |
| steps | {steps} |
| notes | {notes} |
| pictures | {pictures} |

Columns: `prompt` (with the chat template), `completion`, `reward`, `parts` and `weights` (JSON, by part), `correct`,
`advantage`, `sample` and `target` (JSON), `images` (as the model was given them, before resizing), `turns` (JSON; of an
episode each action and observation), `flag` and `comment` of people who read it, `error` (why it could not be scored),
`group_id` and `index` (answers to one prompt share the group).

The texts are a model's and may be wrong. The data set that the pictures and questions come from has its own licence.
"""


@dataclass
class ExportedRollouts:
    """What was written."""

    folder: Path
    rows: int = 0
    images: int = 0
    notes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """What is not in it -> how often."""

    def miss(self, what: str) -> None:
        """Counts something that is left out."""
        self.left_out[what] = self.left_out.get(what, 0) + 1


def export(run: RunFolder, folder: Path, *, steps: range | None = None, split: str | None = None,
           notes: Notes | None = None, progress: Progress = no_progress, media: bool = True,
           private: PrivateWords | None = None) -> ExportedRollouts:
    """Writes the training rollouts of a run in `steps` (None: all), or with `split` those of its evaluations.

    media: with their pictures. private: what is taken out of every text, for others to read.
    Raises RunError when there are none, ConfigError for a folder that holds something already.
    """
    wanted = [step for step in stored_steps(run, split) if steps is None or step in steps]
    if not wanted:
        raise RunError(f"{run.path} holds no {f'evaluations of {split!r}' if split else 'rollouts'} of these steps")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something already: name a new folder with -o")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    out, name = ExportedRollouts(folder), f"{split or 'train'}-00000-of-00001.parquet"
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    with pq.ParquetWriter(folder / "data" / name, SCHEMA.with_metadata(metadata), compression="zstd") as writer:
        for number, step in enumerate(wanted):
            progress("writing rollouts", number, len(wanted))
            rows = run.rollouts(step, split=split).to_pylist()
            records = (_row(run, row, "eval" if split else "train", notes or {}, out, media) for row in rows)
            for some in _together(row if private is None else _published(row, private) for row in records):
                writer.write_table(pa.Table.from_pylist(some, SCHEMA))
    text = _card(run, out, name, split or "train", wanted)
    write_text(folder / "README.md", private.text(text) if private else text)
    return out


def _together(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields rows in row groups, of _TOGETHER rows or _GROUP_BYTES of pictures at most."""
    some, size = [], 0
    for row in rows:
        some.append(row)
        size += sum(len(image["bytes"]) for image in row["images"])
        if len(some) == _TOGETHER or size >= _GROUP_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def files_of(folder: Path) -> dict[str, Path | bytes]:
    """Returns the files of an exported folder by their names in the repository of a data set."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _row(run: RunFolder, row: Mapping[str, Any], source: str, notes: Notes, out: ExportedRollouts,
         with_media: bool) -> dict[str, Any]:
    key = source, row["split"] or "", row["step"], row["group_id"] or "", row["index"] or 0
    flag, comment = notes.get(key, ("", ""))
    out.rows, out.notes = out.rows + 1, out.notes + bool(flag or comment)
    turns = row["turns"] if row["episode_id"] else None
    return {**{name: row[name] for name in (*_TEXTS, *_NUMBERS)}, "flag": flag or None, "comment": comment or None,
            **{name: json.dumps(dict(row[name] or ())) for name in ("parts", "weights")},
            "turns": None if turns is None else json.dumps(turns, ensure_ascii=False),
            "images": [image for media in row["media"] or () if (image := _image(run, media, out, with_media))]}


def _published(row: Mapping[str, Any], private: PrivateWords) -> dict[str, Any]:
    """Returns a row without words of this machine, and without paths where a text is not the model's."""
    cleaned = {name: private.model_text(value) if isinstance(value, str) else value for name, value in row.items()}
    return {**cleaned, **{name: private.json(row[name]) for name in _JSON},
            "error": None if row["error"] is None else private.text(row["error"])}


def _image(run: RunFolder, media: Mapping[str, Any], out: ExportedRollouts, wanted: bool) -> dict[str, Any] | None:
    """Returns a picture as `datasets` keeps it; None, and counted, for a video, for what is not there or wanted."""
    if not wanted:
        return out.miss("pictures and videos (--with-media)")
    if media["kind"] != "image":
        return out.miss("videos")
    path = run.path / str(media["path"] or "")
    try:
        if not media["path"] or not path.resolve().is_relative_to(run.path.resolve() / "media"):
            return out.miss("pictures that the run did not keep (store.media)")
        data = path.read_bytes()
    except OSError:
        return out.miss("pictures whose file is gone")
    out.images += 1
    return {"bytes": data, "path": path.name}


def _card(run: RunFolder, out: ExportedRollouts, file: str, split: str, steps: Sequence[int]) -> str:
    import yaml

    config = run.path / "config.yaml"
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    model, task = ((settings.get(part) or {}).get("name", "") for part in ("model", "task"))
    missing = "".join(f", {count} {what} left out" for what, count in out.left_out.items())
    files = f"  - split: {json.dumps(split)}\n    path: {json.dumps(f'data/{file}')}"
    return _CARD.format(title=json.dumps(f"Rollouts of {run.path.resolve().name}")[1:-1], files=files, rows=out.rows,
                        model=Path(str(model)).name if str(model).startswith("/") else model, task=task,
                        steps=f"{steps[0]} to {steps[-1]}", notes=out.notes, pictures=f"{out.images}{missing}")
