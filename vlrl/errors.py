"""Errors that a user can cause and fix.

    VlrlError                   printed as one message, without a traceback
    ├── ConfigError             a setting: its name, its value and the way out
    ├── DataError               a row or a media file
    ├── TaskError               a task's code breaks the Task contract
    ├── RunError                the run folder: in use, of another config, unreadable checkpoint, disk full
    ├── TrainingError           the run itself went wrong: NaN loss, too many scoring errors
    └── RankError               another process of the run is gone, hangs, or cannot be reached"""

import difflib
from collections.abc import Iterable


class VlrlError(Exception):
    """Base of every error that the user can fix; the command line prints its message and exits with 1."""


class ConfigError(VlrlError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class DataError(VlrlError, ValueError):
    """A row or a media file cannot be used."""


class TaskError(VlrlError, ValueError):
    """A task breaks the Task contract."""


class RunError(VlrlError, RuntimeError):
    """The run folder cannot be used as asked."""


class TrainingError(VlrlError, RuntimeError):
    """Training cannot go on."""


class NotFiniteError(TrainingError):
    """The model's logits are NaN or infinite, so no token can be sampled."""


class RankError(VlrlError, RuntimeError):
    """A process waited too long for others of its run."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'lr'?"` for the known word closest to `word`, or `""` when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
