"""film.py: what an episode showed as a GIF and an MP4, of bounded size, and the route that makes them."""

import io
from dataclasses import replace

import av
import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.app import made_runs
from vlrl.app import AppError, details, film
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.store import RunFolder

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
    assert [ms for _, ms in found] == [800] * TURNS + [2400]
    assert len(film.pictures(view, one)) == TURNS + 1
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
