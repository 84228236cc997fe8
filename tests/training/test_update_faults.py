"""Updates that go wrong: NaN and infinity, and memory that does not suffice. Failures are the real ones."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import credited_groups, load, settings
from tests.training.test_update import Recorder, assert_close, spoiled
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import TrainingError
from vlrl.models.oom import short_of_memory
from vlrl.models.sharding.fsdp import decoder_layers
from vlrl.training.update import NonFinite, make_optimizer, update


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    return policy, credited_groups(policy, encode, config), tiny_models["qwen3_vl"]


def snapshot(policy):
    return {n: p.detach().clone() for n, p in policy.trainable()}


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [math.nan, 1e38])
def test_a_step_that_is_not_finite_is_left_out_and_counted(scene, advantage, caplog):
    policy, groups, folder = scene
    config = settings(folder, limits={"nonfinite_steps": 2}, rollout={"minibatches": 1, "max_new_tokens": 8},
                      algo={"kl_coef": 0.1, "kl_target": 0.01}, train={"lr": 1e-6, "tokens_per_batch": 300})
    policy.keep_reference()
    optimizer, algorithm = make_optimizer(policy, config), Algorithm(config)
    before, bad = snapshot(policy), [spoiled(groups[0], advantage), *groups[1:]]
    for count in (1, 2):
        stats, _ = update(policy, optimizer, bad, config, count, algorithm)
        algorithm.after_step(policy, optimizer, stats, count + 1)
        assert stats["skipped"] == 1 and math.isnan(stats["loss"]) and math.isnan(stats["kl"])
        assert not optimizer.state and algorithm.nonfinite == count
        assert all(torch.equal(p, before[n]) and p.grad is None for n, p in policy.trainable())
    assert "step 2" in caplog.text and "sample 'image'" in caplog.text and "2 in a row" in caplog.text
    assert math.isfinite(algorithm.kl.value)
    again = Algorithm(config)
    again.load_state_dict(algorithm.state_dict(policy), policy)
    with pytest.raises(NonFinite, match=r"step 3: .*number 3 in a row, more than limits\.nonfinite_steps=2"):
        update(policy, optimizer, bad, config, 3, again)
    good, _ = update(policy, optimizer, groups, config, 3, algorithm)
    assert good["skipped"] == 0 == algorithm.nonfinite and all(map(math.isfinite, good.values()))
    assert any(not torch.equal(p, before[n]) for n, p in policy.trainable())
    with torch.no_grad():
        for n, p in policy.trainable():
            p.copy_(before[n])


def test_one_optimizer_step_of_several_is_left_out(scene):
    policy, groups, folder = scene
    config = settings(folder, rollout={"minibatches": 2, "max_new_tokens": 8}, train={"lr": 1e-6})
    before = snapshot(policy)
    stats, _ = update(policy, make_optimizer(policy, config), [*groups[:-1], spoiled(groups[-1])], config, 0)
    assert stats["skipped"] == 1 and all(map(math.isfinite, stats.values())) and stats["grad_norm"] > 0
    assert any(not torch.equal(p, before[n]) for n, p in policy.trainable())
    with torch.no_grad():
        for n, p in policy.trainable():
            p.copy_(before[n])


def starved(policy, most, when):
    """From here on the allocator is asked for too much wherever a micro-batch has more than `most` tokens: when the
    backward pass is in the middle of the layers, or already in the forward pass. Returns what takes it back."""
    layer = decoder_layers(policy.base)[0]

    def ask(hidden):
        if hidden.shape[0] * hidden.shape[1] > most:
            torch.empty(2**50)

    if when == "forward":
        return layer.register_forward_hook(lambda module, given, out: ask(out[0] if isinstance(out, tuple) else out))
    return layer.register_full_backward_pre_hook(lambda module, grads: ask(grads[0]))


@pytest.mark.parametrize("when, layout, updates", [
    ("backward", "shared", 1), ("forward", "shared", 2),
    pytest.param("backward", "padded", 2, marks=pytest.mark.slow)])
def test_a_micro_batch_too_large_for_the_memory_is_halved(scene, when, layout, updates, caplog):
    policy, groups, folder = scene
    train = {"lr": 1e-6, "tokens_per_batch": 100_000, "packing": layout}
    config = settings(folder, train=train, rollout={"updates": updates, "minibatches": updates, "max_new_tokens": 8},
                      algo={"kl_coef": 0.1, "loss": "cispo"})
    policy.keep_reference()
    before = snapshot(policy)
    def one():
        recorder = Recorder(policy)
        stats, per_token = update(policy, recorder, groups, config, 3)
        return recorder.steps, stats, per_token
    whole, stats, values = one()
    hook = starved(policy, 130, when)
    try:
        halved, found, others = one()
    finally:
        hook.remove()
        most, policy.most_tokens = policy.most_tokens, None
    assert found.pop("memory/halved") >= 2 and most <= 130 and "out of memory in the update" in caplog.text
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable())
    assert len(halved) == len(whole) == updates**2
    for a, b in zip(halved, whole, strict=True):
        assert_close(a, b)
    assert found == pytest.approx(stats, rel=1e-4, abs=1e-6)
    for name in values:
        for a, b in zip(values[name], others[name], strict=True):
            assert np.allclose(a, b, atol=1e-4)


def test_one_answer_alone_too_large_for_the_memory(scene):
    policy, groups, folder = scene
    hook = starved(policy, 10, "backward")
    try:
        with pytest.raises(TrainingError, match=r"a single completion.*gradient_checkpointing"):
            update(policy, Recorder(policy), groups, settings(folder), 0)
    finally:
        hook.remove()
        policy.most_tokens = None
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50)
    assert short_of_memory(real.value) and short_of_memory(MemoryError())
    assert short_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not short_of_memory(RuntimeError("shape mismatch")) and not short_of_memory(ValueError())
