"""What a notebook shows of a run: the page by hand, and cells of a real kernel."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.monitoring.notebook import curve, page


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
