"""Branching where the meanings of short continuations differ most (rollout.branch.at=meaning), the rule of ROSE.

A few short continuations are generated from positions spread over a finished completion. They are clustered by meaning.
The entropy of the clusters, the semantic entropy (Semantic Uncertainty, arXiv 2302.09664; its discrete form, Nature
630, 625), measures how open the position still is. No model judges the meaning: two continuations mean the same if they
share half of their words (`words`), if they are equal except for case and punctuation (`exact`), or if a user's own
function says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from vlrl.config.base import Fraction, Positive
from vlrl.config.registry import resolve
from vlrl.rewards.text import clean_label, same_label, token_f1

Alike = Callable[[str, str], bool]
"""A function that returns whether two continuations mean the same."""


def words(a: str, b: str) -> bool:
    """Whether two texts share at least half of their words (F1 of the words >= .5). Two texts without words mean the
    same."""
    return token_f1(clean_label(a), clean_label(b)) >= 0.5


ALIKE: dict[str, Alike] = {"words": words, "exact": same_label}


def semantic_entropy(texts: Sequence[str], alike: Alike) -> float:
    """Clusters texts by meaning and returns the entropy of the cluster shares in nats; 0 = all texts mean the same. A
    text joins the first cluster whose first text means the same."""
    clusters: list[list[str]] = []
    for text in texts:
        own = next((cluster for cluster in clusters if alike(cluster[0], text)), None)
        if own is None:
            clusters.append([text])
        else:
            own.append(text)
    shares = [len(cluster) / len(texts) for cluster in clusters]
    return -sum(p * math.log(p) for p in shares) + 0.0


class Meaning:
    """Branches at the position with the largest semantic entropy; the next branch of the same completion is at the next
    largest. ROSE.

    In each completion, `candidates` evenly spread positions get `continuations` continuations of at most `tokens`
    tokens each. With probability `root`, a new completion starts from the prompt instead of branching."""

    def __init__(self, continuations: Annotated[int, Field(ge=2)] = 4, tokens: Positive = 16,
                 candidates: Positive = 8, root: Fraction = 0.1, alike: str = "words"):
        self.continuations, self.tokens, self.most, self.root = continuations, tokens, candidates, root
        self.alike = resolve("rollout.branch.at.alike", alike, ALIKE)

    def candidates(self, places: np.ndarray) -> list[int]:
        """The positions, out of `places` [K], from which continuations are generated."""
        count = min(self.most, len(places))
        return [int(places[round(i * (len(places) - 1) / max(count - 1, 1))]) for i in range(count)]

    def entropy(self, texts: Sequence[str]) -> float:
        return semantic_entropy(texts, self.alike)

    def __call__(self, entropies: Mapping[int, float], before: int, rng: np.random.Generator) -> int:
        """Chooses the position at which a completion branches; 0 = start from the prompt. `entropies` holds the
        semantic entropy by position, and `before` is the number of branches that the completion already has."""
        if rng.random() < self.root:
            return 0
        order = sorted(entropies, key=lambda place: (-entropies[place], place))
        return order[before % len(order)]
