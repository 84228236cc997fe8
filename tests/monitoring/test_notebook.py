"""What a notebook shows of a run: the page by hand, cells of a real kernel, pictures with marks, a run that goes on."""

import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers import made_group
from vlrl.monitoring.notebook import curve, page
from vlrl.store import RunFolder
from vlrl.tools.run import load_run
from vlrl.types import LoadedMedia


def test_curves_and_the_page():
    svg = curve([(0, 1.0), (5, 2.0), (10, 1.5)])
    assert re.search(r'points="([^"]*)"', svg)[1] == "40.0,120.0 320.0,20.0 600.0,70.0"
    assert ">2</text>" in svg and ">1</text>" in svg and ">step 0</text>" in svg and ">10</text>" in svg
    assert curve([]) == curve([(0, 1.0)]) == curve([(0, 1.0), (1, float("nan"))]) == ""
    assert "40.0,120.0 600.0,120.0" in curve([(3, 0.5), (4, 0.5)])
    places = re.search(r'points="([^"]*)"', curve([(i, i) for i in range(10_000)]))[1].split()
    assert 600 <= len(places) <= 640 and places[-1] == "600.0,20.0"
    html = page(3, 8, "reward <b>0.4</b>", [])
    assert '<progress value="3" max="8"' in html and "3/8 reward &lt;b&gt;0.4&lt;/b&gt;" in html
    assert "> 3 x<" in page(3, None, "x", [])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=6))
def test_any_points_give_finite_places(points):
    assert "nan" not in curve(points) and "inf" not in curve(points)


@pytest.mark.slow
def test_a_cell_is_drawn_in_place(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    code = ("from vlrl.monitoring.progress import Progress\n"
            "with Progress(2) as progress:\n"
            "    progress.update(1, {'reward/mean': 0.25})\n    progress.update(2, {'reward/mean': 0.5})")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    pages = [output["data"]["text/html"] for output in notebook.cells[0].outputs if "data" in output]
    assert len(pages) == 1 and "2/2 reward 0.500" in pages[0] and "40.0,120.0 600.0,20.0" in pages[0]


def group(name, kind="image"):
    frames = (Image.new("RGB", (512, 256), "white"),) * (1 + (kind == "video"))
    media = LoadedMedia(kind=kind, frames=frames, sha256=f"{name:064x}")
    marks = [{"kind": "box", "at": [10, 10, 100, 100], "role": "target"}]
    return made_group(f"s{name}", media=(media,), of={"marks": marks})


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create("task: {name: grounding}\n", 0)
    folder.write_rollouts(0, 0, [group(1)], split="heldout")
    folder.write_rollouts(5, 0, [group(2, "video"), group(3), group(4)], split="heldout")
    folder.heartbeat({"step": 0, "steps": 2, "state": "running"})
    return folder


def test_pictures_are_those_of_the_newest_evaluation_inside_the_run(folder, tmp_path):
    run = load_run(folder.path)
    first, _ = run.pictures()
    assert first.size == (512, 256) and first.getpixel((10, 50)) == (34, 197, 94)
    assert len(run.pictures(1)) == 1 and run.pictures(split="train") == []
    (folder.path / "media" / f"{3:064x}.png").unlink()
    (folder.path / "media" / f"{4:064x}.png").write_bytes(b"no picture")
    assert run.pictures() == []
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
    (folder.path / "media" / f"{3:064x}.png").symlink_to(tmp_path / "other.png")
    assert load_run(folder.path).pictures() == []


def test_a_run_is_followed_to_its_end(folder, capsys):
    def goes_on():
        folder.append_metrics({"step": 0, "reward/mean": 0.25})
        folder.append_metrics({"step": 1, "reward/mean": 0.5})
        folder.heartbeat({"step": 2, "steps": 2, "state": "finished"})

    other = threading.Timer(0.2, goes_on)
    other.start()
    load_run(folder.path).show(follow=True, every_s=0.05)
    other.join()
    lines = capsys.readouterr().out.splitlines()
    assert "0 of 2 steps" in lines[0] and any("2 of 2 steps, reward 0.500" in line for line in lines)
