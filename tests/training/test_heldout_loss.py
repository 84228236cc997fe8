"""Metric `loss` of a supervised run's evaluations, the checkpoint chosen by it, and rows that weigh more."""

import numpy as np
import pytest
import torch

from tests.conftest import TWO
from tests.helpers import load as load_policy
from vlrl import config as configs
from vlrl.models.packing import make_batch, pieces_of
from vlrl.models.shards import resolve_sharding
from vlrl.store import checkpoint
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.heldout_loss import heldout_loss
from vlrl.training.sft import SupervisedSource, supervised_config, train
from vlrl.training.update import update

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
    session = train(settings(tmp_path, tiny_models[TWO[0]], **more))
    losses = {line["step"]: line["loss"] for line in session.folder.evals()}
    marked = checkpoint.best_record(session.folder.checkpoints)
    best = min((1, 2, 3), key=losses.__getitem__)
    assert marked["metric"] == "loss" and marked["step"] == best and best != max((1, 2, 3), key=losses.__getitem__)
    assert checkpoint.find(session.folder.checkpoints / "best").path.name == f"step-{best:06d}"
