"""Rules of many rows together: what occurs twice, and what is in train and held out too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlrl.checks.identity import asked
from vlrl.checks.rule import CheckedRow, Context, Found
from vlrl.data import MEDIA_FIELDS, repeated_id
from vlrl.data.samples import side_of
from vlrl.data.values import short
from vlrl.task import Task
from vlrl.task.environment import has_environment

_NOT_ASKED = (*MEDIA_FIELDS, "id", "original_id", "split", "source", "category", "difficulty", "weight", "meta",
              "group_key")
"""Fields that say nothing of what a row asks."""
_SAID = {"row": ("what it asks", "what is held out must not be trained on: take it out of one of the two"),
         "group": ("group_key={}", "a group stays on one side"),
         "media": ("its image or video", "`vlrl data split` keeps them on one side")}


def side(path: Path, split: object) -> str | None:
    """train or heldout, by the `split` of a row, else by the name of its file; None for neither."""
    stated = side_of(split) if split is not None else None
    words = path.stem.replace("_", "-").replace(".", "-").split("-")
    return stated or next((name for word in words if (name := side_of(word))), None)


def ids_twice(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields the rows of a file whose id an earlier one has."""
    first: dict[Path, dict[str, str]] = {}
    for n, row in enumerate(rows):
        if row.id and (problem := repeated_id(first.setdefault(row.path, {}), row.id, row.where)):
            yield Found(problem, row=n)


def leaks(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields the held-out rows that are not unseen: what they ask, their `group_key` or one of their media is in train
    too; media by content where that was read, else by path.
    """
    trained: dict[Any, CheckedRow] = {}
    for row in rows:
        if row.side == "train":
            for key in _marks(row):
                trained.setdefault(key, row)
    for n, row in enumerate(rows):
        if row.side == "heldout":
            for key in _marks(row):
                if key in trained and (key[0] != "row" or _asks_as(row, trained[key], context.task)):
                    yield _leak(n, row, key[0], trained[key].where)
                    break


def _asks_as(row: CheckedRow, other: CheckedRow, task: Task | None) -> bool:
    """Returns whether two rows of the same fields have the same prompt: one may show the split, or the id."""
    return task is None or asked(task, row) == asked(task, other)


def same_prompts(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields the held-out rows that the model sees as one of train, whatever else they say."""
    if (task := context.task) is None:
        return
    trained: dict[str, str] = {}
    for n, row in sorted(enumerate(rows), key=lambda one: one[1].side != "train"):
        if row.side is None or row.sample is None or has_environment(task.of(row.sample)):  # which shows more than that
            continue
        if row.side == "train":
            trained.setdefault(asked(task, row), row.where)
        elif not any(f.kind == "leak" for f in row.findings) and (key := asked(task, row)) and key in trained:
            yield _leak(n, row, "row", trained[key])


def _leak(n: int, row: CheckedRow, kind: str, where: str) -> Found:
    what, way = _SAID[kind]
    return Found(f"{what.format(short(row.row.get('group_key')))} is in train too, in {where}; {way}", row=n)


def look_alikes(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields the held-out rows of which a picture looks like one in train: resized, or saved anew."""
    shown = {side: {file.sha256: (row, file.look) for row in rows if row.side == side
                    for file in row.files if file.look} for side in ("train", "heldout")}
    own = [look for sha, (_, look) in shown["heldout"].items() if sha not in shown["train"]]
    if not own or not shown["train"]:
        return
    from vlrl.checks.image_similarity import similar_images

    near = {one.heldout: one for one in similar_images([look for _, look in shown["train"].values()], own)}
    for n, row in enumerate(rows):
        one = next((near[f.sha256] for f in row.files if row.side == "heldout" and f.sha256 in near), None)
        if one and not any(f.kind == "leak" for f in row.findings):
            where = shown["train"][one.train][0].where
            yield Found(f"its image looks like one in train, in {where} (likeness {one.likeness:.2f}), resized or "
                        "saved anew: look at both; `vlrl data split` keeps such pictures on one side, `vlrl data "
                        "overlap` finds crops too", row=n)


def _marks(row: CheckedRow) -> Iterator[tuple[str, str]]:
    """Yields what one row alone, or rows of one side alone, may have."""
    asked = {name: value for name, value in row.row.items() if name not in _NOT_ASKED}
    if asked and len(row.contents) >= len(row.sample.media if row.sample else ()):  # all that it shows is known
        yield "row", repr((row.contents, sorted(asked.items(), key=lambda item: item[0])))
    if row.row.get("group_key") is not None:
        yield "group", str(row.row["group_key"])
    for one in row.contents:
        yield "media", one
