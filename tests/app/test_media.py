"""app/media.py: only images and videos of a run's media folder are served, as files and as small pictures."""

import hashlib
import io
import os
import re
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlrl.app import AppError
from vlrl.app.library import Library
from vlrl.app.media import MediaStore, url
from vlrl.store import RunFolder
from vlrl.types import LoadedMedia


@pytest.fixture(scope="module")
def media(runs):
    return MediaStore(Library(runs))


@pytest.fixture
def run(tmp_path):
    """A run folder below tmp_path/runs with an image, as a store and as its path."""
    path = tmp_path / "runs/a"
    (path / "media").mkdir(parents=True)
    (path / "heartbeat.json").write_text("{}")
    Image.new("RGB", (400, 100), "red").save(path / "media/red.png")
    return MediaStore(Library(tmp_path / "runs")), path


def opened(data):
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "JPEG"
        return np.asarray(image, int)


def test_a_picture_small_and_as_it_is(run):
    media, path = run
    assert media.resolve("a", "red.png") == media.resolve("a", "media/red.png") == path / "media/red.png"
    small = opened(media.thumbnail("a", "media/red.png", 64))
    assert small.shape == (16, 64, 3) and abs(small - [255, 0, 0]).max() < 8
    assert media.thumbnail("a", "red.png", 64) is media.thumbnail("a", "red.png", 64)  # kept
    Image.new("RGB", (40, 40), "blue").save(path / "media/red.png")
    assert abs(opened(media.thumbnail("a", "red.png", 64)) - [0, 0, 255]).max() < 8
    assert opened(media.thumbnail("a", "red.png", 10**9)).shape == (40, 40, 3)
    with pytest.raises(AppError, match="pixels"):
        media.thumbnail("a", "red.png", "x")


@pytest.mark.parametrize("suffix", ["webp", "webm"])
def test_frames_of_a_video_by_their_times(media, runs, suffix):
    path = next((runs / "sweep/clips/media").glob(f"*.{suffix}"))
    frames = [opened(f) for f in media.frames("sweep/clips", path.name, [0.0, 1.5, 3.5], 160)]
    centres = []
    for frame in frames:
        assert frame.shape == (120, 160, 3)
        coloured = frame.max(-1) - frame.min(-1) > 90
        centres.append(np.flatnonzero(coloured.any(0)).mean())
    assert np.allclose(centres, [25 + 28 * t for t in (0.0, 1.5, 3.5)], atol=4)  # where made_runs drew them
    first = opened(media.thumbnail("sweep/clips", path.name, 160))
    assert abs(first - frames[0]).max() < 40
    assert media.frames("sweep/clips", path.name, []) == []
    assert len(media.frames("sweep/clips", path.name, [0.5] * 500, 32)) == 64
    with pytest.raises(AppError, match="seconds"):
        media.frames("sweep/clips", path.name, ["x"])


def test_frames_go_one_by_one_and_only_runs_have_media(media, runs, run):
    path = next((runs / "sweep/clips/media").glob("*.webp"))
    by_number = media.frames("sweep/clips", path.name, [10.0 * i for i in range(8)], 64)
    assert by_number == media.frames("sweep/clips", path.name, [i / 2 for i in range(8)], 64)
    media, _ = run
    assert len(media.frames("a", "red.png", [0.0, 7.0], 32)) == 2
    for run_id in ("..", "boxes/../boxes", "", "/etc", "none", None):
        with pytest.raises(AppError, match="no run"):
            media.resolve(run_id, "x.png")


@settings(max_examples=40)
@given(st.one_of(st.text(), st.none(), st.integers(), st.sampled_from([
    "../config.yaml", "media/../../secret.png", "/etc/passwd", "media//etc/passwd", "..", ".", "", "media/",
    "\\..\\x.png", ".hidden.png", "media/media/red.png", "\0.png", "a" * 300, "ä" * 200 + ".png", "http://x/y.png",
    "\ud800.png"])))
def test_no_name_leads_out_of_the_media_folder(media, name):
    with pytest.raises(AppError):
        media.resolve("boxes", name)


def test_files_that_are_no_media_and_bombs_are_errors_of_one_line(run):
    media, path = run
    for name, content in (
            ("page.png", b"<script>alert(1)</script>"), ("page.svg", b"<svg/>"), ("page.html", b"\x89PNG\r\n\x1a\n"),
            ("empty.png", b""), ("config.yaml", b"a: 1"), ("x.mp4", b"#!/bin/sh\n" * 9), ("x.parquet", b"PAR1")):
        (path / "media" / name).write_bytes(content)
        with pytest.raises(AppError, match="not an image or video"):
            media.resolve("a", name)
    media, path = run
    big = io.BytesIO()
    Image.new("1", (8_100, 8_100)).save(big, "PNG", compress_level=1)
    broken = (path / "media/red.png").read_bytes()[:60]
    for name, content in (("bomb.png", big.getvalue()), ("broken.png", broken),
                          ("broken.webp", b"RIFF\x00\x00\x00\x00WEBP"),
                          ("broken.mp4", b"\x00\x00\x00\x18ftypmp42" + b"\x00" * 50), ("broken.gif", b"GIF89a\x01")):
        (path / "media" / name).write_bytes(content)
        assert media.resolve("a", name)
        for ask in (lambda name=name: media.thumbnail("a", name), lambda name=name: media.frames("a", name, [0.0])):
            with pytest.raises(AppError, match=r"cannot be shown") as error:
                ask()
            assert "\n" not in str(error.value)
    os.mkfifo(path / "media/pipe.png")
    with pytest.raises(AppError, match="no media file"):
        media.resolve("a", "pipe.png")


def test_links_show_only_the_file_that_they_are_named_after(run, tmp_path):
    media, path = run
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8), "lime").save(secret)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    links = {f"{digest}.png": secret, "other.png": secret, "0" * 64 + ".png": secret, "passwd.png": "/etc/passwd",
             "loop.png": "loop.png", "none.png": tmp_path / "none.png", "run.png": "red.png"}
    for name, target in links.items():
        (path / "media" / name).symlink_to(target)
    assert media.resolve("a", f"{digest}.png") == secret  # what store.media=link makes
    assert opened(media.thumbnail("a", f"{digest}.png")).shape == (8, 8, 3)
    for name in list(links)[1:]:
        with pytest.raises(AppError, match="no media file"):
            media.resolve("a", name)
    text = tmp_path / "notes.txt"
    text.write_text("TOP-SECRET")
    named = hashlib.sha256(text.read_bytes()).hexdigest() + ".png"
    (path / "media" / named).symlink_to(text)
    with pytest.raises(AppError, match="not an image or video"):
        media.resolve("a", named)
    Image.new("RGB", (8, 8), "red").save(secret)  # changed since it was linked
    with pytest.raises(AppError):
        media.resolve("a", f"{digest}.png")


def test_links_of_the_store_are_followed_and_folders_that_lead_out_are_not(tmp_path):
    source = tmp_path / "data/photo.JPG"
    source.parent.mkdir()
    Image.new("RGB", (30, 20), "red").save(source)
    loaded = LoadedMedia(kind="image", frames=(Image.open(source).copy(),), path=source,
                         sha256=hashlib.sha256(source.read_bytes()).hexdigest())
    folder = RunFolder(tmp_path / "runs/a", media="link")
    name = folder.write_media(loaded)
    folder.append_metrics({"step": 0})
    assert MediaStore(Library(tmp_path / "runs")).resolve("a", name) == source
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (8, 8)).save(outside / "x.png")
    run = tmp_path / "runs/b"
    run.mkdir(parents=True)
    (run / "heartbeat.json").write_text("{}")
    (run / "media").symlink_to(outside, target_is_directory=True)
    with pytest.raises(AppError, match="leads out"):
        MediaStore(Library(tmp_path / "runs")).resolve("b", "x.png")


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(exclude_categories=[])), st.text())
def test_addresses_hold_any_name(run_id, name):
    address = url(run_id, name, 64)
    assert re.fullmatch(r"vlrl/media\?[\w%&=.~+-]+", address)
    words = parse_qs(urlsplit(address).query, keep_blank_values=True)
    assert words["name"] == [name] and words["size"] == ["64"]
