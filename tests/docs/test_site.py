"""`make docs`: all pages are built, without a warning, and load nothing from a network."""

import re
import subprocess
import sys

import pytest

from tests.e2e.runs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_there(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} | {"index"}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    measured = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {path.stem for path in (site / "results").glob("*.html")} == measured


def test_the_reference_has_what_is_documented(site):
    text = (site / "reference" / "vlrl.html").read_text()
    assert all(f'id="{name}"' in text for name in (
        "vlrl.task.base.Task", "vlrl.types.Sample", "vlrl.tools.train.train", "vlrl.tools.run.load_run"))
    assert 'id="vlrl.rewards.boxes.iou"' in (site / "reference" / "rewards.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)="?(https?:)?//""")
    for page in site.rglob("*.html"):
        found = loaded.search(page.read_text())
        assert not found, (page, found)
