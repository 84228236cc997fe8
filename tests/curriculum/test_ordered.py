"""easy_to_hard and gaussian: their order, their weights, what is dropped, and that they go on exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.curriculum.drives import told
from vlrl import curriculum
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import ForeseeingSampler, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.ordered import EasyToHard, Gaussian


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
    with pytest.raises(ConfigError, match=r"curriculum.descending='x'"):
        curriculum.make(CurriculumSettings(name="easy_to_hard", descending="x"), prompts([1]))  # pyright: ignore


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
