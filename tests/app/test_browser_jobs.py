"""The jobs of benchmarks/inspector_jobs.py can be done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gradio")
from tests.app import made_runs
from tests.app.conftest import opened, serving
from tests.docs.test_benchmarks import module

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_job_is_done_in_so_many_actions(tmp_path):
    made_runs.write(tmp_path / "boxes", "boxes", steps=2)
    command = [sys.executable, str(ROOT / "benchmarks/inspector_jobs.py"), str(tmp_path / "boxes"), "--only",
               "all groups without variance", "--json", str(tmp_path / "out.json")]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    [found] = json.loads((tmp_path / "out.json").read_text())["now"].values()
    assert found["actions"] == 2 and found["seconds"] > 0


def test_before_and_after_is_one_action(chromium, tmp_path):
    jobs = module("inspector_jobs")
    made_runs.write(tmp_path / "boxes", "boxes", steps=2)
    with serving(tmp_path) as address, opened(chromium) as page:
        page.goto(address)
        hands = jobs.Hands(page)
        hands.see("#v-curves .v-chart")
        jobs.before_after(hands)
        assert hands.actions == 1
