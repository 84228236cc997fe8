"""Saves models. A trial save before the first step makes failures show early instead of after hours."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlrl.errors import RunError, VlrlError
from vlrl.store.files import is_disk_error

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_log = logging.getLogger(__name__)


def drop_unused_sampling(model: Any, name: str) -> None:
    """Removes the sampling settings from a model's generation config if do_sample is not set there. transformers
    ignores such settings when it reads the file, but refuses to save them. `name` names the model in the warning."""
    config = getattr(model, "generation_config", None)
    given = [one for one in _SAMPLED if getattr(config, one, None) is not None]
    if config is None or config.do_sample or not given:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        _log.warning("generation_config.json of %s sets %s without do_sample=true. Such settings have no effect and "
                     "cannot be saved, so they are removed", name,
                     ", ".join(f"{one}={getattr(config, one)}" for one in given))
        for one in given:
            setattr(config, one, None)


def write_model(model: Any, processor: Any, folder: Path, **options: Any) -> None:
    """Writes a model or adapter, and its processor, into a folder. Raises RunError, which says what cannot be saved. A
    disk failure raises OSError, or another error that is_disk_error recognizes."""
    with _save_errors("the model's config, generation config or weights"):
        model.save_pretrained(folder, safe_serialization=True, **options)
    with _save_errors("its tokenizer and processor"):
        processor.save_pretrained(folder)


@contextlib.contextmanager
def _save_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (VlrlError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever the libraries raise for what they cannot write
        if is_disk_error(error):
            raise
        lines = " ".join(str(error).split())[:600]
        raise RunError(f"model.name: {what} cannot be saved: {type(error).__name__}: {lines}. Correct the file in the "
                       "model's folder, or copy it again from the original model") from error


def try_writing(place: Path | None, write: Callable[[Path], None]) -> None:
    """Calls `write` with a new folder below `place` (None: in the temporary directory), then removes the folder. Raises
    RunError if writing fails."""
    try:
        if place:
            place.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".tmp-try-{os.getpid()}-", dir=place))
        try:
            write(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        if not is_disk_error(error):
            raise
        why = getattr(error, "strerror", None) or error
        raise RunError(f"run.dir: nothing can be saved in {place}: {why}. Free space on this "
                       "disk, fix the folder's permissions, or choose another run.dir") from error
