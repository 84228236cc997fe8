"""Agreement between annotators: the share of equal flags, and Cohen's kappa, which corrects it for chance.

Source: Cohen, "A Coefficient of Agreement for Nominal Scales", Educational and Psychological Measurement 20 (1960)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Pair:
    """The agreement of two annotators on the answers that both have flagged."""

    a: str
    b: str
    n: int
    same: int
    """Number of answers to which both annotators gave the same flag."""
    kappa: float | None
    """Cohen's kappa in [-1, 1]; None if all flags of both annotators are the same flag."""


def kappa(flags: Sequence[tuple[str, str]]) -> float | None:
    """Cohen's kappa of (flag by the first annotator, flag by the second annotator) for each answer.

    This is (observed - expected) / (1 - expected) agreement. None for no answers, or if the expected agreement is 1."""
    if not flags:
        return None
    n, first, second = len(flags), Counter(a for a, _ in flags), Counter(b for _, b in flags)
    observed = sum(a == b for a, b in flags) / n
    expected = sum(first[flag] * second[flag] for flag in first) / n**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def pairs(verdicts: Iterable[Mapping[str, str]]) -> list[Pair]:
    """Compares every two annotators who flagged at least one common answer; sorted by the number of common answers,
    largest first.

    `verdicts` holds {annotator: flag} for each answer."""
    common: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for flags in verdicts:
        for a, b in combinations(sorted(flags), 2):
            common.setdefault((a, b), []).append((flags[a], flags[b]))
    agreements = [Pair(a, b, len(both), sum(x == y for x, y in both), kappa(both)) for (a, b), both in common.items()]
    return sorted(agreements, key=lambda pair: (-pair.n, pair.a, pair.b))
