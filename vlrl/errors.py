"""Errors that a user can cause and fix.

    VlrlError                   printed as one message, without a traceback
    ├── ConfigError             a setting: its name, its value and how to fix it
    ├── DataError               a row or a media file
    ├── TaskError               a task's code breaks the Task contract
    ├── RunError                the run folder: in use, of another config, unreadable checkpoint, disk full
    ├── TrainingError           the training failed: NaN loss, too many scoring errors
    └── RankError               another process of the run has ended, hangs, or cannot be reached"""

import difflib
from collections.abc import Iterable


class VlrlError(Exception):
    """Base class of all errors that the user can fix; the command line prints the message and exits with status 1."""


class ConfigError(VlrlError, ValueError):
    """A setting is unknown, has the wrong type or is out of range."""


class DataError(VlrlError, ValueError):
    """A row or a media file cannot be used."""


class TaskError(VlrlError, ValueError):
    """A task breaks the Task contract."""


class RunError(VlrlError, RuntimeError):
    """The run folder cannot be used as requested."""


class TrainingError(VlrlError, RuntimeError):
    """Training cannot continue."""


class NotFiniteError(TrainingError):
    """The model's logits are NaN or infinite, so no token can be sampled."""


class RankError(VlrlError, RuntimeError):
    """Another process of the run has ended, hangs or cannot be reached."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'lr'?"` for the known word most similar to `word`; `""` if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
