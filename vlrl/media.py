"""Media, observations and steps of environments: the types that tasks and environments create.

vlrl.types exports the same names. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """One image or video of a sample, not yet loaded.

    Example: `Media(source=Path("photos/cat.jpg"))`, `Media(source=pil_image)`, `Media(kind="video",
    source=Path("clip.mp4"), start=2.0, end=7.5)`."""

    source: Any
    """A path, a PIL image or the bytes of a file; for a video also a sequence of such frames, or a LoadedMedia."""
    kind: Literal["image", "video"] = "image"
    start: float | None = None
    """Start in seconds of the part of a video that is read; None = the beginning."""
    end: float | None = None
    """End in seconds of the part of a video that is read; None = the end."""
    fps: float | None = None
    """Frames per second, for a video whose source is a sequence of frames."""
    times: Sequence[float] | None = None
    """Time of each frame in seconds, ascending, for a video whose source is a sequence of frames; an alternative to
    `fps`."""
    edits: tuple[tuple[Any, ...], ...] = ()
    """Edits applied to the decoded frames, in this order, each (name, arguments): `(("shuffle", 17), ("noise", 500,
    17))`; see data/media_edits.py."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedMedia:
    """One image or video as pixels, with the hash that identifies it in the run folder."""

    kind: Literal["image", "video"]
    frames: tuple[Any, ...]
    """The frames as RGB PIL images; a single frame for an image."""
    sha256: str
    """Hash of the file's bytes, or of the pixels for media drawn by code. Includes the frame times if these were
    specified."""
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    """The file's bytes, if they are stored in the row itself."""
    timestamps: tuple[float, ...] = ()
    """[frames] display time of each frame in seconds from the start of the clip; empty for an image."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For a video: mean fps, total_num_frames and frames_indices of the whole file, duration of the clip in seconds,
    video_backend. data/video/sampling.clock converts this dictionary for processors."""

    @property
    def size(self) -> tuple[int, int]:
        """Original width and height in pixels."""
        return self.frames[0].size

    def as_media(self) -> Media:
        """A Media that is loaded as exactly these frames and times."""
        return Media(kind=self.kind, source=self if self.kind == "video" else self.frames[0])


@dataclass(frozen=True, eq=False)
class Observation:
    """What an environment shows to the model: media, then text.

    Example: `Observation("You see a door.", [Media(source=image)])`."""

    text: str = ""
    media: Sequence[Media] = ()
    results: Sequence[Observation] = ()
    """One observation per result of a tool call; `text` and `media` then combine these results (`of_results`)."""

    @classmethod
    def of_results(cls, results: Sequence[Observation]) -> Observation:
        """Combines the results of tool calls into one observation."""
        return cls("\n".join(r.text for r in results if r.text), tuple(m for r in results for m in r.media),
                   tuple(results))


@dataclass(frozen=True, eq=False)
class Step:
    """The response of an environment to an action. Example: `Step(Observation("A wall."), {"progress": 0.0})`."""

    observation: Observation = field(default_factory=Observation)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Raw values of reward parts for this turn, by their names in the task's `rewards`; a missing part counts as 0."""
    done: bool = False
    """Whether the episode has ended; the observation is then stored but not shown to the model."""
    state: Any = None
    """The state of the environment after the action; hashable."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible data for the viewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastAction:
    """One action of an episode, and the environment's response."""

    action: str
    """Text of the action, including text with which the prompt started the action, as in `Answer.text`."""
    observation: str = ""
    media: tuple[Media, ...] = ()
    """Media of the observation."""
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None
    done: bool = False
    error: str | None = None
