"""`Rule`, and the inputs of rules: rows, their media and the context."""

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

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, kw_only=True)
class MediaFile:
    """The inspected properties of one image or video of a row."""

    name: str  # name of the file, for messages
    path: str = ""  # path of the file; a hash for media that are embedded in the row
    start: float | None = None
    end: float | None = None  # `start` and `end` in seconds are the part of a video that the row selects
    size: Size | None = None  # width and height after the EXIF orientation is applied
    orientation: int = 1  # EXIF orientation of an image: 1 = as stored, 5 to 8 = rotated by 90 degrees
    seconds: float | None = None  # duration in seconds of a video from `start` on
    sha256: str = ""  # SHA-256 of the content; "" if the content was not read
    signature: ImageSignature | None = None
    """Signature of an image, for the comparison with other images; None unless images are compared."""
    problem: str = ""  # why the file cannot be used; "" if it can


@dataclass
class CheckedRow:
    """One row of a file, or one sample of a task, with its media and the findings about it."""

    where: str  # file and line (or number of the row)
    row: Mapping[str, Any]  # the canonical fields of the row; {} if the row could not be read
    id: str = ""
    side: str | None = None  # "train" or "heldout"; None if unknown
    sample: Sample | None = None  # the sample that the task makes from the row; None if that fails
    files: Sequence[MediaFile] = ()  # the media of the row; empty if they were not inspected
    checked: bool = False  # whether the rules of single rows were applied; other rows are only compared
    unlabelled: bool = False  # True if the task has no perfect answer to the row
    error: str = ""  # why the task cannot read the row; "" if it can
    path: Path = Path()
    root: Path = Path()  # folder that media paths are relative to
    findings: list[Finding] = field(default_factory=list)

    @property
    def media_ids(self) -> list[str]:
        """The SHA-256 of each media file if its content was read, else its path. Media without hash and path are left
        out."""
        return [name for file in self.files if (name := file.sha256 or file.path)]


def default_refusal(size: Size) -> str:
    """Returns why the image processors of most model families refuse an image of this size; "" if they accept it."""
    width, height = size
    if max(size) > 200 * min(size):
        return (f"an image of {width}x{height} pixels has an aspect ratio of {max(size) / min(size):.0f}, and the "
                "processors of most models accept at most 200")
    return ""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The inputs of a rule other than the row: the task, limits and conventions."""

    task: Task | None = None  # the task that reads the rows; None = only canonical fields are checked
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    boxes: str = ""  # the setting data.boxes (the format of boxes); "" = the format given by the task's own data
    refusal: Callable[[Size], str] = default_refusal
    """Function that returns why the model's processor refuses an image of a given size; "" if it accepts the image."""

    @property
    def canonical(self) -> bool:
        """Whether the fields of rows have the meanings documented in docs/data.md. False for a user's own task, whose
        fields may have other meanings."""
        return self.task is None or type(self.task).__module__.partition(".")[0] == "vlrl"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of data or tasks; the docstring of vlrl.checks says how to add a rule."""

    name: str
    scope: Literal["row", "file", "task"]
    find: Callable[..., Any]
    """Function that finds faults, by `scope`: row: (CheckedRow, Context) -> messages; file: (rows, Context) -> (row
    number, message) pairs; task: TaskSamples -> findings. A message may be a Finding with another level than the
    rule's."""
    level: Level = "error"
    cost: Literal["cheap", "expensive"] = "cheap"
    """cheap: reads at most headers of media, so every run applies the rule to some rows. expensive: only the check
    commands apply the rule."""
    start: Level | None = None  # level at the start of a run, if it differs from `level`

    def finding(self, found: str | Finding, at_start: bool, where: str, id: str) -> Finding:
        """Returns `found`, a message or Finding of this rule, as a complete Finding about the row or sample `id` at
        `where`. With `at_start`, the Finding gets the rule's level for the start of a run."""
        found = Finding(message=found.removeprefix(f"row {id!r}: ")) if isinstance(found, str) else found
        level = found.level if found.level != "error" else (at_start and self.start) or self.level
        return replace(found, rule=self.name, level=level, where=where, id=id)
