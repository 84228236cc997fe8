"""Rewards of an answer relative to the other answers of its group. The order of the answers does not matter."""

import math
from collections.abc import Sequence

CORRECT = 0.1  # an answer with an accuracy above this is correct (Video-R1)
_ROUNDING = 1e-12


def temporal_bonus(ordered: Sequence[float], shuffled: Sequence[float], ratio: float = 0.8) -> list[float]:
    """T-GRPO's temporal bonus (2503.21776) for each answer of a group: 1 for a correct answer if the group's mean
    accuracy exceeds `ratio` times the mean accuracy with shuffled frames, else 0. `ordered` are the group's
    accuracies in [0, 1], `shuffled` those of answers to the same clip with shuffled frames. All are 0 if `shuffled`
    is empty."""
    earned = bool(ordered) and bool(shuffled) and _mean(ordered) > ratio * _mean(shuffled) + _ROUNDING
    return [float(earned and accuracy > CORRECT) for accuracy in ordered]


def length_bonus(accuracies: Sequence[float], lengths: Sequence[int], least: int = 320, most: int = 512) -> list[float]:
    """Video-R1's length bonus (2503.21776) for each answer: 1 for a correct answer of `least` to `most` tokens in a
    group with at least two correct answers, else 0."""
    right = [accuracy > CORRECT for accuracy in accuracies]
    return [float(good and sum(right) > 1 and least <= length <= most)
            for good, length in zip(right, lengths, strict=True)]


def consistency_bonus(accuracies: Sequence[float], likelihoods: Sequence[float | None], margin: float = 0.01,
                      cap: float = 0.95) -> list[float]:
    """GRPO-CARE's consistency bonus (2506.16141) for each answer: its accuracy if its reasoning makes the answer likely
    under the reference model, else 0.

    Candidates are the correct answers whose accuracy is at least the group's mean. A candidate is consistent if its
    likelihood is at least the candidates' mean likelihood minus `margin`. Likelihoods in [0, 1] are capped at `cap`. A
    likelihood of None (an answer without tokens) is never consistent."""
    mean = _mean(accuracies) - _ROUNDING if accuracies else 0.0
    chosen = {i: min(p, cap) for i, (accuracy, p) in enumerate(zip(accuracies, likelihoods, strict=True))
              if p is not None and accuracy > CORRECT and accuracy >= mean}
    needed = _mean([*chosen.values()]) - margin - _ROUNDING if chosen else 0.0
    return [accuracy if i in chosen and chosen[i] >= needed else 0.0 for i, accuracy in enumerate(accuracies)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
