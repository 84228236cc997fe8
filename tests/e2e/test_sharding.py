"""Sharded training (train.sharding=fsdp2) gives what whole models give, and its files are theirs."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import ENV, ROOT, metrics
from tests.e2e.sharded import main
from vlrl import checkpoint
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
FULL = {"train": ["language", "merger", "vision"]}
LORA = {"lora": {"rank": 4, "target": "vision_language"}}


def make(model, folder, steps=5, sharding="none", own=None, train=None, **more):
    """The config of a run."""
    return {"task": f"{ROOT}/tests/e2e/sharded.py:Mixed", "steps": steps, "run": {"dir": str(folder)},
            "model": {"name": str(model), **(own or FULL)}, "curriculum": "sequential", "log": {"samples_every": 0},
            "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 8}, "save": {"every": 2, "keep": 9},
            "train": {"lr": 1e-4, "tokens_per_batch": 200, "sharding": sharding, **(train or {})},
            "eval": {"samples": 0}, "algo": {"kl_coef": 0.1}, **more}


def launch(processes, runs, path, **env):
    """Runs them one after the other in as many processes, in this one where that is one."""
    path.write_text(json.dumps(runs))
    if processes == 1:
        return main(str(path))
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m",
         "tests.e2e.sharded", str(path)], cwd=ROOT, env={**ENV, "ACCELERATE_USE_CPU": "true", **env}, text=True,
        capture_output=True, timeout=1500)
    assert found.returncode == 0, found.stderr[-4000:]


def saved(folder, step):
    """The weights and the optimizer's averages of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    (model,) = path.glob("*model.safetensors")
    return load_file(model), load_file(path / checkpoint.TENSORS)


@pytest.fixture(scope="module")
def alone(tiny_models, tmp_path_factory):
    """Runs of one process on stored answers: full and LoRA."""
    root = tmp_path_factory.mktemp("alone")
    launch(1, stored(tiny_models["qwen3_vl"], root, "none"), root / "runs.json")
    return root


def stored(model, root, sharding):
    return [{"stored": True, "config": make(model, root / name, sharding=sharding, own=own)}
            for name, own in (("full", FULL), ("lora", LORA))]


@pytest.mark.parametrize("processes, sharding", [(2, "none"), (4, "none"), (2, "fsdp2")])
def test_same_losses_and_weights_as_one_process(alone, tiny_models, tmp_path, processes, sharding):
    """Five steps on the same answers, with images on one process alone, or no group on one."""
    launch(processes, stored(tiny_models["qwen3_vl"], tmp_path, sharding), tmp_path / "runs.json")
    for name in ("full", "lora"):
        one, several = metrics(alone / name), metrics(tmp_path / name)
        assert len(one) == len(several) == 5
        for a, b in zip(one, several, strict=True):
            for key in ("loss", "grad_norm", "entropy", "kl", "reward/mean"):
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-8), (name, a["step"], key)
        (first, _), (weights, averages), (found, others) = saved(alone / name, 2), saved(alone / name, 5), saved(
            tmp_path / name, 5)
        assert weights.keys() == found.keys() and averages.keys() == others.keys()
        for key, value in weights.items():
            assert not torch.equal(value, first[key]), (name, key, "did not move")
            assert (found[key] - value).norm() <= 1e-5 * value.norm(), (name, key)
