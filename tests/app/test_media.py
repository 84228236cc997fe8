"""app/media.py and film.py: only images and videos of a run's media folder are served; an episode as a film."""

import hashlib
import io
import os
import re
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import av
import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.app import made_runs
from vlrl.app import AppError, details, film
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
        centres.append(np.flatnonzero((frame.max(-1) - frame.min(-1) > 90).any(0)).mean())
    assert np.allclose(centres, [25 + 28 * t for t in (0.0, 1.5, 3.5)], atol=4)  # where made_runs drew them
    first = opened(media.thumbnail("sweep/clips", path.name, 160))
    assert abs(first - frames[0]).max() < 40 and media.frames("sweep/clips", path.name, []) == []
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


TURNS = 6


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("films")
    RunFolder(root / "a").write_rollouts(0, 0, [made_runs.zoomed(1, turns=TURNS), made_runs.made_group("boxes", 3, 0)])
    return root


@pytest.fixture
def shown(stored):
    library = Library(stored)
    view = details.group(library, "a", "train", 0, "zoomed-1")
    return MediaStore(library), view, view.rollouts[0]


def frames(data):
    with Image.open(io.BytesIO(data)) as moving:
        assert moving.format == "GIF" and moving.info["loop"] == 0
        found = []
        for i in range(moving.n_frames):
            moving.seek(i)
            found.append((np.asarray(moving.convert("RGB"), int), moving.info["duration"]))
    return found


def decoded(data):
    """Every frame of an MP4 [H, W, 3], and the second at which it is shown."""
    with av.open(io.BytesIO(data)) as moving:
        (stream,) = moving.streams
        assert moving.format.name.startswith("mov,mp4") and stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        return [(frame.to_ndarray(format="rgb24").astype(int), float(frame.time)) for frame in moving.decode(stream)]


def alike(one, other):
    """Whether two MP4s show the same: colours at an edge may differ by what is in memory beyond it."""
    pairs = list(zip(decoded(one), decoded(other), strict=True))
    return all(a[1] == b[1] and np.abs(a[0] - b[0]).mean() < 1 for a, b in pairs)


def red(picture):
    return int(np.flatnonzero(((picture[..., 0] > 180) & (picture[..., 1] < 110)).any(0))[0])


def test_the_pictures_of_an_episode_in_their_order_also_as_mp4(shown):
    """made_runs draws a red box whose left edge is the number of the turn."""
    media, view, one = shown
    found = frames(film.rendered(media, view, one))
    assert len(found) == TURNS + 1 and {picture.shape for picture, _ in found} == {(120, 160, 3)}
    assert [red(picture) for picture, _ in found[1:]] == pytest.approx(range(TURNS), abs=1)
    assert [ms for _, ms in found] == [800] * TURNS + [2400] and len(film.pictures(view, one)) == TURNS + 1
    # at 5 frames a second: 0.8 s are 4 frames, the last picture's 2.4 s are 12
    found = decoded(film.rendered(media, view, one, "mp4"))
    pictures = [picture for picture, _ in frames(film.rendered(media, view, one))]
    assert [seconds for _, seconds in found] == pytest.approx([i / 5 for i in range(4 * TURNS + 12)], abs=1e-3)
    for i, (picture, _) in enumerate(found):
        wanted = pictures[min(i // 4, TURNS)]
        assert picture.shape == wanted.shape and abs(picture - wanted).mean() < 4, i
        assert abs(picture - pictures[min(i // 4, TURNS) - 1]).mean() > abs(picture - wanted).mean()
    assert alike(film.rendered(media, view, one, "mp4"), film.rendered(media, view, one, "mp4"))


def test_films_are_bounded_and_mp4s_have_even_sides(shown, stored):
    media, view, one = shown
    few = frames(film.rendered(media, view, one, size=80, most_frames=3))
    assert [picture.shape for picture, _ in few] == [(60, 80, 3)] * 3
    assert red(few[-1][0]) == pytest.approx((TURNS - 1) / 2, abs=1)  # the last picture is among them
    whole = film.rendered(media, view, one)
    small = film.rendered(media, view, one, most_bytes=len(whole) // 2)
    assert len(small) <= len(whole) // 2 and 1 <= len(frames(small)) < TURNS
    gone = replace(view, media=(replace(view.media[0], name="gone.png"), replace(view.media[0], name=None)))
    assert len(frames(film.rendered(media, gone, one))) == TURNS
    with pytest.raises(AppError, match="answer 0 of group 'zoomed-1' has no stored image"):
        film.rendered(media, replace(view, media=()), replace(one, media=()))
    whole = film.rendered(media, view, one, "mp4")
    small = film.rendered(media, view, one, "mp4", most_bytes=len(whole) * 2 // 3)
    assert len(small) <= len(whole) * 2 // 3 and len(decoded(small)) < len(decoded(whole))
    odd = decoded(film.rendered(media, view, one, "mp4", size=81))  # 81 x 61
    assert {picture.shape for picture, _ in odd} == {(62, 82, 3)}
    assert abs(odd[0][0][-1] - 128).max() < 40 and abs(odd[0][0][:-1, :-1] - 128).max() > 60
    with pytest.raises(AppError, match="film kind 'avi' is unknown: choose one of gif, mp4"):
        film.rendered(media, view, one, "avi")
    Image.new("RGB", (40, 120), "blue").save(stored / "a/media/tall.png")
    tall = replace(view.media[0], name="tall.png", hash="tall")
    (first, _), *rest = frames(film.rendered(media, replace(view, media=(tall,)), one))
    assert first.shape == rest[0][0].shape == (120, 160, 3)
    assert first[60, 80, 2] > 200 and abs(first[60, 10] - 128).max() < 8


@given(st.lists(st.integers(), min_size=1, max_size=200), st.integers(1, 80))
def test_some_are_spread_evenly(items, most):
    found = film.spread(items, most)
    assert len(found) == min(most, len(items)) and found[-1] == items[-1]
    assert most == 1 or found[0] == items[0]


@given(st.text(), st.text())
def test_any_name_is_one_of_a_file(run, sample):
    from tests.app.views import group, rollout
    view = group()
    for kind in film.KINDS:
        name = film.file_name(replace(view, key=view.key._replace(run=run), sample_id=sample), rollout(), kind)
        assert name.isascii() and name.endswith(f".{kind}") and len(name) < 200
        assert not {*'/\\"\r\n; '} & {*name} and not name.startswith(".")


@pytest.mark.slow
def test_the_app_saves_it(shown, stored):
    from vlrl.app import server
    app, _ = server.create(stored)
    media, view, one = shown
    with TestClient(app, base_url="http://127.0.0.1:7860") as client:
        for kind, media_type in {"gif": "image/gif", "mp4": "video/mp4"}.items():
            answer = client.get(f"/{film.url(view, one, kind)}")
            assert answer.status_code == 200 and answer.headers["content-type"] == media_type
            assert answer.headers["content-disposition"] == f'attachment; filename="{film.file_name(view, one, kind)}"'
            again = film.rendered(media, view, one, kind)
            assert alike(answer.content, again) if kind == "mp4" else answer.content == again
        for wrong in ({"rollout": 9}, {"group": "none"}, {"run": ".."}, {"source": "x"}, {"step": 10**30},
                      {"kind": "avi"}):
            asked = {"run": "a", "source": "train", "step": 0, "group": "zoomed-1", "rollout": 0} | wrong
            assert client.get("/vlrl/film", params=asked).status_code == 404, wrong
        assert client.get("/vlrl/film", params={"run": "a", "step": "x"}).status_code == 422
