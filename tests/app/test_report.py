"""report.py: one file that tells what a run did, and asks for nothing."""

import base64
import io
import re
import shutil
from urllib.parse import urlparse

import av
import numpy as np
import pytest
from PIL import Image

from tests.app import made_runs
from tests.app.views import Markup
from vlrl.app import curves, details, notable, report
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.cli.main import main
from vlrl.errors import RunError
from vlrl.tools.experiments.report import gains


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_runs.write(tmp_path_factory.mktemp("runs") / "boxes", steps=4).path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return made_runs.hostile(tmp_path_factory.mktemp("hostile"))


def read(path):
    made = Markup(path.read_text(encoding="utf-8"))
    assert made.odd == ["doctype html"] and not {"script", "iframe", "object", "embed", "link", "base"} & set(made.tags)
    for attributes in made.attributes:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "poster", "srcset", "action"):
            assert urlparse(attributes.get(name) or "data:").scheme == "data", attributes
    style = path.read_text(encoding="utf-8")
    assert "@import" not in style and "url(" not in style.partition("</style>")[0]
    return made


def test_a_whole_run(run):
    made = read(report.write(run))
    assert (run / "report.html").exists() and not list(run.glob(".*.tmp"))
    for words in ("boxes", "grounding", "embedded/tiny-qwen3-vl", "4 of 4", "Before and after, steps 0 to 4", "heldout",
                  "config.yaml", "IoU", "Reward last"):
        assert words in made.text, words
    (row,) = [g for g in gains(Library(run).folder(".")) if g.metric == "reward/mean"]
    assert str(row.before) in made.text and str(row.after) in made.text
    assert len(made.all("article")) > 20 and 10 < len(made.all("img")) < 60
    assert (run / "report.html").stat().st_size < 2e6
    assert {i["src"][:22] for i in made.all("img")} == {"data:image/jpeg;base64"}


def test_changed_settings_and_why_each_group_is_there(run):
    changed = [Markup("".join(line)).text for line in report._changed(Library(run).settings("."))]
    assert changed == ["steps4100", "task.namegroundingnull", "model.nameembedded/tiny-qwen3-vlnull"]
    found = notable.choose(Library(run).folder("."), ["heldout"])
    assert len(found) <= 20 and len({t.key for t in found}) == len(found)
    whys = " ".join(t.why for t in found)
    assert all(word in whys for word in ("gained", "mixed answers", "best groups", "worst groups"))
    changes = [float(re.search(r"gained ([\d.]+)", t.why)[1]) for t in found if "gained" in t.why]
    assert changes[:5] == sorted(changes[:5], reverse=True)
    first = next(t for t in found if t.source == "eval")
    assert first.before == (0, first.group.replace("-4-", "-0-")) and first.step == 4
    assert len(notable.choose(Library(run).folder("."), ["heldout"], most=3)) == 3
    view = report._view(Library(run), first)
    assert [r.policy_step for r in view.rollouts] == [0, 4] and [r.index for r in view.rollouts] == [0, 1]


def test_hostile_texts_stay_text(hostile):
    made = read(report.write(hostile))
    assert "window.hacked=1" in made.text and "TOP-SECRET" not in made.text and "⟨U+202E⟩" in made.text
    for words in ("What could not be read", "step-000010-rank-00000.parquet", "written by a newer vlrl",
                  "heartbeat.json"):
        assert words in made.text, words


def test_a_run_in_progress_and_an_empty_one(run, tmp_path):
    going = tmp_path / "going"
    shutil.copytree(run / "media", going / "media")
    (going / "rollouts").mkdir()
    for name in ("rollouts/step-000000-rank-00000.parquet", "config.yaml"):
        shutil.copyfile(run / name, going / name)
    (going / "rollouts/.step-000001-rank-00000.parquet.9-9.tmp").write_bytes(b"PAR1")
    (going / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-20])  # the last line is half-written
    (going / "heartbeat.json").write_text('{"state": "running", "step": 1, "steps": 9, "pid": 1, "host": "elsewhere"}')
    text = read(report.write(going)).text
    assert "1 of 9" in text and "No evaluation yet" in text and "4 telling groups" in text and "read" not in text[-20:]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "heartbeat.json").write_text("{}")
    text = read(report.write(empty)).text
    for words in ("No step has been finished", "No evaluation yet", "No rollouts yet", "neither env.json nor"):
        assert words in text, words


def test_what_is_no_run_and_the_command(tmp_path, run, capsys, monkeypatch):
    with pytest.raises(RunError, match="is not a run folder"):
        report.write(tmp_path / "nothing")
    with pytest.raises(RunError, match="no run in"):
        report.write(tmp_path)
    with pytest.raises(RunError, match=r"contains 1 runs.*vlrl report .*boxes"):
        report.write(run.parent)
    with pytest.raises(RunError, match="is a folder: name a file"):
        report.write(run, tmp_path)
    opened, run = [], tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert main(["report", str(run), "-o", str(tmp_path / "r.html"), "--open"]) == 0
    assert opened == [(tmp_path / "r.html").as_uri()]
    assert re.fullmatch(r".*r\.html \(\d\.\d MB\)\n", capsys.readouterr().out)
    assert main(["report", str(tmp_path / "none")]) == 1 and "is not a run folder" in capsys.readouterr().err


def test_curves_and_ticks_by_hand_and_odd_ones():
    made = Markup(curves.curve("Reward", [(0, 0.0), (10, 1.0)], [curves.EvalPoints("heldout", [(0, 0.5, 0.25, None)])]))
    (line,) = made.all("polyline")
    (x0, y0), (x1, y1) = [map(float, p.split(",")) for p in line["points"].split()]
    assert (x0, x1) == (46, 332) and y0 > y1  # y grows downwards
    (dot,) = made.all("circle")
    assert float(dot["cy"]) == pytest.approx((y0 + y1) / 2, abs=0.1) and "last 1" in made.text and not made.odd
    many = Markup(curves.curve("x", [(i, i) for i in range(5000)]))
    assert [len(p["points"].split()) for p in many.all("polyline")] == [400, 400]
    np.testing.assert_allclose(curves.ticks(0, 1), [0, 0.5, 1])
    np.testing.assert_allclose(curves.ticks(-3, 9), [0, 5])
    np.testing.assert_allclose(curves.ticks(0, 200, 4), [0, 50, 100, 150, 200])
    for points in ([(0, 0)], [(1, 5), (1, 5)], [(0, 1e300), (1, -1e300)], [(0, 1e-300), (1, 2e-300)], [],
                   [(0, float("nan"))], [(5, 1e18), (6, 1e18)], [(0, float("inf")), (1, 1)],
                   [(10 ** 15, 0), (10 ** 15 + 1, 0)]):
        made = curves.curve("<b>", points, [curves.EvalPoints("<i>", [(0, 1e300, -1e300, 0)])])
        assert not Markup(made).odd and "nan" not in made and "<b>" not in made and len(made) < 20_000, points
    assert curves.of_run([], []) == [] and curves.of_run([{"step": 1, "loss": None}], [{"step": "x"}]) == []


@pytest.mark.browser
def test_opens_from_disk(run, hostile, chromium):
    page, wrong = chromium.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
    for path in (hostile, run):
        page.goto(report.write(path).as_uri())
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("window.hacked") is None
    picture = page.locator(".v-pic .v-frame").first
    small = picture.bounding_box()["width"]
    picture.click()
    assert picture.bounding_box()["width"] > 1.5 * small
    assert page.locator(".v-marks .v-line").first.evaluate("e => getComputedStyle(e).stroke") == "rgb(34, 197, 94)"
    page.locator(".v-keys .v-on-t").first.uncheck()
    assert page.locator(".v-draw").first.locator("g.v-of-t").first.is_hidden() and wrong == []
    page.close()


def test_episodes_in_a_report(tmp_path):
    run = made_runs.write(tmp_path / "a", steps=1, evaluate=False)
    run.write_rollouts(1, 0, [made_runs.zoomed(1, turns=12)])
    names = ("episode/turns_mean", "episode/success", "episode/limit_frac", "episode/tool_calls_mean")
    for step in range(3):
        run.append_metrics({"step": step, "reward/mean": 0.5, **dict.fromkeys(names, step / 2)})
    made = read(report.write(run.path))
    for words in ("Turns of an episode last 1", "Episodes that succeed", "a limit ended", "Tool calls of an episode",
                  "look shown 7", "4 more turns, too many to show"):
        assert words in made.text, words
    assert "Tool calls that failed" not in made.text and "look shown 8" not in made.text
    assert len([a for a in made.all("article") if a.get("class") == "v-turn"]) == 9
    (shown,) = [i["src"] for i in made.all("img") if i["src"].startswith("data:image/gif;base64,")]
    assert len(shown) < 1_500_000 and "showed, turn by turn" in made.text
    with Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))) as moving:
        assert moving.n_frames == 13 and moving.size == (160, 120)  # the prompt's picture, and one a turn
    (saved,) = [a for a in made.all("a") if a.get("href", "").startswith("data:video/mp4;base64,")]
    assert saved["download"].endswith(".mp4") and len(saved["href"]) < 1_500_000
    with av.open(io.BytesIO(base64.b64decode(saved["href"].partition(",")[2]))) as moving:
        pictures = [np.asarray(frame.to_image()) for frame in moving.decode(video=0)]
    assert len(pictures) == 12 * 4 + 12 and pictures[0].shape == (120, 160, 3)  # five a second


def test_few_films_are_in_a_report(tmp_path):
    run = made_runs.write(tmp_path / "a", steps=1, evaluate=False)
    run.write_rollouts(1, 0, [made_runs.zoomed(n, turns=1) for n in range(5)])
    library = Library(run.path)
    addresses = report.InlineMedia(MediaStore(library))
    views = [details.group(library, ".", "train", 1, f"zoomed-{n}") for n in range(5)]
    assert [bool(addresses.film(view, view.rollouts[0])) for view in views] == [True] * 3 + [False] * 2
