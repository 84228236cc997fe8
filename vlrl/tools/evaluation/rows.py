"""Rows of an evaluation in answers.jsonl, one per answer, with all that its metrics are computed from. No torch.

The first line holds the facts that the answers depend on. Each other one is an answer:

    split, number, sample, task     position in the split, the sample's id, the label of its task
    setting, seed, index            name of the setting, seed, index among the answers to the sample
    content                         hash of question and target, independent of id and wording
    prompt                          hash of the prompt as the model sees it, media included
    cluster                         hash of the media, which other questions may share
    answer, parsed, target          the text, the task's parse of it, and the target
    parts, reward, correct, metrics, confidence
    tokens, truncated, finish_reason, size, error

or a sample that could not be asked: split, number, sample, setting, seed and the reason `left_out`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.data.row_samples import FIELDS, MEDIA_FIELDS
from vlrl.errors import ConfigError
from vlrl.store import plain
from vlrl.store.files import append_line, write_text
from vlrl.types import Row

NOT_CONTENT = {*MEDIA_FIELDS, "id", "difficulty", "difficulty_given", "pass_at_k", "reward_mean", "answers_scored",
                "category", "source", "split", "weight", "processed_size", "coordinates", "solution", "rejected",
                "hints", "group_key", "meta", "original_id", "width", "height"}
"""Fields of a row that are no part of question and target."""
_ASKS = {"question", "expression", "instruction", "label", "labels", "responses", "trajectory", "action"}
"""A row with one of these fields is canonical: its other fields, such as texts for a template, are not content."""

Key = tuple[str, str, int, int]
"""Split, setting, seed and position in the split."""


def content_hash(row: Mapping[str, Any], target: Any, media: Sequence[str]) -> str:
    """sha256 of a question: its row without ids, paths, weights and the like, its target, and the sha256 of each of its
    `media`. The same image under another name, or the same row under another id, has the same hash.
    """
    known = FIELDS if _ASKS & row.keys() else row.keys()
    content = {key: value for key, value in row.items() if key in known and key not in NOT_CONTENT}
    return _hash([plain(content), plain(target), list(media)])


def prompt_hash(text: str, media: Sequence[str]) -> str:
    """sha256 of a rendered prompt and of the sha256 of each of its media."""
    return _hash([text, list(media)])


def cluster_hash(media: Sequence[str], content: str) -> str:
    """A hash shared by all questions about the same media; for a question without media its own content."""
    return _hash(list(media)) if media else content


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a row."""
    return row["split"], row["setting"], row["seed"], row["number"]


def read_rows(path: str | Path) -> list[Row]:
    """Answers and left-out samples of an answers.jsonl, each once and in order. A half-written last line is skipped,
    and of duplicate rows the later counts.

    Raises ConfigError where the file cannot be read.
    """
    return sorted(_latest(_objects(Path(path))).values(), key=_order)


class RowFile:
    """An answers.jsonl that grows as answers come in, and resumes where an earlier process ended."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        """Raises ConfigError when the file was begun with other facts, or is something else."""
        self.path, self.facts = path, json.loads(json.dumps(plain(facts)))
        self._rows = _latest(resume_lines(path, facts, "an evaluation", "folder"))

    def rows(self) -> list[Row]:
        """All rows in order."""
        return sorted(self._rows.values(), key=_order)

    def answered(self, answers: int) -> set[Key]:
        """The keys that need no more answers: with `answers` answers without a server error, or left out."""
        count: dict[Key, int] = {}
        for row in self._rows.values():
            if row.get("left_out") or not row.get("unanswered"):
                count[key_of(row)] = count.get(key_of(row), 0) + (answers if row.get("left_out") else 1)
        return {key for key, n in count.items() if n >= answers}

    def add(self, rows: Sequence[Row]) -> None:
        """Appends rows in one write."""
        if rows:
            append_line(self.path, "\n".join(json.dumps(plain(row)) for row in rows))
            _latest(rows, self._rows)

    def close(self) -> None:
        """Rewrites the file in order, each row once: a resumed evaluation leaves the same file as an undisturbed one.
        """
        lines = [{"facts": self.facts}, *self.rows()]
        write_text(self.path, "".join(json.dumps(plain(line)) + "\n" for line in lines))


def resume_lines(path: Path, facts: Mapping[str, Any], what: str, place: str) -> list[Row]:
    """The lines of a file that grows with `what` (an evaluation, verdicts); a new file is begun with the facts.

    Raises ConfigError where its facts differ, naming each difference, or where it is another kind of file; `place` is
    the thing to remove.
    """
    known = json.loads(json.dumps(plain(facts)))
    lines = list(_objects(path)) if os.path.lexists(path) else []
    before = next((line["facts"] for line in lines if isinstance(line.get("facts"), dict)), None)
    if before is None and lines:
        raise ConfigError(f"{path} is not the file of {what}: remove it, or name another {place} with --out")
    if before is None:
        append_line(path, json.dumps({"facts": known}))
    elif changed := sorted(differing_leaves(before, known)):
        raise ConfigError(f"{path} holds {what} with other settings:\n  " + "\n  ".join(changed) +
                          f"\nSet them back, remove that {place} to start over, or name another with --out.")
    return lines


def differing_leaves(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """`rollout.temperature was 1.0, is 0.5` for each leaf in which two JSON trees differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differing_leaves(before.get(key), after.get(key), f"{name}.{key}" if name else key)
    elif before != after:
        yield f"{name} was {json.dumps(before)[:200]}, is {json.dumps(after)[:200]}"


def _objects(path: Path) -> Iterator[Row]:
    """The complete lines; a half-written one of a killed process is skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file of answers, such as the "
                          "answers.jsonl of an evaluation") from None
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _latest(lines: Iterable[Row], latest: dict[tuple[Any, ...], Row] | None = None) -> dict[tuple[Any, ...], Row]:
    """(key, index) -> row, added to `latest`; index -1 for a left-out sample. An answer is only replaced by another
    answer.
    """
    latest = {} if latest is None else latest
    for line in lines:
        try:
            place = (*key_of(line), line.get("index", -1))
            hash(place)
        except (KeyError, TypeError):
            continue
        if not line.get("unanswered") or latest.get(place, line).get("unanswered"):
            latest[place] = line
    return latest


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["split"], row["setting"], row["seed"], row["number"], row.get("index", -1)
