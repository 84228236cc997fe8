"""From Python objects to a run: rows that are written, functions whose source is kept, and the settings they give."""

import datetime
import functools
import importlib.util
import json
import linecache
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from vlrl import Callback, evaluate, load_run, train
from vlrl.config import config_of, registry
from vlrl.data.sources.heldout import part_of
from vlrl.errors import ConfigError, RunError
from vlrl.rewards.text import parse_answer
from vlrl.task import load as load_task
from vlrl.task import task_samples
from vlrl.task.scoring import score_group
from vlrl.tools.start.rows import rows_file
from vlrl.tools.start.settings import settings_of, with_task_named, write_config
from vlrl.tools.start.source import named
from vlrl.training import sources
from vlrl.training.build_task import make_task
from vlrl.types import Sample

PICTURE = Image.new("RGB", (64, 64), (200, 30, 30))
NUMBER = re.compile(r"\d+")
BONUS = {"7": 0.5}


class Reader:
    """Reads a number, with a bonus."""

    def read(self, text):
        found = NUMBER.search(text)
        return found[0] if found else ""


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_written_once_with_their_pictures(tmp_path):
    (tmp_path / "own").mkdir()
    PICTURE.save(tmp_path / "own" / "a.png")
    rows = [{"image": PICTURE, "n": np.int64(3), "at": datetime.date(2024, 1, 2), "box": np.array([1, 2])},
            {"image": tmp_path / "own" / "a.png", "n": None, "text": "a.png", "tags": {"x"}},
            {"images": [PICTURE.convert("CMYK"), {"bytes": (tmp_path / "own" / "a.png").read_bytes(), "path": None}]}]
    path, roots = rows_file(rows, "data", tmp_path)
    first, second, third = lines(path)
    assert first["n"] == 3 and first["at"] == "2024-01-02" and first["box"] == [1, 2]
    assert second["image"] == str(tmp_path / "own" / "a.png") and roots == [str(tmp_path / "own")]
    assert second["text"] == "a.png" and second["tags"] == ["x"]
    stored = Image.open(Path(path).parent / first["image"])
    assert stored.getpixel((5, 5)) == (200, 30, 30) and len(third["images"]) == 2
    assert (Path(path).parent / third["images"][1]).read_bytes() == (tmp_path / "own" / "a.png").read_bytes()
    assert rows_file(iter(rows), "data", tmp_path)[0] == path
    assert rows_file(rows[:1], "data", tmp_path)[0] != path


@pytest.mark.parametrize(("source", "said"), [
    ([], "there are no rows in this list"), ([1], "data: row 0 is a int"), (3, "data=int: give the name of a file"),
    ([{"a": float("nan")}], "row 0, column 'a' holds nan"), ([{}, {"a": object()}], "row 1, column 'a' holds a object"),
    ([{"a": b"x"}], "column 'a' holds a bytes")])
def test_what_is_no_row_is_named(source, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        rows_file(source, "data", tmp_path)
    assert not [*tmp_path.glob("rows/*.new")]


def test_tables_of_other_libraries(tmp_path):
    expected = [{"question": "a?", "answer": "b"}]
    assert lines(rows_file(pa.Table.from_pylist(expected), "data", tmp_path)[0]) == expected
    datasets = pytest.importorskip("datasets")
    own = datasets.Dataset.from_dict({"image": [PICTURE], "pictures": [[PICTURE, PICTURE]]}).cast(datasets.Features(
        {"image": datasets.Image(), "pictures": datasets.Sequence(datasets.Image())}))
    (row,) = lines(rows_file(own, "data", tmp_path)[0])
    assert row["image"] == row["pictures"][0] == row["pictures"][1] and row["image"].endswith(".png")
    both = datasets.DatasetDict({"train": own, "test": own})
    found = settings_of(data=both, reward=outer()[0], settings={"data": {"cache": str(tmp_path)}})
    assert found["data"]["train"] == found["data"]["heldout"] and "heldout_share" not in found["data"]


def samples(count):
    return [Sample(id=str(i), row={"group_key": f"scene {i // 2}"}) for i in range(count)]


@pytest.mark.parametrize(("count", "share", "held"), [(40, 0.25, 10), (41, 0.1, 4), (3, 0.1, None), (6000, 0.5, 1000)])
def test_a_share_is_held_out_by_group(count, share, held):
    train_part, heldout = (part_of(samples(count), split, share, 5, "f") for split in ("train", "heldout"))
    ids = [{s.id for s in part} for part in (train_part, heldout)]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == count and ids[1]
    assert held is None or len(ids[1]) == held
    assert not {s["group_key"] for s in train_part} & {s["group_key"] for s in heldout}
    again = part_of(samples(count), "heldout", share, 5, "f")
    other = part_of(samples(count), "heldout", share, 6, "f")
    assert {s.id for s in again} == ids[1] and (count < 40 or {s.id for s in other} != ids[1])
    assert f"held out for evaluation: {len(ids[1]):,} of {count:,} rows of f" in heldout.note


def test_labels_are_held_out_in_proportion():
    rows = [Sample(id=str(i), row={"label": "rare" if i % 10 == 0 else "a" if i % 2 else "b"}) for i in range(100)]
    for seed in range(5):
        labels = [s["label"] for s in part_of(rows, "heldout", 0.1, seed, "f")]
        assert sorted(map(labels.count, ("rare", "a", "b"))) in ([1, 4, 5], [2, 4, 4], [0, 5, 5], [1, 3, 6])
    digits = [Sample(id=str(i), row={"answer": str(i // 10)}) for i in range(100)]
    assert len({s["answer"] for s in part_of(digits, "heldout", 0.1, 3, "f")}) == 10


def test_one_group_cannot_be_shared_out():
    with pytest.raises(ConfigError, match="all 2 rows of f share a picture or group_key"):
        part_of(samples(2), "train", 0.1, 0, "f")


# --- functions --------------------------------------------------------------------------------------------------------


def outer(limit=3):
    weights, reader = {"a": 1.0}, Reader

    def inner(completion: str, row: dict) -> float:
        """Uses a module, a pattern, a constant, a class, a closure and another function."""
        right = weights["a"] * (reader().read(completion) == row["answer"])
        return right + BONUS.get(completion, 0) + bonus(completion)

    @functools.lru_cache
    def bonus(text: str = "x", *, factor: float = limit) -> float:
        return factor * json.loads("1") if text == "bonus" else np.float64(0)

    def unwritable(completion, row):
        return PICTURE.size

    return inner, unwritable


def loaded(location):
    path, _, name = location.rpartition(":")
    spec = importlib.util.spec_from_file_location("kept", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def test_the_source_of_a_function_runs_elsewhere(tmp_path):
    inner, _ = outer()
    entry = named(inner, "reward", tmp_path)
    again = loaded(entry["name"])
    for text, answer in (("a 7", "7"), ("7", "7"), ("", "7"), ("bonus", "")):
        assert again(text, {"answer": answer}) == inner(text, {"answer": answer})
    assert named(outer()[0], "reward", tmp_path) == entry
    assert named(functools.partial(inner, row={}), "reward", tmp_path) == {**entry, "row": {}}
    assert named("rewards.py:f", "reward", tmp_path) == {"name": "rewards.py:f"}
    assert named(test_one_group_cannot_be_shared_out, "reward", tmp_path)["name"].endswith(
        "tests.tools.test_start:test_one_group_cannot_be_shared_out")


@pytest.mark.parametrize(("function", "said"), [
    (lambda: (lambda c, r: 1), "a lambda has no name"), (lambda: Reader().read, "give a function that is defined by"),
    (lambda: outer()[1], "uses 'PICTURE', a Image, which cannot be stored"), (lambda: 3, "reward=3: give a function"),
    (lambda: functools.partial(outer()[0], "x"), "binds positional arguments")])
def test_functions_that_cannot_be_kept(function, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        named(function(), "reward", tmp_path)


# --- settings ---------------------------------------------------------------------------------------------------------

FUNCTIONS = """
def right(completion, row):
    return completion == row["answer"]

def both(completions, answer):
    return [{"overall": 1.0, "length": len(c)} for c in completions]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n"
                                                 for i in range(20)))
    return tmp_path


def test_settings_of_each_form(folder):
    plain = settings_of(data="rows.jsonl", reward="rewards.py:right", prompt="{question}")
    assert plain == {"extends": "tiny.yaml", "run": {"dir": "runs/rows-right"}, "data": {
        "train": "rows.jsonl", "heldout_share": 0.1}, "task": {
            "name": "rows", "prompt": "{question}", "parts": ["rewards.py:right"]}}
    several = settings_of(data="rows.jsonl", reward=["rewards.py:right", "rewards.py:both"], heldout=0.2)
    assert several["task"]["parts"] == ["rewards.py:right", {
        "name": "rewards.py:both", "returns": ["overall", "length"]}]
    assert several["data"]["heldout_share"] == 0.2
    task = make_task(config_of(several))
    assert task.weights == {"right": 1.0, "overall": 1.0, "length": 0.0}
    assert [len(task_samples(task, split)) for split in ("train", "heldout")] == [16, 4]
    renamed = settings_of(data="rows.jsonl", reward={"accuracy": "rewards.py:right"}, heldout="rows.jsonl")
    assert renamed["task"]["parts"] == [{"name": "rewards.py:right", "part": "accuracy"}]
    assert renamed["data"] == {"train": "rows.jsonl", "heldout": "rows.jsonl"}
    hub = settings_of(model="Qwen/Qwen2.5-VL-3B-Instruct", data="org/name", reward="rewards.py:right", settings={
        "task": "qa", "run.dir": "r"})
    assert hub["extends"] == "models/qwen2_5_vl_3b.yaml" and hub["data"]["train"] == "org/name@train"
    assert "model" not in hub and "run" not in hub and "name" not in hub["task"]
    larger = settings_of(model="Qwen/Qwen2.5-VL-32B-Instruct", data="rows.jsonl", reward="rewards.py:right")
    assert larger["extends"] == "models/qwen2_5_vl_3b.yaml"
    assert larger["model"] == {"name": "Qwen/Qwen2.5-VL-32B-Instruct"}
    other = settings_of(model="org/Other", data="rows.jsonl", reward="rewards.py:right")
    assert other["model"] == {"name": "org/Other"} and "extends" not in other
    with_rows = {"data": {"train": "rows.jsonl", "heldout": "other.jsonl"}, "task": "qa", "model": {"name": "x"}}
    shared = config_of(settings_of(config=with_rows, heldout=0.3, settings={"run.dir": "r"}))
    assert (shared.data.train, shared.data.heldout, shared.data.heldout_share) == ("rows.jsonl", "", 0.3)
    assert config_of(settings_of(config=with_rows, heldout="rows.jsonl")).data.heldout == "rows.jsonl"
    inert = config_of(with_rows, **{"data.heldout_share": 0.3})
    assert [name for name, *_ in inert.data.inert(inert)] == ["data.heldout_share"]
    added = config_of(settings_of(config="quickstart.yaml", reward="rewards.py:right"))
    assert added.task.name == "grounding" and [p.name for p in added.task.parts] == ["rewards.py:right"]
    assert added.run.dir == "runs/quickstart" and added.data.heldout_share == 0
    more = config_of(settings_of(config=added, reward="rewards.py:both", settings={"data": {"own_samples": False}}))
    assert [p.name for p in more.task.parts] == ["rewards.py:right", "rewards.py:both"]


@pytest.mark.parametrize(("given", "said"), [
    ({"data": "rows.jsonl"}, "there is no reward: give reward=f"),
    ({"heldout": 0.2, "reward": "f.py:f"}, "data is not"), ({"data": "rows.jsonl", "reward": []}, "reward is empty")])
def test_what_is_missing_is_named(given, said, folder):
    with pytest.raises(ConfigError, match=said):
        settings_of(**given)


def test_the_saved_config_is_the_same_run(folder):
    tree = settings_of(data="rows.jsonl", reward="rewards.py:both", prompt="{question} Be brief.")
    settings = {"steps": 3, "rollout.group_size": 4, "task.rewards.length": 0.1}
    write_config(tree, settings, folder / "own.yaml")
    assert config_of(folder / "own.yaml", run={"dir": "runs/rows-both"}) == config_of(tree, **settings)
    with pytest.raises(ConfigError, match="exists already"):
        write_config(tree, settings, folder / "own.yaml")


# --- the code that a run keeps ----------------------------------------------------------------------------------------


def test_copies_of_code_are_kept_and_loaded(folder, monkeypatch):
    monkeypatch.setattr(registry, "USED", {})
    monkeypatch.setattr(registry, "COPIES", {})
    run = folder / "run"
    own = config_of({"task": {"name": "rows", "parts": ["rewards.py:right"]}, "model": {"name": "x"}})
    assert registry.resolve("reward", "rewards.py:right", {})("1", {"answer": "1"})
    (folder / "unrelated_code.py").write_text("f = print")
    assert registry.resolve("reward", "unrelated_code.py:f", {}) is print  # of another run of this process
    assert sources.keep(run, own) == [] == sources.keep(run, own) and not (run / "source/unrelated_code.py").exists()
    (folder / "rewards.py").write_text(FUNCTIONS + "# changed")
    (warning,) = sources.keep(run, own)
    assert "rewards.py has changed since the run began" in warning and (run / "source/rewards.py.before-1").exists()
    (folder / "rewards.py").unlink()
    with pytest.raises(ConfigError, match=r"the file 'rewards\.py' does not exist"):
        registry.resolve("reward", "rewards.py:right", {})
    sources.offer(run)
    assert registry.resolve("reward", "rewards.py:right", {})("1", {"answer": "1"})
    (run / "source/index.json").write_text(json.dumps({"rewards.py": "../../rewards.py", "x.py": 3}))
    monkeypatch.setattr(registry, "COPIES", {})
    sources.offer(run)
    assert registry.COPIES == {}


# --- a run ------------------------------------------------------------------------------------------------------------


class Stop(Callback):
    """Ends a run after two steps."""

    def __init__(self):
        self.seen = []

    def on_step(self, run, step, metrics):
        self.seen.append(("step", step, metrics["reward/mean"] is not None))

    def on_evaluation(self, run, step, record):
        self.seen.append((record["split"], step, len(run.evaluations)))

    def stop(self, run):
        return len(run.metrics) == 2


SHORT = {"rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}, "eval": {"samples": 2, "every": 1}}


def changed():
    def vowels(completion, row):
        return len(completion)

    return vowels


def test_a_run_of_objects_with_callbacks(tmp_path):
    def vowels(completion, row):
        return sum(c in "aeiou" for c in completion) + row["bonus"]

    rows = [{"image": Image.new("RGB", (64, 64), (i, 9, 9)), "name": f"picture {i}", "bonus": i % 2} for i in range(20)]
    watch, steps = Stop(), []
    run = train(data=rows, reward=vowels, prompt="How bright is {name}?", steps=9,
                callbacks=[watch, lambda run, step, metrics: steps.append(step)], run={"dir": str(tmp_path / "run")},
                **{**SHORT, "data.cache": str(tmp_path / "cache")})
    assert watch.seen == [("heldout", 0, 1), ("step", 0, True), ("heldout", 1, 2), ("step", 1, True), ("heldout", 2, 3)]
    assert steps == [0, 1] and json.loads((run.path / "heartbeat.json").read_text())["state"] == "finished"
    assert (run.path / "source/vowels.py").exists() and run.last.name == "step-000002"
    with pytest.raises(RunError, match=r"(?s)the rows have changed: .*the source of vowels has changed: "):
        train(data=rows[1:], reward=changed(), prompt="How bright is {name}?",
              steps=9, run={"dir": str(tmp_path / "run")}, **{**SHORT, "data.cache": str(tmp_path / "cache")})
    (row, *_) = run.rollouts(columns=["prompt", "parts", "sample", "media"]).to_pylist()
    assert "How bright is picture" in row["prompt"] and len(row["media"]) == 1
    assert dict(row["parts"]).keys() == {"vowels"}
    found = evaluate(run, heldout=rows[:3], **{"data.cache": str(tmp_path / "cache"), "eval.samples": 9})
    assert found["heldout"]["n"] == 3 and evaluate(run.path)["heldout"]["n"] == 2
    patient = train(data=rows, reward=vowels, prompt="How bright is {name}?", steps=9, train={"lr": 1e-9},
                    run={"dir": str(tmp_path / "patient")}, **{
                        **SHORT, "data.cache": str(tmp_path / "cache"), "eval.patience": 2})
    assert len(patient.metrics) == 3 and len(load_run(patient.path).evaluations) == 4


@pytest.mark.parametrize(("callbacks", "said"), [([3], "callbacks=3"), ([Stop], "callbacks=<class")])
def test_what_is_no_callback(callbacks, said):
    with pytest.raises(ConfigError, match=said):
        train("quickstart.yaml", callbacks=callbacks)


# --- task classes -----------------------------------------------------------------------------------------------------

CELLS = ("""
from vlrl.tasks.grounding import Grounding
LEAST = 0.7

def reached(value):
    return float(value > LEAST)
""", """
x = 1
class Near(Grounding):
    @classmethod
    def rewards_for(cls, settings):
        return {**super().rewards_for(settings), "near": 0.5}

    def score(self, sample, answer):
        parts = super().score(sample, answer)
        return {**parts, "near": reached(parts["iou"])}

class Empty(Grounding):
    pass
""")


@pytest.fixture
def notebook(monkeypatch):
    """The names that two cells define. As in a notebook, `__main__` is no file, and linecache has the cells."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, text in enumerate(CELLS):
        name = f"<ipython-input-{number}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(main))
    return main


def test_a_task_class_of_a_notebook_is_loaded_elsewhere(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = {"data.cache": str(tmp_path)}
    given = [{"task": notebook.Near}, {"task": "__main__:Near"}, {"task.name": notebook.Near},
             {"task": {"name": notebook.Near, "drawn": True}}]
    locations = [with_task_named({**one, **cached}) for one in given]
    name = locations[0]["task"]
    assert locations[1]["task"] == locations[2]["task.name"] == locations[3]["task"]["name"] == name
    assert locations[3]["task"]["drawn"] and with_task_named({"task": "qa", "steps": 3}) == {"task": "qa", "steps": 3}
    task = load_task(name, {"drawn": True})
    sample = task.samples("train")[0]
    (scored,) = score_group(task, sample, [parse_answer(task.oracle(sample))], 0)
    assert scored.parts["near"] == 1 and scored.reward == pytest.approx(1.5, abs=0.01)
    assert type(task) is not notebook.Near
    with pytest.raises(ConfigError, match="the source of Empty is not known"):
        with_task_named({"task": notebook.Empty})
    assert settings_of(settings=with_task_named(given[0]))["run"] == {"dir": "runs/Near"}


@pytest.mark.slow
def test_a_run_keeps_its_task_class(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "USED", {})
    monkeypatch.setattr(registry, "COPIES", {})
    cache = tmp_path / "cache"
    run = train("quickstart.yaml", task={"name": notebook.Near, "drawn": True}, steps=1,
                run={"dir": str(tmp_path / "run")}, **{**SHORT, "data.cache": str(cache)})
    assert "near" in dict(run.rollouts().to_pylist()[0]["parts"])
    shutil.rmtree(cache)
    for name in [name for name in sys.modules if name.startswith(registry.FILE_MODULE) and name.endswith("_Near")]:
        monkeypatch.delitem(sys.modules, name)
    assert evaluate(run)["heldout"]["metrics"]["near"]["mean"] >= 0
