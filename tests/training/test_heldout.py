"""Evaluations of held-out rows: a change between a stop and a resume is marked, and nothing compared across it; metric
`loss` of a supervised run, the checkpoint chosen by it, and rows that weigh more."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TWO
from tests.helpers import load as load_policy
from vlrl import config
from vlrl import config as configs
from vlrl.config.schema import EvalSettings
from vlrl.evaluation.basis import changed_basis, evaluation_basis
from vlrl.models.packing import make_batch, pieces_of
from vlrl.models.shards import resolve_sharding
from vlrl.monitoring import trackers
from vlrl.store import RunFolder, checkpoint, comparable
from vlrl.tools.experiments.report import gains, summary_table
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.heldout_loss import heldout_loss
from vlrl.training.loop import train
from vlrl.training.sft import SupervisedSource, supervised_config
from vlrl.training.sft import train as sft_train
from vlrl.training.update import update

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
    assert names == [f"eval.{name}" for name in EvalSettings.model_fields if name != "patience"]


TASK = '''
from vlrl.task import Task
from vlrl.types import Sample

class Sums(Task):
    """Six questions; the last one has no answer, the others one of their own or the task's."""
    prompt = "What is {question}?"
    rewards = {"short": 1.0}

    def samples(self, split):
        rows = [{"id": f"{split}-{i}", "question": f"{i} + {i}", "weight": 1.0 + 2 * (i == 1)} for i in range(6)]
        rows[0]["solution"] = "nothing at all"
        return [Sample(id=row["id"], row=row) for row in rows]

    def score(self, sample, answer):
        return {"short": float(len(answer.text) < 4)}

    def oracle(self, sample):
        i = int(sample.id[-1])
        return None if i == 5 and sample.id[0] == "h" else str(2 * i)
'''


def settings(folder, model, **more):
    (folder / "sums.py").write_text(TASK)
    return resolve_sharding(supervised_config(configs.validate({
        "steps": 1, "task": f"{folder}/sums.py:Sums", "run": {"dir": str(folder / "run"), "checks": "warn"},
        "model": {"name": str(model), "train": ["language"]}, "curriculum": "sequential",
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 4}, "train": {"lr": 1e-3, "max_grad_norm": 1e9},
        "eval": {"samples": 6}, **more})))


@pytest.fixture
def parts(tiny_models, tmp_path):
    config = settings(tmp_path, tiny_models[TWO[0]])
    made = assemble(config, make_accelerator(config), make_source=SupervisedSource)
    yield made
    made.engine.close()


def nll(parts, sample, text):
    """-log p of each token of an answer, one padded row at a time."""
    prompt, tokens = parts.encode(parts.task, sample), parts.encode.answer_ids(text)
    (piece,) = pieces_of([prompt], [tokens], 10**9)
    with torch.no_grad(), parts.policy.evaluating():
        return -parts.policy.logprobs(make_batch([piece]), 1.0).logprobs.numpy()


def test_by_hand(parts):
    """Each sample's mean over its tokens, in equal parts; the one without an answer is left out."""
    texts = ["nothing at all", "2", "4", "6", "8"]
    each = [nll(parts, s, text) for s, text in zip(parts.task.samples("heldout"), texts, strict=False)]
    found = heldout_loss(parts, "heldout", 0)
    assert len({len(e) for e in each}) > 1  # so a mean over all tokens is another
    assert found["loss"] == pytest.approx(np.mean([e.mean() for e in each]), abs=1e-5)
    assert found["loss/ci95_low"] < found["loss"] < found["loss/ci95_high"]
    parts.task.oracle = lambda sample: None
    assert heldout_loss(parts, "heldout", 0)["loss"] == pytest.approx(each[0].mean(), abs=1e-5)
    parts.task.samples = lambda split: type(parts.task)().samples(split)[1:]
    assert heldout_loss(parts, "heldout", 0) == {}


def test_a_row_weighs_what_it_says(parts):
    """The loss is sum(weight * nll) / tokens, so its gradient is."""
    groups = parts.credit(parts.source.next_groups(2, 0), 0)
    stats, _ = update(parts.policy, parts.optimizer, groups, parts.config, 0, parts.algorithm)
    fresh, _ = load_policy(parts.config)
    parts.policy.model.load_state_dict(fresh.model.state_dict())
    first, second = (nll(parts, g.sample, g.rollouts[0].completion.text) for g in groups)
    expected = (first.sum() + 3 * second.sum()) / (len(first) + len(second))
    assert stats["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_checkpoint_of_the_lowest_loss_is_kept(tiny_models, tmp_path):
    more = {"steps": 3, "save": {"best": "loss", "every": 1, "keep": 1}, "train": {"lr": 3.0},
            "eval": {"every": 1, "samples": 6}, "log": {"samples_every": 0}}
    session = sft_train(settings(tmp_path, tiny_models[TWO[0]], **more))
    losses = {line["step"]: line["loss"] for line in session.folder.evals()}
    marked = checkpoint.best_record(session.folder.checkpoints)
    best = min((1, 2, 3), key=losses.__getitem__)
    assert marked["metric"] == "loss" and marked["step"] == best and best != max((1, 2, 3), key=losses.__getitem__)
    assert checkpoint.find(session.folder.checkpoints / "best").path.name == f"step-{best:06d}"
