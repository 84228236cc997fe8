"""A rule, and the rows, media and context that rules look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlrl.checks.finding import Finding, Level
from vlrl.config.schema import LimitsSettings
from vlrl.task import Task
from vlrl.types import Sample

if TYPE_CHECKING:
    from vlrl.checks.image_similarity import ImageSignature

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, kw_only=True)
class MediaFile:
    """What is known of one image or video of a row."""

    name: str
    """Of the file, for messages."""
    path: str = ""
    """Of media inside a row, their hash."""
    start: float | None = None
    end: float | None = None
    """The part of a video that the row selects, in seconds."""
    size: Size | None = None
    """With the EXIF orientation applied."""
    orientation: int = 1
    """EXIF orientation of an image: 1 = as stored, 5 to 8 = rotated by 90 degrees."""
    seconds: float | None = None
    """Duration of a video from `start` on."""
    sha256: str = ""
    """Of its content; "" where that was not read."""
    look: ImageSignature | None = None
    """Of an image that is compared with others."""
    problem: str = ""
    """Why it cannot be used."""


@dataclass
class CheckedRow:
    """One row of a file, or one sample of a task, that is being checked."""

    where: str
    """File and line (or number of the row)."""
    row: Mapping[str, Any]
    """Canonical fields; {} where the row could not be read."""
    id: str = ""
    side: str | None = None
    """train or heldout, where that is known."""
    sample: Sample | None = None
    """What the task makes of the row; None where that fails."""
    files: Sequence[MediaFile] = ()
    """Its media; empty where they were not looked at."""
    unlabelled: bool = False
    """The task has no perfect answer to it."""
    error: str = ""
    """Why the task cannot read it."""
    path: Path = Path()
    """File of the row."""
    root: Path = Path()
    """Folder that media paths are relative to."""
    findings: list[Finding] = field(default_factory=list)
    """What rules have found so far."""

    @property
    def media_ids(self) -> list[str]:
        """The hash of each of its media where the content was read, else the path; media without both are left out."""
        return [name for file in self.files if (name := file.sha256 or file.path)]


def default_refusal(size: Size) -> str:
    """Why the image processors of most families refuse an image of this size; "" where they accept it."""
    width, height = size
    if max(size) > 200 * min(size):
        return (f"an image of {width}x{height} pixels has an aspect ratio of {max(size) / min(size):.0f}, and the "
                "processors of most models accept at most 200")
    return ""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rule may use besides the row."""

    task: Task | None = None
    """None = only canonical fields are checked."""
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    boxes: str = ""
    """data.boxes; "" = the task's."""
    refusal: Callable[[Size], str] = default_refusal
    """Why the model's processor refuses an image of a size; "" where it accepts it."""

    @property
    def canonical(self) -> bool:
        """Whether fields mean what docs/data.md says; in a user's own task they may mean something else."""
        return self.task is None or type(self.task).__module__.partition(".")[0] == "vlrl"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of data or tasks; vlrl.checks says how to add one."""

    name: str
    scope: Literal["row", "file", "task"]
    find: Callable[..., Any]
    """row: (CheckedRow, Context) -> messages; file: (rows, Context) -> (row number, message); task: TaskSamples ->
    findings. A message may be a Finding with another level than the rule's."""
    level: Level = "error"
    cost: Literal["cheap", "whole"] = "cheap"
    """cheap: reads no more than headers, so every run applies it to some rows; whole: only checks apply it."""
    start: Level | None = None
    """Level at the start of a run, where it differs."""

    def finding(self, found: str | Finding, at_start: bool, where: str, id: str) -> Finding:
        """A message of this rule about the row or sample `id`, as a finding."""
        found = Finding(message=found.removeprefix(f"row {id!r}: ")) if isinstance(found, str) else found
        level = found.level if found.level != "error" else (at_start and self.start) or self.level
        return replace(found, rule=self.name, level=level, where=where, id=id)
