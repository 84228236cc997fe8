"""Media, and the observations and steps of environments: the types that tasks and environments create.

vlrl.types has these names too. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """One image or video of a sample, not yet read.

    Example: `Media(source=Path("photos/cat.jpg"))`, `Media(source=pil_image)`, `Media(kind="video",
    source=Path("clip.mp4"), start=2.0, end=7.5)`."""

    source: Any
    """A path, a PIL image or the bytes of a file; for a video also a sequence of such frames, or a LoadedMedia."""
    kind: Literal["image", "video"] = "image"
    start: float | None = None
    """Seconds; the part of a video that is read, from here ..."""
    end: float | None = None
    """... to here."""
    fps: float | None = None
    """Frames per second of a video given as frames ..."""
    times: Sequence[float] | None = None
    """... or the time of each of its frames in seconds, rising."""
    edits: tuple[tuple[Any, ...], ...] = ()
    """Edits of its decoded frames, in order: `(("shuffle", 17), ("noise", 500, 17))`; see data/media_edits.py."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedMedia:
    """One image or video as pixels, with the hash that names it in the run folder."""

    kind: Literal["image", "video"]
    frames: tuple[Any, ...]
    """PIL images in RGB; one for an image."""
    sha256: str
    """Hash of the file's bytes, or of the pixels of media drawn by code, and of given frame times."""
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    """The file's bytes, if the row itself holds them."""
    timestamps: tuple[float, ...] = ()
    """[frames] display time of each frame in seconds from the start of the clip; empty for an image."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For a video: mean fps, total_num_frames and frames_indices of the whole file, duration of the clip in seconds,
    video_backend; data/video/sampling.clock converts it for processors."""

    @property
    def size(self) -> tuple[int, int]:
        """Original width and height in pixels."""
        return self.frames[0].size

    def as_media(self) -> Media:
        """Media that are read as these frames, at these times."""
        return Media(kind=self.kind, source=self if self.kind == "video" else self.frames[0])


@dataclass(frozen=True, eq=False)
class Observation:
    """What an environment shows: text, after its media.

    Example: `Observation("You see a door.", [Media(source=image)])`."""

    text: str = ""
    media: Sequence[Media] = ()
    results: Sequence[Observation] = ()
    """Results of the tool calls, one each; `text` and `media` then combine them, see `of_results`."""

    @classmethod
    def of_results(cls, results: Sequence[Observation]) -> Observation:
        """The results of tool calls as one observation."""
        return cls("\n".join(r.text for r in results if r.text), tuple(m for r in results for m in r.media),
                   tuple(results))


@dataclass(frozen=True, eq=False)
class Step:
    """The response of an environment to an action. Example: `Step(Observation("A wall."), {"progress": 0.0})`."""

    observation: Observation = field(default_factory=Observation)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Raw reward parts of this turn, named in the task's `rewards`; a missing part counts 0."""
    done: bool = False
    """Whether the episode has ended; its observation is then stored and not shown to the model."""
    state: Any = None
    """Hashable: the state after the action."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able, for the viewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastAction:
    """One action of an episode, and the environment's response."""

    action: str
    """Including text that its prompt opened, as `Answer.text`."""
    observation: str = ""
    media: tuple[Media, ...] = ()
    """Media of the observation."""
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None
    done: bool = False
    error: str | None = None
