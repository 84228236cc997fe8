"""Which of data.train and data.heldout a task reads: rows that a task ignores in favour of its own samples are an
error.

What counts is that `samples` accesses the setting, so a task may read its file in any way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import PrivateAttr

from vlrl.config.schema import DataSettings
from vlrl.errors import ConfigError

_FILES = ("train", "heldout")


class RowFiles(DataSettings):
    """`data.*` as a task has it; records which of its files were accessed."""

    _requested: set[str] = PrivateAttr(default_factory=set)
    _own: Collection[str] = PrivateAttr(default=_FILES)

    @classmethod
    def of(cls, data: DataSettings, own: Collection[str] = _FILES) -> RowFiles:
        """`own`: the splits set for this task alone; in a mixture, the others are shared by its tasks."""
        files = cls(**data.model_dump())
        files._own = own
        return files

    def __getattribute__(self, name: str) -> Any:
        if name in _FILES:
            self._requested.add(name)
        return super().__getattribute__(name)

    def reset_reads(self, split: str) -> None:
        """Forgets earlier accesses to the file of a split."""
        self._requested.discard(split)

    def unread_file(self, split: str) -> str:
        """The file of a split that was not accessed; "" if there is none."""
        return vars(self).get(split, "") if split in _FILES and split not in self._requested else ""


def unread_file(task: Any, split: str) -> str:
    """The file of `data.<split>` that a task did not access for its samples; "" if there is none."""
    return task.data.unread_file(split) if isinstance(task.data, RowFiles) else ""


def reset_reads(task: Any, split: str) -> None:
    """Makes `unread_file` count from now on."""
    if isinstance(task.data, RowFiles):
        task.data.reset_reads(split)


def refuse_unread_file(task: Any, split: str) -> None:
    """Raises ConfigError if a task makes its own samples of a split despite rows given for it alone."""
    file = unread_file(task, split)
    if file and split in task.data._own:
        raise unread_file_error(f"task '{task.name}' makes", split, file)


def unread_file_error(whose: str, split: str, file: str) -> ConfigError:
    return ConfigError(f"data.{split}={file!r} is not read: {whose} its own samples. Remove the setting, or set "
                       "data.own_samples=false to use the rows of the file instead")
