"""Where the meanings of short continuations differ most: `rollout.branch.at=meaning`, ROSE's choice of branches.

From places spread over a finished answer a few short continuations are written. They are put into clusters of one
meaning each, and the entropy of the clusters, the semantic entropy (Semantic Uncertainty, arXiv 2302.09664; its
discrete form, Nature 630, 625), says how much is still open there. No model is asked what means the same: it is texts
that share half of their words (`words`), texts that are equal but for case and punctuation (`exact`), or what a
function of one's own says.
"""

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
"""Whether two continuations mean the same."""


def words(a: str, b: str) -> bool:
    """Whether the F1 of the words of two texts is at least .5; two texts without words are alike."""
    return token_f1(clean_label(a), clean_label(b)) >= 0.5


ALIKE: dict[str, Alike] = {"words": words, "exact": same_label}


def semantic_entropy(texts: Sequence[str], alike: Alike) -> float:
    """Returns the entropy in nats of the shares of the clusters of one meaning; 0 = all mean the same. A text joins the
    first cluster whose first text is like it."""
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
    """The place of the largest semantic entropy; the next time that of the next largest. ROSE.

    Of each answer `candidates` places, evenly spread, get `continuations` of at most `tokens` tokens. With probability
    `root` an answer is written from the prompt anew.
    """

    def __init__(self, continuations: Annotated[int, Field(ge=2)] = 4, tokens: Positive = 16,
                 candidates: Positive = 8, root: Fraction = 0.1, alike: str = "words"):
        self.continuations, self.tokens, self.most, self.root = continuations, tokens, candidates, root
        self.alike = resolve("rollout.branch.at.alike", alike, ALIKE)

    def candidates(self, places: np.ndarray) -> list[int]:
        """Returns which of the places [K] get continuations."""
        count = min(self.most, len(places))
        return [int(places[round(i * (len(places) - 1) / max(count - 1, 1))]) for i in range(count)]

    def entropy(self, texts: Sequence[str]) -> float:
        return semantic_entropy(texts, self.alike)

    def __call__(self, entropies: Mapping[int, float], before: int, rng: np.random.Generator) -> int:
        """Returns a place, 0 = from the prompt. `entropies` by place; `before`: how often others have gone on from the
        answer."""
        if rng.random() < self.root:
            return 0
        order = sorted(entropies, key=lambda place: (-entropies[place], place))
        return order[before % len(order)]
