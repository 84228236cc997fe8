"""Whether annotators agree: the share of equal flags, and Cohen's kappa, which takes out what chance alone would give.

Source: Cohen, "A Coefficient of Agreement for Nominal Scales", Educational and Psychological Measurement 20 (1960).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Pair:
    """Two annotators over the answers that both flagged."""

    a: str
    b: str
    n: int
    same: int
    """Answers with equal flags."""
    kappa: float | None
    """In [-1, 1]; None where both gave one and the same flag throughout."""


def kappa(flags: Sequence[tuple[str, str]]) -> float | None:
    """Returns Cohen's kappa of pairs of flags: (observed - expected) / (1 - expected) agreement. None without a pair,
    and where chance alone explains all of it.
    """
    if not flags:
        return None
    n, first, second = len(flags), Counter(a for a, _ in flags), Counter(b for _, b in flags)
    observed = sum(a == b for a, b in flags) / n
    expected = sum(first[flag] * second[flag] for flag in first) / n**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def pairs(verdicts: Iterable[Mapping[str, str]]) -> list[Pair]:
    """Returns every two annotators who flagged an answer in common, those with the most answers first. `verdicts` are
    the flags of each answer by annotator.
    """
    common: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for flags in verdicts:
        for a, b in combinations(sorted(flags), 2):
            common.setdefault((a, b), []).append((flags[a], flags[b]))
    agreements = [Pair(a, b, len(both), sum(x == y for x, y in both), kappa(both)) for (a, b), both in common.items()]
    return sorted(agreements, key=lambda pair: (-pair.n, pair.a, pair.b))
