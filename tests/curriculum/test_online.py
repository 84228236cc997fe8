"""Samplers that weigh every prompt, and those that let go of prompts: rules by hand, draws, resume, data."""

import logging

import numpy as np
import pytest
from scipy.stats import chisquare

from vlrl.curriculum import Draw, Outcome, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.lifecycle import Lifecycle, Limr
from vlrl.methods.curricula.online import Prioritised, Rlcs, SelectiveReplay

LEVELS = {"level": ["a"] * 30 + ["b"] * 30}


def prompts(size=60, seed=5, **fields):
    fields = {**LEVELS, **fields}
    return Prompts(size, seed, lambda name: fields.get(name, [None] * size))


def outcome(index, rate, reward=None, visit=0):
    """Of 8 answers."""
    right = tuple(i < round(8 * rate) for i in range(8))
    return Outcome(Draw(index, visit), tuple(map(float, right)) if reward is None else (reward,) * 8, right)


def counted(sampler, calls, count, step=0):
    """How often each prompt is drawn, with nothing learned between."""
    drawn = [d.index for _ in range(calls) for d in sampler.next(count, step)]
    return np.bincount(drawn, minlength=sampler.prompts.size)


def follows(counts, weights):
    weights = weights.astype(np.float64)
    return chisquare(counts, weights / weights.sum() * counts.sum()).pvalue > 1e-3


def test_prioritised_by_hand():
    sampler = Prioritised(prompts(4), prior=0.5, strength=1.0, floor=0.1)
    sampler.observe([outcome(0, 1), outcome(1, 0), Outcome(Draw(3, 0), ())], 0)
    sampler.observe([outcome(0, 0.75), outcome(0, 1)], 1)
    assert sampler.rates.values() == pytest.approx([(2.75 + 0.5) / 4, 0.25, 0.5, 0.5], abs=1e-5)
    sampler.observe([outcome(0, 1)] * 20, 2)
    assert sampler.weights(sampler.rates.values()) == pytest.approx([0.1, 0.75, 0.5, 0.5], abs=1e-5)
    sampler = Prioritised(prompts(3), prior=1.0, strength=0.0)
    assert {d.index for d in sampler.next(3, 0)} == {0, 1, 2}  # all have weight 0: evenly
    sampler.observe([outcome(1, 0)], 0)
    assert [d.index for d in sampler.next(1, 1)] == [1]
    assert sorted(d.index for d in sampler.next(3, 1)) == [0, 1, 2]
    sampler = Prioritised(prompts(), by="level")
    sampler.observe([outcome(0, 1), outcome(1, 1), outcome(30, 0.25)], 0)
    up, down = (1 - 0.9 ** 2) * 0.5, 0.1 * -0.25
    assert sampler.rates.expected()[[2, 31]] == pytest.approx([0.5 + up, 0.5 + down], abs=1e-5)
    assert sampler.rates.values()[[0, 30]] == pytest.approx([(1 + 0.5 + up) / 2, (0.25 + 0.5 + down) / 2], abs=1e-5)
    sampler.next(1, 1)
    found = sampler.metrics()
    weights = 1 - sampler.rates.values()
    assert found["curriculum/weight/b"] == pytest.approx(weights[30:].sum() / weights.sum(), abs=1e-5)
    assert found["curriculum/expected_pass_rate"] == pytest.approx(sampler.rates.values().mean(), abs=1e-5)


def test_rlcs_merges_tiers_with_what_is_observed():
    sampler = Rlcs(prompts(4, pass_at_k=[0.0, 0.125, 1.0, None]), tiers=2, decay=0.5, strength=1.0, floor=0.05)
    assert sampler.rates.values() == pytest.approx([0, 0.125, 1, 0.375], abs=1e-5)  # .375: mean of the others
    assert sampler.weights(sampler.rates.values()) == pytest.approx([0.05, 0.4375, 0.05, 0.9375], abs=1e-5)
    sampler.observe([outcome(1, 0.625)], 0)  # its tier, [0, .5), drifts by .1 * (.625 - .125)
    assert sampler.rates.values() == pytest.approx([0.05, (0.625 + 0.175) / 2, 1, 0.375], abs=1e-5)
    sampler.observe([outcome(1, 1)], 1)
    sampler.observe([outcome(1, 0.5)], 2)
    mean = ((0.625 + 1) / 2 + 0.5) / 2  # of 2 visits, from then on with decay .5
    drift = 0.9 * (0.9 * 0.05 + 0.1 * 0.875) + 0.1 * 0.375
    assert sampler.rates.values()[:2] == pytest.approx([drift, (2 * mean + 0.125 + drift) / 3], abs=1e-5)
    sampler = Rlcs(prompts(), by="level")
    for step in range(30):
        sampler.observe([outcome(i, float(i < 30)) for i in (0, 40)], step)
    rates = sampler.rates.values()
    assert rates[5] > 0.9 and rates[50] < 0.1
    plain = Rlcs(prompts())
    plain.observe([outcome(0, 0)] * 10, 0)
    assert plain.rates.values()[5] == pytest.approx(0.5 * 0.9 ** 10, abs=1e-5)
    plain.next(2, 1)
    assert [*plain.metrics()] == ["curriculum/expected_pass_rate"]


def test_rlcs_takes_difficulties_and_refuses_pass_rates_out_of_range():
    for values, rates in (([0.0, 0.25, None, 1.0], [1, 0.75, 0.583333, 0]), ([1, 5, None, 3], [1, 0, 0.5, 0.5]),
                          ([7, 7, None, 7], [0.5] * 4)):
        found = Rlcs(prompts(4, difficulty=values), tier_by="difficulty").rates.values()
        assert found == pytest.approx(rates, abs=1e-5), values
    with pytest.raises(ConfigError, match=r"tier_by='pass_at_k': 2 of 60 rows .* 8 in row 1"):
        Rlcs(prompts(pass_at_k=[0.5, 8, -1] + [None] * 57))


@pytest.mark.parametrize("kind, options", [(Prioritised, {"by": "level"}), (Rlcs, {}), (Rlcs, {"by": "level"})])
def test_draws_are_proportional_to_the_weights(kind, options):
    sampler = kind(prompts(pass_at_k=[i / 59 for i in range(60)] if not options else [None] * 60), **options)
    sampler.observe([outcome(i, i % 9 / 8) for i in range(0, 60, 2)], 0)
    weights = sampler.weights(sampler.rates.values())
    assert follows(counted(sampler, 1500, 1), weights)


def test_replay_holds_the_last_that_differed_and_draws_its_share_by_advantage():
    sampler = SelectiveReplay(prompts(), buffer=2)
    sampler.observe([outcome(0, 0.5), outcome(1, 1), outcome(2, 0.125), outcome(3, 0)], 0)
    assert sampler.pool == pytest.approx({0: 1.0, 2: 2 * (0.125 * 0.875) ** 0.5}, abs=1e-5)
    sampler.observe([outcome(0, 0.25), outcome(4, 0.5)], 1)
    assert [*sampler.pool] == [0, 4]
    sampler.observe([outcome(0, 1)], 2)
    assert [*sampler.pool] == [4] and sampler.metrics()["curriculum/buffer"] == 1
    sampler = SelectiveReplay(prompts(), share=0.3, alpha=2.0)
    sampler.observe([outcome(0, 0.5), outcome(1, 0.125)], 0)
    counts = counted(sampler, 3000, 1)
    weights = np.full(60, 0.7 / 60)
    weights[:2] += 0.3 * np.array([1, 0.4375]) / 1.4375  # |A|^2 = 4 p (1 - p)
    passes = counts[2:].sum() / 58
    assert counts[2:].max() - counts[2:].min() <= 1 and counts[:2] - passes == pytest.approx(
        3000 * (weights[:2] - 0.7 / 60), rel=0.1)
    assert follows(np.array([*(counts[:2] - passes).round(), passes * 60]), np.array([*(weights[:2] - 0.7 / 60), 0.7]))


@pytest.mark.parametrize("alpha", [0.0, 1.0, 100.0])
def test_replay_never_gives_a_prompt_twice_in_a_call(alpha):
    sampler = SelectiveReplay(prompts(10), share=0.5, alpha=alpha)
    sampler.observe([outcome(i, 0.5 if i else 0.125) for i in range(4)], 0)
    sampler.pool[0] = 1e-9
    for step in range(50):
        assert sorted(d.index for d in sampler.next(10, step)) == [*range(10)]
        assert len({d.index for d in sampler.next(7, step)}) == 7
    assert len(sampler.next(25, 0)) == 25


def test_utility_and_rests_by_hand():
    sampler = Lifecycle(prompts(4), decay=0.5)
    sampler.observe([outcome(0, 0.5), outcome(1, 0)], 0)
    sampler.observe([outcome(0, 0.75), outcome(1, 0, reward=0.3)], 1)
    assert sampler.utility[:2] == pytest.approx([(0.25 + 0.1875 + 0.25) / 2, 0.15], abs=1e-5)
    sampler.observe([outcome(0, 0.25)], 2)  # what is lost is no gain
    assert sampler.utility[0] == pytest.approx((0.34375 + 0.1875) / 2, abs=1e-5)
    sampler = Lifecycle(prompts(2), patience=2, rest=10, low=0.05)
    assert {d.index for d in sampler.next(2, 0)} == {0, 1}
    sampler.observe([outcome(0, 1), outcome(1, 0.5)], 0)
    assert sampler.due.tolist() == [0, 0]
    sampler.observe([outcome(0, 1)], 1)
    assert sampler.due[0] == 11 and sampler.utility[0] == pytest.approx(0.05)
    assert {d.index for step in range(2, 11) for d in sampler.next(1, step)} == {1}
    assert sampler.metrics() == {"curriculum/new": 0.0, "curriculum/active": 0.5, "curriculum/resting": 0.5}
    assert {d.index for _ in range(60) for d in sampler.next(1, 11)} == {0, 1}
    sampler.observe([outcome(0, 1)], 11)
    assert sampler.due[0] == 31  # one visit of no use more: twice as long
    sampler.observe([outcome(0, 0.5)], 31)
    assert (sampler.due[0], sampler.lows[0], sampler.rests[0]) == (0, 0, 0)
    first, again = (Lifecycle(prompts(2), patience=1, rest=10) for _ in range(2))
    first.observe([outcome(0, 1)], 0)
    assert first.due[0] == 10
    again.load_state_dict(first.state_dict())
    again.observe([outcome(0, 1)], 10)
    assert again.due[0] == 30


def test_new_ones_come_at_their_share_and_active_ones_by_utility():
    sampler = Lifecycle(prompts(2000), fresh=0.25, floor=0.02)
    seen = [d.index for d in sampler.next(3, 0)]
    sampler.observe([outcome(i, rate) for i, rate in zip(seen, (0.5, 0.125, 0), strict=True)], 0)
    counts = counted(sampler, 1500, 1, step=1)
    weights = np.array([0.27, 0.129375, 0.02])
    new = counts.sum() - counts[seen].sum()
    assert follows(np.array([*counts[seen], new]), np.array([*(0.75 * weights / weights.sum()), 0.25]))
    assert np.delete(counts, seen).max() == 1


def test_the_life_cycle_always_finds_prompts():
    sampler = Lifecycle(prompts(12), patience=1, rest=1000)
    for step in range(12):
        draws = sampler.next(8, step)
        assert len({d.index for d in draws}) == 8
        sampler.observe([outcome(d.index, 1) if d.index % 3 else Outcome(d, ()) for d in draws], step)
    assert len(sampler.next(30, 12)) == 30
    assert np.count_nonzero(sampler.due < 10**9) == 8


def epochs(sampler, rates):
    """Answers `rates[k][i]` to the k-th visit of prompt i until all are answered."""
    size = len(rates[0])
    for step in range(len(rates)):
        draws = sampler.next(size, step)
        sampler.observe([outcome(d.index, rates[d.visit][d.index], visit=d.visit) for d in draws], step)


def test_limr_by_hand():
    sampler = Limr(prompts(4), epochs=2, threshold=0.6)
    epochs(sampler, [[0.25, 1.0, 0.0, 0.25], [0.75, 1.0, 0.0, 0.25]])
    means, rates = np.array([0.375, 0.5]), np.array([[0.25, 1, 0, 0.25], [0.75, 1, 0, 0.25]])
    scores = 1 - ((rates - means[:, None]) ** 2).sum(0) / ((1 - means) ** 2).sum()
    assert sampler.scores() == pytest.approx(scores, abs=1e-5)
    assert sampler.metrics() == {"curriculum/kept": 1.0, "curriculum/epoch": 2.0}
    assert np.flatnonzero(scores > 0.6).tolist() == [0, 3]
    assert [sorted(d.index for d in sampler.next(2, step)) for step in range(2, 6)] == [[0, 3]] * 4
    assert sampler.metrics() == {"curriculum/kept": 0.5, "curriculum/epoch": 4.0}
    sampler = Limr(prompts(6), epochs=1)
    sampler.observe([Outcome(d, ()) for d in sampler.next(6, 0)], 0)
    assert {d.index for d in sampler.next(6, 1)} == {*range(6)}
    solved = Limr(prompts(6), epochs=1)
    epochs(solved, [[1.0] * 6])
    assert solved.scores() == pytest.approx([1] * 6)


def test_limr_keeps_the_best_where_none_is_good_enough(caplog):
    sampler = Limr(prompts(20), epochs=1, threshold=0.9999)
    epochs(sampler, [[0.0] * 10 + [1.0] * 9 + [0.5]])
    with caplog.at_level(logging.WARNING):
        found = {d.index for step in range(5) for d in sampler.next(2, step)}
    assert len(found) == 2 and 19 in found and "curriculum.threshold=0.9999" in caplog.text
    assert sampler.metrics()["curriculum/kept"] == 0.1
