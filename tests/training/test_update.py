"""One optimizer step: invariance of its gradient, what changes, what stops it, values of steps of an answer."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.conftest import FAMILIES, SAMPLES, TWO
from tests.helpers import Vowels, credited_groups, load, settings
from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import TrainSettings
from vlrl.models import oom
from vlrl.rollout.generate import make_group
from vlrl.training.advantages import Credit
from vlrl.training.minibatch import make_minibatch, no_grad_passes, split
from vlrl.training.update import NonFinite, lr_at, make_optimizer, update
from vlrl.types import Completion, StepValues


class Recorder(torch.optim.SGD):
    """Keeps each step's gradients by parameter and changes nothing."""

    def __init__(self, policy):
        super().__init__([{"params": [p for _, p in policy.trainable()], "ratio": 1.0}], lr=0.0)
        self.policy, self.steps = policy, []

    def step(self, closure=None):
        self.steps.append({n: p.grad.clone() for n, p in self.policy.trainable() if p.grad is not None})


def gradients(policy, groups, config):
    recorder = Recorder(policy)
    stats, per_token = update(policy, recorder, groups, config, step=0)
    return recorder.steps, stats, per_token


def assert_close(a, b, tolerance=1e-5):
    assert a.keys() == b.keys() and a
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * b[name].abs().max() + 1e-9, name


def taken(policy):
    """The gradients of all that is trained, which it no longer has."""
    found = {n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None}
    for _, p in policy.trainable():
        p.grad = None
    return found


def norm(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def scarce(monkeypatch, policy, at, counts=lambda: True):
    """Memory does not suffice in that one of the passes that count. Returns the passes so far, [0] at first."""
    calls, logprobs = [0], policy.logprobs

    def refuse(*args, **kwargs):
        calls[0] += counts()
        if calls[0] == at:
            calls[0] += 1
            raise torch.OutOfMemoryError("no")
        return logprobs(*args, **kwargs)

    monkeypatch.setattr(policy, "logprobs", refuse)
    monkeypatch.setattr(policy, "most_tokens", policy.most_tokens)
    monkeypatch.setattr(oom, "release", lambda device: None)
    return calls


@pytest.fixture(scope="module", params=TWO)
def scene(request, tiny_models):
    config = settings(tiny_models[request.param])
    policy, encode = load(config)
    return policy, credited_groups(policy, encode, config), tiny_models[request.param]


@pytest.mark.parametrize("scene, aggregation", [(TWO[0], "sequence_mean"), (TWO[1], "token_mean")], indirect=["scene"])
def test_gradient_does_not_depend_on_packing(scene, aggregation):
    policy, groups, folder = scene
    def config(**train):
        return settings(folder, algo={"aggregation": aggregation}, train={"max_grad_norm": 1e9, **train})
    (whole,), _, _ = gradients(policy, groups, config(tokens_per_batch=10**6))
    padded = config(packing="padded", tokens_per_batch=300)
    for other in (config(tokens_per_batch=60), config(tokens_per_batch=200), padded):
        (parts,), _, _ = gradients(policy, groups, other)
        assert_close(parts, whole)
    (shuffled,), _, _ = gradients(policy, groups[::-1], config(tokens_per_batch=10**6))
    assert_close(shuffled, whole)


def test_on_policy_ratio_is_one_and_values_belong_to_their_rollouts(scene):
    policy, groups, folder = scene
    _, stats, per_token = gradients(policy, groups, settings(folder))
    rollouts = [r for g in groups for r in g.rollouts]
    assert stats["clip_frac"] == 0 and stats["mismatch/kl"] < 1e-9 and stats["entropy"] > 0
    assert 0 < stats["mismatch/gap_mean"] <= stats["mismatch/gap_max"] < 2e-5
    for r, logp, ratio in zip(rollouts, per_token["trainer_logprobs"], per_token["ratio"], strict=True):
        assert len(logp) == len(r.completion.tokens) and np.abs(logp - r.completion.logprobs).max() < 2e-5
        assert (ratio == 1).all()
    # Whatever the order of the groups, and however they fall into optimizer steps.
    parted = settings(folder, rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, "minibatches": 3})
    for order in (groups, groups[::-1]):
        _, _, per_token = gradients(policy, order, parted)
        for i, r in enumerate(r for g in order for r in g.rollouts):
            assert np.abs(per_token["trainer_logprobs"][i] - r.completion.logprobs).max() < 2e-5


def test_mismatch_says_how_far_the_sampler_is_off(scene):
    policy, groups, folder = scene
    lengths = [len(r.completion.tokens) for g in groups for r in g.rollouts]
    def off(by):
        """The groups, with `by` [T] added to the sampler's log-probabilities of the first answer."""
        first, *others = groups[0].rollouts
        moved = dataclasses.replace(first.completion, logprobs=first.completion.logprobs + by)
        rollouts = (dataclasses.replace(first, completion=moved), *others)
        return [dataclasses.replace(groups[0], rollouts=rollouts), *groups[1:]]
    by = np.zeros(lengths[0], np.float32)
    by[-1] = 0.5
    _, stats, _ = gradients(policy, off(by), settings(folder))
    assert stats["mismatch/gap_max"] == pytest.approx(0.5, abs=1e-4)
    assert stats["mismatch/gap_mean"] == pytest.approx(0.5 / sum(lengths), abs=1e-5)
    assert stats["mismatch/kl"] == pytest.approx((np.exp(-0.5) + 0.5 - 1) / sum(lengths), rel=1e-3)
    by[-1] = np.nan  # the engine does not know: left out, and no other metric is touched
    _, stats, _ = gradients(policy, off(by), settings(folder))
    assert stats["mismatch/gap_max"] < 2e-5 and stats["mismatch/kl"] < 1e-9


def test_several_passes_use_the_old_logprobs(tiny_models):
    config = settings(tiny_models["qwen3_vl"], rollout={"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8,
                                                        "updates": 2, "minibatches": 3})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    stats, per_token = update(policy, make_optimizer(policy, config), groups, config, step=0)
    ratios = np.concatenate(per_token["ratio"])
    assert (np.abs(ratios - 1) > 1e-3).any() and np.isfinite(ratios).all()
    rollouts = [r for g in groups for r in g.rollouts]
    for r, logp in zip(rollouts, per_token["trainer_logprobs"], strict=True):
        assert np.abs(logp - r.completion.logprobs).max() < 2e-5  # of the weights that sampled, not of later ones
    assert stats["grad_norm"] > 0


def test_minibatch_gradients_add_up_to_the_whole(scene):
    """Token counts are those of each optimizer step, so the parts weigh by their tokens."""
    policy, groups, folder = scene
    (whole,), _, _ = gradients(policy, groups, settings(folder))
    parts, _, _ = gradients(policy, groups, settings(folder, rollout={"group_size": 3, "prompts_per_step": 6,
                                                                      "max_new_tokens": 8, "minibatches": 2}))
    tokens = [sum(len(r.completion.tokens) for g in half for r in g.rollouts) for half in (groups[:3], groups[3:])]
    total = sum(tokens)
    for name in whole:
        mixed = sum(p[name] * (n / total) for p, n in zip(parts, tokens, strict=True) if name in p)
        assert (mixed - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max() + 1e-9, name


# A key's bias shifts every score of a query alike, which softmax does not see. LLaVA-OneVision takes the features of
# its vision tower before the last norm.
WITHOUT_EFFECT = ("k_proj.bias", "vision_tower.post_layernorm")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", [{"train": ["language", "merger", "vision"]},
                                   {"lora": {"rank": 4, "target": "vision_language"}}], ids=["full", "lora"])
def test_every_trainable_parameter_changes(tiny_models, family, model):
    config = settings(tiny_models[family], model={"name": str(tiny_models[family]), **model})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    optimizer = make_optimizer(policy, config)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    for step in range(2):  # the first leaves half of an adapter as it is
        update(policy, optimizer, groups, config, step)
    trained = {n for n, _ in policy.trainable()}
    assert trained
    for name, p in policy.model.named_parameters():
        if name not in trained:
            assert torch.equal(p, before[name]), f"{name} is frozen and changed"
        elif not any(part in name for part in WITHOUT_EFFECT):
            assert not torch.equal(p, before[name]), f"{name} did not change"


def test_rates_of_parts_and_schedules(tiny_models):
    config = settings(tiny_models["qwen3_vl"], train={"lr": 1e-3, "part_lr": {"vision": 1e-5}, "weight_decay": 0.1})
    policy, _ = load(config)
    optimizer = make_optimizer(policy, config)
    rates = {(round(g["lr"] * g["ratio"], 9), g["weight_decay"]) for g in optimizer.param_groups}
    assert rates == {(1e-3, 0.1), (1e-3, 0.0), (1e-5, 0.1), (1e-5, 0.0)}

    def rates(**s):
        return [lr_at(i, 10, TrainSettings(lr=1.0, **s)) for i in range(10)]
    assert rates() == [1.0] * 10
    assert rates(schedule="linear") == pytest.approx([1 - i / 10 for i in range(10)])
    assert rates(schedule="linear", warmup=0.2)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates(schedule="cosine", min_lr_ratio=0.1)[5] == pytest.approx(0.1 + 0.9 * 0.5)


def spoiled(group, advantage=math.nan):
    return dataclasses.replace(group, rollouts=tuple(
        dataclasses.replace(r, advantage=advantage) for r in group.rollouts))


def test_nan_stops_before_the_weights_are_touched(scene):
    policy, groups, folder = scene
    before = {n: p.detach().clone() for n, p in policy.trainable()}
    config = settings(folder, limits={"nonfinite_steps": 0})
    with pytest.raises(NonFinite, match=r"step 7.*train\.lr.*In the batch: group 0 \(sample 'image'\)"):
        update(policy, make_optimizer(policy, config), [spoiled(groups[0]), *groups[1:]], config, step=7)
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable())


def test_answers_that_are_truncated_or_left_out_can_be_masked(scene):
    policy, groups, folder = scene
    def ending(reason, trained=True):
        return [dataclasses.replace(g, rollouts=tuple(
            dataclasses.replace(r, trained=trained, completion=dataclasses.replace(r.completion, finish_reason=reason))
            for r in g.rollouts)) for g in groups]
    masking = settings(folder, algo={"mask_truncated": True})
    stopped, cut = ending("stop"), ending("length")
    (plain,), _, _ = gradients(policy, stopped, masking)
    (half,), _, _ = gradients(policy, [*stopped[:3], *cut[3:]], masking)
    (alone,), _, _ = gradients(policy, stopped[:3], masking)
    assert_close({k: half[k] for k in alone}, alone)  # as if the others were not there
    (left_out,), _, _ = gradients(policy, [*stopped[:3], *ending("stop", trained=False)[3:]], masking)
    assert_close(left_out, half)
    name = next(iter(plain))
    assert not torch.allclose(plain[name], half[name])
    assert gradients(policy, cut, masking)[0] == []  # nothing to learn from: no optimizer step


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"lora": {"rank": 4}}, {}], ids=["lora", "full"])
def test_kl_to_the_reference(tiny_models, model):
    """Zero at the start, above zero once the policy has moved; weighed by the coefficient as it was steered."""
    folder = tiny_models["qwen3_vl"]
    config, strong = (settings(folder, model={"name": str(folder), **model}, algo={"kl_coef": coefficient},
                               rollout={"temperature": 0.7}) for coefficient in (0.1, 9.0))
    policy, encode = load(config)
    policy.keep_reference(config.model.name)
    groups = credited_groups(policy, encode, config)
    optimizer = make_optimizer(policy, config)
    first, _ = update(policy, optimizer, groups, config, 0)
    second, _ = update(policy, optimizer, groups, config, 1)
    assert first["kl"] == pytest.approx(0, abs=1e-9) and second["kl"] > 1e-6
    (wanted,), _, _ = gradients(policy, groups, strong)
    steered, recorder = Algorithm(config), Recorder(policy)
    steered.kl.value = 9.0
    update(policy, recorder, groups, config, 0, steered)
    assert_close(recorder.steps[0], wanted)


class Counted:
    """Counts the passes through a model's vision tower."""

    def __init__(self, policy):
        self.passes = 0
        policy.base.model.visual.register_forward_hook(self.count)

    def count(self, *_):
        self.passes += 1


@pytest.mark.parametrize("model, shared", [
    ({"lora": {"rank": 4}}, True), ({"lora": {"rank": 4, "target": "vision_language"}}, False), ({}, True),
    ({"train": ["language", "vision"]}, False)], ids=["lora", "vision lora", "language", "with vision"])
def test_old_and_reference_passes_share_the_features(tiny_models, model, shared):
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), **model}, algo={"kl_coef": 0.1},
                      rollout={"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "minibatches": 2})
    policy, encode = load(config)
    for name, p in policy.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    policy.keep_reference(config.model.name)
    (part,) = split(credited_groups(policy, encode, config, ("two images", "video")), 1)
    counted, passes = Counted(policy), []
    for _ in range(2):
        batch = make_minibatch(policy, part, config)
        no_grad_passes(policy, batch, Algorithm(config), several=True)
        passes.append(counted.passes)
        (alone,) = batch.batches
        with torch.no_grad(), policy.evaluating():
            assert torch.equal(alone.old, policy.logprobs(alone.batch, 1.0).logprobs)
            assert torch.equal(alone.reference, policy.reference_logprobs(alone.batch, 1.0))
        counted.passes = 0
    full = not policy.lora  # its reference is another model with a tower of its own
    assert passes == [2 if shared or full else 4] * 2  # images and videos are one pass each


TEXTS = ("I see a c\u00e4t \U0001f600\n\nTwo of them.", "No\n\ncat")


class Stepwise(Vowels):
    def score_group(self, sample, answers, services):
        ends = [(answer.text.index("\n\n"), len(answer.text)) for answer in answers]
        return [{"vowels": StepValues((0.4 + i, 0.2), end)} for i, end in enumerate(ends)]


def test_each_token_has_the_value_of_its_step(tiny_models):
    """A token that holds the end of a step belongs to it; the last token, which ends the answer, to none."""
    config = settings(tiny_models["qwen3_vl"], algo={"advantage": {"name": "clip_delta", "eta": 1.0, "scale": 1.0,
                                                                   "normalize": False}})
    policy, encode = load(config)
    task, prompt = Stepwise(), encode(Vowels(), SAMPLES["text"])
    answers = []
    for text in TEXTS:
        ids = encode.answer_ids(text)
        answers.append(Completion(tokens=ids, logprobs=np.zeros(len(ids)), loss_mask=np.ones(len(ids), bool), text=text,
                                  finish_reason="stop"))
    group = make_group(task, SAMPLES["text"], prompt, answers, group_id="a", split="train", step=0)
    rewards = [r.reward for r in group.rollouts]
    assert rewards == pytest.approx([0.3, 0.8]) and [v for _, v in group.rollouts[0].steps] == [0.4, 0.2]
    (credited,) = Credit(Algorithm(config), config, policy, task)([group], 0)
    decode = encode.processor.tokenizer.decode
    for rollout, text, first, base in zip(credited.rollouts, TEXTS, (-0.6, 0.0), (-0.25, 0.25), strict=True):
        end = text.index("\n\n")
        for k, advantage in enumerate(rollout.advantage):
            before = len(decode(rollout.completion.tokens[:k]))
            step = 0.0 if before >= len(text) else first if before < end else -0.8
            assert advantage == pytest.approx(base + step), (k, before)
