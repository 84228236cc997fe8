"""Hashes of media, prompts and samples, which are equal for equal content."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from PIL import Image

from vlrl.checks.rule import CheckedRow
from vlrl.data.media import as_rgb
from vlrl.data.row_media import sources_of
from vlrl.errors import DataError, VlrlError
from vlrl.task import Task, task_messages
from vlrl.types import Media, Sample


def media_digest(media: Media) -> str:
    """Hash of an image or video, computed from its files or pixels (`source_digest`), time range and frame times."""
    return _digest([media.kind, media.start, media.end, media.fps, media.times,
                    *map(source_digest, sources_of(media))])


def source_digest(source: Any) -> str:
    """Hash of one source of an image or video. For an image in memory it is a hash of the pixels, for a file a hash of
    its first MiB followed by its size."""
    if isinstance(source, Image.Image):
        try:
            return hashlib.sha256(f"{source.mode}{source.size}".encode() + as_rgb(source).tobytes()).hexdigest()
        except DataError as error:  # reported where it is loaded
            return str(error)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with open(source, "rb") as file:  # enough to tell files apart, cheap for videos
            return hashlib.sha256(file.read(1 << 20)).hexdigest() + str(os.path.getsize(source))
    return repr(source)


def prompt_digest(task: Task, row: CheckedRow) -> str:
    """Hash of a row's prompt as the model sees it: messages and media. "" if the content of the media is unknown."""
    sample = row.sample
    if sample is None or len(row.media_ids) < len(sample.media):
        return ""
    media = [(file.sha256 or file.path, file.start, file.end) for file in row.files]
    try:
        return _digest([task_messages(task, sample), media])
    except VlrlError:  # another rule reports it
        return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def fingerprint(task: Task, sample: Sample) -> str:
    """Hash of a sample: its id, row, media and messages."""
    return _digest([sample.id, sample.row, task.messages(sample), *map(media_digest, sample.media)])


def unstable_sample(when: str) -> str:
    """The message about a task that returns a different sample at a second request; `when` describes that request."""
    return (f"the sample differs {when}: use random.Random with a seed made of (self.seed, split, index), never "
            "a shared generator, hash() or the order of a set")
