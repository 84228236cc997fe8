"""How a long job reports how far it is."""

from collections.abc import Callable

Progress = Callable[[str, float, int], None]
"""`progress(what, done, total)`, called as the work proceeds; `done` counts pieces of work and may be a fraction."""


def no_progress(what: str, done: float, total: int) -> None:
    """Reports nothing."""
