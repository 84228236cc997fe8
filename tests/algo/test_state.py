"""What of the objective changes from step to step: by hand, after a resume exactly, and a reference that moves."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.runs import goes_on_exactly, metrics
from tests.helpers import credited_groups, load, settings
from vlrl import config
from vlrl.algo.algorithm import Algorithm, KLCoefficient
from vlrl.store import RunFolder
from vlrl.training.loop import train
from vlrl.training.update import make_optimizer, update

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.samples=0",
         "save.every=2", "save.keep=9", "log.samples_every=0", "data.workers=0", "algo.kl_coef=0.05", "train.lr=1e-3")
CASES = {
    "ema, adaptive kl and entropy": ("algo.reference={name: ema, decay: 0.8, every: 2}", "algo.kl_target=0.01",
                                     "algo.kl_horizon=20", "algo.entropy={name: adaptive, target: 9, delta: 0.01}",
                                     "algo.advantage=ema_std"),
    "reset, siren": ("algo.reference={name: reset, every: 2}", "algo.entropy={name: siren, coef: 0.5}"),
    "temperature, lora": ("algo.reference={name: ema, decay: 0.8, every: 2}", "model.lora.rank=4",
                          "algo.entropy={name: temperature, rate: 0.5, target: 3}")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_exactly(tmp_path, case):
    lines = metrics(goes_on_exactly(lambda folder, steps: train(config.load("configs/quickstart.yaml", [
        *SMALL, *CASES[case], f"run.dir={folder}", f"steps={steps}"])), tmp_path, 2, 4))
    told = {"ema": ["kl_coef", "entropy_coef"], "reset, siren": ["entropy_anchor"], "temperature": ["temperature"]}
    for name in next((names for key, names in told.items() if case.startswith(key)), []):
        assert len({line[name] for line in lines}) > 1 or name == "entropy_anchor", json.dumps(lines[-1])
    assert any(line["reference_reset"] for line in lines) == ("reset" in case)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_coefficient_is_steered_to_the_target():
    kl = KLCoefficient(0.1, target=0.02, horizon=100)
    for measured, expected in ((0.022, 0.1 * 1.01), (0.2, 0.1 * 1.01 * 1.02), (0.0, 0.1 * 1.01 * 1.02 * 0.98)):
        kl.observe(measured, answers=10)  # 10 % above; far above, so 20 %; far below
        assert kl.value == pytest.approx(expected, rel=1e-9)
    other = KLCoefficient(0.1, target=0.02, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.value == kl.value and kl.metrics() == {"kl_coef": kl.value}
    kl = KLCoefficient(0.1)
    kl.observe(5.0, answers=1000)
    kl.load_state_dict({})
    assert kl.value == 0.1 and kl.state_dict() == {} == kl.metrics()


def test_a_step_that_was_left_out_moves_no_temperature():
    algorithm = Algorithm(config.validate({
        "task": {"name": "grounding"}, "model": {"name": "x"},
        "algo": {"entropy": {"name": "temperature", "rate": 0.5}}}))
    policy: Any = SimpleNamespace(choices=600)
    optimizer, seen = torch.optim.SGD([torch.zeros(1, requires_grad=True)]), []
    for step, entropy in enumerate((1.0, math.nan, 0.5, math.nan)):
        algorithm.after_step(policy, optimizer, {"entropy": entropy, "kl": math.nan}, step)
        seen.append(algorithm.temperature)
    assert seen[0] == seen[1] != seen[2] == seen[3]
