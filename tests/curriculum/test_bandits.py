"""Samplers over categories: each rule by hand, draws against the shares, resume, and what data must have."""

from math import exp, log, sqrt

import numpy as np
import pytest
from scipy.stats import chisquare

from vlrl.curriculum import SAMPLERS, Draw, Outcome, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.bandits import DomainWeighted, Dump, Recap, Sec, Sws

NAMES = ["sec", "dump", "domain_weighted", "recap", "sws"]


def prompts(sizes=(40, 40, 40), seed=3, **fields):
    """Prompts of categories a, b, ... with the given sizes, one after another."""
    names = [name for name, size in zip("abcdef", sizes, strict=False) for _ in range(size)]
    fields = {"category": names, "task": names, **fields}
    return Prompts(len(names), seed, lambda name: fields.get(name, [None] * len(names)))


def test_numbers_are_grouped_into_ranges_with_their_lower_edge():
    found = prompts((6,), size=[0, 1, 2, 3, 4, None]).categories("size", bins=2)
    assert found.names == ("0-2", "2-4", "none") and found.indices.tolist() == [0, 0, 1, 1, 1, 2]


def outcome(index, *rewards, visit=0):
    return Outcome(Draw(index, visit), rewards, tuple(r >= 0.5 for r in rewards))


def answered(sampler, draws, seed=0):
    """Outcomes of four answers each, which category a always gets right, b half of the time, c never."""
    rights, random = {0: 1.0, 1: 0.5, 2: 0.0}, np.random.default_rng(seed)
    of = sampler.prompts.categories("category").indices
    return [outcome(d.index, *(random.random(4) < rights[int(of[d.index])]).astype(float), visit=d.visit)
            for d in draws]


def run(sampler, steps):
    for step in range(steps):
        sampler.observe(answered(sampler, sampler.next(16, step), step), step)


def test_sec_by_hand():
    sampler = Sec(prompts(), alpha=0.5, tau=1.0)
    assert sampler.shares() == pytest.approx([1 / 3] * 3)
    sampler.observe([outcome(0, 1, 0, 0, 0), outcome(1, 1, 1, 1, 1), outcome(40, 1, 0)], 0)
    one = 2 * 0.75 * 0.25 / sqrt(0.75 * 0.25)  # mean |A| of 1 right in 4; of 1 in 2 it is 1
    assert sampler.values == pytest.approx([one / 4, 0.5, 0], abs=1e-5)
    sampler.observe([outcome(2, 1, 1, 0, 0), outcome(3, 0, 0), outcome(80, 0, 0), Outcome(Draw(41, 0), ())], 1)
    values = [one / 8 + 0.5 * 4 / 6, 0.5, 0]  # means are over answers; b was not answered, c paid nothing
    assert sampler.values == pytest.approx(values, abs=1e-5)
    total = sum(map(exp, values))
    assert sampler.shares() == pytest.approx([exp(v) / total for v in values], abs=1e-5)
    assert sampler.metrics() == pytest.approx({f"curriculum/weight/{n}": exp(v) / total
                                               for n, v in zip("abc", values, strict=True)}, abs=1e-5)
    sampler = Sec(prompts(), alpha=0.25)
    for value in (0.25, 0.25 * 1 + 0.75 * 0.25):  # |A| of 1 right in 2 is 1
        sampler.observe([outcome(40, 1, 0)], 0)
        assert sampler.values == pytest.approx([0, value, 0], abs=1e-5)
    sampler = Sec(prompts(), alpha=1.0, scale=False)
    sampler.observe([outcome(0, 0.5, 0.51), outcome(40, 0.0, 1.0)], 0)
    assert sampler.values == pytest.approx([0.005, 0.5, 0], abs=1e-5)


def test_dump_by_hand():
    sampler = Dump(prompts(), window=4, tau=0.1)
    sampler.observe([outcome(0, 1, 0), outcome(1, 1, 1), outcome(40, 1, 0)], 0)
    bounds = [0.5 + sqrt(2 * log(4) / 3), 1 + sqrt(2 * log(4) / 2), sqrt(2 * log(4))]
    assert sampler.bounds() == pytest.approx(bounds, abs=1e-5)
    sampler.observe([outcome(2, 0, 0, 0)], 1)  # the window of 4 answers forgets the first 3
    bounds = [0 / 4 + sqrt(2 * log(5) / 4), 1 + sqrt(2 * log(5) / 2), sqrt(2 * log(5))]
    assert sampler.bounds() == pytest.approx(bounds, abs=1e-5)
    total = sum(exp((b - bounds[1]) / 0.1) for b in bounds)
    assert sampler.shares() == pytest.approx([exp((b - bounds[1]) / 0.1) / total for b in bounds], abs=1e-5)


def test_domain_weighted_by_hand():
    sampler = DomainWeighted(prompts(), alpha=0.5, tau=0.8, target=1.0, epsilon=0.1)
    sampler.observe([outcome(0, 1, 1, 1, 0), outcome(40, 0.2, 0.4)], 0)
    sampler.observe([outcome(1, 0, 0.5)], 1)
    assert sampler.values == pytest.approx([0.5 * 0.75 + 0.5 * 0.25, 0.3, 0], abs=1e-5)
    weights = [exp(0.5 / 0.8) + 0.1, exp(0.7 / 0.8) + 0.1, exp(1 / 0.8) + 0.1]
    assert sampler.shares() == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)
    sampler.observe([outcome(0, -1e30, 1e30), outcome(40, 1e30)], 2)
    assert np.isfinite(sampler.shares()).all() and sampler.shares().sum() == pytest.approx(1)


def test_recap_by_hand():
    sampler = Recap(prompts(), by="task", fast=0.5, slow=0.9, tau=0.5, target=2.0)
    assert sampler.scores() == pytest.approx([1, 1, 1])
    sampler.observe([outcome(0, 1.0, 0.0), outcome(40, 2.0, 2.0)], 0)
    assert sampler.scores() == pytest.approx([0.75 * 1, 0, 1], abs=1e-5)  # stalled, solved, not met
    sampler.observe([outcome(0, 1.0, 1.0), outcome(40, 0.0, 0.0)], 1)
    fast, slow, deviation = 0.75, 0.55, sqrt(0.1 * 0.25)
    rising = (2 - fast) / 2 * ((2 - fast) / (2 - slow) + deviation / 2)
    forgotten = 0.5 * (2 + sqrt(0.1 * 4) / 2)  # (2 - 1) / (2 - 1.8) = 5 counts as 2
    assert sampler.scores() == pytest.approx([rising, forgotten, 1], abs=1e-5)
    total = exp(rising / 0.5) + exp(forgotten / 0.5) + exp(1 / 0.5)
    assert sampler.shares() == pytest.approx([exp(v / 0.5) / total for v in (rising, forgotten, 1)], abs=1e-5)
    of = prompts()
    even, other = Recap(of, by="task", weigh="loss"), Recap(prompts(), by="task", weigh="draws")
    for sampler in (even, other):
        sampler.observe([outcome(0, 0.0, 0.0), outcome(40, 1.0, 1.0)], 0)
    weight = even.shares() / (even.sizes / even.sizes.sum())
    draws = even.next(of.size, 1)
    assert sorted(d.index for d in draws) == list(range(of.size))
    assert np.mean([d.weight for d in draws]) == pytest.approx(1)
    assert all(d.weight == weight[even.categories.indices[d.index]] for d in draws)
    assert weight[0] > 1 > weight[1] and {d.weight for d in other.next(8, 1)} == {1.0}


def test_sws_by_hand():
    sampler = Sws(prompts((40, 20)), visits=1, floor=0.1)
    sampler.observe([outcome(0, 0, 0, 0, 1), outcome(1, 1, 1, 0, 0), outcome(40, 0, 0)], 0)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 1], [2, 1])
    sampler.observe([outcome(0, 0, 0, 1, 0), outcome(1, 0, 0, 0, 0), outcome(40, 0, 0, 0, 1)], 1)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 0], [2, 1])  # 0 stays, 1 had a half, 40 rises
    failures = [2 / 4, 1 / 3]
    assert sampler.shares() == pytest.approx([0.9 * f / sum(failures) + 0.1 * size / 60
                                              for f, size in zip(failures, (40, 20), strict=True)], abs=1e-5)
    sampler.observe([outcome(40, 0, 0, 0, 0)], 2)
    assert sampler.weak.tolist() == [1, 1]  # 0, .25, 0: no slope
    sampler = Sws(prompts(), visits=2)
    sampler.observe([outcome(0, 0, 0)], 0)
    assert sampler.judged.sum() == 0 and sampler.failures() == pytest.approx([0.5] * 3)
    sampler.observe([outcome(0, 0, 0)], 1)
    assert (sampler.weak.tolist(), sampler.judged.tolist()) == ([1, 0, 0], [1, 0, 0])


@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_the_shares(name):
    sampler = SAMPLERS[name](prompts((400, 300, 200)))
    run(sampler, 3)
    shares, counts = sampler.shares().copy(), np.zeros(3)
    for step in range(100):
        counts += np.bincount(sampler.categories.indices[[d.index for d in sampler.next(16, step)]], minlength=3)
    assert chisquare(counts, shares * counts.sum()).pvalue > 1e-3
    assert len({round(float(s), 6) for s in shares}) > 1


def test_no_prompt_twice_while_others_are_left():
    sampler = Sec(prompts((8, 500)))
    drawn = [d.index for step in range(150) for d in sampler.next(2, step) if d.index < 8]
    passes = [drawn[i:i + 8] for i in range(0, 64, 8)]
    assert all(len({*p}) >= 7 for p in passes) and len({tuple(p) for p in passes}) == 8
    sampler = Sec(prompts((3, 7, 20)), tau=0.01)
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
