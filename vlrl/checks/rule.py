"""A rule, and what rules look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vlrl.checks.finding import Finding, Level
from vlrl.config.schema import LimitsSettings
from vlrl.task import Task
from vlrl.types import Sample

if TYPE_CHECKING:
    from vlrl.checks.image_similarity import ImageSignature

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class MediaFile:
    """What is known of one image or video that a row names."""

    name: str
    """Of the file, as messages call it."""
    path: str = ""
    """Where it lies; of media inside a row, their hash."""
    start: float | None = None
    end: float | None = None
    """Seconds of a video that the row cuts out."""
    size: Size | None = None
    """Width and height as it is shown, EXIF orientation applied."""
    orientation: int = 1
    """EXIF orientation of an image: 1 = as stored, 5 to 8 = on its side."""
    seconds: float | None = None
    """Of a video, how long it lasts from `start` on."""
    sha256: str = ""
    """Of its content, where that was read."""
    look: ImageSignature | None = None
    """What an image looks like, where it is to be compared."""
    problem: str = ""
    """Why it cannot be used."""


@dataclass
class CheckedRow:
    """One row of a file, or one sample of a task, under examination."""

    where: str
    """File and line, or file and number of the row."""
    row: Mapping[str, Any]
    """Canonical fields; {} where it could not be read."""
    id: str = ""
    side: str | None = None
    """train or heldout, where that is known."""
    sample: Sample | None = None
    """What the task makes of it; None where that fails."""
    files: Sequence[MediaFile] = ()
    """What is known of its media; empty where they were not looked at."""
    unlabelled: bool = False
    """Whether the task knows no perfect answer to it, where it was asked."""
    error: str = ""
    """Why the task cannot read it."""
    path: Path = Path()
    """Of the file that it stands in."""
    root: Path = Path()
    """Folder that its media lie under."""
    findings: list[Finding] = field(default_factory=list)
    """What rules have found of it so far."""

    @property
    def contents(self) -> list[str]:
        """Names of its media: hashes where their content was read, else paths; without those of which neither is
        known.
        """
        return [name for file in self.files if (name := file.sha256 or file.path)]


def usual_refusal(size: Size) -> str:
    """Returns why image processors of most families refuse an image of this size, "" where they take it."""
    width, height = size
    if max(size) > 200 * min(size):
        return (f"an image of {width}x{height} pixels has an aspect ratio of {max(size) / min(size):.0f}, and the "
                "processors of most models take none above 200")
    return ""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What rules may ask beside the row."""

    task: Task | None = None
    """None where only the canonical fields are looked at."""
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    boxes: str = ""
    """data.boxes, where it is not the task's."""
    refusal: Callable[[Size], str] = usual_refusal
    """Why the model's processor refuses an image of a size; "" where it takes it."""

    @property
    def canonical(self) -> bool:
        """Whether fields mean what docs/data.md says: a task of somebody's own may give them another meaning."""
        return self.task is None or type(self.task).__module__.partition(".")[0] == "vlrl"


class Found(NamedTuple):
    """What a rule says, where it says more than a message."""

    message: str
    row: int = 0
    """Of a file rule, the number of the row."""
    id: str = ""
    """Of a task rule, the sample; "" for the task as a whole."""
    text: str = ""
    """The answer that shows it."""
    level: Level | None = None
    """Where it differs from the rule's."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of data or tasks; vlrl.checks says how to add one."""

    name: str
    scope: Literal["row", "file", "task"]
    find: Callable[..., Any]
    """row: (CheckedRow, Context) -> texts; file: (rows, Context) -> Found with the row's number; task:
    Seen -> Found."""
    level: Level = "error"
    cost: Literal["cheap", "whole"] = "cheap"
    """cheap: opens no more than headers, so every run does it on some of its rows; whole: the checks alone do it."""
    start: Level | None = None
    """Level at the start of a run, where it differs."""
