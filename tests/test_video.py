from pathlib import Path

import av
import numpy as np
import pytest

from vlrl import video
from vlrl.errors import DataError
from vlrl.media import load
from vlrl.settings import LimitsSettings
from vlrl.types import LoadedMedia, Media
from vlrl.video import VideoSampling, choose

LIMITS = LimitsSettings()


def make_video(path: Path, frames=20, rate=10, size=(64, 32)) -> Path:
    """Frame i is grey of value 10 * i."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 10 * i, np.uint8), format="rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def read(path: Path, start=None, end=None, **sampling) -> LoadedMedia:
    return load(Media(kind="video", source=path, start=start, end=end), LIMITS, VideoSampling(**sampling))


def levels(loaded: LoadedMedia) -> list[int]:
    """Which frames of `make_video` these are."""
    return [round(float(np.asarray(frame).mean()) / 10) for frame in loaded.frames]


@pytest.fixture(params=["decord", "pyav"])
def backend(request, monkeypatch):
    if request.param == "decord":
        pytest.importorskip("decord")
    else:
        monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: name == "av")
    return request.param


def test_frames_times_and_metadata(tmp_path, backend):
    loaded = read(make_video(tmp_path / "a.mp4"), fps=2)
    assert loaded.kind == "video" and loaded.size == (64, 32) and loaded.frames[0].mode == "RGB"
    assert loaded.timestamps == pytest.approx((0, 0.6, 1.3, 1.9), abs=1e-5)
    assert levels(loaded) == loaded.metadata["frames_indices"] == [0, 6, 13, 19]
    assert loaded.metadata["fps"] == 10 and loaded.metadata["total_num_frames"] == 20
    assert loaded.metadata["duration"] == pytest.approx(2) and loaded.metadata["video_backend"] == backend


def test_a_part_of_the_video(tmp_path, backend):
    loaded = read(make_video(tmp_path / "a.mp4"), start=0.5, end=1.2, fps=10, max_frames=5)
    assert loaded.timestamps == pytest.approx((0.5, 0.7, 1.0, 1.2), abs=1e-5)
    assert levels(loaded) == [5, 7, 10, 12]


def test_a_single_frame_is_taken_twice(tmp_path, backend):
    assert levels(read(make_video(tmp_path / "a.mp4", frames=1), fps=2)) == [0, 0]
    assert levels(read(make_video(tmp_path / "b.mp4"), start=0.3, end=0.35)) == [3, 3]


def test_a_width_that_decord_pads_is_still_right(tmp_path):
    assert levels(read(make_video(tmp_path / "a.mp4", size=(48, 32)), fps=2)) == [0, 6, 13, 19]


def test_the_hash_is_of_the_file(tmp_path):
    whole, part = read(make_video(tmp_path / "a.mp4")), read(tmp_path / "a.mp4", start=1.0)
    assert whole.sha256 == part.sha256 != read(make_video(tmp_path / "b.mp4", frames=10)).sha256


def test_nothing_in_the_range(tmp_path):
    path = make_video(tmp_path / "a.mp4")
    for start, end in ((5, 9), (1, 1), (1.5, 0.5)):
        with pytest.raises(DataError, match=r"a\.mp4: no frame between.*lasts 2\.000 s"):
            read(path, start=start, end=end)


def test_limits(tmp_path):
    path = make_video(tmp_path / "a.mp4")
    with pytest.raises(DataError, match=r"a\.mp4 is 64x32 .*limits\.image_pixels=100"):
        load(Media(kind="video", source=path), LimitsSettings(image_pixels=100))
    with pytest.raises(DataError, match=r"limits\.media_bytes=100"):
        load(Media(kind="video", source=path), LimitsSettings(media_bytes=100))


@pytest.mark.parametrize("damage", ["cut", "junk", "empty", "image"])
def test_a_broken_video_names_its_file(tmp_path, backend, damage):
    data = make_video(tmp_path / "a.mp4").read_bytes()
    path = tmp_path / "bad.mp4"
    image = b"\x89PNG\r\n\x1a\n"
    path.write_bytes({"cut": data[:len(data) // 2], "junk": b"hello" * 99, "empty": b"", "image": image}[damage])
    with pytest.raises(DataError, match=r"bad\.mp4"):
        read(path)


def test_without_a_decoder(tmp_path, monkeypatch):
    path = make_video(tmp_path / "a.mp4")
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install av"):
        read(path)


@pytest.mark.parametrize(("frames", "fps", "sampling", "span", "expected"), [
    (100, 10, VideoSampling(fps=1, max_frames=64), (None, None), [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]),
    (100, 10, VideoSampling(fps=1, max_frames=5), (None, None), [0, 33, 66, 99]),  # 5 is taken as 4
    (100, 10, VideoSampling(fps=0.01, max_frames=64), (None, None), [0, 99]),
    (3, 10, VideoSampling(fps=100, max_frames=64), (None, None), [0, 2]),  # no more than there are, and even
    (100, 10, VideoSampling(fps=1, max_frames=64), (-5, 2.0), [0, 20]),
    (1, 1, VideoSampling(), (None, None), [0, 0]),
])
def test_choose(frames, fps, sampling, span, expected):
    assert choose(np.arange(frames) / fps, fps, sampling, *span, "video") == expected


def test_choose_goes_by_time_not_by_number():
    times = np.array([0, 0.1, 0.2, 0.3, 0.4, 3.0, 6.0, 9.0])
    assert choose(times, 1, VideoSampling(fps=0.4), None, None, "video") == [0, 5, 6, 7]
