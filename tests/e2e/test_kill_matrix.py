"""kill -9 in random phases, with restarts: everything ends as in an undisturbed run. The long version: benchmarks/."""

import subprocess
import sys

import pytest

from tests.e2e.runs import ENV, ROOT

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_four_kills(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "kill_matrix.py"), "--kills", "4", "--seed", "8",
               "--out", str(tmp_path / "table.md")]
    done = subprocess.run(command, env=ENV, text=True, capture_output=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed in") == 4 + 1 and "| all | 4 | 4 |" in (tmp_path / "table.md").read_text()
