"""What of the objective changes from step to step: it goes on after a resume exactly, and the reference moves."""

import json

import numpy as np
import pytest
import torch

from tests.e2e.runs import goes_on_exactly, metrics
from tests.helpers import credited_groups, load, settings
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.store import RunFolder
from vlrl.training.loop import train
from vlrl.training.update import make_optimizer, update

pytestmark = pytest.mark.slow
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.samples=0",
         "save.every=2", "save.keep=9", "log.samples_every=0", "data.workers=0", "algo.kl_coef=0.05", "train.lr=1e-3")
CASES = {
    "ema, adaptive kl and entropy": ("algo.reference={name: ema, decay: 0.8, every: 2}", "algo.kl_target=0.01",
                                     "algo.kl_horizon=20", "algo.entropy={name: adaptive, target: 9, delta: 0.01}",
                                     "algo.advantage=ema_std"),
    "reset, siren": ("algo.reference={name: reset, every: 2}", "algo.entropy={name: siren, coef: 0.5}"),
    "temperature, lora": ("algo.reference={name: ema, decay: 0.8, every: 2}", "model.lora.rank=4",
                          "algo.entropy={name: temperature, rate: 0.5, target: 3}"),
    "reset on spikes, lora": ("algo.reference={name: reset, every: 0, kl: 1e-9}", "model.lora.rank=4")}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_exactly(tmp_path, case):
    lines = metrics(goes_on_exactly(lambda folder, steps: train(config.load("configs/quickstart.yaml", [
        *SMALL, *CASES[case], f"run.dir={folder}", f"steps={steps}"])), tmp_path, 2))
    told = {"ema": ["kl_coef", "entropy_coef"], "reset, siren": ["entropy_anchor"], "temperature": ["temperature"]}
    for name in next((names for key, names in told.items() if case.startswith(key)), []):
        assert len({line[name] for line in lines}) > 1 or name == "entropy_anchor", json.dumps(lines[-1])
    assert any(line["reference_reset"] for line in lines) == ("reset" in case)


@pytest.mark.parametrize("model", [{"lora": {"rank": 4}}, {}], ids=["lora", "full"])
def test_a_reference_that_moves(tiny_models, model):
    folder = tiny_models["qwen3_vl"]
    values = settings(folder, model={"name": str(folder), **model},
                      algo={"kl_coef": 0.1, "reference": {"name": "reset", "every": 2}})
    policy, encode = load(values)
    policy.keep_reference(str(folder))
    policy.start_moving_reference()
    groups, optimizer, algorithm = credited_groups(policy, encode, values), make_optimizer(policy, values), None
    algorithm = Algorithm(values)
    kls = []
    for step in range(4):
        before = {n: p.detach().clone() for n, p in policy.trainable()}
        stats, _ = update(policy, optimizer, groups, values, step, algorithm)
        assert any(not torch.equal(p, before[n]) for n, p in policy.trainable())
        after = {n: p.detach().clone() for n, p in policy.trainable()}
        told = algorithm.after_step(policy, optimizer, stats, step + 1)
        assert all(torch.equal(p, after[n]) for n, p in policy.trainable())
        kls.append((stats["kl"], told["reference_reset"]))
    zero = pytest.approx(0, abs=1e-9)
    assert kls[0] == (zero, 0) and kls[1][0] > 1e-6 and kls[1][1] == 1 and kls[2] == (zero, 0) and kls[3][0] > 1e-6


def test_alternatives_are_stored(tmp_path):
    words = [*SMALL, "store.alternatives=3", "steps=1", f"run.dir={tmp_path}", "rollout.minibatches=2"]
    train(config.load("configs/quickstart.yaml", words))
    for row in RunFolder(tmp_path).rollouts().to_pylist():
        ids, logprobs = np.array(row["top_ids"]), np.array(row["top_logprobs"])
        assert ids.shape == logprobs.shape == (len(row["token_ids"]), 3)
        assert (np.diff(logprobs) <= 0).all() and (np.exp(logprobs).sum(-1) <= 1 + 1e-5).all()
        same = ids == np.array(row["token_ids"])[:, None]
        own = np.broadcast_to(np.array(row["trainer_logprobs"])[:, None], same.shape)
        assert same.any() and np.abs(logprobs - own)[same].max() < 1e-4
