"""Metrics over several answers to a sample: pass@k, majority votes, and the region where boxes agree. Does not import
torch.

    pass_at(n=8, c=2, k=4)                                   # probability that at least one of 4 is right, unbiased
    majority(["4", "4", "5"], [1, 1, 0], k=3)                # probability that the most frequent of 3 is right
    region([[0, 0, 9, 9], [4, 0, 9, 9]])                     # GUI-RC's box

Answers are compared by their parsed value (`Task.parse`), not by their text."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.rewards.boxes import is_number
from vlrl.rewards.codes import is_code
from vlrl.rewards.numbers import read_number
from vlrl.rewards.regions import clip_to_image, region_vote

MOST_SUBSETS = 1000
"""Maximum number of subsets of k answers over which a vote is averaged. If there are more subsets, a random sample of
this size is used."""
_MOST_TEXT = 1000


def reported_ks(n: int) -> list[int]:
    """The values of k for which metrics over n answers are reported: 1, 2, 4, ... and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def pass_at(n: int, c: int, k: int) -> float:
    """pass@k: the probability that at least one of `k` answers is correct, estimated from `c` correct answers among
    `n`.

    This is the unbiased estimator 1 - C(n - c, k) / C(n, k) for k <= n (Chen et al., 2021, 2107.03374, eq. 1). It is
    computed with integers, so it is exact to the last bit for any n."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# --- votes ------------------------------------------------------------------------------------------------------------


def ballot(parsed: Any) -> str | None:
    """The value by which a parsed answer is counted in a vote; equal answers have equal values. None if nothing was
    parsed.

    Numbers are equal by value ("12" and "12.0", but not "007" and "7"). Texts are compared without case, spaces and a
    final full stop. A stated confidence is ignored."""
    if isinstance(parsed, Mapping) and "confidence" in parsed:
        parsed = {key: value for key, value in parsed.items() if key != "confidence"}
        parsed = next(iter(parsed.values())) if len(parsed) == 1 else parsed
    if parsed is None or parsed == "" or parsed == [] or parsed == {}:
        return None
    if isinstance(parsed, str):
        number = None if is_code(parsed) else read_number(parsed[:_MOST_TEXT])
        return " ".join(parsed[:_MOST_TEXT].casefold().split()).rstrip(".") if number is None else repr(float(number))
    if isinstance(parsed, (int, float)) and not isinstance(parsed, bool):
        return repr(float(parsed))
    return json.dumps(parsed, sort_keys=True, ensure_ascii=False, default=str)[:10 * _MOST_TEXT]


def majority(ballots: Sequence[str | None], right: Sequence[float], k: int,
             weights: Sequence[float] | None = None) -> float:
    """Probability in [0, 1] that the majority vote among `k` of the n answers is correct (self-consistency,
    2203.11171).

    `ballots` [n] are the answers as returned by `ballot`; `right` [n] is 1 for a correct answer. The winner is the
    ballot with the most votes, weighted by `weights` [n] if given; ties are broken uniformly. If only some of the
    winner's answers are correct, the value is their share. Answers without a ballot do not vote; a subset without any
    vote counts as wrong. The result is the mean over all subsets of k answers, or over MOST_SUBSETS sampled subsets."""
    names = sorted({b for b in ballots if b is not None})
    if not names:
        return 0.0
    codes = np.array([names.index(b) if b is not None else -1 for b in ballots])
    cast = (codes[:, None] == np.arange(len(names))).astype(float)  # [n, names]
    share = (cast * np.asarray(right, float)[:, None]).sum(0) / cast.sum(0)
    votes = cast if weights is None else cast * np.asarray(weights, float)[:, None]
    subsets = _subsets(len(ballots), k)
    counts, heads = subsets @ votes, subsets @ cast
    counts = np.where(heads > 0, counts, -1.0)
    best = (counts >= counts.max(1, keepdims=True) - 1e-12) & (heads > 0)
    won = best.sum(1)
    return float(np.mean(np.where(won > 0, (best * share).sum(1) / np.maximum(won, 1), 0.0)))


def _subsets(n: int, k: int) -> np.ndarray:
    """Subsets of k of n answers as an array [subsets, n] of 0 and 1. Every call returns the same subsets."""
    if math.comb(n, k) <= MOST_SUBSETS:
        chosen = np.array(list(itertools.combinations(range(n), k)))
    else:
        chosen = np.argsort(np.random.default_rng(0).random((MOST_SUBSETS, n)), axis=1)[:, :k]
    out = np.zeros((len(chosen), n))
    np.put_along_axis(out, chosen, 1.0, axis=1)
    return out


def winner(ballots: Sequence[str | None]) -> tuple[str | None, float]:
    """Returns (the most frequent ballot, its share of all answers in [0, 1]). In a tie, the ballot that comes first
    wins. Returns (None, 0) if no answer has a ballot."""
    names = [b for b in ballots if b is not None]
    if not names:
        return None, 0.0
    best = max(dict.fromkeys(names), key=names.count)
    return best, names.count(best) / len(ballots)


# --- regions ----------------------------------------------------------------------------------------------------------


def location_of(parsed: Any) -> list[float] | None:
    """The parsed answer if it is a box (4 numbers) or a point (2 numbers), in pixels; None if it is anything else."""
    if isinstance(parsed, (list, tuple)) and len(parsed) in (2, 4) and all(map(is_number, parsed)):
        return [float(v) for v in parsed]
    return None


def region(places: Sequence[Sequence[float] | None], size: Sequence[float] | None = None,
           reach: float = 50.0) -> list[float] | None:
    """The combined answer of GUI-RC (2508.05615): a box around the region that is covered by the highest number of
    answers. If there are several such regions, the largest one is used.

    `places` are boxes, points or None. A point votes for a square that extends `reach` pixels to each side. Boxes are
    clipped to an image of this `size`. Returns None if no answer has a location."""
    width, height = size or (math.inf, math.inf)
    boxes = []
    for at in places:
        if at is not None:
            box = clip_to_image(at if len(at) == 4 else [at[0] - reach, at[1] - reach, at[0] + reach, at[1] + reach],
                                min(width, 1e9), min(height, 1e9))
            boxes += [box] if box else []
    return region_vote(boxes)
