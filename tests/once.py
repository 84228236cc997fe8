"""What hundreds of tests would do again, and a process of a user does once."""

import copy
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from _pytest.logging import catching_logs


def install() -> None:
    """Saves it for what is imported by now."""
    do_not_sync()
    if hasattr(catching_logs(logging.NullHandler()), "attached_loggers"):
        catching_logs.__enter__ = _at_the_root  # type: ignore[method-assign]
    if "transformers" in sys.modules:
        from transformers import PreTrainedConfig
        PreTrainedConfig.__repr__ = object.__repr__  # half of loading a tiny model: the text of an unprinted log line
    if "typer" in sys.modules:
        import typer.main
        typer.main.get_command = cache(typer.main.get_command)  # most of a short command: making all of them
    if "httpx" in sys.modules:
        import ssl
        ssl.create_default_context = _read_once(ssl.create_default_context)
    if loading := sys.modules.get("vlrl.models.loading"):
        loading._load_whole = _copies(loading._load_whole, loading.resolve)


def do_not_sync() -> None:
    """Leaves files to the system's cache, which outlives a killed process. What a machine that loses its power keeps is
    tested in tests/store, by the calls to `os.fsync`."""
    os.fsync = lambda descriptor: None


def _at_the_root(self: Any) -> logging.Handler:
    """Has pytest record what reaches the root logger. It looks through all loggers, 2,500 of them, for some that hand
    nothing on, six times a test."""
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


def _read_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `create_default_context` that reads the 140 certificates of a file once, which takes 20 ms."""
    cached = cache(lambda cafile: make(cafile=cafile))
    return lambda *args, **more: cached(more["cafile"]) if not args and set(more) == {"cafile"} else make(*args, **more)


def _copies(load: Callable[..., Any], resolve: Callable[[str], str]) -> Callable[..., Any]:
    """Returns a `_load_whole` that reads a model for the CPU once while its files stay as they are, and copies that."""
    cached: dict[Any, Any] = {}

    def copied(name: str, dtype: Any, what: str, quantized: Any, device: Any) -> Any:
        folder = Path(resolve(name))
        if quantized is not None or (device is not None and device.type != "cpu") or not folder.is_dir():
            return load(name, dtype, what, quantized, device)
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        files = tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
        if (name, dtype, files) not in cached:
            if len(cached) > 20:
                cached.clear()
            cached[name, dtype, files] = load(name, dtype, what, quantized, device)
        return copy.deepcopy(cached[name, dtype, files])

    return copied
