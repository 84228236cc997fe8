"""Answers that state a confidence: parsing of <confidence> tags, the Brier score, and calibration. Linear time; no text
makes a function raise.

RLCR (2507.16806) rewards an answer with confidence q by accuracy - (q - accuracy)^2. The expected reward is largest if
the answer is as accurate as possible and q is the probability that it is right."""

from __future__ import annotations

from collections.abc import Sequence

from vlrl.rewards.numbers import read_number
from vlrl.rewards.text import extract_tag, think_answer_format

_TAGS = ("<confidence>", "</confidence>")


def read_confidence(text: str) -> float | None:
    """The confidence that an answer states: the number in [0, 1] in the only <confidence> tag after the thinking. None
    without such a number, and for more than one tag."""
    rest = text.partition("</think>")[2] if "<think>" in text or "</think>" in text else text
    if any(rest.count(tag) != 1 for tag in _TAGS):
        return None
    value = read_number(extract_tag(rest, "confidence") or "")
    return value if value is not None and 0 <= value <= 1 else None


def brier(confidence: float | None, accuracy: float) -> float:
    """The squared difference between confidence and accuracy, both in [0, 1]; 1, the worst value, if the confidence is
    None."""
    return 1.0 if confidence is None else (confidence - accuracy) ** 2


def confidence_format(text: str) -> float:
    """1 if the text is <think> ... </think> <answer> ... </answer> <confidence> q </confidence> and nothing else, with
    q in [0, 1]; else 0.

    An <analysis> of the uncertainty may precede the confidence, as RLCR's prompt requests."""
    before, mark, after = text.partition(_TAGS[0])
    if not mark or after.partition(_TAGS[1])[2].strip() or read_confidence(text) is None:
        return 0.0
    answered, opened, doubts = before.partition("<analysis>")
    if opened and (doubts.count("</analysis>") != 1 or not doubts.rstrip().endswith("</analysis>")):
        return 0.0
    return think_answer_format(answered)


def calibration_error(confidences: Sequence[float], accuracies: Sequence[float], bins: int = 10) -> float:
    """The expected calibration error (ECE, 1706.04599), in [0, 1]: the mean of |mean confidence - mean accuracy| over
    bins of equal width, weighted by the number of answers in a bin. 0 if there are no answers.

    Bin b of `bins` contains the confidences in [b / bins, (b + 1) / bins); the last bin also contains 1."""
    gaps = [0.0] * bins
    for confidence, accuracy in zip(confidences, accuracies, strict=True):
        gaps[min(int(confidence * bins), bins - 1)] += confidence - accuracy
    return sum(map(abs, gaps)) / max(1, len(confidences))
