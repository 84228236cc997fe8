"""How a run of several stages is listed while it goes on: vlrl status and the inspector's library."""

import json
import os

import pytest

from vlrl.app.library import Library
from vlrl.cli.main import main
from vlrl.store.lock import this_process
from vlrl.tools.experiments import status
from vlrl.tools.stages.stage_list import StageList, read_stages


def stage(folder, state="finished", step=2, reward=0.5):
    folder.mkdir(parents=True)
    (folder / "heartbeat.json").write_text(json.dumps({"step": step, "steps": 4, "state": state, "time": 5.0}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step - 1, "reward/mean": reward}) + "\n")
    return folder


@pytest.fixture
def staged(tmp_path):
    """A run whose first stage is finished, and whose rounds are in their first."""
    run = tmp_path / "runs" / "two"
    StageList(run, [("cold", "sft"), ("own", "rounds"), ("last", "rl")], {"cold": {"steps": 4, "model": "m"}}).write()
    StageList(run / "own", [("round-01", "sft"), ("round-02", "sft")]).write()
    stage(run / "cold", step=4)
    stage(run / "own" / "round-01", "interrupted", 3, 0.25)
    return run


def test_it_is_one_run_with_its_stages(staged, capsys):
    assert status.find_runs(staged.parent) == [staged]
    found = status.read_status(staged)
    assert (found.state, found.step, found.steps, found.reward) == ("interrupted", 7, 8, 0.25)
    assert [(os.path.basename(s.path), s.state, s.step) for s in found.stages] == [
        ("cold", "finished", 4), ("own", "interrupted", 3)]
    assert [os.path.basename(s.path) for s in found.stages[1].stages] == ["round-01"]
    assert main(["status", str(staged.parent)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "two" in line] == [
        "two", "two/cold", "two/own", "two/own/round-01"]
    assert main(["status", str(staged)]) == 0 and "own/round-01: interrupted, step 3/4" in capsys.readouterr().out
    assert main(["status", str(staged), "--json"]) == 0
    assert [s["step"] for s in json.loads(capsys.readouterr().out)["stages"]] == [4, 3]


def test_states_and_the_library_of_the_inspector(staged):
    stage(staged.parent / "other")
    runs = Library(staged.parent).runs()
    assert [(r.id, r.part_of) for r in runs] == [
        ("other", ""), ("two", ""), ("two/cold", "two"), ("two/own", "two"), ("two/own/round-01", "two/own")]
    assert (runs[1].step, runs[1].steps, runs[1].state) == (7, 8, "interrupted")
    (staged / "run.lock").write_text(json.dumps(this_process()))  # this process works on it, between two stages
    assert status.read_status(staged).state == "running"
    (staged / "run.lock").write_text(json.dumps({**this_process(), "pid": 2**22 - 1, "started": 1}))
    stage_beat = staged / "own" / "round-01" / "heartbeat.json"
    stage_beat.write_text(json.dumps({**json.loads(stage_beat.read_text()), "state": "running"}))
    assert status.read_status(staged).state == "dead"
    (staged / "run.lock").unlink()
    known = read_stages(staged)
    for name in ("own", "last"):
        known = known.finished(name, steps=4, model="m")
    assert status.read_status(staged).state == "finished"


def test_no_list_and_links_that_lead_elsewhere(staged, tmp_path):
    assert read_stages(tmp_path) is None
    for text in ("{", "[]", '{"stages": [{"name": "../x", "kind": "rl"}], "done": {}}', '{"stages": 3, "done": {}}'):
        (tmp_path / "stages.json").write_text(text)
        assert read_stages(tmp_path) is None
    os.symlink(stage(tmp_path / "elsewhere"), staged / "last")
    assert len(read_stages(staged).folders) == 2 and len(status.read_status(staged).stages) == 2
