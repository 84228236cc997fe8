"""tools/experiments/profiles.py, by hand, against implementations of its own, and against rliable where installed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vlrl.tools.experiments import profiles
from vlrl.tools.experiments.profiles import iqm, optimality_gap, performance_profile, probability_of_improvement

TABLES = arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
                       elements=st.floats(-1, 2, width=16))


def test_by_hand():
    scores = np.array([[0.0, 0.2], [0.4, 0.6], [0.8, 1.2], [0.9, 0.1]])
    assert iqm(scores) == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4, abs=1e-12)
    assert optimality_gap(scores) == pytest.approx(1 - (0 + 0.2 + 0.4 + 0.6 + 0.8 + 1 + 0.9 + 0.1) / 8, abs=1e-12)
    assert performance_profile(scores, [0, 0.4, 1]).tolist() == [7 / 8, 4 / 8, 1 / 8]
    assert probability_of_improvement([[1.0], [2.0]], [[1.0], [0.0], [3.0]]) == pytest.approx(3.5 / 6, abs=1e-12)
    for table in ([], [1.0], [[np.nan]], [[]]):
        with pytest.raises(ValueError, match="must be a finite array"):
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


@pytest.mark.slow
def test_equal_to_rliable():
    metrics = pytest.importorskip("rliable.metrics")
    library = pytest.importorskip("rliable.library")
    rng = np.random.default_rng(0)
    scores, others = rng.random((5, 7)) * 1.2, rng.random((4, 7))
    assert iqm(scores) == pytest.approx(metrics.aggregate_iqm(scores), abs=1e-12)
    assert optimality_gap(scores) == pytest.approx(metrics.aggregate_optimality_gap(scores), abs=1e-12)
    assert probability_of_improvement(scores, others) == pytest.approx(
        metrics.probability_of_improvement(scores, others), abs=1e-12)
    taus = np.linspace(0, 1.2, 13)
    theirs = [library.run_score_deviation(scores, tau) for tau in taus]
    assert performance_profile(scores, taus) == pytest.approx(theirs, abs=1e-12)
