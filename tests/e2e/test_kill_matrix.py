"""kill -9 in random phases, with restarts: everything ends as in an undisturbed run. The long version: benchmarks/."""

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_three_kills(tmp_path):
    words = [str(ROOT / "benchmarks" / "kill_matrix.py"), "--kills", "3", "--seed", "8",
             "--out", str(tmp_path / "table.md")]
    done = forked.run(words, ENV, tmp_path, 1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed in") == 3 + 1 and "| all | 3 | 3 |" in (tmp_path / "table.md").read_text()
