"""Rollouts with nothing to learn, or nearly nothing, through credit and update of a real model."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import credited_groups, load, settings
from tests.training.test_update import assert_close, gradients
from vlrl.algo.aggregation import AGGREGATIONS
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.tables import CORRECTIONS, KLS, LOSSES, WEIGHTS
from vlrl.training.advantages import Credit

pytestmark = pytest.mark.slow
RISING = [0.0, 0.4, 1.0]


@pytest.fixture(scope="module")
def scene(tiny_models):
    """A model and two groups of three answers, and a function: groups, algo -> (gradient, metrics, groups)."""
    folder = tiny_models["qwen3_vl"]
    policy, encode = load(settings(folder))
    policy.keep_reference(str(folder))
    groups = credited_groups(policy, encode, settings(folder), ("image", "text"))

    def learn(groups, **algo):
        config = settings(folder, algo=algo)
        groups = Credit(Algorithm(config), config, policy)(groups, 0)
        steps, stats, _ = gradients(policy, groups, config)
        assert all(np.isfinite(value) for value in stats.values())
        return steps[0] if steps else {}, stats, groups
    return groups, learn


def rewarded(groups, rewards):
    """The groups with those rewards; an answer is correct above 0.5."""
    return [replace(g, rollouts=tuple(replace(r, reward=value, correct=None if value is None else value > 0.5)
                                      for r, value in zip(g.rollouts, rewards, strict=True))) for g in groups]


def answered(groups, change):
    """The groups with other completions: change(completion)."""
    return [replace(g, rollouts=tuple(replace(r, completion=change(r.completion)) for r in g.rollouts)) for g in groups]


def first_token(c):
    return replace(c, tokens=c.tokens[:1], logprobs=c.logprobs[:1], loss_mask=c.loss_mask[:1])


def largest(gradient):
    return max(float(value.abs().max()) for value in gradient.values())


@pytest.mark.parametrize("loss", ["ppo_clip", "rover", "nft", "simko"])
def test_equal_rewards_have_no_gradient(scene, loss):
    groups, learn = scene
    for reward in (0.3, 1.0):
        gradient, stats, credited = learn(rewarded(groups, [reward] * 3), loss=loss)
        assert largest(gradient) == 0 == stats["grad_norm"]
        assert all(r.advantage == 0 for g in credited for r in g.rollouts)
    assert largest(learn(rewarded(groups, RISING), loss=loss)[0]) > 0


AROUND = [{"aggregation": a, "weights": [w], "kl": k, "kl_coef": 0.1, "correction": c} for a, w, k, c in zip(
    itertools.cycle(AGGREGATIONS), itertools.cycle(WEIGHTS), KLS, itertools.cycle(CORRECTIONS), strict=False)]


@pytest.mark.parametrize("algo", [*({"loss": name} for name in LOSSES), *AROUND], ids=str)
def test_answers_of_one_token_and_one_that_nobody_can_score(scene, algo):
    groups, learn = scene
    gradient, _, credited = learn(rewarded(answered(groups, first_token), [0.0, None, 1.0]), **algo)
    assert all(torch.isfinite(value).all() for value in gradient.values())
    assert all(g.rollouts[1].advantage == 0 for g in credited)


def test_an_answer_that_nobody_can_score_teaches_nothing(scene):
    groups, learn = scene
    some = rewarded(groups, [0.0, None, 1.0])
    with_it, _, credited = learn(some, advantage="grpo")
    without = [replace(g, rollouts=(g.rollouts[0], g.rollouts[2])) for g in some]
    alone, _, _ = learn(without, advantage="grpo")
    tokens = [sum(len(r.completion.tokens) for g in many for r in g.rollouts) for many in (some, without)]
    assert_close({k: v * tokens[0] / tokens[1] for k, v in with_it.items()}, alone)
    assert [r.advantage for r in credited[0].rollouts] == pytest.approx([-2 ** -0.5, 0, 2 ** -0.5], abs=2e-4)


def test_a_group_that_nobody_can_score_leaves_the_others_alone(scene):
    groups, learn = scene
    none, rest = rewarded(groups[1:], [None] * 3), rewarded(groups[:1], RISING)
    gradient, stats, _ = learn(none)
    assert largest(gradient) == 0 == stats["grad_norm"]
    gradient, _, credited = learn([*none, *rest], aggregation="sequence_mean")
    assert [r.advantage for r in credited[0].rollouts] == [0, 0, 0] and largest(gradient) > 0
    alone, _, _ = learn(rest, aggregation="sequence_mean")
    assert_close({k: 2 * v for k, v in gradient.items()}, alone)


@pytest.mark.parametrize("algo", [{}, {"loss": "clip_cov"}, {"loss": "pacs"}, {"weights": ["top_entropy"]},
                                  {"entropy": "siren"}, {"kl_coef": 0.1}], ids=str)
def test_answers_that_are_all_cut_off_change_nothing(scene, algo):
    groups, learn = scene
    cut = answered(rewarded(groups, RISING), lambda c: replace(c, finish_reason="length"))
    gradient, stats, _ = learn(cut, mask_truncated=True, **algo)
    assert gradient == {} and stats["grad_norm"] == 0 == stats["loss"]


def test_a_sampler_that_computes_alike_needs_no_correction(tiny_models, scene):
    groups, learn = scene
    config = settings(tiny_models["qwen3_vl"])
    known = iter(gradients(load(config)[0], groups, config)[2]["trainer_logprobs"])
    same = answered(rewarded(groups, RISING), lambda c: replace(c, logprobs=next(known)))
    plain, _, _ = learn(same)
    for correction in CORRECTIONS:
        corrected, stats, _ = learn(same, correction=correction)
        assert stats["correction/weight"] == pytest.approx(1, abs=1e-6) and stats["correction/outside"] == 0, correction
        assert_close(corrected, plain)


def test_bfloat16_learns_in_the_same_direction(tiny_models, scene):
    groups, learn = scene
    folder = tiny_models["qwen3_vl"]
    policy, _ = load(settings(folder, model={"name": str(folder), "dtype": "bfloat16",
                                             "train": ["language", "merger", "vision"]}))
    for algo in ({}, {"loss": "gspo", "aggregation": "sequence_mean"}, {"loss": "vespo"}, {"loss": "gmpo"}):
        exact, _, credited = learn(rewarded(groups, RISING), **algo)
        (rough,), _, _ = gradients(policy, credited, settings(folder, algo=algo))
        a, b = (torch.cat([values[k].float().flatten() for k in exact]) for values in (exact, rough))
        assert torch.isfinite(b).all() and torch.cosine_similarity(a, b, dim=0) > 0.98, algo
