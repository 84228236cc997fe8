"""`vlrl tasks`: list, new, check; and built-in tasks that nothing in the working directory can hide."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import forked
from tests.tables import each
from vlrl import config
from vlrl.cli.main import main
from vlrl.store import RunFolder
from vlrl.task import builtin_names, load_class
from vlrl.tools.tasks import scaffold

ROOT = Path(__file__).resolve().parents[2]
VLRL = [sys.executable, "-P", "-m", "vlrl"]  # -P as for the installed script: the working directory is no import path


def run(capsys, *words):
    capsys.readouterr()
    code = main(["tasks", *map(str, words)])
    return (code, *capsys.readouterr())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_list_shows_every_task_with_parts_settings_and_configs(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0 and all(f"{name}: " in out for name in builtin_names())
    for text in ("iou × 1.0, format × 0.0", "task.size=128  (whole number >= 32 and <= 4096)",
                 "configs/quickstart.yaml", 'task.thinking="no_thinking"  (one of thinking, no_thinking, both)'):
        assert text in out
    assert "task.prompts" not in out  # every task has it
    entries = {entry["name"]: entry for entry in json.loads(run(capsys, "list", "--json")[1])}
    assert "configs/classification/digits.yaml" in entries["digits"]["configs"]
    assert entries["grounding"]["parts"] == {"iou": 1.0, "format": 0.0}
    assert {"name": "drawn", "kind": "true or false", "default": False} in entries["grounding"]["settings"]


@pytest.mark.parametrize("kind", ["task", "rows", "environment"])
def test_a_new_task_is_whole(capsys, folder, kind):
    rows, acts = kind == "rows", kind == "environment"
    code, out, _ = run(capsys, "new", "my_task", "--dir", "mine", *[f"--{kind}"] * (kind != "task"))
    assert code == 0 and "cd mine\n" in out and ("vlrl score my_task.yaml" in out) != acts
    for line in ("vlrl train my_task.yaml --dry-run", "vlrl train my_task.yaml\n"):
        assert line in out
    check = re.search("vlrl tasks (check my_task.py.*)", out)[1].split()
    os.chdir("mine")
    assert len(Path("my_task.py").read_text().splitlines()) <= (70 if acts else 40)
    ruff = [sys.executable, "-m", "ruff", "check", "-q", "--no-cache"]
    subprocess.run([*ruff, "--config", str(ROOT / "pyproject.toml"), "."], check=True)
    code, out, _ = run(capsys, *check, "--samples", 5, "--processes", 0)
    assert code == 0 and "task 'my_task' keeps the contract" in out, out
    note = "note: perfect episodes earn 1.2 on average over 5 samples, hostile actions at most 0\n"
    assert (note in out) == acts, out
    loaded = config.load("my_task.yaml")
    assert loaded.task.name == "my_task.py:MyTask" and loaded.model.name == "embedded/tiny-qwen3-vl"
    if rows:
        lines = [json.loads(line) for split in ("train", "heldout")
                 for line in Path(f"my_task_rows/{split}.jsonl").read_text().splitlines()]
        assert len({row["id"] for row in lines}) == 8 and all(Path("my_task_rows", r["image"]).is_file() for r in lines)


@pytest.mark.slow
def test_new_tasks_train_and_their_tests_pass(folder):
    kinds = ("task", "rows", "environment")
    for kind in kinds:
        scaffold.create(f"my_{kind}", folder, kind)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    tests = [f"test_my_{kind}.py" for kind in kinds]
    forked.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], env, folder, 300).check_returncode()
    words = ["steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2", "log.samples_every=1"]
    for kind in kinds:
        forked.run(["-m", "vlrl", "train", f"my_{kind}.yaml", *words], env, folder, 300).check_returncode()
        run_folder = RunFolder(folder / "runs" / f"my_{kind}")
        assert [line["step"] for line in run_folder.metrics()] == [0]
        assert {line["split"] for line in run_folder.evals()} == {"heldout"}


def test_names_that_cannot_be_tasks_and_those_of_their_classes(capsys, folder):
    python = "name of a Python file"
    for name, says in (
            ("grounding", "is the name of a built-in task.*e.g. my_grounding"), ("vlrl", "installed package"),
            ("json", "module of Python's standard library"), ("numpy", "installed package"), ("class", python),
            ("1x", f"{python}.*e.g. my_1x"), ("foo.py", f"{python}.*e.g. foo$"), ("a/b", "e.g. a_b"), ("../up", python),
            ("", "e.g. task"), ("_", python), ("é", python), ("test_x", "read by pytest"),
            ("x" * 61, "longer than 60")):
        code, _, err = run(capsys, "new", name)
        assert code == 1 and re.search(says, err.strip()) and "Traceback" not in err, name
        scaffold.check_name(re.search(r"e\.g\. (\w+)$", err.strip())[1])  # the way out is one
    assert list(folder.iterdir()) == []
    for name, wanted in (("image", "ImageTask"), ("task", "TaskTask"), ("count_mugs", "CountMugs"), ("x2", "X2")):
        assert scaffold.class_name(name) == wanted
        scaffold.create(name, folder)
        assert load_class(str(folder / f"{name}.py")).__name__ == wanted


def test_nothing_is_overwritten_and_a_folder_that_cannot_be_written_is_named(capsys, folder):
    (folder / "test_foo.py").write_text("mine")
    code, _, err = run(capsys, "new", "foo")
    assert code == 1 and "test_foo.py exists already, so nothing was written" in err
    assert [p.name for p in folder.iterdir()] == ["test_foo.py"] and (folder / "test_foo.py").read_text() == "mine"
    (folder / "bar_rows").mkdir()
    assert "bar_rows exists already" in run(capsys, "new", "bar", "--rows")[2]
    (folder / "file").write_text("")
    code, _, err = run(capsys, "new", "foo", "--dir", "file/sub")
    assert code == 1 and "--dir 'file/sub' cannot be written" in err


BROKEN = '''
from vlrl.data import Drawn
from vlrl.task import Task
from vlrl.types import Sample

class Leaky(Task):
    """Pays wherever the word stands."""
    prompt = "{id}: which word?"
    rewards = {"correct": 1.0}
    extra: int = 1

    def samples(self, split):
        return Drawn(6, lambda i: self.make(f"{split}-{i}", ("ant", "bee")[i % 2]))

    def make(self, name, word):
        return Sample(id=name, row={"id": name, "answer": word})

    def score(self, sample, answer):
        return {"correct": float(sample["answer"] in answer.text)}

    def oracle(self, sample):
        return sample["answer"]
'''


@pytest.fixture
def leaky(folder):
    (folder / "leaky.py").write_text(BROKEN)
    return folder


@pytest.mark.slow
def test_check_names_what_is_wrong_and_exits_with_1(capsys, leaky):
    code, out, err = run(capsys, "check", "leaky.py", "task.extra=2", "--processes", 1)
    assert code == 1 and err == ""
    assert re.search(r"FAILED cheat: sample 'train-0': the cheat 'hidden in the reasoning' earns 1 on average.*"
                     r"answer: '<think>ant</think><answer>bee</answer>'", out)
    assert "task 'leaky' breaks the contract" in out
    code, out, _ = run(capsys, "check", "leaky.py:Leaky", "--json", "--processes", 0)
    report = json.loads(out)
    assert code == 1 and report["ok"] is False and report["answers"] is None
    assert {"check", "message", "sample", "text", "more"} == set(report["findings"][0])
    assert {row["name"] for row in report["cheats"]} >= {"perfect answer", "two answers"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_errors_of_the_verifier_are_listed_with_rates(capsys, folder):
    scaffold.create("foo", folder, "rows")
    row = {"id": "new", "question": "Which shape is this?", "answer": "square"}
    answers = write(folder / "judged.jsonl",
                    {"id": "0", "answer": "Circle", "correct": True},
                    {"id": "0", "answer": "a circle", "correct": True},  # not paid: a false negative
                    {"id": "6", "answer": "square", "correct": False},  # held out
                    {"sample": row, "answer": "square", "correct": False},  # paid: a false positive
                    {"sample": row, "answer": "square", "correct": True, "part": "format"})
    words = ("check", "foo.py", "--config", "foo.yaml", "--answers", answers, "--processes", 0)
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "false positives: 1 of 2 (50.0%)" in out and "row 4, sample 'new': correct=1  answer: 'square'" in out
    assert "false negatives: 1 of 3 (33.3%)" in out and "row 2, sample '0': correct=0  answer: 'a circle'" in out
    assert "FAILED answers: 2 errors, more than --max-errors 0" in out
    code, out, _ = run(capsys, *words, "--max-errors", 2, "--json")
    verdict = json.loads(out)["answers"]
    assert code == 0 and verdict["false_positives"]["rate"] == 0.5 and verdict["false_negatives"]["count"] == 1


def test_bad_judged_answers_are_named(capsys, folder):
    scaffold.create("foo", folder, "rows")
    for row, says in (
            ({"id": "0", "answer": 3, "correct": True}, "row 1: answer='3' must be a string"),
            ({"id": "0", "answer": "x", "correct": "yes"}, "correct='yes' must be true or false"),
            ({"id": "nobody", "answer": "x", "correct": True}, "id='nobody' is not a sample of train or heldout"),
            ({"sample": "0", "answer": "x", "correct": True}, "sample must be a row"),
            ({"sample": {"id": "0"}, "answer": "x", "correct": True}, "give question and answer"),
            ({"id": "0", "answer": "x", "correct": True, "part": "corect"}, "part='corect'.*Did you mean 'correct'")):
        write(folder / "judged.jsonl", row)
        code, _, err = run(capsys, "check", "foo.py", "--config", "foo.yaml", "--answers", "judged.jsonl")
        assert code == 1 and err.startswith("error: ") and re.search(says, err) and "Traceback" not in err


@each("words code says", [
    (["nope"], 1, "no built-in task of that name"), (["groundin"], 1, "Did you mean 'grounding'"),
    (["nope.py"], 1, "'nope.py' does not exist"), (["."], 1, "task.name='.'"), ([""], 1, "task.name is not set"),
    (["grounding"], 1, "data.train is not set"), (["leaky.py", "task.extr=3"], 1, "Did you mean 'extra'"),
    (["leaky.py", "--config", "no.yaml"], 1, "'no.yaml' does not exist"), (["leaky.py", "lr"], 1, "is not a setting"),
    (["leaky.py", "--samples", "0"], 2, "--samples"), (["leaky.py", "--answers", "no.jsonl"], 1, "no.jsonl"),
    (["leaky.py", "--answers", "."], 1, "error: "), (["leaky.py", "--answers", "binary.jsonl"], 1, "cannot be read"),
    (["leaky.py", "--answers", "empty.jsonl"], 1, "has no rows"), ([], 2, "Missing argument"),
    (["broken.py"], 1, r"broken.py:1: SyntaxError")])
def test_bad_input_is_explained(capsys, leaky, words, code, says):
    (leaky / "binary.jsonl").write_bytes(b"\xff\xfe\0")
    (leaky / "empty.jsonl").write_bytes(b"")
    (leaky / "broken.py").write_text("class")
    found, _, err = run(capsys, "check", *words)
    assert found == code and re.search(says, err) and "Traceback" not in err, err


@pytest.mark.slow
def test_files_in_the_working_directory_hide_nothing(folder):
    for name in ("tasks.py", "grounding.py", "_scenes.py", "vlrl/__init__.py", "vlrl/task.py", "tasks/__init__.py",
                 "tasks/grounding.py", "configs/tiny.yaml", "contract.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('the wrong file was read')\n")
    words = ["tasks", "check", "grounding", "task.drawn=true", "--samples", "2", "--processes", "1"]
    result = subprocess.run([*VLRL, *words], capture_output=True, text=True)
    assert result.returncode == 0 and "wrong file" not in result.stdout + result.stderr, result.stderr
    # under `python -m` the folder comes first on the path: everything but a package called vlrl is still ours
    for file in (folder / "vlrl").iterdir():
        file.unlink()
    (folder / "vlrl").rmdir()
    code = "from vlrl.task import load_class; print(load_class('grounding').__module__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "vlrl.tasks.grounding"
