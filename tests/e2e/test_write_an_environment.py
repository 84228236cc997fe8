"""docs/write-an-environment.md: its file and its command, in an empty folder."""

import json
import re
import shlex
import shutil

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "write-an-environment.md").read_text(encoding="utf-8")


def test_the_page_trains(tmp_path):
    name, code = re.search(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL).groups()
    (command,) = re.findall(r"^vlrl train (.*)$", PAGE, re.MULTILINE)
    (tmp_path / name).write_text(code)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path)
    done = forked.run([str(ROOT / "train.py"), *shlex.split(command)], ENV, tmp_path, 600)
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "runs" / "lamp")
    rows = run.rollouts().to_pylist()
    assert len(run.metrics()) == 3 and all(line["grad_norm"] >= 0 for line in run.metrics())
    for row in rows:
        acted = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert 1 <= len(acted) <= 4 and row["finish_reason"] == ("stop" if acted[-1]["done"] else "turns")
        assert json.loads(acted[-1]["info"])["level"] == int(acted[-1]["state"])
