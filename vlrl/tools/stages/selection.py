"""Strategies that select which correct answers to a prompt a round trains on (rounds.choose). Each strategy is a
function that gets the candidates and returns the indices of the selected ones.

Candidates are complete and correct answers with different texts, in the order in which they were sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.config.base import Positive
from vlrl.rewards.scripts import pieces


@dataclass(frozen=True)
class Candidate:
    """A correct answer to a prompt, from which a strategy may select."""

    text: str
    reward: float
    tokens: int
    parsed: Any = None


def best(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Indices of the `count` candidates with the highest reward. Among equal rewards, candidates that were sampled
    earlier are preferred.

    RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment (arXiv 2304.06767)."""
    return sorted(range(len(candidates)), key=lambda i: -candidates[i].reward)[:count]


def shortest(candidates: Sequence[Candidate], count: Positive = 1) -> list[int]:
    """Indices of the `count` candidates with the fewest tokens. Among equally short candidates, higher rewards are
    preferred.

    Shortest rejection sampling of Kimi k1.5 (arXiv 2501.12599)."""
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].tokens, -candidates[i].reward))[:count]


def diverse(candidates: Sequence[Candidate], count: Positive = 4) -> list[int]:
    """Indices of `count` candidates: first the candidate with the highest reward, then repeatedly the candidate that is
    least similar to the selected ones.

    The similarity of two answers is the Jaccard index of their sets of words; the similarity to several answers is the
    largest of these. The aim is distinct solutions, as in rejection sampling fine-tuning (arXiv 2308.01825). That paper
    compares the equations in the answers; comparing words is our choice."""
    words = [{*pieces(c.text.lower())} for c in candidates]
    selected = best(candidates)
    while len(selected) < min(count, len(candidates)):
        left = [i for i in range(len(candidates)) if i not in selected]
        selected.append(min(left, key=lambda i: max(_jaccard(words[i], words[j]) for j in selected)))
    return selected


def every(candidates: Sequence[Candidate]) -> list[int]:
    """The indices of all candidates."""
    return [*range(len(candidates))]


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


Choice = Callable[[Sequence[Candidate]], Sequence[int]]
CHOICES: dict[str, Callable[..., Sequence[int]]] = {"best": best, "shortest": shortest, "diverse": diverse,
                                                    "all": every}


def select_answers(rows: Sequence[dict[str, Any]], choose: Choice, least: float | None) -> list[dict[str, Any]]:
    """Returns the rows of the answers to train on, selected by the strategy `choose`. `rows` are all answers to one
    prompt (tools/evaluation/rows.py).

    Only correct answers are considered (`is_right`, with the smallest reward `least`). Truncated and empty answers are
    dropped, and of several answers with the same text only the first is considered. Raises ValueError if `choose`
    returns an index out of range."""
    right: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("answer") and not row.get("truncated") and is_right(row, least):
            right.setdefault(row["answer"], row)
    if not right:
        return []
    candidates = [*right.values()]
    places = choose([Candidate(r["answer"], float(r["reward"]), int(r["tokens"]), r.get("parsed")) for r in candidates])
    if wrong := [i for i in places if not 0 <= i < len(candidates)]:
        raise ValueError(f"rounds.choose returned the index {wrong[0]}, but there are {len(candidates)} answers")
    return [candidates[i] for i in dict.fromkeys(places)]


def select_rejected(rows: Sequence[dict[str, Any]], preferred: dict[str, Any], least: float | None,
           factor: float) -> list[dict[str, Any]]:
    """Returns the rows of the rejected answers to pair with the answer `preferred`, for DPO that shortens answers.
    These are wrong answers that are longer, and correct answers with more than `factor` times as many tokens.
    `least` is the smallest reward of a correct answer (None: the task decides).

    Unscorable answers are excluded, and of several answers with the same text only the first is used. DPO of
    long2short, Kimi k1.5 (arXiv 2501.12599)."""
    rejected: dict[str, dict[str, Any]] = {}
    for row in rows:
        most = preferred["tokens"] * (factor if is_right(row, least) else 1.0)
        if row.get("answer") and row.get("reward") is not None and row["tokens"] > most:
            rejected.setdefault(row["answer"], row)
    return [*rejected.values()]


def is_right(row: dict[str, Any], least: float | None) -> bool:
    """Whether the answer in `row` is correct: whether its reward is at least `least` or, if `least` is None, whether
    the task counts it as correct. False for an unscorable answer."""
    reward = row.get("reward")
    if reward is None or not math.isfinite(reward):
        return False
    return bool(row.get("correct")) if least is None else reward >= least
