"""Reads one group in full from its rollout file. Imports no torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from vlrl.data.coordinates import CONVENTIONS
from vlrl.errors import VlrlError
from vlrl.models.model_config import family_convention
from vlrl.rewards.text import scored_text
from vlrl.store import SCHEMA, as_schema, plain, utf8
from vlrl.task import builtin_names, load_class
from vlrl.task.scoring import overlay_marks
from vlrl.types import Sample

from . import AppError
from .html import finite
from .library import Library
from .queries import SOURCES, GroupKey, RolloutKey
from .textfiles import first_line

pc: Any = pyarrow.compute  # its functions are made when it is imported, where no type checker sees them
_ROWS = 1024  # read at a time
_LONGEST = 4_000_000  # characters of a JSON column
_MARKS = 1000  # per answer
MOST_ANSWERS = 4096
"""Largest number of answers read from a group."""
_MARK_DEPTH = 6
_MARK_ITEMS = 4000  # per list in a mark
_FIELDS = list(SCHEMA)

Mark = dict[str, Any]
"""A mark that a task draws on the image or video with the index "media":
{"kind": "box"|"point"|"path"|"span"|"track", "at": ..., "label": str, "role": "answer"|"target", "media": int}.
Keys may be missing, and values are not validated."""


@dataclass(frozen=True)
class MediaView:
    """One image or video of a prompt or an episode. `size` is the (width, height) of the file in pixels, and
    `processed_size` that of the model's input; None if unknown."""

    name: str | None
    """File name in the run's media/ folder, for MediaStore; None if not stored."""
    hash: str
    kind: str
    """"image" or "video"."""
    size: tuple[int, int] | None
    processed_size: tuple[int, int] | None
    visual_tokens: int | None
    timestamps: tuple[float, ...] = ()
    """[frames] Time of each sampled video frame in seconds."""


@dataclass(frozen=True, eq=False)
class RolloutView:
    """One answer with all of its columns in the rollout file. T is its number of tokens. An array that the file does
    not store is None."""

    key: RolloutKey
    schema: int | None
    policy_step: int | None
    completion: str
    token_ids: np.ndarray
    """[T] int32: the tokens of the answer."""
    loss_mask: np.ndarray | None
    """[T] bool: whether the token counts in the loss."""
    logprobs: np.ndarray | None
    """[T] float32: log-probabilities of the tokens under the sampler. `trainer_logprobs` are those under the trainer,
    `ratio` is the importance ratio, and `entropies` are in nats; all are [T] float32."""
    trainer_logprobs: np.ndarray | None
    entropies: np.ndarray | None
    ratio: np.ndarray | None
    clipped: np.ndarray | None
    """[T] bool: whether the token's ratio was clipped in the objective."""
    top_ids: tuple[np.ndarray, ...] | None
    """[T][k] int32: the ids of the most likely tokens at each position."""
    top_logprobs: tuple[np.ndarray, ...] | None
    """[T][k] float32: the log-probabilities of `top_ids`."""
    parts: dict[str, float | None]
    weights: dict[str, float | None]
    reward: float | None
    correct: bool | None
    """Whether the task judged the answer correct; None if it stored no verdict."""
    advantage: float | None
    """None in evaluations, and for an answer of a prompt variant that is not trained on."""
    metrics: dict[str, float | None]
    """Task metrics of an answer in an evaluation, e.g. an IoU."""
    parsed: Any
    """The parsed answer, decoded from JSON."""
    error: str | None
    finish_reason: str | None
    truncated: bool
    turns: tuple[dict[str, Any], ...]
    """One dict for each turn, with the keys "start" and "end" (its tokens), "role" and "media" (hashes). In episodes it
    also has "text" and the result of the action."""
    episode_id: str | None
    variant: str | None
    marks: tuple[Mark, ...] | None
    """The marks (boxes, points ...) that the task draws for the answer; None if the rollout file stores no marks."""
    media: tuple[MediaView, ...] = ()
    """The media that an episode showed after its prompt."""
    turn_advantages: np.ndarray | None = None
    """[actions] float32 for an episode; None if all of its actions have the same advantage."""
    opened: str = ""
    """Text at the end of the prompt that counts as the beginning of the answer, such as "<think>"."""
    extra: Any = None
    """Values that a method stored with the answer, decoded from JSON; None if it stored none."""

    @property
    def whole(self) -> str:
        """The text that was scored: the completion, preceded by `opened`."""
        return scored_text(self.completion, self.opened)

    @property
    def index(self) -> int:
        return self.key.index

    @property
    def aside(self) -> bool:
        """Whether the answer belongs to a prompt variant that is not trained on. Group statistics omit such answers."""
        return self.variant is not None and self.advantage is None


@dataclass(frozen=True, eq=False)
class GroupView:
    """One group of answers. Its statistics cover the scored answers that are not `aside`; without such answers they are
    None."""

    key: GroupKey
    task: str
    sample_id: str
    category: str | None
    difficulty: float | None
    prompt: str
    weights: dict[str, float | None]
    target: Any
    """The target of the sample, decoded from JSON; `sample` is decoded from JSON, too."""
    sample: dict[str, Any]
    """The row of the data set."""
    media: tuple[MediaView, ...]
    rollouts: tuple[RolloutView, ...]
    """Sorted by index; answers whose `aside` is true come last."""
    mean: float | None
    std: float | None
    """Standard deviation with Bessel's correction, as in the GRPO advantage; 0 for a single answer."""
    best: float | None
    worst: float | None
    zero_variance: bool
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    """The marks of the target in the preview of a sample; () for a group with answers."""


def group(library: Library, run: str, source: str, step: int, group_id: str, split: str = "") -> GroupView:
    """Reads one group of `source`, which is "train" or "eval". If `split` is empty, the group is taken from the first
    split that has a group with this id at this step. Raises AppError if there is no such group."""
    if source not in SOURCES:
        raise AppError(f"source {str(source)[:100]!r} is unknown: choose one of {', '.join(SOURCES)}")
    folder, group_id = library.folder(run), utf8(str(group_id))  # as the writer encodes it
    rows: list[dict[str, Any]] = []
    for file, steps, file_split in folder.rollout_files(SOURCES[source]):
        if step not in steps or len(rows) >= MOST_ANSWERS:
            continue
        try:
            rows += _rows(file, steps.start, step, group_id, file_split or ("train" if source == "train" else ""))
        except Exception as error:  # pyarrow may raise anything for a damaged or hostile file
            folder.notes.append(f"skipped {file.name}: {first_line(error)}")
    if len(rows) >= MOST_ANSWERS:
        rows = rows[:MOST_ANSWERS]
        folder.notes.append(f"only the first {MOST_ANSWERS:,} answers of this group were read")
    splits = [split] if split else sorted({row["split"] for row in rows})[:1]
    rows = [row for row in rows if row["split"] in splits]
    if not rows:
        of_split = f" of split {str(split)[:100]!r}" if split else ""
        notes = f" {'; '.join(folder.notes)[:1000]}." if folder.notes else ""
        raise AppError(f"run {run!r} has no group {str(group_id)[:200]!r} in its {source} rollouts of step {step}"
                       f"{of_split}.{notes}")
    return _group_view(GroupKey(run, source, rows[0]["split"], step, group_id), rows, folder.notes)


def with_marks(library: Library, view: GroupView, trust: bool = False) -> GroupView:
    """Adds marks (what an answer states, such as its boxes, to be drawn on the image) to those answers of a group that
    have none stored, by running the group's task. If the task cannot be loaded, only a note on the reason is added.
    Tasks that are not built-in are run only with `trust`, since this executes code that config.yaml names by path or
    module."""
    if all(rollout.marks is not None for rollout in view.rollouts):
        return view
    name = _of_task(library.settings(view.key.run), view.task, "name")
    if not isinstance(name, str) or not (trust or name in builtin_names()):
        return view
    try:
        task = load_class(name)()
    except Exception as error:  # code of a task may raise anything
        return replace(view, notes=(*view.notes, f"task {name!r} draws no marks: {first_line(error)}"))
    sample = Sample(id=view.sample_id, row=view.sample)

    def drawn(rollout: RolloutView) -> RolloutView:
        marks = rollout.marks if rollout.marks is not None else overlay_marks(task, sample, rollout.parsed)
        return replace(rollout, marks=None if marks is None else _checked_marks(plain(marks)))

    return replace(view, rollouts=tuple(map(drawn, view.rollouts)))


def box_convention(library: Library, view: GroupView) -> str:
    """Returns the coordinate convention in which the group's model writes boxes. It is the task's setting `coordinates`
    in config.yaml, else the convention of the model family; "original" if neither is known."""
    settings = library.settings(view.key.run)
    set_to, model = _of_task(settings, view.task, "coordinates"), settings.get("model.name")
    if set_to in CONVENTIONS:
        return set_to
    try:
        return family_convention(model) if isinstance(model, str) else "original"
    except VlrlError:
        return "original"


def _of_task(settings: Mapping[str, Any], label: str, setting: str) -> Any:
    several = settings.get("tasks")
    for task in several if isinstance(several, list) else ():
        if isinstance(task, Mapping) and task.get("label") == label:
            return task.get(setting)
    return settings.get(f"task.{setting}")


def _rows(file: Path, first_step: int, step: int, group_id: str, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with pq.ParquetFile(file) as reader:
        wanted = [name for name in reader.schema_arrow.names if name in SCHEMA.names]
        keys = [name for name in ("step", "group_id") if name in wanted]
        for number in range(reader.num_row_groups):
            mask = _of_group(reader.read_row_group(number, keys), first_step, step, group_id)
            if not mask.any():
                continue
            at, last = 0, int(np.flatnonzero(mask)[-1])
            for batch in reader.iter_batches(_ROWS, [number], wanted):
                if mask[at:at + len(batch)].any():
                    table = pa.Table.from_batches([batch]).filter(pa.array(mask[at:at + len(batch)]))
                    rows += _unpacked(as_schema(table, _FIELDS))
                at += len(batch)
                if at > last or len(rows) >= MOST_ANSWERS:
                    break
    return [row | {"split": row["split"] if row["split"] is not None else split} for row in rows]


def _of_group(keys: pa.Table, first_step: int, step: int, group_id: str) -> np.ndarray:
    """Returns a bool mask [rows]: which rows of `keys` (columns step and group_id) belong to the group. A row without a
    step has the step `first_step`, and a row without a group id belongs to the group ""."""
    size = keys.num_rows
    steps = pc.fill_null(keys["step"].cast(pa.int64()), first_step) if "step" in keys.column_names else None
    ids = pc.fill_null(keys["group_id"].cast(pa.string()), "") if "group_id" in keys.column_names else None
    same_step = np.asarray(pc.equal(steps, step)) if steps is not None else np.full(size, step == first_step)
    same_id = np.asarray(pc.equal(ids, group_id)) if ids is not None else np.full(size, group_id == "")
    return same_step & same_id


def _unpacked(table: pa.Table) -> Iterator[dict[str, Any]]:
    plain_names = [f.name for f in _FIELDS if not _numbers(f.type)]
    rows = table.select(plain_names).to_pylist()
    for name in table.column_names:
        if name not in plain_names:
            for row, value in zip(rows, table[name], strict=True):
                row[name] = _array(value)
    yield from rows


def _numbers(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_list(kind) else None
    return inner is not None and (pa.types.is_primitive(inner) or (pa.types.is_list(inner)))


def _array(value: Any) -> np.ndarray | tuple[np.ndarray, ...] | None:
    if not value.is_valid:
        return None
    items = value.values
    if pa.types.is_list(items.type):
        return tuple(np.zeros(0) if not item.is_valid else _array(item) for item in items)  # type: ignore[misc]
    array = items.to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(items.type):
        return np.asarray([bool(v) for v in array]) if array.dtype == object else array.astype(bool)
    return np.nan_to_num(array).astype(np.int32) if pa.types.is_integer(items.type) else array.astype(np.float32)


def _group_view(key: GroupKey, rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> GroupView:
    remarks = list(notes)
    rollouts = sorted((_rollout_view(key, place, row, remarks) for place, row in enumerate(rows)),
                      key=lambda r: (r.aside, r.index))
    rewards = [r.reward for r in rollouts if r.reward is not None and not r.aside]
    first = rows[0]
    sample = decoded(first["sample"])
    return GroupView(
        key, first["task"] or "", first["sample_id"] or "", first["category"], finite(first["difficulty"]),
        first["prompt"] or "", _parts(first["weights"]), decoded(first["target"]),
        sample if isinstance(sample, dict) else {} if sample is None else {"sample": sample}, _shown(first)[0],
        tuple(rollouts), float(np.mean(rewards)) if rewards else None, _std(rewards), max(rewards, default=None),
        min(rewards, default=None), len(set(rewards)) < 2, tuple(dict.fromkeys(remarks)))


def _rollout_view(key: GroupKey, place: int, row: Mapping[str, Any], notes: list[str]) -> RolloutView:
    ids = row["token_ids"] if row["token_ids"] is not None else np.zeros(0, np.int32)
    index = place if row["index"] is None else row["index"]
    per_token = {name: row[name] for name in _PER_TOKEN}
    for name, values in per_token.items():
        if values is not None and len(values) != len(ids):
            notes.append(f"answer {index}: {name} has {len(values)} values for {len(ids)} tokens, so it is not shown")
            per_token[name] = None
    return RolloutView(
        RolloutKey(*key, index), row["schema"], row["policy_step"], row["completion"] or "", ids, **per_token,
        parts=_parts(row["parts"]), weights=_parts(row["weights"]), metrics=_parts(row["metrics"]),
        reward=finite(row["reward"]), correct=row["correct"], advantage=finite(row["advantage"]),
        parsed=decoded(row["parsed"]), error=row["error"], finish_reason=row["finish_reason"],
        truncated=bool(row["truncated"]), turns=tuple(turn for turn in row["turns"] or () if turn),
        episode_id=row["episode_id"], variant=row["variant"], marks=_marks(row["marks"]), media=_shown(row)[1],
        turn_advantages=row["turn_advantages"], opened=row["opened"] or "",
        extra=decoded(row["extra"]))


_PER_TOKEN = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratio", "clipped", "top_ids", "top_logprobs")


def _std(rewards: Sequence[float]) -> float | None:
    if len(rewards) < 2 or len(set(rewards)) < 2:
        return 0.0 if rewards else None
    return float(np.std(rewards, ddof=1))


def _parts(parts: Any) -> dict[str, float | None]:
    return {str(name): finite(value) for name, value in parts or ()}


def _shown(row: Mapping[str, Any]) -> tuple[tuple[MediaView, ...], tuple[MediaView, ...]]:
    later = sum(len(turn["media"] or ()) for turn in row["turns"] or () if turn) if row["episode_id"] else 0
    media = _media(row["media"])
    place = max(0, len(media) - later)
    return media[:place], media[place:]


def _media(media: Any) -> tuple[MediaView, ...]:
    return tuple(MediaView(m["path"], m["hash"] or "", "video" if m["kind"] == "video" else "image",
                           _size(m["width"], m["height"]), _size(m["processed_width"], m["processed_height"]),
                           m["visual_tokens"], tuple(t for t in map(finite, m["timestamps"] or ()) if t is not None))
                 for m in media or () if m)


def _size(width: int | None, height: int | None) -> tuple[int, int] | None:
    return (width, height) if width and height and 0 < width < 1 << 20 and 0 < height < 1 << 20 else None


def decoded(text: str | None) -> Any:
    """Decodes a JSON column: NaN becomes None, nesting below depth 50 is cut off. Invalid JSON is returned as text."""
    if text is None or len(text) > _LONGEST:
        return text and text[:1000] + "…"
    try:
        return plain(json.loads(text))
    except (ValueError, RecursionError):
        return text


def _marks(text: str | None) -> tuple[Mark, ...] | None:
    return None if text is None else _checked_marks(decoded(text))


def _checked_marks(entries: Any) -> tuple[Mark, ...]:
    marks = [m for m in entries if isinstance(m, dict)] if isinstance(entries, list) else []
    return tuple({key: _cut(value, _MARK_DEPTH) for key, value in mark.items()} for mark in marks[:_MARKS])


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return {k: _cut(v, depth - 1) for k, v in value.items()} if depth else None
    if isinstance(value, list):
        return [_cut(v, depth - 1) for v in value[:_MARK_ITEMS]] if depth else None
    return value
