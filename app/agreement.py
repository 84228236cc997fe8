"""Agreement between annotators: the share of equal flags, and Cohen's kappa, which corrects it for chance.

Source: Cohen, "A Coefficient of Agreement for Nominal Scales", Educational and Psychological Measurement 20 (1960).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Pair:
    """Two annotators, compared over the answers that both flagged."""

    a: str
    b: str
    n: int
    same: int
    """Number of answers with equal flags."""
    kappa: float | None
    """In [-1, 1]; None if both annotators always set the same single flag."""


def kappa(flags: Sequence[tuple[str, str]]) -> float | None:
    """Cohen's kappa of pairs of flags: (observed - expected) / (1 - expected) agreement.

    None without pairs, or if the expected agreement is 1.
    """
    if not flags:
        return None
    n, first, second = len(flags), Counter(a for a, _ in flags), Counter(b for _, b in flags)
    observed = sum(a == b for a, b in flags) / n
    expected = sum(first[flag] * second[flag] for flag in first) / n**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def pairs(verdicts: Iterable[Mapping[str, str]]) -> list[Pair]:
    """Every two annotators with at least one answer in common, most answers first. `verdicts` holds the flags of each
    answer by annotator.
    """
    common: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for flags in verdicts:
        for a, b in combinations(sorted(flags), 2):
            common.setdefault((a, b), []).append((flags[a], flags[b]))
    agreements = [Pair(a, b, len(both), sum(x == y for x, y in both), kappa(both)) for (a, b), both in common.items()]
    return sorted(agreements, key=lambda pair: (-pair.n, pair.a, pair.b))
