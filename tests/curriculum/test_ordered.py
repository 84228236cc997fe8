"""Samplers by difficulty (easy_to_hard, gaussian, adcl, hard_focus): orders, weights, probes, and how they go on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.curriculum.drives import told
from vlrl import curriculum
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import ForeseeingSampler, ProbingSampler, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.ordered import EasyToHard, Gaussian
from vlrl.methods.curricula.refocus import ADCL, HardFocus


def prompts(values, seed=0, name="difficulty"):
    return Prompts(len(values), seed, lambda asked: values if asked == name else [None] * len(values))


def order(sampler, count, step=0):
    return [draw.index for draw in sampler.next(count, step)]


def test_easy_to_hard_goes_by_the_field_pass_after_pass():
    values = [0.5, None, 0.1, 0.9, 0.1, "x", True]
    assert order(EasyToHard(prompts(values)), 14) == [2, 4, 0, 3, 1, 5, 6] * 2
    assert order(EasyToHard(prompts(values), descending=True), 7) == [3, 0, 2, 4, 1, 5, 6]
    lengths = prompts([30, 10, 20], name="length")
    made = curriculum.make(CurriculumSettings(name="easy_to_hard", by="length"), lengths)  # pyright: ignore
    assert [(d.index, d.visit) for d in made.next(4, 0)] == [(1, 0), (2, 0), (0, 0), (1, 1)]
    assert made.metrics() == {"curriculum/epoch": pytest.approx(4 / 3)}
    with pytest.raises(ConfigError, match=r"curriculum.by='length': none of the 2 training rows .*name=easy_to_hard"):
        EasyToHard(prompts([None, "long"], name="length"), by="length")


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9), st.lists(st.integers(0, 9), max_size=5))
def test_easy_to_hard_foresees_and_goes_on(values, counts):
    sampler = EasyToHard(prompts(values))
    assert isinstance(sampler, ForeseeingSampler)
    for count in counts:
        expected = sampler.upcoming(count, 0)
        again = EasyToHard(prompts(values))
        again.load_state_dict(sampler.state_dict())
        assert sampler.next(count, 0) == expected == again.next(count, 0)
    drawn = order(EasyToHard(prompts(values)), len(values))
    assert sorted(drawn) == list(range(len(values))) and [values[i] for i in drawn] == sorted(values)


def test_gaussian_weights():
    sampler = Gaussian(prompts([0.7, 0.5, 0.9, 0.3, None]))
    expected = [1, np.exp(-0.5), np.exp(-0.5), np.exp(-2), 1]
    assert sampler.weights() == pytest.approx(expected, abs=1e-5)
    sampler = Gaussian(prompts([0.3, 0.0]), mean=0.3, std=0.1)
    assert sampler.weights() == pytest.approx([1, np.exp(-4.5)], abs=1e-5)
    rows = prompts([0.7, None, None])
    sampler = Gaussian(rows)
    draws = sampler.next(3, 0)
    told(sampler, rows, {d: {0: 1.0, 1: 0.25, 2: 0.5}[d.index] for d in draws}, 0)
    expected = [1, np.exp(-0.5 * (0.05 / 0.2) ** 2), np.exp(-0.5)]  # difficulties .7 (the field's), .75, .5
    assert sampler.weights() == pytest.approx(expected, abs=1e-5)
    told(sampler, rows, {draws[0]: None}, 0)  # a rejected one changes nothing
    assert sampler.weights() == pytest.approx(expected, abs=1e-5)


def test_gaussian_drops_the_solved_after_an_epoch_until_all_are():
    rows = prompts([0.7] * 4)
    sampler = Gaussian(rows)
    told(sampler, rows, dict(zip(sampler.next(4, 0), [1, 0.5, 1, 0], strict=True)), 0)
    assert sampler.left.all()  # while the epoch lasts
    unsolved = np.flatnonzero(rows.history.pass_rate < 1).tolist()
    assert sorted(order(sampler, 2, 1)) == unsolved and sampler.metrics()["curriculum/left"] == 0.5
    told(sampler, rows, dict.fromkeys(sampler.next(2, 2), 1.0), 2)  # a new epoch of two
    assert sorted(order(sampler, 4, 3)) == [0, 1, 2, 3] and sampler.metrics()["curriculum/left"] == 1
    rows = prompts([0.7] * 2)
    sampler = Gaussian(rows, solved=0.5)
    told(sampler, rows, dict(zip(sampler.next(2, 0), [0.4, 0.5], strict=True)), 0)
    sampler.next(1, 1)
    assert sampler.left.tolist() == (rows.history.pass_rate < 0.5).tolist()


def test_gaussian_draws_by_its_weights():
    sampler = Gaussian(prompts([0.1, 0.4, 0.7, 0.9], seed=5))
    drawn = np.bincount([order(sampler, 1)[0] for _ in range(1500)], minlength=4)
    shares = np.exp(-0.5 * ((np.array([0.1, 0.4, 0.7, 0.9]) - 0.7) / 0.2) ** 2)
    assert chisquare(drawn, 1500 * shares / shares.sum()).pvalue > 1e-3
    assert len({*order(sampler, 4)}) == 4
    assert sorted(order(Gaussian(prompts([0.0, 1e30]), std=1e-3), 2)) == [0, 1]


HARD = [0.9, 0.1, 0.5, 0.3, 0.7, 0.2]
"""In order: 1, 5, 3, 2, 4, 0."""


def known_prompts(values=HARD, seed=0, per_step=2):
    return Prompts(len(values), seed, lambda name: values if name == "difficulty" else [None] * len(values),
                   RolloutSettings(prompts_per_step=per_step))


def probed(sampler, rows, step, rates=()):
    """The known_prompts that are probed, answered with the pass rates of `rates` (else .5)."""
    draws = sampler.probes(step)
    assert all(d.group_size == 4 for d in draws)
    told(sampler, rows, {d: dict(rates).get(d.index, 0.5) for d in draws}, step)
    return [d.index for d in draws]


def drawn(sampler, count, step):
    draws = sampler.next(count, step)
    assert all(d.group_size is None for d in draws)
    return [d.index for d in draws]


def test_each_batch_is_probed_and_sorted_again_before_it_is_drawn():
    rows = known_prompts()
    sampler = ADCL(rows, batches=2)
    assert isinstance(sampler, ProbingSampler) and isinstance(sampler, ForeseeingSampler)
    assert probed(sampler, rows, 0, {1: 0.2, 5: 0.9, 3: 0.6}) == [1, 5, 3]
    assert drawn(sampler, 2, 0) == [5, 3] and [d.index for d in sampler.upcoming(2, 1)] == [1]
    assert probed(sampler, rows, 1, {2: 0.1, 4: 0.3, 0: 1.0}) == [2, 4, 0]  # the step reaches into the second batch
    assert drawn(sampler, 2, 1) == [1, 0]
    assert sampler.metrics() == {"curriculum/epoch": pytest.approx(4 / 6), "curriculum/batch": 2,
                                 "curriculum/probes": 6}
    assert probed(sampler, rows, 2) == [] and drawn(sampler, 2, 2) == [4, 2]
    assert probed(sampler, rows, 3, {0: 0.0}) == [0, 5, 3]  # a pass by the last pass rates: 1, .9, .6, .3, .2, .1
    assert drawn(sampler, 2, 3) == [5, 3]
    # Of batches of two: five draws from the sixth prompt on need those up to the tenth.
    values = list(range(12))
    sampler, again = (ADCL(known_prompts(values), batches=6) for _ in range(2))
    assert drawn(sampler, 5, 0) == [0, 1, 2, 3, 4]
    again.load_state_dict(sampler.state_dict())
    assert [d.index for d in again.probes(1)] == [5, 6, 7, 8, 9]
    rows = known_prompts()
    sampler = ADCL(rows, batches=3)
    assert probed(sampler, rows, 0, {5: 0.9}) == [1, 5] and probed(sampler, rows, 1) == []
    assert drawn(sampler, 2, 1) == [5, 1]


def test_what_was_not_foreseen_goes_by_what_is_known():
    rows = known_prompts()
    sampler = ADCL(rows, batches=3)
    assert probed(sampler, rows, 0) == [1, 5]
    assert drawn(sampler, 2, 0) == [1, 5] and drawn(sampler, 1, 0) == [3]  # a refill
    assert probed(sampler, rows, 1, {4: 0.9, 2: 0.95}) == [2, 4, 0]  # a step took 3: this batch's rest, and the next
    assert drawn(sampler, 3, 1) == [2, 4, 0]
    assert drawn(sampler, 2, 2) == [2, 4] and rows.history.visits[4] == 3  # without probes, past the end of the pass
    rows = known_prompts([0.1, 0.2, 0.3])
    sampler = ADCL(rows, batches=1)
    told(sampler, rows, dict(zip(sampler.next(2, 0), [0.0, 0.4], strict=True)), 0)
    assert drawn(sampler, 2, 1) == [2, 1] and drawn(sampler, 2, 2) == [0, 2]  # by 1, .6, .3, but 2 was just drawn
    rows = known_prompts(list(np.linspace(0, 1, 40)), per_step=7)
    sampler = ADCL(rows, batches=5)
    found = [i for step in range(8) for i in (probed(sampler, rows, step), drawn(sampler, 5, step))[1]]
    assert sorted(found) == list(range(40))


def test_without_a_field_everything_is_probed_first():
    rows = known_prompts([None] * 4)
    sampler = ADCL(rows, batches=2, by=None)
    assert probed(sampler, rows, 0, {0: 0.1, 1: 0.9, 2: 0.3, 3: None}) == [0, 1, 2, 3]
    assert drawn(sampler, 2, 0) == [1, 2]
    assert probed(sampler, rows, 1, {0: 0.1, 3: 0.4}) == [0, 3] and drawn(sampler, 2, 1) == [3, 0]
    rows = known_prompts([0.5, None, 0.1])
    sampler = ADCL(rows, batches=1)
    assert probed(sampler, rows, 0, {0: None, 1: None, 2: 0.2}) == [2, 0, 1]
    assert drawn(sampler, 3, 0) == [0, 2, 1]


def test_adcl_options_are_checked():
    with pytest.raises(ConfigError, match="batches=7 is more than the number of training rows, 6"):
        curriculum.make(CurriculumSettings(name="adcl", batches=7), known_prompts())  # pyright: ignore
    with pytest.raises(ConfigError, match=r"none of the 2 training rows .* or set curriculum.by=null"):
        ADCL(known_prompts([None, None]), batches=1)


def test_hard_focus_keeps_the_hardest_share():
    rows = known_prompts([None] * 6)
    sampler = HardFocus(rows, after=2, share=0.5, group_size=64)
    rates = {0: 0.5, 1: 0.0, 2: 1.0, 3: None, 4: 0.25, 5: 0.75}
    first = sampler.next(6, 0)
    assert sorted(d.index for d in first) == [*range(6)] and {d.group_size for d in first} == {None}
    told(sampler, rows, {d: rates[d.index] for d in first}, 0)
    assert {d.group_size for d in sampler.next(1, 1)} == {None}
    assert sampler.metrics()["curriculum/stage"] == 1
    second = sampler.next(3, 2)
    assert sorted(d.index for d in second) == [0, 1, 4] and {d.group_size for d in second} == {64}  # 3 is rejected
    assert sampler.metrics() == {"curriculum/stage": 2, "curriculum/left": 0.5, "curriculum/epoch": 1}
    told(sampler, rows, {d: {0: 1.0, 1: 0.0, 4: 0.5}[d.index] for d in second}, 2)
    assert sorted(d.index for d in sampler.next(3, 2)) == [0, 1, 4]  # the same step
    assert sampler.upcoming(3, 3) == []
    assert sorted(d.index for d in sampler.next(3, 3)) == [1, 4, 5]
    taken = np.zeros(5)
    for seed in range(200):
        taken[HardFocus(known_prompts([None] * 5, seed), after=0, share=0.2).next(1, 0)[0].index] += 1
    assert chisquare(taken).pvalue > 1e-3
    sampler = HardFocus(known_prompts(), after=1, share=0.5)
    assert sampler.next(4, 0) and sampler.upcoming(2, 1) == []
    sampler.next(1, 1)
    expected = sampler.upcoming(2, 2)
    assert len(expected) == 2 and sampler.next(2, 2) == expected
