"""Rules that compare many rows: repeated ids, and rows that are in both train and held-out data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlrl.checks.identity import prompt_digest
from vlrl.checks.rule import CheckedRow, Context
from vlrl.data import MEDIA_FIELDS, repeated_id
from vlrl.data.samples import train_or_heldout
from vlrl.data.values import short
from vlrl.errors import did_you_mean
from vlrl.task.environment import has_environment

_NOT_ASKED = (*MEDIA_FIELDS, "id", "original_id", "split", "source", "category", "difficulty", "weight", "meta",
              "group_key")
"""Fields that are not part of the question."""
_COUNTS = re.compile(r"\b(how|number|digit|count|age|year|numeral)\b", re.IGNORECASE)
"""Finds questions whose answer is a number."""
_OFTEN = 5
"""A label of a single row is suspicious if every other label has at least this many rows."""
_LEAKS = {"row": ("what it asks", "held-out data must not be trained on: remove it from one of the two"),
          "group": ("group_key={}", "all rows of a group must be in the same split"),
          "media": ("its image or video", "`vlrl data split` keeps them in the same split")}
"""Maps each kind of leak (see `_leak_keys`) to (what both splits contain, how to fix it)."""


def split_of(path: Path, split: object) -> str | None:
    """Returns "train" or "heldout": the split that the row's field `split` names, or else the one that the name of the
    file `path` contains; None if neither names a split."""
    stated = train_or_heldout(split) if split is not None else None
    words = path.stem.replace("_", "-").replace(".", "-").split("-")
    return stated or next((name for word in words if (name := train_or_heldout(word))), None)


def repeated_ids(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message for each row whose id already occurs earlier in the same file."""
    first: dict[Path, dict[str, str]] = {}
    for n, row in enumerate(rows):
        if row.id and (problem := repeated_id(first.setdefault(row.path, {}), row.id, row.where)):
            yield n, problem


def leaks(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message for each held-out row whose question, `group_key` or media also occur in train.

    Media are compared by content, or by path if the content was not read."""
    task, trained = context.task, dict[tuple[str, str], CheckedRow]()
    for row in rows:
        if row.side == "train":
            for mark in _leak_keys(row):
                trained.setdefault(mark, row)
    for n, row in enumerate(rows):
        for mark in _leak_keys(row) if row.side == "heldout" else ():
            other = trained.get(mark)
            # rows of the same fields may differ in prompt, e.g. where a prompt shows the split or the id
            if other and (mark[0] != "row" or task is None or prompt_digest(task, row) == prompt_digest(task, other)):
                yield n, _leak(row, mark[0], other.where)
                break


def number_labels(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message if all labels are numbers and no row lists the allowed labels, so that the answer that is
    rewarded is a number that no prompt explains."""
    labelled = [n for n, row in enumerate(rows) if row.row.get("label") is not None] if context.canonical else []
    questions = {str(rows[n].row.get("question") or "") for n in labelled}
    if len(questions) == 1 and not _COUNTS.search(next(iter(questions))) and all(
            str(rows[n].row["label"]).isdecimal() and not rows[n].row.get("labels") for n in labelled):
        yield labelled[0], (f"label={short(rows[labelled[0]].row['label'])}: every label is a number, and no row has "
                            "`labels`, so a model cannot know what the numbers mean. Write the names of the classes "
                            "as labels, list them in `labels`, or explain the numbers in task.prompt")


def rare_labels(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message for each label of a single row if the other labels have several rows each, since it may be
    misspelt. Files in which more than a tenth of the labels are that rare are left alone."""
    first: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for n, row in enumerate(rows):
        if isinstance(label := row.row.get("label"), str):
            counts[label] += 1
            first.setdefault(label, n)
    once = [label for label, count in counts.items() if count == 1]
    others = [count for count in counts.values() if count > 1]
    if once and others and len(once) <= max(1, len(counts) // 10) and min(others) >= _OFTEN:
        for label in once:
            near = did_you_mean(label, [name for name in counts if name != label])
            yield first[label], (f"label={short(label)} has one row, and every other label {min(others)} or more: "
                                 f"correct it if it is misspelt.{near}")


def same_prompts(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message for each held-out row whose prompt and media equal those of a row in train, whatever the other
    fields are."""
    if (task := context.task) is None:
        return
    trained: dict[str, str] = {}
    for n, row in sorted(enumerate(rows), key=lambda one: one[1].side != "train"):
        if row.side is None or row.sample is None or has_environment(task.of(row.sample)):  # which shows more
            continue
        if row.side == "train":
            trained.setdefault(prompt_digest(task, row), row.where)
        elif not _has_leak(row) and (key := prompt_digest(task, row)) and key in trained:
            yield n, _leak(row, "row", trained[key])


def _leak(row: CheckedRow, kind: str, where: str) -> str:
    what, way_out = _LEAKS[kind]
    return f"{what.format(short(row.row.get('group_key')))} is in train too, in {where}; {way_out}"


def _has_leak(row: CheckedRow) -> bool:
    return any(f.kind == "leak" for f in row.findings)


def look_alikes(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, str]]:
    """Yields a message for each held-out row with an image that looks like an image in train, such as a resized or
    recompressed copy."""
    shown = {side: {file.sha256: (row, file.signature) for row in rows if row.side == side
                    for file in row.files if file.signature} for side in ("train", "heldout")}
    own = [look for sha, (_, look) in shown["heldout"].items() if sha not in shown["train"]]
    if not own or not shown["train"]:
        return
    from vlrl.checks.image_similarity import similar_images

    near = {one.heldout: one for one in similar_images([look for _, look in shown["train"].values()], own)}
    for n, row in enumerate(rows):
        one = next((near[f.sha256] for f in row.files if row.side == "heldout" and f.sha256 in near), None)
        if one and not _has_leak(row):
            yield n, ("the image looks like a resized or recompressed copy of one in train, in "
                      f"{shown['train'][one.train][0].where} (similarity {one.likeness:.2f}): compare the two images; "
                      "`vlrl data split` keeps such images in the same split, `vlrl data overlap` also finds crops")


def _leak_keys(row: CheckedRow) -> Iterator[tuple[str, str]]:
    """Yields (kind, value) for everything in a row that must not occur in both train and held-out rows: the question
    with its media (kind "row"), the group_key ("group"), and the content or path of each media file ("media")."""
    question: dict[str, Any] = {name: value for name, value in row.row.items() if name not in _NOT_ASKED}
    if question and len(row.media_ids) >= len(row.sample.media if row.sample else ()):  # all its media are known
        yield "row", repr((row.media_ids, sorted(question.items(), key=lambda item: item[0])))
    if row.row.get("group_key") is not None:
        yield "group", str(row.row["group_key"])
    for one in row.media_ids:
        yield "media", one
