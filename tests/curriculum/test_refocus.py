"""adcl and hard_focus: what is probed and sorted again, what is hardest, and that they go on exactly."""

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.curriculum.drives import told
from vlrl import curriculum
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import ForeseeingSampler, ProbingSampler, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.refocus import ADCL, HardFocus

HARD = [0.9, 0.1, 0.5, 0.3, 0.7, 0.2]
"""In order: 1, 5, 3, 2, 4, 0."""


def prompts(values=HARD, seed=0, per_step=2):
    return Prompts(len(values), seed, lambda name: values if name == "difficulty" else [None] * len(values),
                   RolloutSettings(prompts_per_step=per_step))


def probed(sampler, rows, step, rates=()):
    """The prompts that are probed, answered with the pass rates of `rates` (else .5)."""
    draws = sampler.probes(step)
    assert all(d.group_size == 4 for d in draws)
    told(sampler, rows, {d: dict(rates).get(d.index, 0.5) for d in draws}, step)
    return [d.index for d in draws]


def drawn(sampler, count, step):
    draws = sampler.next(count, step)
    assert all(d.group_size is None for d in draws)
    return [d.index for d in draws]


def test_each_batch_is_probed_and_sorted_again_before_it_is_drawn():
    rows = prompts()
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
    sampler, again = (ADCL(prompts(values), batches=6) for _ in range(2))
    assert drawn(sampler, 5, 0) == [0, 1, 2, 3, 4]
    again.load_state_dict(sampler.state_dict())
    assert [d.index for d in again.probes(1)] == [5, 6, 7, 8, 9]
    rows = prompts()
    sampler = ADCL(rows, batches=3)
    assert probed(sampler, rows, 0, {5: 0.9}) == [1, 5] and probed(sampler, rows, 1) == []
    assert drawn(sampler, 2, 1) == [5, 1]


def test_what_was_not_foreseen_goes_by_what_is_known():
    rows = prompts()
    sampler = ADCL(rows, batches=3)
    assert probed(sampler, rows, 0) == [1, 5]
    assert drawn(sampler, 2, 0) == [1, 5] and drawn(sampler, 1, 0) == [3]  # a refill
    assert probed(sampler, rows, 1, {4: 0.9, 2: 0.95}) == [2, 4, 0]  # a step took 3: this batch's rest, and the next
    assert drawn(sampler, 3, 1) == [2, 4, 0]
    assert drawn(sampler, 2, 2) == [2, 4] and rows.history.visits[4] == 3  # without probes, past the end of the pass
    rows = prompts([0.1, 0.2, 0.3])
    sampler = ADCL(rows, batches=1)
    told(sampler, rows, dict(zip(sampler.next(2, 0), [0.0, 0.4], strict=True)), 0)
    assert drawn(sampler, 2, 1) == [2, 1] and drawn(sampler, 2, 2) == [0, 2]  # by 1, .6, .3, but 2 was just drawn
    rows = prompts(list(np.linspace(0, 1, 40)), per_step=7)
    sampler = ADCL(rows, batches=5)
    found = [i for step in range(8) for i in (probed(sampler, rows, step), drawn(sampler, 5, step))[1]]
    assert sorted(found) == list(range(40))


def test_without_a_field_everything_is_probed_first():
    rows = prompts([None] * 4)
    sampler = ADCL(rows, batches=2, by=None)
    assert probed(sampler, rows, 0, {0: 0.1, 1: 0.9, 2: 0.3, 3: None}) == [0, 1, 2, 3]
    assert drawn(sampler, 2, 0) == [1, 2]
    assert probed(sampler, rows, 1, {0: 0.1, 3: 0.4}) == [0, 3] and drawn(sampler, 2, 1) == [3, 0]
    rows = prompts([0.5, None, 0.1])
    sampler = ADCL(rows, batches=1)
    assert probed(sampler, rows, 0, {0: None, 1: None, 2: 0.2}) == [2, 0, 1]
    assert drawn(sampler, 3, 0) == [0, 2, 1]


def test_adcl_options_are_checked():
    with pytest.raises(ConfigError, match="batches=7 is more than the number of training rows, 6"):
        curriculum.make(CurriculumSettings(name="adcl", batches=7), prompts())  # pyright: ignore
    with pytest.raises(ConfigError, match=r"none of the 2 training rows .* or set curriculum.by=null"):
        ADCL(prompts([None, None]), batches=1)


def test_hard_focus_keeps_the_hardest_share():
    rows = prompts([None] * 6)
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
        taken[HardFocus(prompts([None] * 5, seed), after=0, share=0.2).next(1, 0)[0].index] += 1
    assert chisquare(taken).pvalue > 1e-3
    sampler = HardFocus(prompts(), after=1, share=0.5)
    assert sampler.next(4, 0) and sampler.upcoming(2, 1) == []
    sampler.next(1, 1)
    expected = sampler.upcoming(2, 2)
    assert len(expected) == 2 and sampler.next(2, 2) == expected
