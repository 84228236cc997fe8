"""Exports selected rollouts to one file: JSONL, parquet, or a data set for `vlrl sft`. Imports no Gradio.

    made = export("sft", library, media, notes.all(flag="good"), folder)
    made.path, made.rows, made.left_out

Texts of a run are data: none is executed, and no name from a run folder becomes a file name of the export."""

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vlrl.config.schema import LimitsSettings
from vlrl.data import MEDIA_FIELDS, json_line
from vlrl.errors import VlrlError
from vlrl.rewards.text import scored_text
from vlrl.store import PER_TOKEN, SCHEMA

from . import AppError
from .library import Library
from .media import MediaStore
from .notes import Note
from .queries import RolloutKey

MOST_ROWS = 20_000
MOST_BYTES = 4 << 30
"""Largest total size of the media in one export."""
_HEAVY = {"token_ids", "loss_mask", "logprobs", "turns", "turn_advantages", "schema", "top_ids", "top_logprobs",
          *PER_TOKEN}
_JSON = ("parsed", "target", "sample", "marks")
_MAPS = ("parts", "weights")
_ADDED = ("run", "source", "flag", "comment")
_NOT_CARRIED = {*MEDIA_FIELDS, "split", "solution"}
"""Fields of a data row that the export replaces or omits."""
_README = """Answers chosen in vlrl's inspector, as data for supervised fine-tuning: rows.jsonl, its media in media/.

    vlrl data check rows.jsonl --config CONFIG data.format=canonical
    vlrl sft CONFIG data.train=rows.jsonl data.format=canonical data.root= data.own_samples=false run.dir=runs/sft

CONFIG is that of the run the answers come from (config.yaml in its folder), for its task and coordinates.
data.own_samples=false has a task that draws its samples read these rows; it is evaluated on its own.
"""


@dataclass(frozen=True)
class Export:
    """The exported file and its number of rows."""

    path: Path
    rows: int
    left_out: tuple[str, ...] = ()
    """Sentences on rollouts that were omitted, and on other limitations."""


def export(form: str, library: Library, media: MediaStore, chosen: Sequence[Note], folder: Path,
           bad: bool = False) -> Export:
    """Writes the rollouts of the notes `chosen` to a file in `folder`; `form` is a key of FORMS. Answers flagged bad
    are written to a data set for `vlrl sft` only with `bad`. Raises AppError for an unknown form, for too many
    rollouts, or if no rollout can be written."""
    if form not in FORMS:
        raise AppError(f"export format {form!r} is unknown: choose one of {', '.join(FORMS)}")
    if len(chosen) > MOST_ROWS:
        raise AppError(f"{len(chosen)} rollouts are selected, more than the limit of {MOST_ROWS} per file: "
                       "narrow the selection")
    left_out: list[str] = []
    if form == "sft" and not bad:
        usable = [note for note in chosen if note.flag != "bad"]
        if len(usable) < len(chosen):
            left_out.append(f"{len(chosen) - len(usable)} answers flagged bad are left out: no model should learn "
                            "them. To export them all the same, select the flag bad above")
        chosen = usable
    path, rows = FORMS[form](library, media, chosen, folder, left_out)
    if not rows:
        path.unlink(missing_ok=True)
        why = f": {left_out[0]}" if left_out else ", because none is selected"
        raise AppError(f"no rollout can be written{why}")
    return Export(path, rows, tuple(left_out))


def _tables(library: Library, chosen: Sequence[Note], names: Sequence[str],
            left_out: list[str]) -> Iterator[tuple[list[Note], pa.Table]]:
    """Yields (notes, table) for each step of each run. The table has the columns `names`, and a row for each note, in
    the order of the notes. Rollouts that cannot be read are described in `left_out`."""
    by_file: dict[tuple, list[Note]] = {}
    for note in chosen:
        by_file.setdefault(note.key[:4], []).append(note)
    for (run, source, split, step), notes in by_file.items():
        try:
            table = library.folder(run).rollouts(step, split=split if source == "eval" else None, columns=names)
            places = {key: i for i, key in enumerate(_places(table))}
            located = [(note, places[note.key[4:]]) for note in notes if note.key[4:] in places]
        except (VlrlError, OSError, pa.ArrowException, UnicodeDecodeError) as error:
            left_out.append(f"{len(notes)} rollouts of run {run!r}, step {step}, cannot be read: {error}")
            continue
        if len(located) < len(notes):
            left_out.append(f"{len(notes) - len(located)} rollouts of run {run!r}, step {step}, are no longer stored")
        if located:
            yield [note for note, _ in located], table.take([place for _, place in located])


def _places(table: pa.Table) -> Iterator[tuple[str, int]]:
    return zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)


def _records(library: Library, chosen: Sequence[Note], left_out: list[str]) -> Iterator[tuple[Note, dict[str, Any]]]:
    names = [name for name in SCHEMA.names if name not in _HEAVY]
    for notes, table in _tables(library, chosen, names, left_out):
        for i, note in enumerate(notes):
            try:
                row = table.slice(i, 1).to_pylist()[0]
                yield note, {**row, **{k: _decoded(row[k]) for k in _JSON if k in row},
                             **{k: dict(row[k] or ()) for k in _MAPS}}
            except (ValueError, RecursionError) as error:  # text that is not UTF-8, or invalid JSON
                left_out.append(f"{_name(note.key)}: {error}")


def _decoded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _name(key: RolloutKey) -> str:
    return f"run {key.run!r}, step {key.step}, group {key.group!r}, answer {key.index}"


def _remarks(note: Note) -> dict[str, str]:
    return dict(zip(_ADDED, (note.key.run, note.key.source, note.flag, note.comment), strict=True))


def _jsonl(library: Library, media: MediaStore, chosen: Sequence[Note], folder: Path,
           left_out: list[str]) -> tuple[Path, int]:
    path, rows = folder / "rollouts.jsonl", 0
    with open(path, "w", encoding="utf-8") as file:
        for note, record in _records(library, chosen, left_out):
            try:
                file.write(json_line({**_remarks(note), **record}) + "\n")
                rows += 1
            except VlrlError as error:
                left_out.append(f"{_name(note.key)}: {error}")
    return path, rows


def _parquet(library: Library, media: MediaStore, chosen: Sequence[Note], folder: Path,
             left_out: list[str]) -> tuple[Path, int]:
    path, rows = folder / "rollouts.parquet", 0
    schema = pa.schema([*SCHEMA, *((name, pa.string()) for name in _ADDED)])
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for notes, table in _tables(library, chosen, SCHEMA.names, left_out):
            for name in _ADDED:
                table = table.append_column(name, pa.array([_remarks(note)[name] for note in notes], pa.string()))
            file.write_table(table.cast(schema))
            rows += len(table)
    return path, rows


def _sft(library: Library, media: MediaStore, chosen: Sequence[Note], folder: Path,
         left_out: list[str]) -> tuple[Path, int]:
    path, lines, sizes, ids, tasks = folder / "sft.zip", [], {}, set(), set()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # media are compressed already
        for note, record in _records(library, chosen, left_out):
            try:
                if record["episode_id"]:
                    raise AppError("an episode has several actions, which a supervised row cannot hold")
                files = [_media_file(media, note.key.run, entry) for entry in record["media"] or ()]
                line = json_line(_row(note, record, files, ids))
                _keep(archive, sizes, files)
                lines.append(line)
                tasks.add(str(record["task"]))
            except (VlrlError, OSError, ValueError, TypeError) as error:
                left_out.append(f"{_name(note.key)}: {error}")
        archive.writestr("rows.jsonl", "".join(f"{line}\n" for line in lines))
        archive.writestr("README.txt", _README)
    if len(tasks) > 1:
        left_out.append(f"Beware: these are answers to several tasks ({', '.join(sorted(tasks))}), but `vlrl sft` uses "
                        "the prompt of one task: export a data set for each")
    evaluated = sorted({note.key.split for note in chosen if note.key.source == "eval"})
    if evaluated:
        left_out.append(f"Beware: some answers come from evaluations of {', '.join(evaluated)}. A model that learns "
                        "from them can no longer be measured there.")
    return path, len(lines)


@dataclass(frozen=True)
class _File:
    name: str
    """Name inside the zip."""
    kind: str
    path: Path
    frames: bool
    """Whether the run stored only the sampled frames of a video, as an animated WebP."""


def _media_file(media: MediaStore, run: str, entry: Mapping[str, Any]) -> _File:
    if not entry.get("path"):
        raise AppError("the run stored no media of this answer (store.media=none)")
    path = media.resolve(run, str(entry["path"]))
    frames = entry.get("kind") == "video" and path.suffix.lower() == ".webp"
    name = re.sub(r"[^0-9a-f]", "", str(entry.get("hash")))[:64] or "unnamed"
    return _File(f"media/{name}{'.png' if frames else path.suffix.lower()}", str(entry.get("kind")), path, frames)


def _row(note: Note, record: Mapping[str, Any], files: Sequence[_File], ids: set[str]) -> dict[str, Any]:
    """The data set row of a rollout, with its answer as the solution. The row has the id of the sample; if that id is
    already in `ids` (the ids of earlier rows), a number is appended. The id of the row is added to `ids`. Raises
    AppError if the data row was not stored, or if the answer is empty or truncated."""
    row = record["sample"]
    if not isinstance(row, dict):
        raise AppError("the data row of this answer was not stored")
    if not record["completion"] or record["truncated"]:
        raise AppError("the answer is empty or truncated: training on it would teach the model to stop there")
    fields = {name: value for name, value in row.items() if name not in _NOT_CARRIED}
    if any(file.frames for file in files):  # a clip of stored frames begins at its first frame
        told = ("video_start", "video_end", "fps", "frame_times")
        fields = {name: value for name, value in fields.items() if name not in told}
    id, number = record["sample_id"], 2
    while id in ids:
        id, number = f"{record['sample_id']}-{number}", number + 1
    ids.add(id)
    images = [file.name for file in files if file.kind == "image"]
    videos = [file.name for file in files if file.kind == "video"]
    shown = {"image": images[0]} if len(images) == 1 else {"images": images} if images else {}
    shown |= {"video": videos[0] if len(videos) == 1 else videos} if videos else {}
    came = {"run": note.key.run, "step": note.key.step, "group": note.key.group, "rollout": note.key.index,
            "reward": record["reward"]}
    meta = row.get("meta")
    return {**fields, "id": id, **shown, "solution": scored_text(record["completion"], record["opened"] or ""),
            "meta": {**(meta if isinstance(meta, dict) else {}), "rollout": came}}


def _keep(archive: zipfile.ZipFile, sizes: dict[str, int], files: Sequence[_File]) -> None:
    for file in files:
        size = file.path.stat().st_size
        if sizes.setdefault(file.name, size) != size:
            raise AppError(f"several media of different sizes are named {file.name}: export fewer runs")
        if file.name in archive.NameToInfo:
            continue
        if sum(sizes.values()) > MOST_BYTES:
            raise AppError(f"the media of these answers exceed {MOST_BYTES >> 30} GiB: select fewer answers")
        if file.frames:
            with archive.open(file.name, "w") as target:
                _animated_png(file.path, target)
        else:
            archive.write(file.path.resolve(), file.name)


def _animated_png(path: Path, target: Any) -> None:
    """Converts an animated WebP losslessly to an animated PNG, because video decoders read only the latter."""
    limits = LimitsSettings()
    with Image.open(path, formats=("WEBP",)) as image:
        count = getattr(image, "n_frames", 1)
        if image.width * image.height > limits.image_pixels or \
                count * image.width * image.height > limits.video_pixels:
            raise AppError(f"{path.name} has more pixels than limits.image_pixels or limits.video_pixels allows")
        frames, shown = [], []
        for i in range(count):
            image.seek(i)
            frames.append(image.convert("RGB"))
            shown.append(image.info.get("duration", 500))
    frames[0].save(target, format="PNG", save_all=True, append_images=frames[1:], duration=shown)


FORMS: dict[str, Callable[..., tuple[Path, int]]] = {"jsonl": _jsonl, "parquet": _parquet, "sft": _sft}
