"""Exports the rollouts of a run, with their images and the notes of reviewers, as a data set: Parquet files and a card.

    exported = export(RunFolder("runs/a"), Path("a-rollouts"), steps=range(0, 100))
    push(HubTarget("org/a-rollouts", "dataset"), files_of(Path("a-rollouts")), "Rollouts of vlrl")

The `datasets` library and the Hub can read the folder directly: `data/*.parquet` declares the features of its columns
(images as Image), and README.md is the card."""

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
"""Notes of reviewers: ("train" or "eval", split, step, group, index) of a rollout -> (flag, comment)."""
_TEXTS = ("sample_id", "task", "group_id", "split", "prompt", "completion", "sample", "target", "parsed", "error",
          "finish_reason", "variant", "category")
_NUMBERS = {"step": "int32", "index": "int32", "policy_step": "int32", "reward": "float64", "advantage": "float64",
            "difficulty": "float64", "correct": "bool", "truncated": "bool"}
_ADDED = ("parts", "weights", "turns", "flag", "comment")
"""Text columns that the rollout files do not have, or do not have as text. `parts`, `weights` and `turns` hold JSON."""
_JSON = ("sample", "target", "parsed", "turns")
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_KINDS = {"int32": pa.int32(), "float64": pa.float64(), "bool": pa.bool_()}
SCHEMA = pa.schema({**dict.fromkeys((*_TEXTS, *_ADDED), pa.string()), **{n: _KINDS[k] for n, k in _NUMBERS.items()},
                    "images": pa.list_(_IMAGE)})
_FEATURES = {**{name: {"dtype": "string", "_type": "Value"} for name in (*_TEXTS, *_ADDED)},
             **{name: {"dtype": kind, "_type": "Value"} for name, kind in _NUMBERS.items()},
             "images": {"feature": {"_type": "Image"}, "_type": "List"}}
_GROUP_ROWS, _GROUP_BYTES = 500, 16 << 20
"""Limits of a Parquet row group: the number of rollouts, and the number of bytes of their images."""
_CARD = """---
{metadata}
---

# {title}

{rows} rollouts of a run of vlrl: completions, every part of their rewards, prompts and images.

| | |
|---|---|
| model | `{model}` |
| task | `{task}` |
| steps | {steps} |
| notes | {notes} |
| images | {images} |

Columns: `prompt` (with the chat template), `completion`, `reward`, `parts` and `weights` (JSON, by part), `correct`,
`advantage`, `sample` and `target` (JSON), `images` (before resizing), `turns` (JSON; the actions and observations of an
episode), `flag` and `comment` of people who read it, `error` (why it could not be scored), `group_id` and `index`
(completions of one prompt form a group).

The texts are written by a model and may be wrong. The data set of the images and questions has its own licence.
"""


@dataclass
class ExportedRollouts:
    """The exported folder, and counts of its rows and images."""

    folder: Path
    rows: int = 0
    images: int = 0
    notes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """What was not exported, such as "videos" -> how many of them were left out."""

    def miss(self, what: str) -> None:
        """Adds 1 to the count of `what` in `left_out`."""
        self.left_out[what] = self.left_out.get(what, 0) + 1


def export(run: RunFolder, folder: Path, *, steps: range | None = None, split: str | None = None,
           notes: Notes | None = None, progress: Progress = no_progress, media: bool = True,
           private: PrivateWords | None = None) -> ExportedRollouts:
    """Exports the training rollouts of a run to `folder`. With `split`, exports the rollouts of the run's evaluations
    on this split instead.

    steps: export only the rollouts of these training steps; None = all. notes: flags and comments of reviewers. media:
    whether to include images. private: words to redact in every string. Raises RunError if there are no such rollouts,
    ConfigError if the folder is not empty."""
    wanted = [step for step in stored_steps(run, split) if steps is None or step in steps]
    if not wanted:
        what = f"evaluations of {split!r}" if split else "rollouts"
        raise RunError(f"{run.path} has no {what} of the chosen steps: choose other steps")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder with -o")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    out, name = ExportedRollouts(folder), f"{split or 'train'}-00000-of-00001.parquet"
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    with pq.ParquetWriter(folder / "data" / name, SCHEMA.with_metadata(metadata), compression="zstd") as writer:
        for number, step in enumerate(wanted):
            progress("writing rollouts", number, len(wanted))
            rows = run.rollouts(step, split=split).to_pylist()
            records = (_row(run, row, "eval" if split else "train", notes or {}, out, media) for row in rows)
            for some in _row_groups(row if private is None else _published(row, private) for row in records):
                writer.write_table(pa.Table.from_pylist(some, SCHEMA))
    text = _card(run, out, name, split or "train", wanted)
    write_text(folder / "README.md", private.text(text) if private else text)
    return out


def _row_groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields a list of rows for each Parquet row group: at most _GROUP_ROWS rows, and about _GROUP_BYTES of images."""
    some, size = [], 0
    for row in rows:
        some.append(row)
        size += sum(len(image["bytes"]) for image in row["images"])
        if len(some) == _GROUP_ROWS or size >= _GROUP_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def files_of(folder: Path) -> dict[str, Path | bytes]:
    """Name in the repository -> path, for each file in an exported folder."""
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
    """A row with its private words replaced. Absolute paths are shortened too, except in strings that the model has
    written."""
    cleaned = {name: private.model_text(value) if isinstance(value, str) else value for name, value in row.items()}
    return {**cleaned, **{name: private.json(row[name]) for name in _JSON},
            "error": None if row["error"] is None else private.text(row["error"])}


def _image(run: RunFolder, media: Mapping[str, Any], out: ExportedRollouts, wanted: bool) -> dict[str, Any] | None:
    """An image of a rollout as {"bytes", "path"}, the format of `datasets`, read from the run folder. Returns None for
    a video, for a missing image, and if `wanted` is False, and counts these cases in `out.left_out`."""
    if not wanted:
        return out.miss("images and videos (--with-media)")
    if media["kind"] != "image":
        return out.miss("videos")
    path = run.path / str(media["path"] or "")
    try:
        if not media["path"] or not path.resolve().is_relative_to(run.path.resolve() / "media"):
            return out.miss("images that the run did not store (store.media)")
        data = path.read_bytes()
    except OSError:
        return out.miss("images whose file is missing")
    out.images += 1
    return {"bytes": data, "path": path.name}


def _card(run: RunFolder, out: ExportedRollouts, file: str, split: str, steps: Sequence[int]) -> str:
    import yaml
    from huggingface_hub import DatasetCardData

    config = run.path / "config.yaml"
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    model, task = ((settings.get(part) or {}).get("name", "") for part in ("model", "task"))
    missing = "".join(f", {count} {what} left out" for what, count in out.left_out.items())
    title = f"Rollouts of {run.path.resolve().name}"
    data_files = [{"split": split, "path": f"data/{file}"}]
    metadata = DatasetCardData(pretty_name=title, tags=["vlrl", "reinforcement-learning", "vision-language"],
                               configs=[{"config_name": "default", "data_files": data_files}])
    return _CARD.format(metadata=metadata.to_yaml(), title=title, rows=out.rows, task=task,
                        model=Path(str(model)).name if str(model).startswith("/") else model,
                        steps=f"{steps[0]} to {steps[-1]}", notes=out.notes, images=f"{out.images}{missing}")
