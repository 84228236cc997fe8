"""Confidence by hand: what is read, what it costs, and how far a model is off."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards.confidence import brier, calibration_error, confidence_format, read_confidence

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


@each("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_the_true_share_earns_the_most(share):
    """A proper score: of answers that are right with probability p, saying p is expected to earn the most."""
    def expected(q):
        return share * (1 - brier(q, 1)) + (1 - share) * (0 - brier(q, 0))
    assert max(range(101), key=lambda q: expected(q / 100)) == round(share * 100)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<confidence>", "</confidence>", "0.5",
                                 "<analysis>", "</analysis>", "9" * 400, "a", " ", "\ud800"])).map("".join) | st.text())
def test_any_text_is_read(text):
    q = read_confidence(text)
    assert (q is None or 0 <= q <= 1) and confidence_format(text) in (0, 1)
    assert 0 <= brier(q, 1) <= 1


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1))))
def test_calibration_error_is_bounded(pairs):
    value = calibration_error([q for q, _ in pairs], [a for _, a in pairs])
    assert -1e-9 <= value <= 1 + 1e-9 and not math.isnan(value)
