"""Sharded training (train.sharding) gives what whole models give, and its files are theirs."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, metrics
from tests.e2e.sharded import main
from vlrl.cli import main as cli
from vlrl.store import RunFolder, checkpoint, trainer_state

pytestmark = pytest.mark.slow
ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs vlrl[deepspeed]")
FULL = {"train": ["language", "merger", "vision"]}
LORA = {"lora": {"rank": 4, "target": "vision_language"}}


def make(model, folder, steps=3, sharding="none", own=None, train=(), **more):
    """The config of a run."""
    return {"task": f"{ROOT}/tests/e2e/sharded.py:Mixed", "steps": steps, "run": {"dir": str(folder)},
            "model": {"name": str(model), **(own or FULL)}, "curriculum": "sequential", "log": {"samples_every": 0},
            "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 8}, "save": {"every": 2, "keep": 9},
            "train": {"lr": 1e-4, "tokens_per_batch": 200, "sharding": sharding, **dict(train)},
            "eval": {"samples": 0}, "algo": {"kl_coef": 0.1}, **more}


def launch(processes, runs, path, **env):
    """Runs them one after the other in as many processes, in this one where that is one."""
    path.write_text(json.dumps(runs))
    if processes == 1:
        return main(str(path))
    done = forked.run(["-m", "tests.e2e.sharded", path], {**ENV, **env}, ROOT, 1500, processes)
    assert done.returncode == 0, done.stderr[-4000:]


def saved(folder, step):
    """The weights and the optimizer's averages of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    (model,) = path.glob("*model.safetensors")
    return load_file(model), load_file(path / trainer_state.TENSORS)


def with_gradient(name, value):
    """Without the bias of keys, which moves all scores of a query nearly alike: what gradient it has is rounding, and
    AdamW makes steps of usual size of that."""
    queries, _, values = value.chunk(3) if name.endswith("attn.qkv.bias") else (value, None, value[:0])
    return torch.cat([queries, values])


@pytest.fixture(scope="module")
def alone(tiny_models, tmp_path_factory):
    """Runs of one process on stored answers: full and LoRA."""
    root = tmp_path_factory.mktemp("alone")
    launch(1, stored(tiny_models["qwen3_vl"], root, "none"), root / "runs.json")
    return root


def stored(model, root, sharding, names=("full", "lora")):
    return [{"stored": True, "config": make(model, root / name, sharding=sharding, own=own)}
            for name, own in (("full", FULL), ("lora", LORA)) if name in names]


@pytest.mark.parametrize("processes, sharding", [(4, "none"), (2, "fsdp2"), pytest.param(2, "zero2", marks=ZERO),
                                                 pytest.param(2, "zero3", marks=ZERO)])
def test_same_losses_and_weights_as_one_process(alone, tiny_models, tmp_path, processes, sharding):
    """Three steps on the same answers, with images on one process alone, or no group on one; adapters that are not
    sharded: test_processes.py."""
    names = ("full", "lora")[:1 if sharding == "none" else 2]
    launch(processes, stored(tiny_models["qwen3_vl"], tmp_path, sharding, names), tmp_path / "runs.json")
    for name in names:
        one, several = metrics(alone / name), metrics(tmp_path / name)
        assert len(one) == len(several) == 3
        for a, b in zip(one, several, strict=True):
            for key in ("loss", "grad_norm", "entropy", "kl", "reward/mean"):
                # the KL is about half the square of a difference of log-probabilities, rounded at 1e-5 of it
                rel = 1e-4 if key == "kl" else 1e-5
                assert b[key] == pytest.approx(a[key], rel=rel, abs=1e-8), (name, a["step"], key)
        (first, _), (weights, averages), (found, others) = (
            saved(alone / name, 2), saved(alone / name, 3), saved(tmp_path / name, 3))
        assert weights.keys() == found.keys() and averages.keys() == others.keys()
        for key, value in weights.items():
            assert not torch.equal(value, first[key]), (name, key, "did not move")
            one, other = with_gradient(key, value), with_gradient(key, found[key])
            assert (other - one).norm() <= 1e-5 * one.norm(), (name, key)


@pytest.fixture(scope="module")
def generated(tiny_models, tmp_path_factory):
    """Runs of two processes that shard and generate, and what follows from their checkpoints."""
    root, model = tmp_path_factory.mktemp("generated"), tiny_models["qwen3_vl"]

    def run(name, steps=3, sharding="fsdp2", own=None, **more):
        return {"config": make(model, root / name, steps, sharding, own, eval={"samples": 3, "every": 2}, **more)}

    def after(of, *given, without=0):
        return {"copy": str(root / of), "without": without, **run(*given)}

    small = {"prompts_per_step": 1, "group_size": 4, "max_new_tokens": 8}
    ahead: dict = {"async": {"max_staleness": 1}}
    launch(1, [run("single", 2, "none")], root / "single.json")
    offloaded = {**LORA, "dtype": "bfloat16", "gradient_checkpointing": True}
    launch(2, [
        run("offloaded", 2, "auto", offloaded, train={"gather": "compute"}),  # the first, as it takes the launcher's
        run("straight"), after("straight", "resumed", without=3),
        after("straight", "unsharded", 3, "none", without=3), after("single", "widened"),
        {"resave": str(root / "single/checkpoints/step-000002"), **run("again")},
        run("ema", 3, own=LORA, algo={"kl_coef": 0.1, "reference": {"name": "ema", "every": 1}}),
        run("one prompt", 2, own=LORA, algo={"correction": "token_truncate"},
            rollout={**small, "forget": {"lr": 1e-4}}),
        run("ahead", 3, own=LORA, algo={"kl_coef": 0.1, "correction": "token_truncate"}, **ahead),
    ], root / "runs.json", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_OFFLOAD_PARAMS="true")
    return root


def test_a_resumed_run_is_the_undisturbed_one(generated):
    assert metrics(generated / "resumed") == metrics(generated / "straight")
    assert metrics(generated / "resumed", "eval.jsonl") == metrics(generated / "straight", "eval.jsonl")
    for a, b in zip(saved(generated / "resumed", 3), saved(generated / "straight", 3), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key].nan_to_num(), b[key].nan_to_num()) for key in a)


def test_checkpoints_are_read_with_and_without_shards(generated, tiny_models, tmp_path):
    """What was loaded is saved again bit for bit; a run of two that shard goes on unsharded and on one process, and one
    of a single process on two that shard: with the same draws and answers, as the weights are the same."""
    model = tiny_models["qwen3_vl"]
    launch(1, [
        {"resave": str(generated / "straight/checkpoints/step-000002"), "config": make(model, tmp_path / "again")},
        {"copy": str(generated / "straight"), "without": 3, "config": make(model, tmp_path / "alone")},
        {"copy": str(generated / "single"), "config": make(model, tmp_path / "single")}], tmp_path / "runs.json")
    for folder, source in ((generated / "again", "single"), (tmp_path / "again", "straight")):
        before, averages = saved(generated / source, 2)
        assert json.loads((folder / "step-000001/config.json").read_text()) == json.loads(
            (generated / source / "checkpoints/step-000002/config.json").read_text())
        after, others = load_file(folder / "step-000001/model.safetensors"), load_file(
            folder / "step-000001" / trainer_state.TENSORS)
        assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
        assert all(torch.equal(others[k], averages[k]) for k in others) and len(others) > 3 * len(before) - 3
    straight, wide = generated / "straight", (generated / "widened", tmp_path / "single")
    for folder, same in ((generated / "unsharded", straight), (tmp_path / "alone", straight), wide):
        line, other = (metrics(f)[2] for f in (folder, same))
        assert line["step"] == 2 and line["loss"] == pytest.approx(other["loss"], rel=1e-3)
        one, two = ({(r["sample_id"], r["index"]): r["token_ids"] for r in RunFolder(f).rollouts(2).to_pylist()}
                    for f in (folder, same))
        assert len(one) == 12 and one == two
    for folder, same in ((tmp_path / "alone", generated / "unsharded"), wide):
        one, two = (checkpoint.load_state(f / "checkpoints/step-000003")["source"] for f in (folder, same))
        assert one["drawn"] == two["drawn"] and (one["history"]["visits"] == two["history"]["visits"]).all()


@pytest.mark.parametrize("name, own", [("straight", FULL), ("ahead", LORA)])
def test_eval_and_export_know_no_shards(generated, tiny_models, tmp_path, name, own):
    """They give the same for the checkpoint of a run that shards and for its weights saved without shards."""
    path = next(p for p in sorted((generated / name / "checkpoints").iterdir(), reverse=True) if p.is_dir())
    launch(1, [{"resave": str(path), "config": make(tiny_models["qwen3_vl"], tmp_path / "again", own=own)}],
           tmp_path / "runs.json")
    found = []
    for kind, weights, word in (("shards", path, "fsdp2"), ("whole", tmp_path / "again/step-000001", "none")):
        answers = tmp_path / f"{kind}-answers"
        assert cli.main(["eval", str(generated / name / "config.yaml"), f"train.sharding={word}", "--checkpoint",
                         str(weights), "--samples", "3", "--rollouts", str(answers)]) == 0
        assert cli.main(["export", str(weights), "-o", str(tmp_path / kind)]) == 0
        rows = RunFolder(answers).rollouts(split="heldout").to_pylist()
        found.append([(r["sample_id"], r["token_ids"], r["reward"]) for r in rows])
    assert found[0] == found[1] and len(found[0]) == 3
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    assert file.read_bytes() == (tmp_path / "shards" / file.name).read_bytes()
    assert (tmp_path / "whole/config.json").read_text() == (tmp_path / "shards/config.json").read_text()


def test_references_that_move_and_processes_without_prompts(generated, tiny_models, tmp_path):
    """The reference of an adapter takes turns with it in the shards; a second half is drawn by a changed policy."""
    own = {"name": "ema", "every": 1}
    launch(1, [{"config": make(tiny_models["qwen3_vl"], tmp_path / "ema", 3, own=LORA,
                               algo={"kl_coef": 0.1, "reference": own})}], tmp_path / "runs.json")
    for one, two in zip(metrics(tmp_path / "ema"), metrics(generated / "ema"), strict=True):
        assert two["kl"] == pytest.approx(one["kl"], rel=1e-2, abs=1e-9)
    assert len(metrics(generated / "one prompt")) == len(metrics(generated / "offloaded")) == 2
    assert len(metrics(generated / "ahead")) == 3
    text = (generated / "offloaded/config.yaml").read_text()
    assert "sharding: fsdp2" in text and "cpu_offload: true" in text  # as the launcher asked
