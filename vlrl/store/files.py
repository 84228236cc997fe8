"""Atomic file writes, file reads with size limits, and facts about the machine. Imports no torch.

    with replacing(folder / "reward.png") as temporary:     # written to a temporary file, synced, renamed
        figure.savefig(temporary)
    append_line(folder / "metrics.jsonl", '{"step": 0}')    # on the disk when this returns

A full or read-only disk raises a RunError that names the path and says what to do."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil

from vlrl.errors import RunError

MOST_LINE = 1 << 20  # Maximum length of a line in bytes. If a line is longer, only its end is read.
_HEADS = ((b"\x89PNG", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"GIF8", ".gif"), (b"BM", ".bmp"), (b"II*\0", ".tiff"),
          (b"MM\0*", ".tiff"), (b"\x1aE\xdf\xa3", ".mkv"))
_INNER = {b"WEBP": ".webp", b"AVI ": ".avi", b"avif": ".avif"}  # at byte 8
_PACKAGES = ("vlrl", "torch", "torchvision", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy",
             "pyarrow", "pillow", "qwen-vl-utils", "vllm")

# --- writing and reading ----------------------------------------------------------------------------------------------


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Context manager that turns disk errors in its block into a RunError that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        there = next((p for p in (path, *path.parents) if os.path.lexists(p)), Path("/"))
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT, errno.EIO):  # None: raised by append_line
            raise RunError(f"cannot write {path}: {error.strerror or error} ({shutil.disk_usage(there).free:,} bytes "
                           "free there). Free space, or set run.dir elsewhere; the same command then continues from "
                           "the last checkpoint.") from error
        why = error.strerror if there == path or os.path.isdir(there) else f"{there} is not a folder"
        raise RunError(f"cannot write {path}: {why}. Use another path (for a run, set run.dir), or fix the "
                       f"permissions of {there}.") from error


def is_disk_error(error: Exception) -> bool:
    """Whether the error comes from the disk or file system and not from the code. Exceptions of safetensors and
    tokenizers are recognized by their messages, any other error by the type OSError."""
    words = ("no space left", "os error", "i/o error", "disk quota")
    return isinstance(error, OSError) or any(w in str(error).lower() for w in words)


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """Context manager that yields a temporary path in the folder of `path`. The temporary file replaces `path` if the
    block succeeds, and is removed otherwise. With `sync`, waits at the end until the file is on the disk. Raises
    RunError if the disk is full or read-only."""
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"  # hosts may share the folder
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if sync:
                fsync(temporary)
            os.replace(temporary, path)
            if sync:
                fsync(path.parent)
        finally:
            if temporary.exists():
                temporary.unlink()


def fsync(path: Path) -> None:
    """Waits until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, sync: bool = True) -> None:
    """Replaces the text of a file atomically; see `replacing`."""
    with replacing(path, sync) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Appends a line completely or not at all. If a killed process left an incomplete line, starts a new line."""
    data = (line + "\n").encode()
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            _refuse_special(file.fileno(), path)
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data  # a killed process left half a line
            written = file.write(data)
            if written != len(data):
                file.truncate(size)
                raise OSError(f"only {written} of {len(data)} bytes fit")
            os.fsync(file.fileno())


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError for a pipe or device (such as /dev/zero), which may be endless."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _refuse_special(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_small(path: Path, most: int = 64 << 20) -> bytes:
    """Returns the content of a settings or status file. Raises OSError if the file has more than `most` bytes, or is a
    pipe or device."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"the file has more than {most:,} bytes", str(path))
    return content


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields (line with its line break, length in bytes) for each line from the offset `start`. Of a line with more
    than MOST_LINE bytes, only "#" and the end of the line are yielded. Raises OSError for a pipe or device."""
    with open_regular(path) as file:
        file.seek(start)
        while line := file.readline(MOST_LINE):
            length = len(line)
            while not line.endswith(b"\n") and len(line) == MOST_LINE:
                line = b"#" + file.readline(MOST_LINE - 1)
                length += len(line) - 1
            yield line, length


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if the file is missing, not a regular file or not a complete object."""
    try:
        return dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits. The file is read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def suffix_of(head: bytes) -> str:
    """Returns the usual suffix of media files that begin with the bytes `head`; ".bin" if unknown. Decoders ignore a
    suffix."""
    if head[4:8] == b"ftyp" and head[8:12] not in _INNER:
        return ".mp4"
    return _INNER.get(head[8:12]) or next((suffix for start, suffix in _HEADS if head.startswith(start)), ".bin")


def await_shared(path: Path, content: Mapping[str, Any] | None, seconds: float = 60) -> None:
    """Waits until the JSON file `path`, which another process wrote, has this content on this host. Network file
    systems need some time. Raises RunError after `seconds`: then the hosts do not share the folder."""
    end = time.monotonic() + seconds
    while read_json(path) != content:
        if time.monotonic() > end:
            raise RunError(f"{path.parent} on {socket.gethostname()} is not the folder in which rank 0 wrote "
                           f"{path.name}. Set run.dir to a folder that every host sees at the same absolute path.")
        time.sleep(0.2)


def cache_folder(name: str = "") -> Path:
    """Returns `name` as an absolute path; if empty, this user's cache folder for vlrl. The folder need not exist."""
    if name:
        return Path(name).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home, "vlrl").absolute()


def move_to_backup(path: Path) -> None:
    """Moves the files of an earlier run in `path` to a new folder next to it, NAME.before-1, 2 ... Deletes nothing."""
    left = [p for p in path.iterdir() if p.name != "run.lock"]
    if not left:
        return
    number = next(i for i in range(1, 10**6) if not path.with_name(f"{path.name}.before-{i}").exists())
    aside = path.with_name(f"{path.name}.before-{number}")
    aside.mkdir()
    for item in left:
        item.rename(aside / item.name)


# --- the machine ------------------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(seed: int) -> dict[str, Any]:
    """Returns what is needed to repeat a run: versions, git state of the folder, hardware, seed and command."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    commit = _output("git", "rev-parse", "HEAD")
    git = {"commit": commit, "branch": _output("git", "rev-parse", "--abbrev-ref", "HEAD"),
           "changed_files": (_output("git", "status", "--porcelain", "-uno") or "").splitlines()} if commit else None
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    hardware = {"machine": platform.machine(), "cpus": os.cpu_count(), "gpus": (gpus or "").splitlines(),
                "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}
    return {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname(), "command": sys.argv,
            "seed": seed, "python": platform.python_version(), "platform": platform.platform(),
            "packages": versions, "git": git,
            "hardware": hardware}


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# --- strict JSON ------------------------------------------------------------------------------------------------------


def utf8(text: str) -> str:
    r"""Returns a string that can be encoded as UTF-8: a lone surrogate is replaced by its escape sequence, such as
    \ud800."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """Converts a value to one line of strict JSON; see `plain`."""
    return utf8(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any, depth: int = 0) -> Any:
    """Converts a value to a value that JSON can represent. NaN and infinities become null, arrays become lists, and
    values of unknown types become strings. Anything nested deeper than 50 levels becomes "…"."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist(), depth)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= 50:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    return str(value)
