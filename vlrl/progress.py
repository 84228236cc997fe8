"""The callback with which a long job reports its progress."""

from collections.abc import Callable

Progress = Callable[[str, float, int], None]
"""`progress(what, done, total)`, called repeatedly during the work; `done` counts units and may be a fraction."""


def no_progress(what: str, done: float, total: int) -> None:
    """A Progress callback that does nothing."""
