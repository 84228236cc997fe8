"""tools/experiments/sequential.py: AdaStop's decisions, by hand, against an enumeration, and its error rates."""

import itertools

import numpy as np
import pytest

from vlrl.tools.experiments.sequential import Sequential, _threshold, hypotheses


def play(rng, shifts, **more):
    test = Sequential(tuple(shifts), **more)
    while test.undecided:
        test.add({name: rng.normal(shifts[name], 1, test.n) for name in test.waiting})
    return test


def test_a_first_block_by_hand():
    """All 252 permutations: 5 + 5 scores that do not overlap have the largest sum, which one other labelling shares;
    level .01 allows two of 252."""
    test = Sequential(("a", "b"))
    look = test.add({"a": [1, 2, 3, 4, 5], "b": [11, 12, 13, 14, 15]})
    assert look.statistics == {("a", "b"): pytest.approx(10, abs=1e-9)} and look.decided == {("a", "b"): "b"}
    assert look.thresholds[("a", "b")] == pytest.approx(10 - 2 * 6 / 5, abs=1e-9)  # 5 and 11 change places
    assert look.spent == pytest.approx(2 / 252) and test.undecided == [] == test.waiting
    close = Sequential(("a", "b"))
    close.add({"a": [1, 2, 3, 4, 12], "b": [11, 12.5, 13, 14, 15]})
    assert close.undecided == [("a", "b")] and close.decisions == {}


def test_the_look_equals_an_enumeration_of_two_blocks():
    """n = 2, all 36 permutations of two blocks, written with sets of places instead of a matrix."""
    blocks = np.random.default_rng(3).normal(size=(2, 2, 2)) + np.array([[[0.0], [1.5]]])
    test = Sequential(("a", "b"), n=2, blocks=2, alpha=0.6)
    first = test.add({"a": blocks[0, 0], "b": blocks[0, 1]})
    sums = [[sum(z[list(chosen)]) / 2 - (sum(z) - sum(z[list(chosen)])) / 2
             for chosen in itertools.combinations(range(4), 2)] for z in blocks.reshape(2, 4)]
    ordered = sorted(map(abs, sums[0]), reverse=True)
    threshold = next(b for b in sorted({0.0, *ordered}) if sum(v > b + 1e-9 for v in ordered) / 6 <= 0.3)
    assert first.thresholds[("a", "b")] == pytest.approx(threshold, abs=1e-9)
    if test.undecided:
        spent = sum(v > threshold + 1e-9 for v in ordered) / 6
        second = test.add({"a": blocks[1, 0], "b": blocks[1, 1]})
        alive = [abs(x + y) for x in sums[0] if abs(x) <= threshold + 1e-9 for y in sums[1]]
        later = next(b for b in sorted({0.0, *alive}) if sum(v > b + 1e-9 for v in alive) / 36 <= 0.6 - spent + 1e-9)
        assert second.thresholds[("a", "b")] == pytest.approx(later, abs=1e-9)
        assert second.statistics[("a", "b")] == pytest.approx(abs(sums[0][0] + sums[1][0]), abs=1e-9)


def test_thresholds_of_few_maxima_and_hypotheses_that_are_partitions():
    for level, expected in ((0.2, (4.0, 0.1)), (0.1, (4.0, 0.1)), (0.0, (5.0, 0.0)), (-0.01, (np.inf, 0.0)),
                            (1.0, (-np.inf, 0.4))):
        assert _threshold(np.array([5.0, 4.0, 4.0, 1.0]), 10, level) == pytest.approx(expected), level
    assert hypotheses("ab") == [(("a", "b"),)]
    assert {*hypotheses("abc")} == {(("a", "b", "c"),), (("a", "b"),), (("a", "c"),), (("b", "c"),)}
    assert [len(hypotheses("abcdefgh"[:m])) for m in range(2, 9)] == [1, 4, 14, 51, 202, 876, 4139]  # Bell - 1
    assert (("a", "c"), ("b", "d")) in hypotheses("abcd")


def test_what_is_never_decided():
    test = Sequential(("a", "b"), n=2, blocks=2)  # 1 of 6 labellings is more than .025
    look = test.add({"a": [0.0, 0.1], "b": [100.0, 100.1]})
    assert look.decided == {} and look.spent == 0
    test.add({"a": [0.0, 0.1], "b": [100.0, 100.1]})
    assert test.decisions == {("a", "b"): ""}  # 2 of 36 is above .05, too
    test = Sequential(("a", "b"), blocks=3)
    while test.undecided:
        look = test.add({"a": [0.3] * 5, "b": [0.3] * 5})
        assert look.decided == {} and look.spent == 0
    assert test.decisions == {("a", "b"): ""} and len(test.looks) == 3


def test_a_labelling_that_ties_with_a_threshold_goes_on():
    """Block 1: the true sum is the threshold itself (2 of 252 labellings are above it). Block 2 has larger scores, by
    which that sum is rounded up now and then; still the true labelling is counted on, with all that tie with it."""
    rng, lost = np.random.default_rng(11), 0
    first = {"a": np.array([0.1, 0.2, 0.3, 0.4, 1.1]) / 3, "b": np.array([1.0, 1.2, 1.3, 1.4, 1.5]) / 3}
    for scale in np.geomspace(1, 1e4, 20):
        test = Sequential(("a", "b"), resamples=1000)
        look = test.add(first)
        threshold = look.thresholds["a", "b"]
        assert look.decided == {} and look.statistics["a", "b"] == threshold and look.spent == pytest.approx(2 / 252)
        second = test.add({name: scale * rng.normal(0, 1, 5) for name in "ab"})
        before, now = test._maxima(("a", "b"), True)
        lost += before[0] > threshold
        counted = np.sort(now[before < threshold + 1e-6])[::-1]
        assert second.thresholds["a", "b"] == counted[int((0.02 - 2 / 252) * 1000)]
    assert lost > 3  # of exactly equal sums these would not have been


def test_of_three_only_the_undecided_go_on_and_the_same_scores_decide_alike():
    test = play(np.random.default_rng(0), {"a": 0.0, "b": 0.1, "c": 8.0}, resamples=2000)
    assert test.decisions[("a", "c")] == test.decisions[("b", "c")] == "c" and test.decisions[("a", "b")] == ""
    assert [len(look.statistics) for look in test.looks] == [3, 1, 1, 1, 1] and test.looks[0].decided.keys() == {
        ("a", "c"), ("b", "c")}
    spent = [look.spent for look in test.looks]
    assert spent == sorted(spent) and all(s <= 0.05 * (k + 1) / 5 + 1e-9 for k, s in enumerate(spent))
    scores = np.random.default_rng(1).normal(size=(5, 2, 5)) + np.array([[[0], [0.7]]])
    tests = [Sequential(("a", "b"), resamples=500) for _ in range(2)]
    for test in tests:
        for a, b in scores:
            if test.undecided:
                test.add({"a": a, "b": b})
    assert tests[0].looks == tests[1].looks and tests[0].decisions == tests[1].decisions


def test_a_pair_is_decided_when_every_hypothesis_that_calls_it_equal_is_rejected():
    """Three algorithms, one block: each hypothesis written with a loop over drawn labellings of its own group."""
    rng = np.random.default_rng(7)
    names, alpha = "abc", 0.4
    for _ in range(6):
        scores = {name: rng.normal(shift, 1, 3) for name, shift in zip(names, (0, 1, 2), strict=True)}
        look = Sequential(tuple(names), n=3, blocks=1, alpha=alpha, resamples=4000).add(scores)
        rejected = {}
        for group in ("ab", "ac", "bc", "abc"):
            pool, above, drawn = np.concatenate([scores[name] for name in group]), 0, 1500
            true = np.ptp([scores[name].mean() for name in group])
            for _ in range(drawn):
                means = rng.permutation(pool).reshape(len(group), 3).mean(axis=1)
                above += np.ptp(means) >= true - 1e-9
            p = above / drawn
            rejected[group] = None if abs(p - alpha) < 0.05 else p <= alpha  # too near to tell by sampling
        for pair in itertools.combinations(names, 2):
            verdicts = [rejected["".join(pair)], rejected["abc"]]
            if False in verdicts or None not in verdicts:
                assert (pair in look.decided) == all(verdicts)


def test_scores_and_tests_that_are_none_are_refused():
    for scores in ({"a": [1, 2]}, {"a": [1, 2], "b": [1, 2, 3]}, {"a": [1, 2], "b": [1, np.nan]}):
        with pytest.raises(ValueError, match="block 1"):
            Sequential(("a", "b"), n=2).add(scores)
    for more in (
            {"names": ("a",)}, {"names": ("a", "a")}, {"n": 1}, {"alpha": 1.0}, {"blocks": 0},
            {"names": tuple("abcdefghi")}):
        with pytest.raises(ValueError):
            Sequential(**{"names": ("a", "b"), **more})


@pytest.mark.slow
@pytest.mark.parametrize("shifts", [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 3, "d": 3}])
def test_error_rates_are_as_promised(shifts):
    """Equal normals are told apart in at most alpha of 400 trials, within 3 standard errors, and not never."""
    rng = np.random.default_rng(5)
    equal = [(a, b) for a, b in itertools.combinations(shifts, 2) if shifts[a] == shifts[b]]
    played = [play(rng, shifts, resamples=500, seed=i).decisions for i in range(400)]
    wrong = np.mean([any(decisions[pair] for pair in equal) for decisions in played])
    assert 0.01 < wrong <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.slow
def test_a_large_shift_is_found_early():
    """One of 2 standard deviations by block 3 in 95 % of 100 trials, also where a third algorithm is like the first."""
    rng = np.random.default_rng(6)
    for shifts in ({"a": 0, "b": 2}, {"a": 0, "b": 2, "c": 0}):
        found = [play(rng, shifts, resamples=1000) for _ in range(100)]
        early = [t for t in found if any(("a", "b") in look.decided for look in t.looks[:3])]
        assert len(early) >= 0.95 * len(found) and all(t.decisions[("a", "b")] == "b" for t in early)
