"""GUI data made from real pages: what is asked for, and what the browser shows."""

import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from vlrl.cli.main import main
from vlrl.config.schema import LimitsSettings
from vlrl.data import read_rows
from vlrl.environments import chromium
from vlrl.errors import ConfigError, DataError
from vlrl.tools.datasets.check import check
from vlrl.tools.makers import gui as makegui
from vlrl.tools.makers.gui import Screenshot, group_of, make_gui, rows_of

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
