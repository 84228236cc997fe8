"""docs/write-an-environment.md: its files and commands, in an empty folder."""

import json
import re
import shlex

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from vlrl.cli.main import main
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "write-an-environment.md").read_text(encoding="utf-8")


def test_the_page_trains(tmp_path):
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    for name, text in re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    commands = re.findall(r"^vlrl train (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = forked.run(["-m", "vlrl", "train", *shlex.split(command)], ENV, tmp_path, 600)
        assert done.returncode == 0, done.stderr
    (line,) = RunFolder(tmp_path / "runs" / "doors").metrics()
    assert line["episode/turns_mean"] >= 1 and line["episode/tool_calls_mean"] >= 0 == line["environment/restarts"]
    helped = RunFolder(tmp_path / "runs" / "helped")
    assert [line["curriculum/stage"] for line in helped.metrics()] == [1, 1, 2]
    said = {(row["step"] < 2, "led nowhere" in str(row["turns"])) for row in helped.rollouts().to_pylist()}
    assert (True, True) in said and (False, True) not in said
    run = RunFolder(tmp_path / "runs" / "lamp")
    rows = run.rollouts().to_pylist()
    assert len(run.metrics()) == 3 and all(line["grad_norm"] >= 0 for line in run.metrics())
    for row in rows:
        acted = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert 1 <= len(acted) <= 4 and row["finish_reason"] == ("stop" if acted[-1]["done"] else "turns")
        assert json.loads(acted[-1]["info"])["level"] == int(acted[-1]["state"])


def test_the_page_checks_its_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    for command in re.findall(r"^vlrl (tasks check .*)$", PAGE, re.MULTILINE):
        assert main([*shlex.split(command), "--processes", "0"]) == 0, capsys.readouterr().out
