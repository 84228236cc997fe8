"""What a run is evaluated on changes between a stop and a resume: the next line says so, and nothing is compared."""

import json
import shutil

import pytest
from PIL import Image

from vlrl import config
from vlrl.config.schema import EvalSettings
from vlrl.evaluation.basis import changed_basis, evaluation_basis
from vlrl.monitoring import trackers
from vlrl.store import RunFolder, checkpoint, comparable
from vlrl.tools.experiments.report import gains, summary_table
from vlrl.training.loop import train

WORDS = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=3",
         "save.best=iou", "log.samples_every=0", "data.cache=cache")


def write_rows(folder, words="the circle", shade=200):
    rows = []
    for name in ("train", "heldout"):
        for i in range(4):
            green = shade if name == "heldout" else 200
            Image.new("RGB", (64, 48), (10 * i, green, 90)).save(folder / f"{name}-{i}.png")
            rows.append({"id": f"{name}-{i}", "image": f"{name}-{i}.png", "width": 64, "height": 48,
                         "expression": words if name == "heldout" else "the circle",
                         "boxes": [{"box": [1, 2, 30, 40]}]})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rows = []


def run(folder, *words):
    files = ("task.drawn=false", f"data.train={folder}/train.jsonl", f"data.heldout={folder}/heldout.jsonl")
    train(config.load("configs/quickstart.yaml", [*WORDS, *files, f"run.dir={folder}/run", *words]))
    return RunFolder(folder / "run").evals()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Rows, and a run on them that stopped after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    write_rows(folder)
    run(folder, "steps=1", "eval.every=1")
    shutil.copytree(folder / "run", folder / "kept")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("change, words, names", [
    (lambda folder: None, (), None),
    (lambda folder: write_rows(folder, "the square"), (), ["rows"]),
    (lambda folder: write_rows(folder, shade=50), (), ["pictures"]),
    (lambda folder: None, ("eval.samples=2", "eval.splits=[heldout,train]"), ["eval.samples", "eval.splits"]),
    (lambda folder: (folder / "heldout.jsonl").write_text(
        (folder / "heldout.jsonl").read_text().split("\n", 1)[1]), (), ["rows", "pictures"]),
], ids=["nothing", "rows", "pictures", "settings", "a row gone"])
def test_a_change_is_marked_and_no_gain_taken_across_it(begun, change, words, names):
    write_rows(begun)
    shutil.rmtree(begun / "run")
    shutil.copytree(begun / "kept", begun / "run")
    change(begun)
    lines = [line for line in run(begun, "steps=3", "eval.every=1", *words) if line["split"] == "heldout"]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("changed") and sorted(line["changed"]) for line in lines] == [None, None, names and sorted(names),
                                                                                   None]
    (steps,) = {gain.steps for gain in gains(RunFolder(begun / "run")) if gain.split == "heldout"}
    assert steps == ((2, 3) if names else (0, 3))
    assert checkpoint.best_record(begun / "run" / "checkpoints")["step"] >= (2 if names else 1)


LINES = [{"step": 0, "split": "a", "iou": 0.1}, {"step": 0, "split": "b", "iou": 0.2},
         {"step": 2, "split": "a", "iou": 0.9},
         {"step": 4, "split": "a", "iou": 0.3, "changed": ["rows"]}, {"step": 4, "split": "b", "iou": 0.4},
         {"step": 6, "split": "a", "iou": 0.2}]


def test_what_is_compared_is_what_comes_after_the_last_change_of_its_split(tmp_path):
    assert comparable(LINES) == [LINES[1], *LINES[3:]]
    assert comparable([{"split": "a"}]) == [{"split": "a"}]
    best = trackers.best_of(comparable(LINES), "a", "iou")
    assert best is LINES[3] and trackers.best_of(LINES, "a", "iou") is LINES[2]
    folder = RunFolder(tmp_path)
    for line in LINES:
        folder.append_eval(line)
    assert {g.split: g.steps for g in gains(folder)} == {"a": (4, 6), "b": (0, 4)}
    assert {g.split: g.steps for g in gains(folder, until=3)} == {"a": (0, 2), "b": (0, 0)}
    assert "a was changed before step 4 (rows): the gain begins there" in str(summary_table(folder).caption)


def test_names_of_what_changed():
    before = {"rows": "1", "pictures": "2", "eval.samples": 8, "eval.temperature": 0.0}
    lines = [{"split": "a", "measured": before}, {"split": "b", "measured": {**before, "rows": "9"}}, {"split": "a"}]
    assert changed_basis(before, "a", lines) == [] == changed_basis(before, "c", lines)
    assert changed_basis({**before, "rows": "3"}, "a", lines) == ["rows"]
    assert changed_basis({**before, "rows": "3", "eval.samples": 4}, "a", lines) == ["eval.samples"]
    assert changed_basis({**before, "eval.every": 1}, "a", lines) == []  # of a version that knows less
    names = [name for name in evaluation_basis([], config.load("configs/quickstart.yaml")) if name.startswith("eval.")]
    assert names == [f"eval.{name}" for name in EvalSettings.model_fields]
