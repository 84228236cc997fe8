"""Media, and what an environment shows and answers: the part of the vocabulary that tasks and environments make.

vlrl.types has these names too. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """One image or video of a sample, not yet read.

    Example: `Media(source=Path("photos/cat.jpg"))`, `Media(source=pil_image)`,
    `Media(kind="video", source=Path("clip.mp4"), start=2.0, end=7.5)`."""

    source: Any
    """A path, a PIL image drawn by code, the bytes of a file; for a video also a sequence of frames of these kinds, or
    the LoadedMedia that it was read as."""
    kind: Literal["image", "video"] = "image"
    start: float | None = None
    """Seconds; a video is read from here ..."""
    end: float | None = None
    """... to here."""
    fps: float | None = None
    """Frames per second of a video given as frames ..."""
    times: Sequence[float] | None = None
    """... or the seconds of each of its frames, rising."""
    edits: tuple[tuple[Any, ...], ...] = ()
    """What is done to its decoded frames, in order: `(("shuffle", 17), ("noise", 500, 17))`: data/media_edits.py."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedMedia:
    """One image or video as pixels, with the hash that names it in the run folder."""

    kind: Literal["image", "video"]
    frames: tuple[Any, ...]
    """PIL images in RGB; one for an image."""
    sha256: str
    """Of the file's bytes, or of the pixels when the media was drawn by code, and of the times that its frames were
    given with."""
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    """The file's bytes, of media that a row holds itself."""
    timestamps: tuple[float, ...] = ()
    """[frames] seconds at which each frame is shown, from the start of the clip; empty for an image."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Of a video: mean fps, total_num_frames and frames_indices of the whole file, duration of the clip in seconds,
    video_backend; data/video/sampling.clock makes of it what processors expect."""

    @property
    def size(self) -> tuple[int, int]:
        """Original width and height in pixels."""
        return self.frames[0].size

    def as_media(self) -> Media:
        """Returns media that are read as these frames, at these times."""
        return Media(kind=self.kind, source=self if self.kind == "video" else self.frames[0])


@dataclass(frozen=True, eq=False)
class Observation:
    """What an environment shows: text, and media before it.

    Example: `Observation("You see a door.", [Media(source=image)])`."""

    text: str = ""
    media: Sequence[Media] = ()
    results: Sequence[Observation] = ()
    """Of tools, what each call returned; `text` and `media` are then theirs together, see `of_results`."""

    @classmethod
    def of_results(cls, results: Sequence[Observation]) -> Observation:
        """Returns the results of calls as one observation."""
        return cls("\n".join(r.text for r in results if r.text), tuple(m for r in results for m in r.media),
                   tuple(results))


@dataclass(frozen=True, eq=False)
class Step:
    """What an environment makes of an action. Example: `Step(Observation("A wall."), {"progress": 0.0})`."""

    observation: Observation = field(default_factory=Observation)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Raw reward parts of this turn, named in the task's `rewards`; a part that is not named counts 0."""
    done: bool = False
    """Whether the episode has ended; its observation is stored and not shown to the model."""
    state: Any = None
    """Hashable: the state after the action."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able, for the viewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastAction:
    """One action of an episode, and what its environment made of it."""

    action: str
    """With what its prompt had opened, as `Answer.text`."""
    observation: str = ""
    media: tuple[Media, ...] = ()
    """Of the observation."""
    parts: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None
    done: bool = False
    error: str | None = None
