"""tools/evaluation/votes.py, summary.py, clustered bootstrap: by hand, by enumeration, planted answers, coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.evaluation import stats
from vlrl.rewards.confidence import calibration_error
from vlrl.task import Task
from vlrl.task.mixture import Mixture
from vlrl.tools.evaluation import votes
from vlrl.tools.evaluation.settings import EvalSetting
from vlrl.tools.evaluation.summary import auroc, calibration, ece, summarise
from vlrl.types import Sample

SAMPLES = [Sample(id=f"s{i}", row={"kind": "odd" if i % 2 else "even"}) for i in range(4)]


class Kinds(Task):
    name = "kinds"
    rewards = {"accuracy": 1.0}

    def summarize(self, records):
        return {f"accuracy/{kind}": float(np.mean([r["parts"]["accuracy"] for r in records
                                                   if r["sample"]["kind"] == kind]))
                for kind in ("even", "odd") if any(r["sample"]["kind"] == kind for r in records)}


def row(number, parsed, right, index=0, seed=0, **more):
    return {"split": "heldout", "setting": "t", "seed": seed, "number": number, "index": index, "sample": f"s{number}",
            "task": "", "cluster": str(number), "answer": str(parsed), "parsed": parsed, "target": "x",
            "parts": {"accuracy": float(right or 0)}, "reward": float(right or 0), "correct": right, "metrics": {},
            "confidence": None, "tokens": 10, "truncated": False, "error": None, **more}


def result(rows, answers=1, seeds=(0,), task=None):
    setting = EvalSetting(name="t", temperature=1.0, seeds=seeds, answers=answers)
    return summarise(task or Kinds(), rows, setting, "heldout", SAMPLES)


def means(found):
    return {name: m.mean for name, m in found.metrics.items()}


PLANTED = [("a", "a", "b", "a"), ("b", "b", "b", "a"), ("c", "d", "b", None), ("b", "b", "b", "b")]  # "a" is right


def test_turns_pass_and_votes_of_planted_answers():
    planted = [row(n, parsed, parsed == "a", i) for n, given in enumerate(PLANTED) for i, parsed in enumerate(given)]
    found = means(result(planted, 4))
    # right: 3, 1, 0, 0 of 4
    assert found["correct_frac"] == found["pass@1"] == found["reward/mean"] == 0.25
    assert found["pass@2"] == pytest.approx((1 + 0.5 + 0 + 0) / 4) and found["pass@4"] == 0.5
    # of pairs: aa 3 of 6, ab 3 of 6 (half of them); bb 3, ab 3
    assert found["maj@2"] == pytest.approx((0.75 + 0.25) / 4) and found["maj@4"] == 0.25
    assert found["completion/length_mean"] == 10 and found["completion/truncated_frac"] == 0
    # shares of the winners .75, .75, .25, 1; right: 1, 0, 0, 0
    assert found["vote/brier"] == pytest.approx((0.0625 + 0.5625 + 0.0625 + 1) / 4)
    assert found["vote/auroc"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["vote/ece"] == pytest.approx((abs(1.5 - 1) + 0.25 + 1) / 4)
    assert found["accuracy/even"] == pytest.approx(3 / 8) and found["accuracy/odd"] == pytest.approx(1 / 8)
    assert not any(name.startswith(("region", "confidence")) for name in found)
    rows = [row(0, "a", True, 0, turns=3), row(0, "a", True, 1, turns=5), row(1, "b", False, 0, turns=1),
            row(1, "b", False, 1), row(2, "c", False, 0, turns=None)]
    assert means(result(rows, 2))["episode/turns_mean"] == pytest.approx((4 + 1) / 2)  # of samples, of their answers
    assert "episode/turns_mean" not in found


def test_seeds_and_stated_confidences():
    rows = [row(n, "x", right, seed=seed) for seed, rights in ((5, (1, 0, 1, 1)), (6, (1, 0, 0, 1)), (7, (0, 0, 0, 1)))
            for n, right in enumerate(map(bool, rights))]
    metric = result(rows, seeds=(5, 6, 7)).metrics["correct_frac"]
    assert metric.by_seed == (0.75, 0.5, 0.25) and metric.mean == 0.5 and metric.sd == pytest.approx(0.25)
    interval = stats.mean_ci([2 / 3, 0, 1 / 3, 1])
    assert (metric.low, metric.high) == (interval.low, interval.high)
    assert result(rows, seeds=(5,)).metrics["correct_frac"].sd is None
    assert result(rows, seeds=(5, 6)).metrics["accuracy/even"].by_seed == (1.0, 0.5)
    rows = [row(n, "x", right, confidence=q) for n, (q, right) in enumerate(
        ((0.9, True), (0.9, False), (0.2, False), (None, True)))]
    found = means(result(rows))
    assert found["confidence/ece"] == pytest.approx(1 / 3) and found["confidence/auroc"] == 0.75
    assert found["confidence/brier"] == pytest.approx(0.86 / 3)
    sure = [row(0, p, p == "a", i, confidence=q) for i, (p, q) in enumerate((("a", 0.9), ("b", 0.3), ("b", 0.4)))]
    found = means(result(sure, 3))
    assert found["maj@3"] == 0 and found["maj@3/by_confidence"] == 1


def test_boxes_and_points_vote_by_region():
    boxes = ([0, 0, 10, 10], [5, 5, 15, 15], [4, 5, 10, 12], None)  # agree on [5, 5, 10, 10]
    rows = [row(0, b, False, i, target=[5, 5, 10, 11], size=[100, 100]) for i, b in enumerate(boxes)]
    found = means(result(rows, 4))
    assert found["region@4/hit"] == 1 and found["region@4/iou"] == pytest.approx(25 / 30)
    assert found["region@4/acc@.5"] == 1 and "maj@4" not in found and "vote/ece" not in found
    points = [row(0, p, False, i, target=[0, 0, 20, 20], size=[200, 200]) for i, p in enumerate(([60, 60], [160, 160]))]
    found = means(result([*points, row(0, [62, 60], False, 2, target=[0, 0, 20, 20], size=[200, 200])], 3))
    assert found["region@3/hit"] == 0  # around [61, 60]
    assert not any("region" in name for name in means(result(rows[:1])))
    rows = [row(n, parsed, False, i, target=target, size=[9, 9]) for n, (parsed, target) in enumerate((
        ([0, 0, 5, 5], [0, 0, 5, 5]), ("x", "x"), ([3, 4], [[3, 5]]), (None, None))) for i in range(2)]
    for number in range(4):
        drawn = means(result([r for r in rows if r["number"] in (0, number)], 2))
        assert ("maj@2" in drawn) == (number == 1) and "region@2/hit" in drawn, number
    found = result(rows, 2).metrics
    assert found["maj@2"].mean == 0 and found["region@2/hit"].mean == 1
    acts = means(result([row(0, {"action": "click"}, True, i, target=[0, 0, 5, 5]) for i in range(2)], 2))
    assert acts["maj@2"] == 1 and not any(name.startswith("region") for name in acts)


def test_what_cannot_be_read_is_wrong_in_every_vote():
    """Two samples are right, two have answers without anything to read: half, and not all, of the votes are right."""
    rows = [row(n, "x" if n < 2 else None, n < 2, i, confidence=0.5 if n < 2 else None) for n in range(4)
            for i in range(2)]
    found = means(result(rows, 2))
    assert found["maj@2"] == found["maj@2/by_confidence"] == found["pass@2"] == 0.5
    assert found["vote/brier"] == 0 and found["vote/auroc"] == 1  # no vote is a confidence of 0
    none = means(result([row(n, None, False, i) for n in range(2) for i in range(2)], 2))
    assert none["maj@2"] == 0 and none["vote/brier"] == 0 and "maj@2/by_confidence" not in none
    at = {"target": [0, 0, 10, 10], "size": [100, 100]}
    boxes = [row(n, [0, 0, 10, 10] if n < 2 else None, n < 2, i, **at) for n in range(4) for i in range(2)]
    found = means(result(boxes, 2))
    assert found["region@2/hit"] == found["region@2/iou"] == found["region@2/acc@.5"] == 0.5 and "maj@2" not in found
    unread = means(result([row(0, None, False, i, **at) for i in range(2)], 2))
    assert unread["region@2/hit"] == 0 and "maj@2" not in unread and "vote/brier" not in unread


def test_what_could_not_be_answered_or_scored_is_no_wrong_answer():
    place = {"split": "heldout", "setting": "t", "seed": 0}
    rows = [row(0, "a", True), {**place, "number": 1, "sample": "s1", "task": "", "left_out": "too long"},
            {**place, "number": 2, "index": 0, "sample": "s2", "unanswered": True, "error": "500"},
            row(3, None, None, reward=None, parts={"accuracy": None}),
            {**row(0, "a", False), "split": "train"}, {**row(0, "a", False), "setting": "other"},
            row(0, "a", False, index=1), row(0, "a", False, seed=9)]
    found = result(rows, task=Task())
    assert (found.n, found.left_out, found.unanswered, found.unscorable) == (2, 1, 1, 1)
    assert found.metrics["correct_frac"].mean == found.metrics["accuracy"].mean == 1.0
    assert result([], task=Task()).metrics == {}


def test_pictures_mixtures_and_clusters():
    rows = [row(n, "x", bool(right), cluster="left" if n < 2 else "right") for n, right in enumerate((1, 1, 0, 0))]
    metric = result(rows).metrics["correct_frac"]
    assert (metric.mean, metric.low, metric.high) == (0.5, 0.0, 1.0)
    alone = result([row(n, "x", bool(right)) for n, right in enumerate((1, 1, 0, 0))]).metrics["correct_frac"]
    assert (alone.low, alone.high) == stats.mean_ci([1, 1, 0, 0])[1:]
    mixture = Mixture({"one": Kinds(), "two": Kinds()})
    rows = [row(n, "x", n < 2, task="one" if n % 2 == 0 else "two") for n in range(4)]
    found = means(result([*rows[:1], {**rows[1], "correct": False, "parts": {"accuracy": 0.0}}, *rows[2:]],
                         task=mixture))
    assert found["one/correct_frac"] == 0.5 and found["two/correct_frac"] == 0
    assert found["one/accuracy/even"] == 0.5 and found["two/accuracy/odd"] == 0 and found["correct_frac"] == 0.25
    values, clusters = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], list("aabbcc")
    mean, low, high = stats.clustered_ci(values, clusters)
    assert mean == pytest.approx(2 / 3) and (low, high) == (0.5, 1.0)  # 1/27 of resamples are all c
    assert stats.clustered_ci([0.3], ["a"]) == (0.3, 0.3, 0.3) and np.isnan(stats.clustered_ci([], [])).all()
    assert stats.clustered_ci([1.0, 0.0], ["a", "b"]) == stats.mean_ci([1.0, 0.0])
    low, high = stats.statistic_ci(lambda at: float(np.median(np.arange(100.0)[at])), [str(i) for i in range(100)])
    assert 30 < low < 49.5 < high < 70 and np.isnan(stats.statistic_ci(lambda at: float("nan"), ["a", "b"])).all()


def clustered_data(rng, clusters=100):
    """Pictures of 1 to 5 questions that share most of their difficulty; the truth is .5."""
    sizes = rng.integers(1, 6, clusters)
    level = rng.random(clusters)
    values = np.concatenate([(rng.random(k) < p).astype(float) for k, p in zip(sizes, level, strict=True)])
    return values, np.repeat(np.arange(clusters), sizes).astype(str)


@pytest.mark.slow
def test_clustered_intervals_cover_the_truth_in_93_to_97_percent():
    rng = np.random.default_rng(3)
    covered = plain = 0
    for i in range(1000):
        values, clusters = clustered_data(rng)
        interval = stats.clustered_ci(values, clusters, seed=i, n=600)
        covered += interval.low <= 0.5 <= interval.high
        half = 1.96 * values.std() / np.sqrt(len(values))
        plain += abs(values.mean() - 0.5) <= half
    assert 930 <= covered <= 970 and plain < 900  # as if independent: too narrow


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


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=40)
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
