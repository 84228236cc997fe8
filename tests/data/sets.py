"""Small data files and their samples, for the tests of readers."""

import io

from PIL import Image

from vlrl.config.schema import DataSettings
from vlrl.data import read_samples
from vlrl.task import Task


def encoded(color="red", size=(8, 6), format="PNG") -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format)
    return file.getvalue()


def picture(shade=0) -> bytes:
    """A PNG of one colour."""
    return encoded((shade, 0, 0))


def read(path, index="lazy", split="train", cache=None, **more):
    """The samples of a split in a file, a folder or under another name (with `cache`)."""
    task = Task()
    task.data = DataSettings(**{split: str(path)}, index=index, cache=str(cache or path.parent / "cache"), **more)
    return read_samples(task, split)
