"""Frames of video files in memory: each clip decoded once, never more than the room there is."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.data import films
from vlrl.config.schema import LimitsSettings
from vlrl.data import media
from vlrl.data.clip_cache import ClipCache
from vlrl.data.media import VideoSampling
from vlrl.data.video import sampling
from vlrl.errors import DataError
from vlrl.types import Media

LIMITS, SAMPLING = LimitsSettings(), VideoSampling(fps=2, max_frames=4)


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    return films.make(tmp_path_factory.mktemp("films") / "a.mp4", films.FILES["constant.mp4"])


@pytest.fixture
def decoded(monkeypatch):
    """Files decoded so far."""
    seen, own = [], sampling.decode

    def decode(path, *rest):
        seen.append(path.name)
        return own(path, *rest)
    monkeypatch.setattr(sampling, "decode", decode)
    return seen


def load(path, cache, sampling=SAMPLING, **more):
    return media.load(Media(kind="video", source=path, **more), LIMITS, sampling, cache)


def test_a_clip_is_decoded_once_whatever_its_name(film, decoded, tmp_path):
    cache, other = ClipCache(16), tmp_path / "b.mp4"
    shutil.copy(film, other)
    plain = load(film, ClipCache(0))
    first, again, copied = load(film, cache), load(film, cache), load(other, cache)
    assert decoded == ["a.mp4", "a.mp4"] and copied.path == other and first.path == film
    for loaded in (first, again, copied):
        assert [f.tobytes() for f in loaded.frames] == [f.tobytes() for f in plain.frames]
        assert (loaded.sha256, loaded.timestamps, loaded.metadata) == (plain.sha256, plain.timestamps, plain.metadata)


def test_which_clips_are_decoded_again(film, decoded, tmp_path):
    cache = ClipCache(16)
    for chosen in (SAMPLING, VideoSampling(fps=2, max_frames=2)):
        load(film, cache, chosen)
        load(film, cache, chosen, start=1.0)
    assert len(decoded) == 4
    turned = load(film, cache, edits=(("shuffle", 3),))
    assert len(decoded) == 4 and turned.sha256 != load(film, cache).sha256  # edits come after the cache
    cache, path = ClipCache(16), tmp_path / "c.mp4"
    shutil.copy(film, path)
    before = load(path, cache)
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(path, cache).sha256 != before.sha256 and decoded[-2:] == ["c.mp4"] * 2


def test_the_least_recently_used_leave_first(film, decoded):
    """A clip of 4 frames of 160x96 takes 184,320 bytes: five fit into 1 MiB."""
    cache = ClipCache(1)
    for end in (1, 2, 3, 4, 5, 1, 6):  # 1 is used again, so 2 leaves
        load(film, cache, end=float(end))
    assert len(decoded) == 6
    load(film, cache, end=1.0)
    assert len(decoded) == 6
    load(film, cache, end=2.0)
    assert len(decoded) == 7


def test_threads_wait_for_the_one_that_decodes(film, decoded, monkeypatch):
    cache, begun, go = ClipCache(16), threading.Event(), threading.Event()
    own = sampling.decode

    def slow(*arguments):
        begun.set()
        assert go.wait(10)
        return own(*arguments)
    monkeypatch.setattr(sampling, "decode", slow)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(load, film, cache) for _ in range(4)]
        assert begun.wait(10)
        go.set()
        frames = [f.result().frames for f in futures]
    assert decoded == ["a.mp4"] and all(a is b for other in frames for a, b in zip(frames[0], other, strict=True))


def test_an_error_is_raised_each_time_and_not_kept(tmp_path, film, decoded):
    cache, path = ClipCache(16), tmp_path / "bad.mp4"
    path.write_bytes(b"junk" * 99)
    for _ in range(2):
        with pytest.raises(DataError, match=r"bad\.mp4"):
            load(path, cache)
    assert decoded == ["bad.mp4"] * 2
    shutil.copy(film, path)
    assert load(path, cache).frames
