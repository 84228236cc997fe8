"""Samplers that weigh categories or every prompt, and those that let go of prompts: rules by hand, draws, resume."""

import logging
from math import exp, log, sqrt

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.tables import each
from vlrl.curriculum import SAMPLERS, Draw, Outcome, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.bandits import DomainWeighted, Dump, Recap, Sec, Sws
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


@each("alpha", [0.0, 1.0, 100.0])
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


NAMES = ["sec", "dump", "domain_weighted", "recap", "sws"]


def in_categories(sizes=(40, 40, 40), seed=3, **fields):
    """Prompts of categories a, b, ... with the given sizes, one after another."""
    names = [name for name, size in zip("abcdef", sizes, strict=False) for _ in range(size)]
    fields = {"category": names, "task": names, **fields}
    return Prompts(len(names), seed, lambda name: fields.get(name, [None] * len(names)))


def test_numbers_are_grouped_into_ranges_with_their_lower_edge():
    found = in_categories((6,), size=[0, 1, 2, 3, 4, None]).categories("size", bins=2)
    assert found.names == ("0-2", "2-4", "none") and found.indices.tolist() == [0, 0, 1, 1, 1, 2]


def paid(index, *rewards, visit=0):
    return Outcome(Draw(index, visit), rewards, tuple(r >= 0.5 for r in rewards))


def answered(sampler, draws, seed=0):
    """Outcomes of four answers each, which category a always gets right, b half of the time, c never."""
    rights, random = {0: 1.0, 1: 0.5, 2: 0.0}, np.random.default_rng(seed)
    of = sampler.prompts.categories("category").indices
    return [paid(d.index, *(random.random(4) < rights[int(of[d.index])]).astype(float), visit=d.visit)
            for d in draws]


def run_steps(sampler, steps):
    for step in range(steps):
        sampler.observe(answered(sampler, sampler.next(16, step), step), step)


def test_sec_by_hand():
    sampler = Sec(in_categories(), alpha=0.5, tau=1.0)
    assert sampler.shares() == pytest.approx([1 / 3] * 3)
    sampler.observe([paid(0, 1, 0, 0, 0), paid(1, 1, 1, 1, 1), paid(40, 1, 0)], 0)
    one = 2 * 0.75 * 0.25 / sqrt(0.75 * 0.25)  # mean |A| of 1 right in 4; of 1 in 2 it is 1
    assert sampler.values == pytest.approx([one / 4, 0.5, 0], abs=1e-5)
    sampler.observe([paid(2, 1, 1, 0, 0), paid(3, 0, 0), paid(80, 0, 0), Outcome(Draw(41, 0), ())], 1)
    values = [one / 8 + 0.5 * 4 / 6, 0.5, 0]  # means are over answers; b was not answered, c paid nothing
    assert sampler.values == pytest.approx(values, abs=1e-5)
    total = sum(map(exp, values))
    assert sampler.shares() == pytest.approx([exp(v) / total for v in values], abs=1e-5)
    assert sampler.metrics() == pytest.approx({f"curriculum/weight/{n}": exp(v) / total
                                               for n, v in zip("abc", values, strict=True)}, abs=1e-5)
    sampler = Sec(in_categories(), alpha=0.25)
    for value in (0.25, 0.25 * 1 + 0.75 * 0.25):  # |A| of 1 right in 2 is 1
        sampler.observe([paid(40, 1, 0)], 0)
        assert sampler.values == pytest.approx([0, value, 0], abs=1e-5)
    sampler = Sec(in_categories(), alpha=1.0, scale=False)
    sampler.observe([paid(0, 0.5, 0.51), paid(40, 0.0, 1.0)], 0)
    assert sampler.values == pytest.approx([0.005, 0.5, 0], abs=1e-5)


def test_dump_by_hand():
    sampler = Dump(in_categories(), window=4, tau=0.1)
    sampler.observe([paid(0, 1, 0), paid(1, 1, 1), paid(40, 1, 0)], 0)
    bounds = [0.5 + sqrt(2 * log(4) / 3), 1 + sqrt(2 * log(4) / 2), sqrt(2 * log(4))]
    assert sampler.bounds() == pytest.approx(bounds, abs=1e-5)
    sampler.observe([paid(2, 0, 0, 0)], 1)  # the window of 4 answers forgets the first 3
    bounds = [0 / 4 + sqrt(2 * log(5) / 4), 1 + sqrt(2 * log(5) / 2), sqrt(2 * log(5))]
    assert sampler.bounds() == pytest.approx(bounds, abs=1e-5)
    total = sum(exp((b - bounds[1]) / 0.1) for b in bounds)
    assert sampler.shares() == pytest.approx([exp((b - bounds[1]) / 0.1) / total for b in bounds], abs=1e-5)


def test_domain_weighted_by_hand():
    sampler = DomainWeighted(in_categories(), alpha=0.5, tau=0.8, target=1.0, epsilon=0.1)
    sampler.observe([paid(0, 1, 1, 1, 0), paid(40, 0.2, 0.4)], 0)
    sampler.observe([paid(1, 0, 0.5)], 1)
    assert sampler.values == pytest.approx([0.5 * 0.75 + 0.5 * 0.25, 0.3, 0], abs=1e-5)
    weights = [exp(0.5 / 0.8) + 0.1, exp(0.7 / 0.8) + 0.1, exp(1 / 0.8) + 0.1]
    assert sampler.shares() == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)
    sampler.observe([paid(0, -1e30, 1e30), paid(40, 1e30)], 2)
    assert np.isfinite(sampler.shares()).all() and sampler.shares().sum() == pytest.approx(1)


def test_recap_by_hand():
    sampler = Recap(in_categories(), by="task", fast=0.5, slow=0.9, tau=0.5, target=2.0)
    assert sampler.scores() == pytest.approx([1, 1, 1])
    sampler.observe([paid(0, 1.0, 0.0), paid(40, 2.0, 2.0)], 0)
    assert sampler.scores() == pytest.approx([0.75 * 1, 0, 1], abs=1e-5)  # stalled, solved, not met
    sampler.observe([paid(0, 1.0, 1.0), paid(40, 0.0, 0.0)], 1)
    fast, slow, deviation = 0.75, 0.55, sqrt(0.1 * 0.25)
    rising = (2 - fast) / 2 * ((2 - fast) / (2 - slow) + deviation / 2)
    forgotten = 0.5 * (2 + sqrt(0.1 * 4) / 2)  # (2 - 1) / (2 - 1.8) = 5 counts as 2
    assert sampler.scores() == pytest.approx([rising, forgotten, 1], abs=1e-5)
    total = exp(rising / 0.5) + exp(forgotten / 0.5) + exp(1 / 0.5)
    assert sampler.shares() == pytest.approx([exp(v / 0.5) / total for v in (rising, forgotten, 1)], abs=1e-5)
    of = in_categories()
    even, other = Recap(of, by="task", weigh="loss"), Recap(in_categories(), by="task", weigh="draws")
    for sampler in (even, other):
        sampler.observe([paid(0, 0.0, 0.0), paid(40, 1.0, 1.0)], 0)
    weight = even.shares() / (even.sizes / even.sizes.sum())
    draws = even.next(of.size, 1)
    assert sorted(d.index for d in draws) == list(range(of.size))
    assert np.mean([d.weight for d in draws]) == pytest.approx(1)
    assert all(d.weight == weight[even.categories.indices[d.index]] for d in draws)
    assert weight[0] > 1 > weight[1] and {d.weight for d in other.next(8, 1)} == {1.0}


def test_sws_by_hand():
    sampler = Sws(in_categories((40, 20)), visits=1, floor=0.1)
    sampler.observe([paid(0, 0, 0, 0, 1), paid(1, 1, 1, 0, 0), paid(40, 0, 0)], 0)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 1], [2, 1])
    sampler.observe([paid(0, 0, 0, 1, 0), paid(1, 0, 0, 0, 0), paid(40, 0, 0, 0, 1)], 1)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 0], [2, 1])  # 0 stays, 1 had a half, 40 rises
    failures = [2 / 4, 1 / 3]
    assert sampler.shares() == pytest.approx([0.9 * f / sum(failures) + 0.1 * size / 60
                                              for f, size in zip(failures, (40, 20), strict=True)], abs=1e-5)
    sampler.observe([paid(40, 0, 0, 0, 0)], 2)
    assert sampler.weak.tolist() == [1, 1]  # 0, .25, 0: no slope
    sampler = Sws(in_categories(), visits=2)
    sampler.observe([paid(0, 0, 0)], 0)
    assert sampler.judged.sum() == 0 and sampler.failures() == pytest.approx([0.5] * 3)
    sampler.observe([paid(0, 0, 0)], 1)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 0, 0], [1, 0, 0])


@each("name", NAMES)
def test_draws_follow_the_shares(name):
    sampler = SAMPLERS[name](in_categories((400, 300, 200)))
    run_steps(sampler, 3)
    shares, counts = sampler.shares().copy(), np.zeros(3)
    for step in range(100):
        counts += np.bincount(sampler.categories.indices[[d.index for d in sampler.next(16, step)]], minlength=3)
    assert chisquare(counts, shares * counts.sum()).pvalue > 1e-3
    assert len({round(float(s), 6) for s in shares}) > 1


def test_no_prompt_twice_while_others_are_left():
    sampler = Sec(in_categories((8, 500)))
    drawn = [d.index for step in range(150) for d in sampler.next(2, step) if d.index < 8]
    passes = [drawn[i:i + 8] for i in range(0, 64, 8)]
    assert all(len({*p}) >= 7 for p in passes) and len({tuple(p) for p in passes}) == 8
    sampler = Sec(in_categories((3, 7, 20)), tau=0.01)
    sampler.values[:] = [1, 0, 0]
    for count in (20, 29, 30, 61):
        for step in range(20):
            counts = np.bincount([d.index for d in sampler.next(count, step)], minlength=30)
            assert counts.sum() == count and counts.max() == -(-count // 30) and counts.min() == count // 30
            assert count > 20 or (counts[:3] == 1).all()


def test_categories_of_a_field():
    rows = {"one": ["x"] * 1001, "id": [str(i) for i in range(1001)]}
    for by, said in (("level", "no row has that field"), ("one", "it is 'x' in every row"), ("id", "1001 categories")):
        with pytest.raises(ConfigError, match=rf"curriculum.by='{by}'.*{said}"):
            Sec(Prompts(1001, 0, lambda name: rows.get(name, [None] * 1001)), by=by)
    # numbers are cut, and empty ranges left out
    values = [0.0, 0.05, 0.1, 0.12, 0.15, 0.9, 1.0]
    sampler = Sec(Prompts(7, 0, lambda name: values), by="difficulty", bins=5)
    assert sampler.names == ("0-0.2", "0.8-1") and sampler.sizes.tolist() == [5, 2]
    assert {d.index for d in sampler.next(7, 0)} == set(range(7))
    # their names in metrics are short and plain
    sampler = Sec(Prompts(3, 0, lambda name: ["a/b\n" * 30, "ü 1", "x"]))
    assert [*sampler.metrics()] == ["curriculum/weight/" + "a_b_" * 10, "curriculum/weight/x", "curriculum/weight/ü_1"]
