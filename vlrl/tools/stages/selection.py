"""Which of the correct answers to a prompt are trained on in a round (rounds.choose): `[Candidate] -> indices`.

Candidates are complete, correct, and of different texts, in the order in which they were sampled."""

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
    """The task's parsed answer."""


def best(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Indices of the `count` with the highest reward, among equals the earlier.

    RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment (arXiv 2304.06767)."""
    return sorted(range(len(candidates)), key=lambda i: -candidates[i].reward)[:count]


def shortest(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Indices of the `count` with the fewest tokens; among equals those with the higher reward.

    Shortest rejection sampling of Kimi k1.5 (arXiv 2501.12599)."""
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].tokens, -candidates[i].reward))[:count]


def diverse(candidates: Sequence[Candidate], count: Positive = 4) -> list[int]:
    """`count` indices: the best, then repeatedly the one least similar to those chosen.

    Similarity of two answers is the share of their different words that both have (Jaccard), to several the largest
    one. Distinct solutions, as in rejection sampling fine-tuning (arXiv 2308.01825), which compares the equations of an
    answer: words are our choice."""
    words = [{*pieces(c.text.lower())} for c in candidates]
    chosen = best(candidates)
    while len(chosen) < min(count, len(candidates)):
        left = [i for i in range(len(candidates)) if i not in chosen]
        chosen.append(min(left, key=lambda i: max(_jaccard(words[i], words[j]) for j in chosen)))
    return chosen


def every(candidates: Sequence[Candidate]) -> list[int]:
    """All indices."""
    return [*range(len(candidates))]


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


Choice = Callable[[Sequence[Candidate]], Sequence[int]]
CHOICES: dict[str, Callable[..., Sequence[int]]] = {"best": best, "shortest": shortest, "diverse": diverse,
                                                    "all": every}


def chosen(rows: Sequence[dict[str, Any]], choose: Choice, least: float | None) -> list[dict[str, Any]]:
    """The rows that are trained on, among all answers to one prompt (tools/evaluation/rows.py).

    Correct is what the task says, or with `least` a reward of at least that; truncated or empty answers are never
    taken, and of equal texts the first. Raises ValueError for indices out of range."""
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
    """The answers to a prompt that a kept one is preferred to for its length: longer wrong ones, and correct ones with
    more than `factor` times its tokens. Unscorable ones are excluded; of equal texts the first is taken.

    DPO of long2short, Kimi k1.5 (arXiv 2501.12599)."""
    rejected: dict[str, dict[str, Any]] = {}
    for row in rows:
        most = preferred["tokens"] * (factor if is_right(row, least) else 1.0)
        if row.get("answer") and row.get("reward") is not None and row["tokens"] > most:
            rejected.setdefault(row["answer"], row)
    return [*rejected.values()]


def is_right(row: dict[str, Any], least: float | None) -> bool:
    """Whether an answer counts as correct; False for an unscorable one."""
    reward = row.get("reward")
    if reward is None or not math.isfinite(reward):
        return False
    return bool(row.get("correct")) if least is None else reward >= least
