"""Paths in a config file: its folder first, then the working directory; task files and their neighbours."""

import pytest

from vlrl import task
from vlrl.config import loading
from vlrl.config.paths import searched_in, split_of_folder
from vlrl.errors import ConfigError, RunError
from vlrl.store import checkpoint

TASK = """
from vlrl.task import Task
from neighbour_of_ours import WEIGHT

class Mine(Task):
    rewards = {"right": WEIGHT}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
    (folder / "rows.jsonl").write_text("")
    (folder / "more-1.jsonl").write_text("")
    (folder / "mine.py").write_text(TASK)
    (folder / "neighbour_of_ours.py").write_text("WEIGHT = 2.5\n")
    (folder / "base.yaml").write_text("model: {name: m}\ndata: {train: rows.jsonl}\n")
    (elsewhere / "rows.jsonl").write_text("")
    monkeypatch.chdir(elsewhere)
    return folder


def load(project, text, *words):
    (project / "a.yaml").write_text(f"extends: base.yaml\n{text}\n")
    return loading.load(project / "a.yaml", words)


def test_paths_go_by_the_file_then_by_the_working_directory(project, tmp_path):
    loaded = load(project, "task: mine.py:Mine\nalgo: {loss: 'mine.py:Mine'}\ndata: {heldout: 'more-*.jsonl'}")
    assert loaded.data.train == str(project / "rows.jsonl")  # both folders have it
    assert loaded.data.heldout == str(project / "more-*.jsonl")
    assert loaded.algo.loss.name == f"{project / 'mine.py'}:Mine"
    assert task.load(loaded.task.name).weights == {"right": 2.5}  # which its neighbour says
    loaded = load(project, "tasks: [{name: mine.py, data: {train: other.jsonl}}]", "data.train=rows.jsonl")
    assert loaded.data.train == "rows.jsonl" and loaded.tasks[0].data.train == "other.jsonl"
    assert loaded.tasks[0].name == str(project / "mine.py")
    loaded = load(project, "task: qa\ndata: {train: /rows.jsonl}\nmodel: {name: Qwen/Qwen2.5-VL-3B-Instruct}")
    assert loaded.data.train == "/rows.jsonl" and loaded.model.name == "Qwen/Qwen2.5-VL-3B-Instruct"
    (project / "shards").mkdir()
    loaded = load(project, "task: mine.py:Mine\ndata: {train: shards@train, heldout: 'org/name@test'}")
    assert (loaded.data.train, loaded.data.heldout) == (str(project / "shards@train"), "org/name@test")
    (tmp_path / "a@b").mkdir()
    (tmp_path / "a").mkdir()
    assert split_of_folder(str(tmp_path / "a@b/rows.jsonl")) is None
    assert split_of_folder(str(tmp_path / "a@b.jsonl")) is None
    assert split_of_folder(str(tmp_path / "a@b")) == (str(tmp_path / "a"), "b")
    loaded = load(project, "task: no.py:Mine\ndata: {train: no.jsonl}")
    both = rf"looked for as {project}/no\.py and {tmp_path}/elsewhere/no\.py"
    with pytest.raises(ConfigError, match=both):
        task.load(loaded.task.name)
    assert f"{project}/no.jsonl" in searched_in("no.jsonl") and not searched_in("rows.jsonl")
    checkpoints = project / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with pytest.raises(RunError, match="has no complete checkpoint"):
        load(project, "task: qa\nmodel: {name: run}")
    for step in (1, 12):
        checkpoint.save(checkpoints, step, lambda folder: (folder / "w").write_text("x"), {}, 9)
    assert load(project, "task: qa\nmodel: {name: run}").model.name == str(checkpoints / "step-000012")
    (project / "yaml.py").write_text("raise SystemExit('the wrong one')\n")
    (project / "other.py").write_text(TASK.replace("from neighbour", "import yaml\nfrom neighbour"))
    assert task.load(f"{project}/other.py").weights == {"right": 2.5}
