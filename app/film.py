"""Renders an episode as an animated GIF or MP4 of the images it showed, turn by turn. Imports no torch.

names = film.pictures(view, rollout)                    # fewer than two: there is nothing to animate
data = film.rendered(site.media, view, rollout, "mp4")  # rendered at each request, not cached"""

import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from PIL import Image

from . import AppError, turns
from .details import GroupView, RolloutView
from .media import MediaStore

T = TypeVar("T")
SIZE = 320
"""Default limit for the longer side in pixels."""
MOST_FRAMES = 64
MOST_BYTES = 4 << 20
_FRAME_MS, _LAST_MS = 800, 2400
_MP4_RATE = 5
"""Frames per second of the MP4; some players fail at lower rates. _FRAME_MS and _LAST_MS must be whole frames."""
_AROUND = (128, 128, 128)
"""Padding colour around images that are smaller than the film."""
_making = threading.Semaphore(1)


def pictures(view: GroupView, rollout: RolloutView) -> list[str]:
    """The file names of an episode's stored images in display order, beginning with those of the prompt. A video
    contributes its first frame."""
    return [one.name for turn in turns.read(view, rollout) for one in turn.media if one and one.name]


def rendered(media: MediaStore, view: GroupView, rollout: RolloutView, kind: str = "gif", size: int = SIZE,
             most_frames: int = MOST_FRAMES, most_bytes: int = MOST_BYTES) -> bytes:
    """Renders an episode as a film of at most `size` pixels on the longer side, `most_frames` images and `most_bytes`
    bytes; returns the file's bytes. `kind` is a key of KINDS. From a longer episode, evenly spaced images are taken,
    including the first and the last. Raises AppError for an episode without images, and for an unknown kind."""
    if kind not in _ENCODERS:
        raise AppError(f"film kind {kind[:20]!r} is unknown: choose one of {', '.join(KINDS)}")
    with _making:
        frames = _read(media, view.key.run, spread(pictures(view, rollout), most_frames), size)
        if not frames:
            raise AppError(f"answer {rollout.index} of group {view.key.group!r} has no stored image (store.media)")
        while len(data := _ENCODERS[kind](frames)) > most_bytes and len(frames) > 1:
            frames = spread(frames, len(frames) // 2)
        return data


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` evenly spaced items: always the last item, and the first item too if `most` is at least 2."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else [items[-1]]


def url(view: GroupView, rollout: RolloutView, kind: str = "gif") -> str:
    """The relative URL from which the server serves the film of an episode; `kind` is a key of KINDS."""
    return "vlrl/film?" + urlencode({**view.key._asdict(), "rollout": rollout.index, "kind": kind},
                                    errors="backslashreplace")


def file_name(view: GroupView, rollout: RolloutView, kind: str = "gif") -> str:
    """The file name offered for download: run, step, sample and answer."""
    words = f"{view.key.run}-{view.key.step}-{view.sample_id[:80]}-{rollout.index}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip(".-")[-150:] + f".{kind}"


def _read(media: MediaStore, run: str, names: Sequence[str], size: int) -> list[Image.Image]:
    frames = []
    for name in names:
        try:
            frames.append(Image.open(io.BytesIO(media.thumbnail(run, name, size))).convert("RGB"))
        except AppError:  # the file was deleted or is damaged
            continue
    sides = tuple(max((frame.size[i] for frame in frames), default=0) for i in (0, 1))
    return [_placed(frame, sides) for frame in frames]


def _placed(frame: Image.Image, sides: Any, corner: bool = False) -> Image.Image:
    if frame.size == sides:
        return frame
    whole = Image.new("RGB", sides, _AROUND)
    whole.paste(frame, (0, 0) if corner else ((sides[0] - frame.width) // 2, (sides[1] - frame.height) // 2))
    return whole


def _gif(frames: Sequence[Image.Image]) -> bytes:
    out = io.BytesIO()
    times = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    frames[0].save(out, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return out.getvalue()


def _mp4(frames: Sequence[Image.Image]) -> bytes:
    """Encodes the frames as H.264 in 4:2:0, which every browser plays. 4:2:0 stores one colour value for 2 x 2 pixels,
    so odd sides are padded by one pixel."""
    import av
    from av.video.frame import VideoFrame
    out = io.BytesIO()
    sides = tuple(side + side % 2 for side in frames[0].size)
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=_MP4_RATE, options={"crf": "18", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = *sides, "yuv420p", 1
        for i, frame in enumerate(frames):
            shown_ms = _LAST_MS if i == len(frames) - 1 else _FRAME_MS
            for _ in range(shown_ms * _MP4_RATE // 1000):
                container.mux(stream.encode(VideoFrame.from_image(_placed(frame, sides, corner=True))))
        container.mux(stream.encode())
    return out.getvalue()


_ENCODERS: Mapping[str, Callable[[Sequence[Image.Image]], bytes]] = {"gif": _gif, "mp4": _mp4}
KINDS: Mapping[str, str] = {"gif": "image/gif", "mp4": "video/mp4"}
"""Kind of film, which is also the suffix of its file name -> media type."""
