"""Which of data.train and data.heldout a task asks for: rows beside samples of its own would be left unread in silence.

What counts is that `samples` looks at the setting, so a task may read its file in whatever way it likes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import PrivateAttr

from vlrl.config.schema import DataSettings
from vlrl.errors import ConfigError

_FILES = ("train", "heldout")


class RowFiles(DataSettings):
    """`data.*` as a task has it; knows which of its files were asked for."""

    _requested: set[str] = PrivateAttr(default_factory=set)
    _own: Collection[str] = PrivateAttr(default=_FILES)

    @classmethod
    def of(cls, data: DataSettings, own: Collection[str] = _FILES) -> RowFiles:
        """`own`: the settings that are for this task alone; of a mixture, others are what its tasks have in common."""
        files = cls(**data.model_dump())
        files._own = own
        return files

    def __getattribute__(self, name: str) -> Any:
        if name in _FILES:
            self._requested.add(name)
        return super().__getattribute__(name)

    def reset_reads(self, split: str) -> None:
        """Forgets that the file of a split was asked for: what an earlier call read says nothing of the next."""
        self._requested.discard(split)

    def unread_file(self, split: str) -> str:
        """Returns the file of a split that no one has asked for; "" where there is none."""
        return vars(self).get(split, "") if split in _FILES and split not in self._requested else ""


def unread_file(task: Any, split: str) -> str:
    """Returns the file of `data.<split>` that a task did not look at when it gave its samples; "" where there is
    none.
    """
    return task.data.unread_file(split) if isinstance(task.data, RowFiles) else ""


def reset_reads(task: Any, split: str) -> None:
    """Has `unread` count from now on."""
    if isinstance(task.data, RowFiles):
        task.data.reset_reads(split)


def refuse_unread_file(task: Any, split: str) -> None:
    """Raises ConfigError where a task makes its own samples of a split, beside rows that are meant for it alone."""
    file = unread_file(task, split)
    if file and split in task.data._own:
        raise unread_file_error(f"task '{task.name}' makes", split, file)


def unread_file_error(whose: str, split: str, file: str) -> ConfigError:
    return ConfigError(f"data.{split}={file!r} is not read: {whose} its own samples. Take the setting away, or set "
                       "data.own_samples=false, which puts the rows of the file in their place")
