"""What makes two samples the same."""

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


def content_of(media: Media) -> str:
    """Returns what tells an image or video from others, by `media_key`."""
    return _digest([media.kind, media.start, media.end, media.fps, media.times, *map(media_key, sources_of(media))])


def media_key(source: Any) -> str:
    """Returns what tells an image or video from others: of a drawing its pixels, of a file its beginning and size."""
    if isinstance(source, Image.Image):
        try:
            return hashlib.sha256(f"{source.mode}{source.size}".encode() + as_rgb(source).tobytes()).hexdigest()
        except DataError as error:  # said where it is loaded
            return str(error)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with open(source, "rb") as file:  # enough to tell files apart, cheap for videos
            return hashlib.sha256(file.read(1 << 20)).hexdigest() + str(os.path.getsize(source))
    return repr(source)


def asked(task: Task, row: CheckedRow) -> str:
    """Returns what the model sees of a row, "" where that is not known: its media by content where that was read, else
    by path.
    """
    sample = row.sample
    if sample is None or len(row.contents) < len(sample.media):
        return ""
    shown = [(file.sha256 or file.path, file.start, file.end) for file in row.files]
    try:
        return _digest([task_messages(task, sample), shown])
    except VlrlError:  # another rule says so
        return ""


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(task: Task, sample: Sample) -> str:
    """Tells two samples apart: id, row, media and messages."""
    return _digest([sample.id, sample.row, task.messages(sample), *map(content_of, sample.media)])


def other_sample(when: str) -> str:
    """Returns what is said of a sample that is another one `when` it is asked for again."""
    return (f"the sample is another one {when}: draw from random.Random of (self.seed, split, index), never from a "
            "shared generator, hash() or a set")
