"""Rows beside a task that makes its own samples: refused, or put in their place, but never left unread in silence."""

import json

import pytest

from tests.tables import each
from vlrl.config import validate
from vlrl.data import read_samples
from vlrl.errors import ConfigError
from vlrl.task import Task, task_samples
from vlrl.training.build_task import make_task
from vlrl.types import Sample


class Made(Task):
    """Makes its own samples."""

    rewards = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={}) for n in range(3)]

    def score(self, sample, answer):
        return {"right": 1.0}

    def sample_from_row(self, row, root=None):
        return Sample(id=str(row["id"]), row=row)


class Opened(Made):
    """Reads its file in a way of its own."""

    def samples(self, split):
        with open(getattr(self.data, split)) as lines:
            return [Sample(id=f"own-{json.loads(line)['id']}", row={}) for line in lines]


class Read(Made):
    def samples(self, split):
        return read_samples(self, split)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "n": 3}\n')
    return str(path)


def ids(split, tasks=None, name="Made", **data):
    tree = {"tasks": tasks} if tasks else {"task": name_of(name)}
    task = make_task(validate({**tree, "model": {"name": "x"}, "data": data}))
    return [s.id for s in task_samples(task, split)]


def name_of(name):
    return f"tests.task.test_row_files:{name}"


@each("split", ["train", "heldout"])
def test_a_file_that_no_one_reads_is_refused(split, rows):
    with pytest.raises(ConfigError, match=rf"data\.{split}='.*rows.jsonl' is not read: task .* makes its own samples"
                                          r".*data\.own_samples=false"):
        ids(split, **{split: rows})
    other = {"train": "heldout", "heldout": "train"}[split]
    assert ids(other, **{split: rows}) == [f"{other}-{n}" for n in range(3)]


@each("split", ["train", "heldout"])
def test_own_samples_false_puts_the_rows_in_their_place(split, rows):
    assert ids(split, own_samples=False, **{split: rows}) == ["a"]


@each("split", ["train", "heldout"])
def test_rows_stay_in_their_place_however_often_they_are_asked_for(split, rows):
    data = {"own_samples": False, split: rows}
    task = make_task(validate({"task": name_of("Made"), "model": {"name": "x"}, "data": data}))
    assert [[s.id for s in task_samples(task, split)] for _ in range(3)] == [["a"]] * 3


def test_rows_beside_own_samples_by_task(rows):
    assert ids("heldout", train=rows, own_samples=False) == [f"heldout-{n}" for n in range(3)]
    task = make_task(validate({"task": {"name": "grounding", "drawn": True}, "model": {"name": "x"},
                               "data": {"train": rows}}))
    with pytest.raises(ConfigError, match="task 'grounding' makes its own samples"):
        task_samples(task, "train")
    tasks = [{"name": name_of("Made"), "data": {"train": rows}}, {"name": name_of("Read"), "data": {"train": rows}}]
    with pytest.raises(ConfigError, match=r"tasks\.0 \(Made\): data\.train=.* is not read.*tasks\.0\.data"):
        ids("train", tasks)
    tasks = [name_of("Made"), name_of("Read")]
    assert ids("train", tasks, train=rows) == ["Made/train-0", "Read/a", "Made/train-1", "Made/train-2"]
    with pytest.raises(ConfigError, match=r"data\.train=.* is not read: every task of `tasks` makes its own samples"):
        ids("train", [name_of("Made"), {"name": name_of("Made"), "label": "other"}], train=rows)


@each("name found", [("Read", "a"), ("Opened", "own-a")])
def test_a_task_may_read_its_file_as_it_likes(name, found, rows):
    assert ids("train", name=name, train=rows) == [found]
