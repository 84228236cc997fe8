"""The jobs of benchmarks/inspector_jobs.py can be done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gradio")
from tests.app import made_runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("job", "actions"), [("all groups without variance", 2), ("before and after", 1)])
def test_a_job_is_done_in_so_many_actions(tmp_path, job, actions):
    made_runs.write(tmp_path / "boxes", "boxes", steps=2)
    command = [sys.executable, str(ROOT / "benchmarks/inspector_jobs.py"), str(tmp_path / "boxes"), "--only", job,
               "--json", str(tmp_path / "out.json")]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    [found] = json.loads((tmp_path / "out.json").read_text())["now"].values()
    assert found["actions"] == actions and found["seconds"] > 0
