"""The recipes of `vlrl data synthesize --recipe`: which prompts new ones are made from, and how. No torch.

    outcomes = outcomes_of_run(Path("runs/a"))               # the results of each group of a run
    parents = RECIPES["sws"].choose(outcomes, 64, rng)       # [Parent(id="7", way="combined", other="12"), ...]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.errors import ConfigError, did_you_mean
from vlrl.store import RunFolder

WAYS = {"similar": "of the same kind that asks something else", "harder": "of the same kind that is harder to solve",
        "easier": "of the same kind that is easier to solve",
        "combined": "that combines the concepts on which the two problems rest"}
"""How a new prompt differs from its parent, as worded for the generator."""
VARIANTS = 4
"""New prompts per parent in eva."""
DRAWN = 0.25
"""Share of the prompts that eva samples as parents."""
WEAK = 0.5
"""A weak prompt stays below this pass rate; from it on a prompt counts as solved."""
_WINDOWS = 4  # parts of a run with a pass rate per category, where no prompt was drawn twice
_EVEN = 1e-9  # largest magnitude of a slope that counts as 0
_COLUMNS = ("step", "group_id", "sample_id", "category", "reward", "correct", "variant", "sample")


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """The results of one group."""

    id: str
    category: str = ""
    step: int = 0
    rewards: tuple[float, ...] = ()
    right: tuple[bool, ...] = ()
    row: str = ""
    """The sample's row as JSON."""

    @property
    def pass_rate(self) -> float:
        """NaN where correctness is unknown."""
        return float(np.mean(self.right)) if self.right else math.nan


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A prompt that new ones are made from."""

    id: str
    way: str = "similar"
    """One of WAYS."""
    other: str = ""
    """The second prompt, for way "combined"."""


Choose = Callable[[Sequence[GroupOutcome], int, np.random.Generator], list[Parent]]
"""(outcomes by step, number of candidates, random stream) -> parents, from which candidates are made in turn."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to choose parents by their outcomes, and the filter for new prompts."""

    choose: Choose
    needs: str = ""
    """What it needs beyond a file of pass rates; "" = nothing."""
    least: float = 0.0
    most: float = 1.0
    drawn: bool = False
    """Whether it decides the number of parents, each with VARIANTS candidates."""
    keep: int | None = None
    """Number of rows to keep, those of the lowest pass rate; None = all, in order."""


def recipe(name: str) -> Recipe:
    """A recipe by name. Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name!r} is not known.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}")
    return RECIPES[name]


# --- outcomes of a run ------------------------------------------------------------------------------------------------


def outcomes_of_run(folder: Path) -> list[GroupOutcome]:
    """The outcomes of a run's training groups by step, without rollouts that have no reward or were sampled under a
    variant of the prompt. Raises ConfigError where there are none.
    """
    run = RunFolder(folder)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in run.rollouts(columns=_COLUMNS).to_pylist():
        if row["reward"] is not None and not row["variant"] and row["sample_id"]:
            groups[row["step"], row["group_id"]].append(row)
    if not groups:
        more = f" ({run.notes[0]})" if run.notes else ""
        raise ConfigError(f"--from {folder}: it has no scored rollouts{more}: name the folder of a run with "
                          "store.rollouts=true")
    return [GroupOutcome(id=first["sample_id"], category=first["category"] or "", step=step, row=first["sample"] or "",
                  rewards=tuple(r["reward"] for r in rows),
                  right=tuple(r["correct"] for r in rows if r["correct"] is not None))
            for (step, _), rows in sorted(groups.items()) for first in rows[:1]]


def outcomes_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[GroupOutcome]:
    """An outcome for each row that has a pass rate (column pass_at_k)."""
    counts = [(row, int(row.get("answers_scored") or 1)) for row in rows if row.get("pass_at_k") is not None]
    return [GroupOutcome(id=str(row["id"]), category=str(row.get("category") or ""),
                  right=tuple(i < round(row["pass_at_k"] * n) for i in range(n))) for row, n in counts]


# --- weaknesses (SwS) -------------------------------------------------------------------------------------------------


def is_weak(rates: Sequence[float]) -> bool:
    """Whether pass rates, in order, stay below 1/2 and fall (negative least-squares slope).

    SwS: Self-aware Weakness-driven Problem Synthesis (arXiv 2506.08989), section 3.1.
    """
    known = np.array([rate for rate in rates if not math.isnan(rate)])
    if len(known) < 2 or known.max() >= WEAK:
        return False
    places = np.arange(len(known)) - (len(known) - 1) / 2
    return bool(places @ known < -_EVEN)


def weaknesses(outcomes: Sequence[GroupOutcome]) -> dict[str, tuple[list[str], float]]:
    """Category -> (its weak prompts, their share of its prompts), for categories that have weak prompts.

    A prompt is weak by its pass rates over time. Where no prompt was drawn twice, a category is weak by its pass rates
    in the four quarters of the run, and its weak prompts are those with a pass rate below 1/2.
    """
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        rates[outcome.category][outcome.id].append(outcome.pass_rate)
    if any(len(own) > 1 for prompts in rates.values() for own in prompts.values()):
        weak = {name: [id for id, own in prompts.items() if is_weak(own)] for name, prompts in rates.items()}
    else:
        last = max((outcome.step for outcome in outcomes), default=0)
        weak = {name: [id for id, own in prompts.items() if own[0] < WEAK] for name, prompts in rates.items()
                if is_weak(_quarters([v for v in outcomes if v.category == name], last + 1))}
    return {name: (ids, len(ids) / len(rates[name])) for name, ids in sorted(weak.items()) if ids}


def _quarters(outcomes: Sequence[GroupOutcome], steps: int) -> list[float]:
    parts: list[list[float]] = [[] for _ in range(_WINDOWS)]
    for outcome in outcomes:
        if not math.isnan(outcome.pass_rate):
            parts[outcome.step * _WINDOWS // steps].append(outcome.pass_rate)
    return [float(np.mean(part)) for part in parts if part]


def shared_out(count: int, shares: Sequence[float]) -> list[int]:
    """Integers that add up to `count` in proportion to `shares`, by largest remainders."""
    exact = count * np.array(shares) / np.sum(shares)
    whole = np.floor(exact).astype(int)
    whole[np.argsort(whole - exact, kind="stable")[:count - whole.sum()]] += 1
    return whole.tolist()


def sws(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """A weak prompt for each candidate, in each category in proportion to its share of weak prompts, combined with
    another weak prompt of its category.

    SwS (arXiv 2506.08989). There a model first extracts the concepts of all weak problems, which are sampled by
    co-occurrence and embeddings; here a second prompt of the same category replaces that.
    """
    weak = weaknesses(outcomes)
    if not weak:
        return []
    counts = shared_out(candidates, [share for _, share in weak.values()])
    parents = []
    for (ids, _), count in zip(weak.values(), counts, strict=True):
        for i in range(count):
            own = ids[i % len(ids)]
            others = [id for id in ids if id != own]
            other = others[int(rng.integers(len(others)))] if others else ""
            parents.append(Parent(id=own, way="combined" if other else "similar", other=other))
    return parents


# --- informativeness (eva) --------------------------------------------------------------------------------------------


def informativeness(outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
    """Id -> largest minus smallest reward in its last group.

    eva: Evolving Alignment via Asymmetric Self-Play (arXiv 2411.00062), section 3.2.
    """
    last = {outcome.id: outcome for outcome in outcomes}
    return {id: max(outcome.rewards) - min(outcome.rewards) for id, outcome in last.items() if outcome.rewards}


def eva(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Parents for four candidates each, sampled in proportion to their informativeness; with 0 candidates a quarter of
    the prompts.
    """
    worth = {id: value for id, value in informativeness(outcomes).items() if value > 0}
    wanted = math.ceil(candidates / VARIANTS) or math.ceil(DRAWN * len({outcome.id for outcome in outcomes}))
    if not worth:
        return []
    values = np.array([*worth.values()])
    drawn = rng.choice(len(worth), min(wanted, len(worth)), replace=False, p=values / values.sum())
    return [Parent(id=[*worth][i]) for i in drawn.tolist()]


# --- harder and easier (Synthetic Data RL) ----------------------------------------------------------------------------


def by_solved(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """All prompts in random order: those solved in their last group (pass rate above 1/2) get harder variations, the
    others easier ones.

    Synthetic Data RL: Task Definition Is All You Need (arXiv 2505.17063).
    """
    last = {outcome.id: outcome.pass_rate for outcome in outcomes if not math.isnan(outcome.pass_rate)}
    ids = [*last]
    return [Parent(id=id, way="harder" if last[id] > WEAK else "easier")
            for id in (ids[i] for i in rng.permutation(len(ids)).tolist())]


_ONLY_RUN = "the rollouts of a run's folder"
RECIPES = {
    "sws": Recipe(choose=sws, needs=_ONLY_RUN, least=0.25, most=0.75),
    "eva": Recipe(choose=eva, needs=_ONLY_RUN, drawn=True),
    "synthetic_data_rl": Recipe(choose=by_solved, keep=500),
}
"""Recipes by name, with the constants of their papers where given (docs/data.md)."""
