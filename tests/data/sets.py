"""Small data files and their samples, for the tests of readers."""

import io
import json
import struct
import zlib

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


def bomb(width=50_000, height=50_000) -> bytes:
    """A PNG that says it is huge and holds nothing."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")),
              (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)


def save(path, value):
    """Writes text as it is, a list of rows (or texts of rows) as lines into a file of lines, all else as JSON."""
    if isinstance(value, list) and path.suffix == ".jsonl":
        value = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in value)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def read(path, index="lazy", split="train", cache=None, task=None, **more):
    """The samples of a split in a file, a folder or under another name (with `cache`)."""
    task = task or Task()
    task.data = DataSettings(**{split: str(path)}, index=index, cache=str(cache or path.parent / "cache"), **more)
    return read_samples(task, split)
