"""float16 with loss scaling, bfloat16, and 4-bit weights under an adapter. Everything but `gpu` runs on a CPU."""

import dataclasses
import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.conftest import SAMPLES, random_answers
from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, metrics, write_config
from tests.helpers import Vowels, credited_groups, load, settings
from vlrl import config as configs
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models import adapters
from vlrl.models import policy as policies
from vlrl.models.packing import pack, pieces_of
from vlrl.models.processing import Encoder
from vlrl.store import checkpoint
from vlrl.training.loop import train as run
from vlrl.training.update import NonFinite, make_optimizer, update

KINDS = ("image",)
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
NF4 = {"rank": 4, "quantize": "nf4"}


def make(folder, more=None, **model):
    config = settings(folder, model={"name": str(folder), "train": ["language", "merger", "vision"], **model},
                      train={"lr": 1e-3}, **more or {})
    return config, *load(config)


def train(policy, encode, config, steps=3, kinds=KINDS):
    """Metrics of steps on fresh rollouts."""
    optimizer = make_optimizer(policy, config)
    return [update(policy, optimizer, credited_groups(policy, encode, config, kinds), config, step)[0]
            for step in range(steps)]


def snapshot(policy):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def moved(policy, before):
    """Names of the parameters that changed; a key bias need not, since softmax does not see it."""
    return {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}


def assert_trained(policy, before):
    trained = {n for n, p in policy.trainable() if p.dtype == torch.float32}
    assert trained == {n for n, _ in policy.trainable()} == moved(policy, before)


def rescale(policy, scale):
    policy.scaler.load_state_dict(policy.scaler.state_dict() | {"scale": scale})


@pytest.mark.slow
@pytest.mark.parametrize("dtype, mismatch", [("float16", 1e-5), ("bfloat16", 1e-3)])
def test_three_steps(tiny_models, dtype, mismatch):
    config, policy, encode = make(tiny_models["qwen3_vl"], dtype=dtype)
    before = snapshot(policy)
    stats = train(policy, encode, config)
    assert_trained(policy, before)
    assert all(math.isfinite(v) for s in stats for v in s.values())
    assert all(s["grad_norm"] > 0 and 0 <= s["mismatch/kl"] < mismatch for s in stats)  # 0 on some processors
    scaled = [(s.get("loss_scale"), s.get("skipped")) for s in stats]
    assert scaled == [(2**16, 0)] * 3 if dtype == "float16" else [(None, 0)] * 3


def test_frozen_weights_are_kept_in_float16(tiny_models):
    _, policy, _ = make(tiny_models["qwen3_vl"], dtype="float16", train=["merger"])
    types = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert types == {(True, torch.float32), (False, torch.float16)}


def test_an_overflow_is_skipped_and_halves_the_scale(tiny_models):
    config, policy, encode = make(tiny_models["qwen3_vl"], dtype="float16")
    groups = credited_groups(policy, encode, config, ("text",))
    optimizer, before, scale = make_optimizer(policy, config), snapshot(policy), 2.0**22
    rescale(policy, scale)
    skipped = 0
    for step in range(12):
        stats, _ = update(policy, optimizer, groups, config, step)
        if not stats["skipped"]:
            break
        skipped += 1
        assert stats["loss_scale"] == scale / 2**skipped and stats["grad_norm"] == 0
        assert not moved(policy, before) and not optimizer.state
    assert skipped and stats["grad_norm"] > 0 and stats["loss_scale"] == scale / 2**skipped
    assert moved(policy, before)


def test_scaling_does_not_change_the_gradient(tiny_models):
    config, policy, encode = make(tiny_models["qwen3_vl"], dtype="float16")
    groups = credited_groups(policy, encode, config, ("text",))
    norms = []
    for scale in (2.0**6, 2.0**12):
        rescale(policy, scale)
        norms.append(update(policy, torch.optim.SGD([{"params": [p for _, p in policy.trainable()], "ratio": 0.0}]),
                            groups, config, 0)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_a_scale_at_its_floor_ends_the_run(tiny_models):
    config, policy, encode = make(tiny_models["qwen3_vl"], {"limits": {"nonfinite_steps": 0}}, dtype="float16")
    groups, before = credited_groups(policy, encode, config, ("text",)), snapshot(policy)
    rescale(policy, 1.0)
    policy.trainable()[-1][1].register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NonFinite, match=r"step 4.*even at a loss scale of 1;.*model\.dtype=bfloat16"):
        update(policy, make_optimizer(policy, config), groups, config, step=4)
    assert not moved(policy, before)


def test_a_loss_that_is_not_finite_ends_the_run(tiny_models):
    config, policy, encode = make(tiny_models["qwen3_vl"], {"limits": {"nonfinite_steps": 0}}, dtype="float16")
    (group,), before = credited_groups(policy, encode, config, ("text",)), snapshot(policy)
    bad = dataclasses.replace(group, rollouts=tuple(dataclasses.replace(r, advantage=math.nan) for r in group.rollouts))
    with pytest.raises(NonFinite, match=r"step 2.*loss is not finite under model\.dtype=float16.*65,504"):
        update(policy, make_optimizer(policy, config), [bad], config, step=2)
    assert not moved(policy, before) and policy.scaler.get_scale() == 2**16


@pytest.mark.slow
def test_resume_restores_the_scale(tiny_models, tmp_path):
    path = write_config(tmp_path, tiny_models["qwen3_vl"])
    small = ("model.dtype=float16", "train.schedule=constant", "train.warmup=0", "eval.samples=0", "save.every=1",
             "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "log.samples_every=0")
    def start(name, *words):
        return run(configs.load(path, [*small, f"run.dir={tmp_path}/{name}", *words])).folder
    whole = start("whole", "steps=2")
    start("parts", "steps=1")
    parts = start("parts", "steps=2", "resume=must")
    one, two = (checkpoint.load_state(f.checkpoints / "step-000002") for f in (whole, parts))
    assert one["scaler"] == two["scaler"] and one["scaler"]["_growth_tracker"] == 2
    assert [m["loss_scale"] for m in metrics(whole.path)] == [2**16] * 2
    same = [(f.checkpoints / "step-000002/model.safetensors").read_bytes() for f in (whole, parts)]
    assert same[0] == same[1]


def both_processes(folder, out):
    """Run by torchrun: rank 1 has nothing to train on, and still skips and steps with rank 0."""
    config, policy, encode = make(folder, dtype="float16")
    optimizer = make_optimizer(policy, config)
    groups = credited_groups(policy, encode, config, ("text",))[comm.rank():]
    seen = []
    for scale in (2.0**60, 2.0**12):
        rescale(policy, scale)
        stats, _ = update(policy, optimizer, groups, config, 0)
        seen.append([stats["skipped"], stats["loss_scale"], sum(float(p.sum()) for _, p in policy.trainable())])
    with open(f"{out}/{comm.rank()}.json", "w") as file:
        json.dump(seen, file)


@pytest.mark.slow
def test_processes_skip_together(tiny_models, tmp_path):
    forked.run(["-m", "tests.models.test_precision", tiny_models["qwen3_vl"], tmp_path], ENV, ROOT, 300,
               processes=2).check_returncode()
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == two and [s[:2] for s in one] == [[1, 2**59], [0, 2**12]]


def four_bit(policy):
    return {n for n, p in policy.base.named_parameters() if getattr(p, "quant_state", None) is not None}


def logits(policy, encode):
    prompt = encode(Vowels(), SAMPLES["text"])
    with torch.no_grad(), policy.evaluating(), policy.autocast():
        return policy.model(input_ids=torch.from_numpy(prompt.ids)[None]).logits.float()


@needs_bitsandbytes
@pytest.mark.parametrize("target, others", [
    ("language", {"visual", "embed_tokens"}),
    pytest.param("vision_language", {"patch_embed", "embed_tokens"}, marks=pytest.mark.slow)])
def test_what_is_kept_in_4_bits(tiny_models, monkeypatch, target, others):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # such a CPU would repack the weights
    _, policy, _ = make(tiny_models["qwen3_vl"], dtype="bfloat16", lora=NF4 | {"target": target})
    rounded = four_bit(policy)
    assert rounded == {n for n, _ in policy.base.named_parameters() if n.endswith("base_layer.weight")}
    assert rounded and not any(word in n for n in rounded for word in (*others, "lm_head"))
    kept = {p.dtype for n, p in policy.base.named_parameters() if n not in rounded and "lora_" not in n}
    assert kept == {torch.bfloat16}
    layers = [m for m in policy.model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    assert len(layers) == len(rounded) and not any(m.support_avx512bf16_for_cpu for m in layers)


@pytest.mark.slow
@needs_bitsandbytes
def test_training_over_4_bits_and_what_is_saved(tiny_models, tmp_path):
    config, policy, encode = make(tiny_models["qwen3_vl"], {"algo": {"kl_coef": 0.1}}, dtype="float32", lora=NF4)
    before = snapshot(policy)
    stats = train(policy, encode, config, kinds=("text",))
    assert_trained(policy, before)
    assert stats[0]["kl"] == pytest.approx(0, abs=1e-9) and stats[2]["kl"] > 1e-6
    assert all(s["grad_norm"] > 0 and s["mismatch/kl"] < 1e-9 for s in stats)
    policy.save(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter/model.safetensors").exists()
    expected = logits(policy, encode)
    resumed = policies.load(config, Accelerator(cpu=True), tmp_path / "adapter")
    assert torch.equal(logits(resumed, encode), expected) and four_bit(resumed)
    merged, _ = load(settings(tmp_path / "adapter", model={"name": str(tmp_path / "adapter"), "dtype": "float32"}))
    assert not four_bit(merged) and (logits(merged, encode) - expected).abs().max() < 1e-4  # over the rounded weights
    merged.save(tmp_path / "whole")
    whole, _ = load(settings(tmp_path / "whole"))
    assert torch.equal(logits(whole, encode), logits(merged, encode))


@needs_bitsandbytes
@pytest.mark.parametrize("dtype, tolerance", [
    ("float32", 1e-5), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("float16", 5e-3), ("bfloat16", 4e-2)))])
def test_packed_equals_padded(tiny_models, dtype, tolerance):
    _, policy, encode = make(tiny_models["qwen3_vl"], dtype=dtype, lora=NF4)
    prompts = [prompt for kind in ("image", "text") for prompt in [encode(Vowels(), SAMPLES[kind])] * 2]
    answers = random_answers(0, len(prompts), len(policy.processor.tokenizer), set(policy.banned.tolist()))
    pieces = pieces_of(prompts, answers, 10**6)
    with policy.evaluating():
        out = []
        for layout in ("shared", "padded"):
            (batch,) = pack(pieces, 10**6, layout)
            stats = policy.logprobs(batch, 1.0)
            loss = stats.logprobs.sum()
            out.append((stats.logprobs.detach(), torch.autograd.grad(loss, [p for _, p in policy.trainable()])))
    (a, grads), (b, others) = out
    assert (a - b).abs().max() <= tolerance * b.abs().max()
    top = max(float(g.abs().max()) for g in others)
    assert all((g - h).abs().max() <= 10 * tolerance * top for g, h in zip(grads, others, strict=True)) and top > 0


def test_4_bits_need_an_adapter_and_its_note_is_readable(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.lora\.quantize=nf4.*model\.lora\.rank=0.*model\.lora\.rank=16"):
        settings("x", model={"name": "x", "lora": {"quantize": "nf4"}})
    (tmp_path / adapters.QUANTIZATION_FILE).write_text('{"quantize": "nf4", "target": "language", "dtype": "load"}')
    with pytest.raises(ConfigError, match=r"quantization\.json cannot be used.*Copy it again"):
        adapters.Quantization.read(str(tmp_path))


def test_bitsandbytes_is_missing(tiny_models, monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.lora\.quantize=nf4.*installed\. Run: pip install 'vlrl\[qlora\]'"):
        make(tiny_models["qwen3_vl"], lora=NF4)


@needs_bitsandbytes
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="the device that is absent elsewhere")
def test_a_device_that_cannot_run_it(tiny_models):
    how = adapters.Quantization(target="language", dtype="float32")
    with pytest.raises(ConfigError, match=r"bitsandbytes cannot run on mps: .*model\.lora\.quantize=none"):
        how.keywords(str(tiny_models["qwen3_vl"]), torch.device("mps"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model, mismatch", [({"dtype": "float16"}, 1e-4), ({"dtype": "bfloat16"}, 1e-2),
                                             ({"dtype": "float16", "lora": NF4}, 1e-4),
                                             ({"dtype": "bfloat16", "lora": NF4}, 1e-2)])
def test_three_steps_on_a_gpu(tiny_models, model, mismatch):
    if "lora" in model:
        pytest.importorskip("bitsandbytes")
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), **model}, train={"lr": 1e-3})
    policy = policies.load(config, Accelerator())
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    before = snapshot(policy)
    stats = train(policy, encode, config)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert policy.device.type == "cuda" and moved(policy, before) == {n for n, _ in policy.trainable()}
    assert all(np.isfinite(s["grad_norm"]) and s["mismatch/kl"] < mismatch for s in stats)


if __name__ == "__main__":
    both_processes(*sys.argv[1:])
