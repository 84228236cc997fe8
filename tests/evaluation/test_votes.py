"""tools/evaluation/votes.py and summary.py against counting by hand and by enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.rewards.confidence import calibration_error
from vlrl.tools.evaluation import votes
from vlrl.tools.evaluation.summary import auroc, calibration, ece


def test_pass_at_k():
    for n, c, k in itertools.product(range(1, 8), range(8), range(1, 8)):
        if max(c, k) > n:
            continue
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert votes.pass_at(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12), (n, c, k)
    log = sum(math.log1p(-1 / (10_000 - i)) for i in range(5_000))  # one right of 10,000: each draw misses it
    assert votes.pass_at(10_000, 1, 5_000) == pytest.approx(-math.expm1(log), abs=1e-12) == 0.5
    assert votes.pass_at(10_000, 0, 5_000) == 0 and votes.pass_at(8, 8, 8) == 1
    assert [votes.reported_ks(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


LETTERS = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7)


@given(LETTERS, st.sampled_from("abc"), st.data())
def test_the_majority_is_that_of_all_subsets(ballots, truth, data):
    """Ties are broken by a fair draw: the share of the best that are right."""
    k, right = data.draw(st.integers(1, len(ballots))), [float(b == truth) for b in ballots]
    total = 0.0
    for chosen in itertools.combinations(ballots, k):
        named = [b for b in chosen if b is not None]
        best = [b for b in set(named) if named.count(b) == max(map(named.count, named))]
        total += (truth in best) / len(best) if best else 0.0
    assert votes.majority(ballots, right, k) == pytest.approx(total / math.comb(len(ballots), k), abs=1e-9)


def test_golden_majorities():
    ballots, right = ["4", "4", "5", "5", "5"], [1.0, 1.0, 0.0, 0.0, 0.0]
    assert votes.majority(ballots, right, 5) == 0
    # of the 10 triples 4 4 5 wins three times (one pair of 4s, three 5s)
    assert votes.majority(ballots, right, 3) == pytest.approx(0.3)
    assert votes.majority(ballots, right, 2) == pytest.approx((1 + 6 * 0.5) / 10)
    assert votes.majority(ballots, right, 5, [0.9, 0.9, 0.1, 0.1, 0.1]) == 1  # by confidence
    assert votes.majority([None, None], [0.0, 0.0], 2) == 0
    assert votes.majority(["a", "a"], [1.0, 0.0], 2) == 0.5  # one of the two breaks the format
    assert votes.winner(["b", None, "a", "b"]) == ("b", 0.5) and votes.winner([None]) == (None, 0.0)
    ballots = ["a"] * 24 + ["b"] * 16
    right = [float(b == "a") for b in ballots]
    exact = sum(math.comb(24, i) * math.comb(16, 9 - i) for i in range(5, 10)) / math.comb(40, 9)
    assert votes.majority(ballots, right, 9) == pytest.approx(exact, abs=4 * math.sqrt(0.25 / votes.MOST_SUBSETS))
    assert votes.majority(ballots, right, 9) == votes.majority(ballots, right, 9)


def test_ballots_that_are_equal_and_that_differ():
    for a, b in (
            ("12", "12.0"), (12, "12"), ("1,200", 1200.0), ("\uff11\uff12", 12), ("A cat.", "a  CAT"),
            ({"label": "dog", "confidence": 0.2}, "Dog"), (["b", 1], ("b", 1))):
        assert votes.ballot(a) == votes.ballot(b) is not None, (a, b)
    for a, b in (
            ("1234567", "1234568"), (1234567, 1234568), ("0.1234567", "0.1234568"), ("12", "12 cats"), ("007", "7"),
            (True, 1), (["1"], "1")):
        assert votes.ballot(a) != votes.ballot(b), (a, b)
    for nothing in (None, "", [], {}):
        assert votes.ballot(nothing) is None, nothing


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_ballots_of_anything(parsed):
    assert votes.ballot(parsed) is None or isinstance(votes.ballot(parsed), str)


def rastered(boxes, size):
    votes_at = np.zeros(size[::-1], int)
    for x1, y1, x2, y2 in boxes:
        votes_at[max(0, y1):y2, max(0, x1):x2] += 1
    left = {(x, y) for y, x in np.argwhere(votes_at == votes_at.max())}
    regions = []
    while left:
        found, edge = set(), [left.pop()]
        while edge:
            x, y = edge.pop()
            found.add((x, y))
            for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
        regions.append(found)
    return regions


BOXES = st.lists(st.tuples(st.integers(0, 18), st.integers(0, 18), st.integers(1, 9), st.integers(1, 9)), min_size=1,
                 max_size=5)


@given(BOXES)
def test_the_region_is_that_of_a_grid(given):
    boxes = [(x, y, min(20, x + w), min(20, y + h)) for x, y, w, h in given]
    regions = rastered(boxes, (20, 20))
    found = votes.region(boxes, (20, 20))
    largest = max(map(len, regions))
    around = [[min(x for x, _ in r), min(y for _, y in r), max(x for x, _ in r) + 1, max(y for _, y in r) + 1]
              for r in regions if len(r) == largest]
    assert found in around


def test_golden_regions_and_calibration():
    assert votes.region([[0, 0, 10, 10], [5, 5, 20, 20], [6, 0, 12, 9]]) == [6, 5, 10, 9]
    assert votes.region([[50, 50], [70, 50]], (100, 60), reach=20) == [50, 30, 70, 60]
    assert votes.region([None, [0, 0, 5, 5]]) == [0, 0, 5, 5] and votes.region([None]) is None
    assert votes.region([[200, 200, 300, 300]], (100, 100)) is None  # outside of the image
    assert votes.location_of([1, 2]) == [1, 2] and votes.location_of([1, 2, 3]) is votes.location_of("1, 2") is None
    # bin .9: |.9 - 1/2| * 2, bin .2: |.2 - 0|
    assert calibration([0.9, 0.9, 0.2], [1, 0, 0]) == pytest.approx(
        {"ece": (0.8 + 0.2) / 3, "brier": (0.01 + 0.81 + 0.04) / 3, "auroc": 0.75}, abs=1e-9)
    assert calibration([], []) == {}


PAIRS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30)


@given(PAIRS)
def test_auroc_and_ece(pairs):
    good, bad = [q for q, r in pairs if r], [q for q, r in pairs if not r]
    found = auroc(*zip(*pairs, strict=True))
    if not good or not bad:
        assert math.isnan(found)
    else:
        wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
        assert found == pytest.approx(wins / len(good) / len(bad), abs=1e-9)
    sure, right = map(np.array, zip(*pairs, strict=True))
    assert ece(sure, right) == pytest.approx(calibration_error(sure.tolist(), right.tolist()), abs=1e-9)
