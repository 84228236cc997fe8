"""Differences of two sides, and profiles of several runs: by hand and against implementations of their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vlrl.evaluation import stats
from vlrl.tools.experiments import profiles
from vlrl.tools.experiments.differences import difference, effect_size, outcomes, spread
from vlrl.tools.experiments.profiles import iqm, optimality_gap, performance_profile, probability_of_improvement


def test_intervals_and_variance_components_by_hand():
    """Seeds 0 and 1 of b differ by 0.4 on every sample and nothing else varies within b: no noise, 0.4^2 / 2 / 2."""
    rng = np.random.default_rng(0)
    a, b = rng.random(200), rng.random(200) + 0.1
    plain, found = stats.paired_gain(a, b), difference(a, b)
    assert found.mean == pytest.approx(plain.mean, abs=1e-12)
    assert found.high - found.low == pytest.approx(plain.high - plain.low, rel=0.05)
    half = 2.0 * (b - a).std(ddof=1) / 200 ** 0.5
    assert found.low == pytest.approx(found.mean - half, abs=0.15 * half) and found == difference(a, b)
    a = np.array([[0.0, 1.0, 0.0, 1.0]])
    b = np.array([[0.2, 0.8, 0.2, 1.0], [0.6, 1.2, 0.6, 1.4]])
    apart = [0.4, 0.0, 0.4, 0.2]
    found = spread(a, b)
    assert found.samples == pytest.approx(np.var(apart, ddof=1) / 4, abs=1e-12)
    assert (found.first, found.second) == (0, pytest.approx(0.04, abs=1e-12))
    total = found.samples + found.second
    assert found.df == pytest.approx(total ** 2 / (found.samples ** 2 / 3 + found.second ** 2 / 1), abs=1e-9)
    assert difference(a, b).mean == pytest.approx(0.25, abs=1e-12)


def test_noise_of_answers_is_no_spread_over_seeds():
    rng = np.random.default_rng(1)
    scores = [spread(*rng.normal(size=(2, 4, 100))) for _ in range(300)]
    assert np.mean([s.samples for s in scores]) == pytest.approx(2 / 4 / 100, rel=0.05)
    assert np.mean([s.second for s in scores]) < 0.4 / 4 / 100  # what is above 0 of a mean of 0
    wide = [spread(*(rng.normal(size=(2, 4, 100)) + rng.normal(size=(2, 4, 1)))) for _ in range(300)]
    assert np.mean([s.first for s in wide]) == pytest.approx(1 / 4, rel=0.15)


@pytest.mark.slow
def test_the_interval_covers_the_truth_in_93_to_97_of_100():
    """1,000 simulations: the truth is over all seeds and samples, of which each simulation draws some."""
    rng, hits = np.random.default_rng(2), 0
    for i in range(1000):
        ease, gain = rng.normal(size=100), rng.normal(0.1, 0.5, 100)
        a, b = (ease + rng.normal(0, 0.2, (3, 1)) + rng.normal(0, 0.5, (3, 100)) for _ in range(2))
        found = difference(a, b + gain, seed=i, n=400)
        hits += found.low <= 0.1 <= found.high
    assert 930 <= hits <= 970


def test_without_an_interval_and_effect_sizes_by_hand():
    assert np.isnan(difference([1.0], [2.0])[1:]).all() and difference([1.0], [2.0]).mean == 1
    assert difference([1.0, 2.0], [2.0, 3.0]) == (1, 1, 1) and np.isnan(difference([], [])).all()
    with pytest.raises(ValueError, match="1 samples and the other 2"):
        difference([1.0], [1.0, 2.0])
    assert effect_size([0, 0, 0], [1, 2, 3]) == pytest.approx(2.0, abs=1e-12)
    assert effect_size([[0, 0], [2, 2]], [[1, 3]]) == pytest.approx(1 / 2 ** 0.5, abs=1e-12)
    assert effect_size([1, 2], [1, 2]) == 0 and effect_size([1, 2], [0, 1]) == -np.inf
    assert np.isnan(effect_size([1], [2])) and outcomes([0.1, 0.2, 0.3, 0.4], [0.1 + 1e-12, 0.3, 0.1, 0.5]) == (2, 1, 1)


TABLES = arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
                       elements=st.floats(-1, 2, width=16))


def test_by_hand():
    scores = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.2], [0.9, 0.1]])
    assert iqm(scores) == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4, abs=1e-12)
    assert optimality_gap(scores) == pytest.approx(1 - (0 + 0.2 + 0.4 + 0.6 + 0.8 + 1 + 0.9 + 0.1) / 8, abs=1e-12)
    assert performance_profile(scores, [0, 0.4, 1]).tolist() == [7 / 8, 4 / 8, 1 / 8]
    assert probability_of_improvement([[1.0], [2.0]], [[1.0], [0.0], [3.0]]) == pytest.approx(3.5 / 6, abs=1e-12)
    for table in ([], [1.0], [[np.nan]], [[]]):
        with pytest.raises(ValueError, match="must be finite numbers"):
            iqm(table)
        with pytest.raises(ValueError, match="1 tasks cannot be compared with scores of 2"):
            probability_of_improvement([[1.0]], [[1.0, 2.0]])
    settings = [{"lr": lr, "clip": clip} for lr in (1, 2) for clip in ("low", "high")]
    lr, clip = profiles.sensitivities(settings, [0.0, 0.2, 1.0, 1.2])
    assert (lr.name, lr.means, clip.means) == ("lr", {"1": (2, pytest.approx(0.1)), "2": (2, pytest.approx(1.1))},
                                               {"high": (2, pytest.approx(0.7)), "low": (2, pytest.approx(0.5))})
    assert (lr.spread, clip.spread) == pytest.approx((1.0, 0.2), abs=1e-12)
    assert (lr.share, clip.share) == pytest.approx((1 / 1.04, 0.04 / 1.04), abs=1e-12)
    (found,) = profiles.sensitivities([{"x": float(i)} for i in range(9)], [float(i // 3) for i in range(9)])
    assert found.means == {"0..2": (3, 0.0), "3..5": (3, 1.0), "6..8": (3, 2.0)} and found.share == 1
    (flat,) = profiles.sensitivities([{"x": [1]}, {"x": [2]}], [0.5, 0.5])
    assert (flat.spread, flat.share, list(flat.means)) == (0, 0, ["[1]", "[2]"])
    scores = np.array([0.1, 0.9]) + np.random.default_rng(1).normal(0, 0.02, (20, 2))
    found, again = (profiles.stratified(lambda x: float(x.mean()), scores) for _ in range(2))
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.02 / 40 ** 0.5, rel=0.35) and found == again


@settings(max_examples=40)
@given(TABLES)
def test_equal_an_implementation_with_loops(scores):
    flat = sorted(scores.ravel().tolist())
    cut = int(0.25 * len(flat))
    middle = flat[cut:len(flat) - cut]
    assert iqm(scores) == pytest.approx(sum(middle) / len(middle), abs=1e-9)
    assert optimality_gap(scores) == pytest.approx(1 - sum(min(v, 1) for v in flat) / len(flat), abs=1e-9)
    taus = [-1, 0.3, 1]
    assert performance_profile(scores, taus) == pytest.approx([sum(v > t for v in flat) / len(flat) for t in taus])
    others = scores[:1] + 0.25
    wins = [sum((x > y) + 0.5 * (x == y) for x in scores[:, t] for y in others[:, t]) / len(scores)
            for t in range(scores.shape[1])]
    assert probability_of_improvement(scores, others) == pytest.approx(sum(wins) / len(wins), abs=1e-9)
    assert probability_of_improvement(scores, scores) == pytest.approx(0.5, abs=1e-9)
