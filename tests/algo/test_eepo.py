"""Sampled answers are forgotten for a while, and nothing of it stays."""

import math

import pytest
import torch

from tests.helpers import credited_groups, load, settings
from vlrl.methods.eepo.method import Forgetting
from vlrl.models.reference import Reference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tiny_models):
    config = settings(tiny_models["qwen3_vl"], algo={"correction": "token_truncate"},
                      rollout={"group_size": 3, "max_new_tokens": 8, "forget": {"lr": 2e-3}},
                      train={"lr": 1e-3, "tokens_per_batch": 120})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config, ("text", "image"))
    return config, policy, [(g.prompt, [r.completion for r in g.rollouts]) for g in groups]


def likelihood(config, policy, answers):
    found = Reference(policy, config).logprobs([p for p, made in answers for _ in made],
                                               [c for _, made in answers for c in made], 1.0, own=True)
    return sum(float(f.sum()) for f in found)


def test_less_likely_within_and_the_same_bits_after(made):
    config, policy, answers = made
    weights = {n: p.detach().clone() for n, p in policy.trainable()}
    before = likelihood(config, policy, answers)
    with Forgetting(policy, config)(answers, 0, 1.0):
        within = likelihood(config, policy, answers)
        moved = torch.cat([(p.detach() - weights[n]).flatten() for n, p in policy.trainable()])
    assert within < before - 0.1
    assert float(moved.square().mean().sqrt()) == pytest.approx(2e-3, rel=0.05)
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in policy.trainable())
    assert likelihood(config, policy, answers) == before


def test_restored_after_an_error_and_without_answers(made):
    config, policy, answers = made
    weights = {n: p.detach().clone() for n, p in policy.trainable()}
    with pytest.raises(RuntimeError), Forgetting(policy, config)(answers, 0, 1.0):
        raise RuntimeError
    assert all(torch.equal(p, weights[n]) for n, p in policy.trainable())
    config, policy, _ = made
    weights = {n: p.detach().clone() for n, p in policy.trainable()}
    with Forgetting(policy, config)([], 0, 1.0):
        assert all(torch.equal(p, weights[n]) for n, p in policy.trainable())


@pytest.mark.parametrize("entropy, due", [(0.01, False), (math.log(1e6), True)])
def test_nothing_to_forget_where_answers_differ_anyway(made, entropy, due):
    config, policy, answers = made
    forget = config.rollout.forget.model_copy(update={"entropy": entropy})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"forget": forget})})
    before = likelihood(config, policy, answers)
    with Forgetting(policy, config)(answers, 0, 1.0):
        assert (likelihood(config, policy, answers) < before) == due
