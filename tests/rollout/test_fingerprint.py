"""Rows that are others at a resume are named, and so are files that are written to while a run reads them."""

import json
import os
import random

import pytest

from tests.curriculum.sourced import source
from vlrl.config.schema import DataSettings
from vlrl.data import read_samples
from vlrl.data.sources import lazy_dataset
from vlrl.errors import RunError
from vlrl.rollout import fingerprint
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.task.mixture import Interleaved


def read(path, entries, index="memory"):
    """The fingerprint of rows written to a file, and the state of a checkpoint."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    task = Task()
    task.data = DataSettings(train=str(path), index=index, cache=str(path.parent / "cache"))
    return fingerprint.fingerprint_of(read_samples(task, "train"))


def rows(count=30):
    return [{"id": f"r{i}", "question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(count)]


def relabelled(entries):
    return [{**row, "answer": "7"} if row["id"] == "r3" else row for row in entries]


@pytest.mark.parametrize("index", ["memory", "lazy"])
@pytest.mark.parametrize("change, said", [
    (lambda entries: entries[:20], r"there were 30 rows and now there are 20\b"),
    (relabelled, r"1 rows changed, 'r3' \(row 4\)\."),
    (lambda entries: random.Random(1).sample(entries, 30),
     r"the same rows in another order: 'r\d+' \(row 1\), .* more"),
])
def test_other_rows_are_named(tmp_path, index, change, said):
    before = read(tmp_path / "rows.jsonl", rows(), index).state_dict()
    read(tmp_path / "rows.jsonl", rows(), index).check(before, "data.train='rows.jsonl'")
    with pytest.raises(RunError, match=rf"data\.train='rows\.jsonl' differ from those of.*{said}.*resume=never"):
        read(tmp_path / "rows.jsonl", change(rows()), index).check(before, "data.train='rows.jsonl'")


def test_of_a_large_file_some_rows_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_dataset, "SPREAD", 4)
    found = read(tmp_path / "rows.jsonl", rows(31), "lazy")
    assert found.places.tolist() == [0, 10, 20, 30] and found.ids == ("r0", "r10", "r20", "r30")
    with pytest.raises(RunError, match=r"3 rows of the 4 compared rows changed.*'r11' \(row 11\)"):
        read(tmp_path / "rows.jsonl", [*rows(33)[:5], *rows(33)[6:32]], "lazy").check(found.state_dict(), "x")


def test_the_tasks_of_a_mixture_are_compared_each_and_files_that_are_written_to_told(tmp_path):
    def both(entries):
        found = []
        for name, of in (("a", rows(5)), ("b", entries)):
            path, task = tmp_path / f"{name}.jsonl", Task()
            path.write_text("".join(json.dumps(entry) + "\n" for entry in of))
            task.data = DataSettings(train=str(path))
            found.append(read_samples(task, "train"))
        return fingerprint.fingerprint_of(Interleaved({"a": found[0], "b": found[1]}))
    before = both(rows(4))
    assert len(before.sums) == 9 and len(before.files) == 2
    with pytest.raises(RunError, match=r"1 rows changed, 'b/r3' \(row 8\)"):
        both(relabelled(rows(4))).check(before.state_dict(), "x")
    found = read(tmp_path / "rows.jsonl", rows())
    assert found.written_to() == []
    os.truncate(tmp_path / "rows.jsonl", 100)
    assert found.written_to() == [str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").unlink()
    assert found.written_to() == [str(tmp_path / "rows.jsonl")]


def test_a_source_refuses_the_state_of_other_samples(tmp_path):
    made = source("uniform", "plain")
    path = checkpoint.save(tmp_path, 1, lambda path: None, {"source": made.state_dict()}, 1)
    state = checkpoint.load_state(path)["source"]
    made.load_state_dict(state)
    del state["data"]  # as earlier checkpoints
    made.load_state_dict(state)
    state["history"]["visits"] = state["history"]["visits"][:-2]
    with pytest.raises(RunError, match=r"the samples of .*there were 12 rows and now there are 14"):
        made.load_state_dict(state)
