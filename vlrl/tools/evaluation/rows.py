"""The rows of an evaluation in answers.jsonl: one row per answer, with everything that its metrics are computed from.
Does not import torch.

The first line of the file holds the facts that the answers depend on. Every other line is an answer:

    split, number, sample, task     position in the split, the sample's id, the label of its task
    setting, seed, index            name of the setting, seed, index among the answers to the sample
    content                         hash of question and target, independent of id and wording
    prompt                          hash of the prompt as the model sees it, media included
    cluster                         hash of the media, which other questions may share
    answer, parsed, target          the text, the task's parse of it, and the target
    parts, reward, correct, metrics, confidence
    tokens, truncated, finish_reason, size, error

or a sample that could not be asked, with the fields split, number, sample, setting, seed and the reason `left_out`."""

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
"""Fields of a data row that are not part of the question or the target."""
_ASKS = {"question", "expression", "instruction", "label", "labels", "responses", "trajectory", "action"}
"""Fields that only canonical data rows have. If a row has one of them, fields that are not canonical (such as texts for
a prompt template) do not count as its content."""

Key = tuple[str, str, int, int]  # (split, setting, seed, position in the split)


def content_hash(row: Mapping[str, Any], target: Any, media: Sequence[str]) -> str:
    """The sha256 of a question: of its target, of the hashes `media` of its images and videos, and of its row without
    fields such as ids, paths and weights.

    The hash does not depend on the file name of an image or the id of a row."""
    known = FIELDS if _ASKS & row.keys() else row.keys()
    content = {key: value for key, value in row.items() if key in known and key not in NOT_CONTENT}
    return _hash([plain(content), plain(target), list(media)])


def prompt_hash(text: str, media: Sequence[str]) -> str:
    """The sha256 of the text of a rendered prompt and of `media`, the sha256 of each of its images and videos."""
    return _hash([text, list(media)])


def cluster_hash(media: Sequence[str], content: str) -> str:
    """A hash that is equal for all questions about the same media. Without media, the hash `content` of the question is
    returned."""
    return _hash(list(media)) if media else content


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a row: (split, setting, seed, position in the split)."""
    return row["split"], row["setting"], row["seed"], row["number"]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of an answers.jsonl (answers and samples that were left out), sorted and without duplicates.

    An incomplete last line is skipped; of duplicate rows the later one counts. Raises ConfigError for an unreadable
    file."""
    return sorted(_latest(_objects(Path(path))).values(), key=_order)


class RowFile:
    """An answers.jsonl file to which rows are appended as answers arrive. An existing file is continued."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        """Opens or creates the file. `facts` is JSON that describes everything that the answers depend on (model,
        settings, data).

        Raises ConfigError if the file was started with different facts, or is not an answers file."""
        self.path, self.facts = path, json.loads(json.dumps(plain(facts)))
        self._rows = _latest(resume_lines(path, facts, "an evaluation", "folder"))

    def rows(self) -> list[Row]:
        """All rows, sorted."""
        return sorted(self._rows.values(), key=_order)

    def answered(self, answers: int) -> set[Key]:
        """Returns the keys (see key_of) of samples that need no further answers. These are the samples with `answers`
        answers without a server error, and the samples that were left out."""
        count: dict[Key, int] = {}
        for row in self._rows.values():
            if row.get("left_out") or not row.get("unanswered"):
                count[key_of(row)] = count.get(key_of(row), 0) + (answers if row.get("left_out") else 1)
        return {key for key, n in count.items() if n >= answers}

    def add(self, rows: Sequence[Row]) -> None:
        """Appends rows to the file in a single write."""
        if rows:
            append_line(self.path, "\n".join(json.dumps(plain(row)) for row in rows))
            _latest(rows, self._rows)

    def close(self) -> None:
        """Rewrites the file sorted and without duplicates, so that a resumed evaluation leaves the same file as an
        uninterrupted one."""
        lines = [{"facts": self.facts}, *self.rows()]
        write_text(self.path, "".join(json.dumps(plain(line)) + "\n" for line in lines))


def resume_lines(path: Path, facts: Mapping[str, Any], what: str, place: str) -> list[Row]:
    """Opens a file of JSON lines to continue it, and returns its lines. If there is no file, it is created with the
    facts as its first line.

    Raises ConfigError if the file was started with different facts, naming each difference, or if it is another kind of
    file. In the error messages, `what` describes the lines (such as "verdicts"), and `place` ("file" or "folder") is
    what the user should remove."""
    known = json.loads(json.dumps(plain(facts)))
    lines = list(_objects(path)) if os.path.lexists(path) else []
    before = next((line["facts"] for line in lines if isinstance(line.get("facts"), dict)), None)
    if before is None and lines:
        raise ConfigError(f"{path} is not a file of {what}. Remove the file, or give another {place} with --out")
    if before is None:
        append_line(path, json.dumps({"facts": known}))
    elif changed := sorted(differing_leaves(before, known)):
        raise ConfigError(f"{path} holds {what} with other settings:\n  " + "\n  ".join(changed) +
                          f"\nRestore these settings, remove the {place} to start over, or give another {place} with "
                          "--out.")
    return lines


def differing_leaves(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Yields a text such as `rollout.temperature was 1.0, is 0.5` for each leaf in which two JSON trees differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differing_leaves(before.get(key), after.get(key), f"{name}.{key}" if name else key)
    elif before != after:
        yield f"{name} was {json.dumps(before)[:200]}, is {json.dumps(after)[:200]}"


def _objects(path: Path) -> Iterator[Row]:
    """Yields the JSON objects in the lines of a file. An incomplete line left by a killed process is skipped. Raises
    ConfigError for an unreadable file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give a file of answers, such as the "
                          "answers.jsonl of an evaluation") from None
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _latest(lines: Iterable[Row], latest: dict[tuple[Any, ...], Row] | None = None) -> dict[tuple[Any, ...], Row]:
    """Returns the latest row for each key (split, setting, seed, number, index), where the index is -1 for a sample
    that was left out. A row without an answer never replaces a row with an answer. If the dictionary `latest` is
    given, the rows are added to it."""
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
