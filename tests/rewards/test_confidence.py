"""What several values make together, by hand: confidence and outcome, ensembles, constraints, steps of a reasoning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.confidence import brier, calibration_error, confidence_format, read_confidence
from vlrl.rewards.constraints import gained, levels
from vlrl.rewards.ensembles import ENSEMBLES, combined, spread
from vlrl.rewards.process import step_spans, with_pair_scores

ANSWER = "<think>so</think><answer>cat</answer>"


test_confidence_is_read = by_hand(lambda text: (read_confidence(text), confidence_format(text)), [
    (f"{ANSWER}<confidence>0.8</confidence>", 0.8, 1), (f" {ANSWER}\n<confidence> 1 </confidence>\n", 1, 1),
    (f"{ANSWER}<analysis>It may be a dog.</analysis>\n<confidence>.5</confidence>", 0.5, 1),
    (f"{ANSWER}<analysis>a</analysis> b<confidence>.5</confidence>", 0.5, 0),
    (f"{ANSWER}<analysis>a</analysis><analysis>b</analysis><confidence>.5</confidence>", 0.5, 0),
    (f"{ANSWER}<confidence>0.8</confidence> sure", 0.8, 0), (f"{ANSWER} so <confidence>0.8</confidence>", 0.8, 0),
    (f"<confidence>0.8</confidence>{ANSWER}", None, 0),  # before the end of the thinking
    ("<think><confidence>0.8</confidence></think><answer>cat</answer>", None, 0),
    ("<think><answer>cat</answer><confidence>0.8</confidence>", None, 0),
    ("<answer>cat</answer><confidence>0.8</confidence>", 0.8, 0),
    (f"{ANSWER}<confidence>1</confidence><confidence>0</confidence>", None, 0),
    *((f"{ANSWER}<confidence>{q}</confidence>", None, 0) for q in (
        "", "85", "85%", "-0.1", "1.01", "nan", "inf", "high", "0.8 or 0.2", "1e400", "\u00b9")),
    (f"{ANSWER}<confidence>\u0661</confidence>", 1.0, 1), (f"{ANSWER}<confidence>0.8", None, 0), (ANSWER, None, 0),
    ("", None, 0)], values=2)


def test_brier_and_calibration_by_hand():
    assert brier(0.75, 1) == 0.0625 and brier(0.75, 0) == 0.5625 and brier(1, 1) == brier(0, 0) == 0
    assert brier(1, 0) == brier(0, 1) == brier(None, 1) == brier(None, 0) == 1 and brier(0.5, 0.25) == 0.0625
    assert calibration_error([], []) == 0 and calibration_error([1, 1], [1, 1]) == 0
    assert calibration_error([0.9] * 4, [1, 1, 0, 0]) == pytest.approx(0.4)
    assert calibration_error([0.95, 0.95, 0.25, 0.25], [1, 1, 0, 1]) == pytest.approx((0.1 + 0.5) / 4)
    assert calibration_error([0.05, 0.15], [0.15, 0.05]) == pytest.approx(0.1)  # in two bins they do not cancel out
    assert calibration_error([0.05, 0.15], [0.15, 0.05], bins=1) == pytest.approx(0)
    assert calibration_error([1, 0.05], [0.5, 0.55]) == pytest.approx(0.5)  # 1 is in the last bin


SCORES = (1.0, 2.0, 6.0)  # mean 3, variance (4 + 1 + 9) / 3


test_each_by_hand = by_hand(lambda name, lam: ENSEMBLES[name](SCORES, lam), [
    ("mean", 0.5, 3), ("min", 0.5, 1), ("less_variance", 0.5, 3 - 7 / 3), ("less_variance", 0.0, 3),
    ("less_deviation", 1.0, 3 - math.sqrt(14 / 3))], abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(0, 10), st.integers(1, 5))
def test_caution_never_pays_more_and_equal_members_change_nothing(scores, lam, count):
    assert all(ENSEMBLES[name](scores, lam) <= ENSEMBLES["mean"](scores, lam) + 1e-6 for name in ENSEMBLES)
    same = [scores[0]] * count
    assert all(function(same, lam) == pytest.approx(scores[0], rel=1e-9, abs=1e-6) for function in ENSEMBLES.values())


def test_without_lam_each_has_that_of_its_paper():
    assert spread(SCORES) == pytest.approx(math.sqrt(14 / 3), abs=1e-9)
    assert combined("less_deviation", SCORES) == pytest.approx(3 - math.sqrt(14 / 3))
    assert combined("less_variance", SCORES) == pytest.approx(3 - 0.1 * 14 / 3)
    assert combined("less_deviation", SCORES, 0.5) == pytest.approx(3 - 0.5 * math.sqrt(14 / 3))


def test_constraints_by_hand():
    assert levels({"common": [True, False, True, True], "hard": [True, True]}) == {
        "common_micro": 0.75, "common_macro": 0.0, "hard_micro": 1.0, "hard_macro": 1.0, "pass": 0.0}
    assert levels({"hard": [True], "soft": []}) == {
        "hard_micro": 1.0, "hard_macro": 1.0, "soft_micro": 1.0, "soft_macro": 1.0, "pass": 1.0}
    assert levels({}) == {"pass": 1.0}
    assert gained({"a": 0.5, "b": 1.0}, {"a": 0.75, "b": 0.0}) == {"a": 0.25, "b": -1.0}
    assert gained({}, levels({"x": [True, False]})) == {"x_micro": 0.5, "x_macro": 0.0, "pass": 0.0}


test_steps_are_paragraphs = by_hand(lambda text: [text[a:b].strip("\n") for a, b in step_spans(text)], [
    ("", []), (" \n\n ", []), ("one", ["one"]), ("one\ntwo\n \n\nthree", ["one\ntwo", "three"]),
    ("\n\n a\n\n\nb\n", [" a", "b"])])


@given(st.lists(st.sampled_from(["a", "b ", "\n", "\n\n", " ", "\t", "\u2028"]), max_size=30).map("".join))
def test_steps_of_any_text(text):
    """They rise, hold all that is written, and no empty line."""
    spans = step_spans(text)
    places = [place for span in spans for place in span]
    assert places == sorted(places) and all(text[a:b].strip() for a, b in spans)
    assert sum(len("".join(text[a:b].split())) for a, b in spans) == len("".join(text.split()))
    assert all("\n\n" not in text[a:b].strip("\n") for a, b in spans)


def test_pairs_by_hand():
    assert with_pair_scores([1.0, 2.0, 3.0], [5.0, 0.0]) == [3.0, 1.0, 3.0]
    assert with_pair_scores([4.0], []) == [4.0] and with_pair_scores([], []) == []
