"""Reads the timestamps of all frames of a video file (PyAV) and decodes selected frames (decord or PyAV).

Timestamps come from the packets of the stream, which need not be decoded. They account for edit lists, frame
reordering, variable frame rates and a first timestamp other than 0. decord is used only if its timestamps agree; they
differ for edit lists, some AVI files, and streams without an index."""

from __future__ import annotations

import bisect
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlrl.errors import DataError

MOST_FRAMES = 20_000_000
"""Maximum number of frames in a file, 92 hours at 60 frames per second; larger files are rejected."""
_FORMATS = ("mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf,mjpeg,mpjpeg,apng,webp,h264,hevc,ivf,mxf,nut,rm,"
            "swf,dv,wtv,y4m,yuv4mpegpipe,vob,m4v,mpegvideo,av1,obu")
"""Container formats that are opened. None can refer to other files or URLs, as playlists do."""
_INDEXED = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Container formats in which decord seeks exactly; in streams without an index it may return neighbouring frames."""


@dataclass(frozen=True, eq=False)
class VideoTrack:
    """Timestamps and properties of a file's video stream, known without decoding all frames."""

    path: Path
    pts: np.ndarray
    """[frames] int64 presentation timestamps in the stream's time base, ascending."""
    keys: np.ndarray
    """[K] int64 presentation timestamps of the keyframes."""
    times: np.ndarray
    """[frames] time of each frame in seconds after the first frame."""
    fps: float
    """Mean frame rate in frames per second."""
    size: tuple[int, int]
    """Width and height in pixels, as displayed."""
    container: str


class HiddenFrames(ValueError):
    """Raised when some packets of the stream are never displayed as frames."""


def read_track(path: Path) -> VideoTrack:
    """Reads and returns the timestamps and properties of a file's video stream. Raises DataError naming a file whose
    video is missing or truncated."""
    if not importlib.util.find_spec("av"):
        raise DataError(f"{path}: reading videos needs a decoder. Run: pip install av")
    try:
        return _track(path)
    except DataError:
        raise
    except Exception as error:  # PyAV raises classes of its own, imported only here
        raise _unreadable(path, _short_error(error)) from None


def header_duration(path: Path) -> float | None:
    """Returns the duration in seconds stated in a file's header, without reading packets; None if unknown."""
    try:
        with _opened(path) as (container, _):
            return container.duration / 1e6 if container.duration else None
    except Exception:  # PyAV is missing, or raises classes of its own
        return None


def read_frames(track: VideoTrack, indices: Sequence[int]) -> tuple[list[Image.Image], str]:
    """Decodes the frames at the given ascending indices, which may repeat. Returns (upright RGB frames, decoder name).
    Raises DataError naming the file, and HiddenFrames if the timestamps of packets and decoded frames differ."""
    errors = []
    for name, decoder in DECODERS.items():
        if not importlib.util.find_spec("av" if name == "pyav" else name):
            continue
        try:
            return decoder(track, indices), name
        except HiddenFrames:
            raise
        except Exception as error:  # each decoder raises classes of its own
            errors.append(f"{name}: {_short_error(error)}")
    raise _unreadable(track.path, "; ".join(errors))


def recount_frames(track: VideoTrack) -> VideoTrack:
    """Returns the track with the timestamps of its decoded frames only, for streams with packets that are never
    displayed.

    Decodes the whole file, one frame at a time. Raises DataError if decoding ends before the last packet."""
    try:
        with _opened(track.path) as (container, stream):
            decoded = sorted({frame.pts for frame in container.decode(stream) if frame.pts is not None})
    except Exception as error:  # as in `track`
        raise _unreadable(track.path, _short_error(error)) from None
    if not decoded or decoded[-1] < track.pts[-1]:
        last = track.times[track.pts <= decoded[-1]][-1] if decoded else 0.0
        raise _unreadable(track.path, f"the video is truncated after {last:.3f} of {track.times[-1]:.3f} s")
    retained = np.isin(track.pts, decoded)
    return replace(track, pts=track.pts[retained], times=np.round(track.times[retained] - track.times[retained][0], 6))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Context manager that opens a file for single-threaded decoding, and yields (container, video stream). Cover
    images do not count as video."""
    import av
    from av.stream import Disposition

    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    # titles need not be UTF-8: PyAV 19 keeps their bytes and has no such keyword, earlier versions raise without it
    lenient: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
    with av.open(f"file:{path}", options=options, **lenient) as container:
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise ValueError("the file has no video stream")
        streams[0].codec_context.thread_count = 1
        yield container, streams[0]


def _track(path: Path) -> VideoTrack:
    with _opened(path) as (container, stream):
        pts, keys, count, end = _packets(container, stream)
        base, declared, promised = float(stream.time_base), float(stream.average_rate or 0), stream.frames
        name, size = container.format.name, (stream.codec_context.width, stream.codec_context.height)
        lasts = (container.duration or 0) / 1e6 if name == "matroska,webm" else 0.0  # other containers only estimate it
    if not pts:
        raise ValueError("the video has no frames")
    if promised > count + 1:
        raise ValueError(f"the video is truncated: {count} of {promised} frames")
    if end < 0.95 * lasts - 1:
        raise ValueError(f"the video is truncated after {end:.3f} of {lasts:.3f} s")
    shown = np.unique(np.array(pts, dtype=np.int64))
    times = np.round((shown - shown[0]) * base, 6)
    turned = _rotation(path) % 180 != 0
    return VideoTrack(path, shown, np.unique(np.array(keys, dtype=np.int64)), times, _rate(times, declared),
                 (size[1], size[0]) if turned else size, name)


def _packets(container: Any, stream: Any) -> tuple[list[int], list[int], int, float]:
    """Returns (timestamps of displayed frames, timestamps of keyframes, number of packets, seconds). `seconds` is the
    time of the last packet of the file in any stream; the other values are those of `stream`."""
    pts, keys, count, end = [], [], 0, 0.0
    for packet in container.demux():
        if packet.pts is not None:
            end = max(end, float(packet.pts * packet.time_base))
        if packet.stream is not stream or not packet.size:
            continue
        count += 1
        if packet.pts is None:
            raise ValueError("the video's frames have no timestamps")
        if packet.is_keyframe:
            keys.append(packet.pts)
        if not packet.is_discard:
            pts.append(packet.pts)
        if count > MOST_FRAMES:
            raise ValueError(f"the video has more than {MOST_FRAMES} frames")
    return pts, keys, count, end


def _rotation(path: Path) -> int:
    """Returns the degrees by which the first frame must be rotated counterclockwise for display."""
    with _opened(path) as (container, stream):
        return _turn(next(container.decode(stream)))


def _rate(times: np.ndarray, declared: float) -> float:
    """Returns the declared frame rate if the timestamps agree with it within one frame, else their mean rate."""
    last, gaps = float(times[-1]), len(times) - 1
    if math.isfinite(declared) and declared > 0 and abs(gaps / declared - last) <= 1 / declared:
        return declared
    return gaps / last if last > 0 else 1.0


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(f"media file {path} cannot be read as a video ({why}); re-encode it (ffmpeg -i OLD -c:v libx264 "
                     "NEW.mp4), or remove its row")


def _short_error(error: Exception) -> str:
    text = getattr(error, "strerror", None) or re.sub(r"\[[\d:]+\] \S+?:\d+: ", "", str(error))
    return " ".join(str(text).split())[:150]


def _by_decord(track: VideoTrack, indices: Sequence[int]) -> list[Image.Image]:
    import decord

    if track.container not in _INDEXED:
        raise ValueError(f"decord is not used for the container format {track.container}")
    decord.logging.set_level(decord.logging.QUIET)
    reader: Any = decord.VideoReader(str(track.path), num_threads=1)
    times = reader.get_frame_timestamp(range(len(reader)))[:, 0] if len(reader) else np.empty(0)
    if len(times) != len(track.times) or np.abs(times - times[0] - track.times).max() > 2e-3:
        raise ValueError("decord's timestamps differ from those of the packets")
    images: dict[int, Image.Image] = {}
    unique = sorted(set(indices))
    for i in range(0, len(unique), 16):  # a batch is a copy of its frames
        # get_batch: single frames of padded rows (48 pixels wide) are silently wrong
        part = unique[i:i + 16]
        images |= {k: Image.fromarray(a) for k, a in zip(part, reader.get_batch(part).asnumpy(), strict=True)}
    if images[indices[0]].size != track.size:
        raise ValueError("decord's frame size differs from that of the stream")
    return [images[i] for i in indices]


def _by_pyav(track: VideoTrack, indices: Sequence[int]) -> list[Image.Image]:
    import av

    wanted = sorted({int(track.pts[i]) for i in indices})
    images: dict[int, Image.Image] = {}
    with _opened(track.path) as (container, stream):
        for key, some in _runs(wanted, track.keys.tolist()):
            try:
                container.seek(key, stream=stream)
            except av.FFmpegError:  # a format without seeking; what is missing is decoded from the start
                break
            images |= _decoded(container, stream, some)
    if missing := [p for p in wanted if p not in images]:
        with _opened(track.path) as (container, stream):
            images |= _decoded(container, stream, missing)
    if missing := [p for p in wanted if p not in images]:
        raise HiddenFrames(f"{len(missing)} of {len(wanted)} frames are never displayed")
    upright = images[wanted[0]].size
    images = {p: image if image.size == upright else image.resize(upright) for p, image in images.items()}
    return [images[int(track.pts[i])] for i in indices]


def _runs(wanted: Sequence[int], keys: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Groups the wanted timestamps into runs that are decoded in one pass. Returns (keyframe to seek to, timestamps) of
    each run.

    A new run begins where a later keyframe precedes the next wanted frame, because seeking there is cheaper than
    decoding on."""
    runs: list[tuple[int, list[int]]] = []
    for pts in wanted:
        place = bisect.bisect_right(keys, pts) - 1
        key = keys[place] if place >= 0 else pts
        if runs and key <= runs[-1][1][-1]:
            runs[-1][1].append(pts)
        else:
            runs.append((key, [pts]))
    return runs


def _decoded(container: Any, stream: Any, wanted: Sequence[int]) -> dict[int, Image.Image]:
    """Decodes from the current position and returns the frames with the wanted timestamps.

    Skips frames before the first keyframe, which cannot be decoded correctly."""
    pictures: dict[int, Image.Image] = {}
    left, started = set(wanted), False
    for packet in container.demux(stream):
        started = started or packet.is_keyframe
        for frame in packet.decode() if started else ():
            if frame.pts in left:
                left.discard(frame.pts)
                if frame.is_corrupt:
                    raise ValueError(f"the frame at {frame.time:.3f} s is damaged")
                pictures[frame.pts] = frame.to_image().rotate(_turn(frame), expand=True)
            if not left or (frame.pts is not None and frame.pts > wanted[-1]):
                return pictures
    return pictures


def _turn(frame: Any) -> int:
    return round(frame.rotation / 90) * 90


DECODERS: dict[str, Callable[[VideoTrack, Sequence[int]], list[Image.Image]]] = {"decord": _by_decord, "pyav": _by_pyav}
"""Decoders by name, in order of preference."""
