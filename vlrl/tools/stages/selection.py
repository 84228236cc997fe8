"""Which of the right answers to a prompt are learned from in a round (rounds.choose): `[Candidate] -> places`.

Candidates are whole, right, and of different texts, in the order in which they were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.config.base import Positive
from vlrl.rewards.scripts import pieces


@dataclass(frozen=True)
class Candidate:
    """An answer that may be chosen."""

    text: str
    reward: float
    tokens: int
    parsed: Any = None
    """What the task reads in it."""


def best(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Returns the places of the `count` with the highest reward, the earlier first of equal ones.

    RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment (arXiv 2304.06767).
    """
    return sorted(range(len(candidates)), key=lambda i: -candidates[i].reward)[:count]


def shortest(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Returns the places of the `count` with the fewest tokens; of equal ones those with the higher reward.

    Shortest rejection sampling of Kimi k1.5 (arXiv 2501.12599).
    """
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].tokens, -candidates[i].reward))[:count]


def diverse(candidates: Sequence[Candidate], count: Positive = 4) -> list[int]:
    """Returns `count` places: the best, then again and again the one that is least like those chosen.

    Two answers are as alike as the share of their different words that both have (Jaccard), and an answer is as like
    several as the one it is most like. Distinct ways to an answer, as in rejection sampling fine-tuning (arXiv
    2308.01825), whose measure is the equations of an answer: words are our choice.
    """
    words = [{*pieces(c.text.lower())} for c in candidates]
    chosen = best(candidates)
    while len(chosen) < min(count, len(candidates)):
        left = [i for i in range(len(candidates)) if i not in chosen]
        chosen.append(min(left, key=lambda i: max(_jaccard(words[i], words[j]) for j in chosen)))
    return chosen


def every(candidates: Sequence[Candidate]) -> list[int]:
    """Returns all places."""
    return [*range(len(candidates))]


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


Choice = Callable[[Sequence[Candidate]], Sequence[int]]
CHOICES: dict[str, Callable[..., Sequence[int]]] = {"best": best, "shortest": shortest, "diverse": diverse,
                                                    "all": every}


def chosen(rows: Sequence[dict[str, Any]], choose: Choice, least: float | None) -> list[dict[str, Any]]:
    """Returns the rows that are learned from, of all answers to one prompt (tools/evaluation/rows.py).

    Right is what the task calls correct, or with `least` what has so much reward; an answer that was cut off or is
    empty is never taken, and of equal texts the first. Raises ValueError for places that there are not.
    """
    right: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("answer") and not row.get("truncated") and is_right(row, least):
            right.setdefault(row["answer"], row)
    if not right:
        return []
    candidates = [*right.values()]
    places = choose([Candidate(r["answer"], float(r["reward"]), int(r["tokens"]), r.get("parsed")) for r in candidates])
    if wrong := [i for i in places if not 0 <= i < len(candidates)]:
        raise ValueError(f"rounds.choose gave the place {wrong[0]} among {len(candidates)} answers")
    return [candidates[i] for i in dict.fromkeys(places)]


def longer(rows: Sequence[dict[str, Any]], preferred: dict[str, Any], least: float | None,
           factor: float) -> list[dict[str, Any]]:
    """Returns the answers to a prompt to which a kept one is preferred for its length: wrong ones that are longer, and
    right ones of more than `factor` times its tokens; one that could not be scored is none of them, and of equal texts
    the first.

    DPO of long2short, Kimi k1.5 (arXiv 2501.12599).
    """
    rejected: dict[str, dict[str, Any]] = {}
    for row in rows:
        most = preferred["tokens"] * (factor if is_right(row, least) else 1.0)
        if row.get("answer") and row.get("reward") is not None and row["tokens"] > most:
            rejected.setdefault(row["answer"], row)
    return [*rejected.values()]


def is_right(row: dict[str, Any], least: float | None) -> bool:
    """Returns whether an answer counts as right; one that could not be scored does not."""
    reward = row.get("reward")
    if reward is None or not math.isfinite(reward):
        return False
    return bool(row.get("correct")) if least is None else reward >= least
