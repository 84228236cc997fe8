"""Finds new prompts that are near duplicates of other new prompts or of held-out rows. Does not import torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl.checks.image_similarity import ImageSignature, image_signature, similar_images
from vlrl.config.schema import Config
from vlrl.data import MEDIA_FIELDS, make_sample, readable
from vlrl.data.media import load
from vlrl.errors import DataError
from vlrl.progress import Progress, no_progress
from vlrl.store.files import file_sha256
from vlrl.task import Task, task_samples
from vlrl.tools.datasets.overlap import shared_texts, text_of, words
from vlrl.tools.synthesis.proposals import Candidate
from vlrl.types import Media, Row, Sample

_REASONS = ("nothing found", "not answered", "malformed")


@dataclass(frozen=True)
class HeldOutRows:
    """Questions, images and ids of the held-out rows."""

    texts: tuple[tuple[str, bool], ...] = ()  # (question, whether the row has media) of each row
    pictures: tuple[ImageSignature, ...] = ()
    ids: frozenset[str] = frozenset()

    @classmethod
    def read(cls, config: Config, task: Task, progress: Progress = no_progress) -> HeldOutRows:
        """Reads the held-out split if the task has one; rows that cannot be read are skipped. Images are read only from
        data.heldout, because a task that generates held-out samples never generates the same image for training."""
        own = getattr(task.samples, "__func__", None) is not Task.samples
        samples = task_samples(task, "heldout") if config.data.heldout or own else ()
        known = [s for i in range(len(samples)) if (s := readable(samples, i))]
        reader, pictures = SignatureReader(config, task, Path()), list[ImageSignature]()
        for done, sample in enumerate(known if config.data.heldout else ()):
            progress("reading held-out media", done, len(known))
            pictures += reader.of_sample(sample)
        return cls(tuple((question_text(task, s.row), bool(s.media)) for s in known), tuple(pictures),
                   frozenset(s.id for s in known))


@dataclass(frozen=True)
class SignatureReader:
    """Computes signatures of the images and videos of samples. Each file is read only once."""

    config: Config
    task: Task
    root: Path  # folder that media paths of rows are relative to
    _read: dict[str, ImageSignature] = field(default_factory=dict)

    def of_row(self, row: Row) -> Iterator[ImageSignature]:
        """Yields the signatures of a row's images and videos. Yields nothing for a row that the task cannot read."""
        try:
            yield from self.of_sample(make_sample(self.task, row, self.root))
        except DataError:
            return

    def of_sample(self, sample: Sample) -> Iterator[ImageSignature]:
        """Yields the signatures of a sample's images, and the hashes of its video files. Raises DataError for media
        that cannot be read."""
        for media in sample.media:
            named = isinstance(media.source, (str, os.PathLike))
            if media.kind == "image" or named:
                name = os.fspath(media.source) if named else ""
                picture = self._read.get(name) or self._picture(sample.id, media)
                if named:
                    self._read[name] = picture
                yield replace(picture, id=sample.id)

    def _picture(self, id: str, media: Media) -> ImageSignature:
        if media.kind == "image":
            loaded = load(media, self.config.limits)
            return image_signature(id, loaded.sha256, loaded.frames[0])
        return ImageSignature(id, file_sha256(Path(media.source)))


def question_text(task: Task, row: Mapping[str, Any]) -> str:
    """The question of a row: its canonical question fields or, if it has none, the values of the task's
    `written_fields`, joined."""
    return text_of(row) or " ".join(str(row[name]) for name in task.written_fields if name in row)


def distinct(candidates: Sequence[Candidate], heldout: HeldOutRows, task: Task, reader: SignatureReader | None = None,
             parents: Sequence[Mapping[str, Any]] = ()) -> tuple[dict[int, Row], Counter[str]]:
    """Removes near duplicates from new prompts. Returns (number -> row of the remaining candidates, reason -> number of
    removed candidates).

    A candidate is a near duplicate of another text if both have the same words, or if half of its 13-grams occur in the
    other text. It is compared with the texts of held-out rows, and with earlier candidates of the same category and the
    same media. A candidate is also removed in three other cases: it has the same words as a row in `parents` (the rows
    that candidates are made from), it has an image of a held-out row (also resized, recompressed or cropped), or its id
    already exists. Candidates with the same words but different media are both kept."""
    rows, counts, same = dict[int, Row](), Counter[str](), dict[tuple[str, ...], list[str]]()
    near = _near_heldout([one.row for one in candidates if one.row is not None], heldout, task, reader)
    words_of = {(*_kind(row), *words(question_text(task, row))) for row in parents}
    ids = {*heldout.ids}
    for one in candidates:
        if one.row is None:
            counts[one.reason if one.reason in _REASONS else "failed"] += 1
            continue
        id, text, kind = one.row["id"], question_text(task, one.row), _kind(one.row)
        if id in near:
            counts["near a held-out row"] += 1
        elif id in ids or (*kind, *words(text)) in words_of or _alike(text, same.setdefault(kind, [])):
            counts["near-duplicate"] += 1
        else:
            rows[one.number] = one.row
            same[kind].append(text)
            ids.add(id)
    return rows, counts


def _near_heldout(rows: Sequence[Row], heldout: HeldOutRows, task: Task, reader: SignatureReader | None) -> set[str]:
    texts = [(row["id"], question_text(task, row), bool(_media(row))) for row in rows]
    whole = {(*words(text),) for text, with_media in heldout.texts if not with_media} - {()}
    near = {id for id, text, with_media in texts if not with_media and (*words(text),) in whole}
    grams = shared_texts([(str(i), text, True) for i, (text, _) in enumerate(heldout.texts)],
                     [(id, text, True) for id, text, _ in texts])
    return near | {one.heldout for one in grams} | _shows_heldout(rows, heldout, reader)


def _shows_heldout(rows: Sequence[Row], heldout: HeldOutRows, reader: SignatureReader | None) -> set[str]:
    pictures = [one for row in rows for one in reader.of_row(row)] if reader and heldout.pictures else []
    each = {one.sha256: one for one in pictures}  # many rows ask about one picture
    matches = {one.heldout for one in similar_images(heldout.pictures, [replace(o, id=name) for name,
                                                                        o in each.items()])}
    return {one.id for one in pictures if one.sha256 in matches}


def _media(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in MEDIA_FIELDS if row.get(name))


def _kind(row: Mapping[str, Any]) -> tuple[str, ...]:
    return str(row.get("category")), *_media(row)


def _alike(text: str, others: Sequence[str]) -> bool:
    own = words(text)
    whole = any(own and own == words(other) for other in others)
    return whole or bool(shared_texts([(str(i), other, True) for i, other in enumerate(others)], [("", text, True)]))
