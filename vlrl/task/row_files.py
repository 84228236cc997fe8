"""Checks that a task reads the files set by data.train and data.heldout. It is an error if a task makes its own samples
and ignores rows that the user set for it.

The check only records whether the task accesses the setting, so a task may read the file in any way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import PrivateAttr

from vlrl.config.schema import DataSettings
from vlrl.errors import ConfigError

_FILES = ("train", "heldout")


class RowFiles(DataSettings):
    """The `data.*` settings of one task. Records which of the files in them the task has accessed."""

    _requested: set[str] = PrivateAttr(default_factory=set)
    _own: Collection[str] = PrivateAttr(default=_FILES)

    @classmethod
    def of(cls, data: DataSettings, own: Collection[str] = _FILES) -> RowFiles:
        """The settings `data` as RowFiles. `own` lists the splits whose file was set for this task alone. The files of
        other splits are shared by all tasks of a mixture."""
        files = cls(**data.model_dump())
        files._own = own
        return files

    def in_format(self, format: str) -> RowFiles:
        """The same settings with another `format`."""
        return self if format == self.format else RowFiles.of(self.model_copy(update={"format": format}), self._own)

    def __getattribute__(self, name: str) -> Any:
        if name in _FILES:
            self._requested.add(name)
        return super().__getattribute__(name)

    def reset_reads(self, split: str) -> None:
        """Forgets that the task has accessed the file of a split."""
        self._requested.discard(split)

    def unread_file(self, split: str) -> str:
        """The value of `data.<split>` if the task has not accessed it; "" if it has, or if no file is set."""
        return vars(self).get(split, "") if split in _FILES and split not in self._requested else ""


def unread_file(task: Any, split: str) -> str:
    """The value of `data.<split>` if the task has not accessed it; "" if it has, or if no file is set."""
    return task.data.unread_file(split) if isinstance(task.data, RowFiles) else ""


def reset_reads(task: Any, split: str) -> None:
    """Forgets that the task has accessed the file of a split, so that `unread_file` only considers later accesses."""
    if isinstance(task.data, RowFiles):
        task.data.reset_reads(split)


def refuse_unread_file(task: Any, split: str) -> None:
    """Raises ConfigError if a task makes its own samples of a split and does not read the file that was set for this
    split and this task alone."""
    file = unread_file(task, split)
    if file and split in task.data._own:
        raise unread_file_error(f"task '{task.name}' makes", split, file)


def unread_file_error(whose: str, split: str, file: str) -> ConfigError:
    return ConfigError(f"data.{split}={file!r} is not read: {whose} its own samples. Remove the setting, or set "
                       "data.own_samples=false to use the rows of the file instead")
