"""What makes two samples the same."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from PIL import Image

from vlrl.data.media import drawn
from vlrl.errors import DataError
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.types import Media, Sample


def asked(task: Task, sample: Sample) -> str:
    """Returns what the model sees of a sample; with an environment also its row, which makes its world."""
    world = sample.row if has_environment(task.of(sample)) else {}
    return _digest([*_prompt_parts(task, sample), *([dict(world)] if world else ())])


def _prompt_parts(task: Task, sample: Sample) -> list[Any]:
    return [task.messages(sample), [_media_key(m) for m in sample.media]]


def _media_key(media: Media) -> list[Any]:
    sources = media.source if isinstance(media.source, (list, tuple)) else [media.source]
    return [media.kind, media.start, media.end, *map(media_key, sources)]


def media_key(source: Any) -> str:
    """Returns what tells an image or video from others: of a drawing its pixels, of a file its beginning and size."""
    if isinstance(source, Image.Image):
        try:
            return hashlib.sha256(f"{source.mode}{source.size}".encode() + drawn(source).tobytes()).hexdigest()
        except DataError as error:  # said where it is loaded
            return str(error)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with open(source, "rb") as file:  # enough to tell files apart, cheap for videos
            return hashlib.sha256(file.read(1 << 20)).hexdigest() + str(os.path.getsize(source))
    return repr(source)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(task: Task, sample: Sample) -> str:
    """Tells two samples apart: id, row, media and messages."""
    return _digest([sample.id, sample.row, *_prompt_parts(task, sample)])


def other_sample(when: str) -> str:
    """Returns what is said of a sample that is another one `when` it is asked for again."""
    return (f"the sample is another one {when}: draw from random.Random of (self.seed, split, index), never from a "
            "shared generator, hash() or a set")
