"""DeepSpeed's ZeRO in whole runs of two processes: generation, resume, checkpoints, what is left out."""

import json

import pytest
import torch

from tests import huge
from tests.e2e.runs import ROOT, metrics
from tests.e2e.test_sharding import LORA, ZERO, launch, make, saved
from vlrl.store import RunFolder

pytestmark = [pytest.mark.slow, ZERO]
HALF = {**LORA, "dtype": "bfloat16", "gradient_checkpointing": True}
STAGES = ("zero2", "zero3")


def spoiled(model, folder, sharding):
    """A run whose second step has rewards beyond float32; stored answers."""
    config = make(model, folder, 3, sharding, LORA, save={"every": 1, "keep": 9},
                  algo={"advantage": huge.ADVANTAGE.partition("=")[2], "kl_coef": 0.1})
    return {"stored": True, "config": {**config, "task": f"{ROOT}/tests/e2e/sharded.py:Spoiled"}}


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    root, model = tmp_path_factory.mktemp("zero"), tiny_models["qwen3_vl"]

    def run(name, steps, sharding="zero3", own=None, **more):
        return {"config": make(model, root / name, steps, sharding, own, **more)}

    def copy(name, of, *rest, without=0):
        return {"copy": str(root / of), "without": without, **run(name, *rest)}

    one = {"prompts_per_step": 1, "group_size": 4, "max_new_tokens": 8}
    launch(2, [
        run("one group", 2, "auto", HALF, rollout=one),  # the first, as it takes the launcher's
        *({**made, "config": {**made["config"], "eval": {"samples": 3, "every": 2}}}
          for made in (run("straight", 3), copy("resumed", "straight", 3, without=3))),
        copy("unsharded", "straight", 3, "none", without=3),
        run("lora", 2, "zero2", LORA), copy("lora resumed", "lora", 3, "zero2", LORA),
        copy("lora zero3", "lora", 3, "zero3", LORA),
        *(spoiled(model, root / f"spoiled {stage}", stage) for stage in STAGES),
    ], root / "runs.json", ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3")
    return root


def same(one, other):
    return all(a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(), b[k].nan_to_num()) for k in a)
               for a, b in zip(one, other, strict=True))


def test_a_resumed_run_is_the_undisturbed_one(runs):
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert metrics(runs / "resumed", name) == metrics(runs / "straight", name) != []
    assert same(saved(runs / "resumed", 3), saved(runs / "straight", 3))
    assert not same(saved(runs / "resumed", 2), saved(runs / "resumed", 3))
    assert len(metrics(runs / "one group")) == 2
    assert "sharding: zero3" in (runs / "one group/config.yaml").read_text()


def test_checkpoints_go_on_with_other_settings(runs):
    """Whole tensors are in them, AdamW's too: without shards and with the other stage the next step is the same."""
    for name, other in (("unsharded", "straight"), ("lora zero3", "lora resumed")):
        assert metrics(runs / name)[2]["loss"] == pytest.approx(metrics(runs / other)[2]["loss"], rel=1e-3)
        assert metrics(runs / name)[:2] == metrics(runs / other)[:2]
        drawn = [sorted(RunFolder(runs / f).rollouts(2).column("sample_id").to_pylist()) for f in (name, other)]
        assert drawn[0] == drawn[1]
        for one, two in zip(saved(runs / name, 3), saved(runs / other, 3), strict=True):
            assert one.keys() == two.keys() and all(one[key].shape == two[key].shape for key in one)


def test_a_step_that_is_not_finite_is_left_out(runs, tiny_models, tmp_path):
    launch(1, [spoiled(tiny_models["qwen3_vl"], tmp_path / "alone", "none")], tmp_path / "runs.json")
    weights, _ = saved(tmp_path / "alone", 3)
    for stage in STAGES:
        folder = runs / f"spoiled {stage}"
        assert [line["skipped"] for line in metrics(folder)] == [0, 1, 0], json.dumps(metrics(folder))
        assert same(saved(folder, 1)[:1], saved(folder, 2)[:1]) and not same(saved(folder, 2), saved(folder, 3))
        for key, found in saved(folder, 3)[0].items():
            assert (found - weights[key]).norm() <= 1e-4 * weights[key].norm(), (stage, key)  # 1.6e-5 on one CPU
