"""Which prompts new ones are made from, and how: the recipes of `vlrl data synthesize --recipe`. No torch.

    visits = visits_of(Path("runs/a"))                       # how each group of a run went
    parents = RECIPES["sws"].choose(visits, 64, rng)         # [Parent(id="7", way="combined", other="12"), ...]
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
"""How a new prompt differs from its parent, in the words that a generator is told."""
VARIANTS = 4
"""New prompts to each parent that eva draws."""
DRAWN = 0.25
"""Share of the prompts that eva draws as parents."""
WEAK = 0.5
"""A weakness stays below this pass rate; from it on a prompt counts as solved."""
_WINDOWS = 4  # parts of a run in which a category's pass rate is taken where no prompt was visited twice
_EVEN = 1e-9  # a slope that is 0 but for rounding
_COLUMNS = ("step", "group_id", "sample_id", "category", "reward", "correct", "variant", "sample")


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How the answers of one group went."""

    id: str
    category: str = ""
    step: int = 0
    rewards: tuple[float, ...] = ()
    right: tuple[bool, ...] = ()
    row: str = ""
    """The sample's row as JSON."""

    @property
    def pass_rate(self) -> float:
        """NaN where it is not known what is right."""
        return float(np.mean(self.right)) if self.right else math.nan


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A prompt that new ones are made from."""

    id: str
    way: str = "similar"
    """One of WAYS."""
    other: str = ""
    """The second prompt of way "combined"."""


Choose = Callable[[Sequence[GroupOutcome], int, np.random.Generator], list[Parent]]
"""(visits by step, wanted candidates, random stream) -> parents, which candidates are made from in turn."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How prompts are made from how others went."""

    choose: Choose
    needs: str = ""
    """What a file of pass rates cannot tell; "" = it does."""
    least: float = 0.0
    most: float = 1.0
    drawn: bool = False
    """Whether it says itself how many parents there are, for VARIANTS candidates each."""
    keep: int | None = None
    """Most rows that are kept, those of the lowest pass rate first; None = all in the order in which they were made."""


def recipe(name: str) -> Recipe:
    """Returns a recipe. Raises ConfigError for a name that there is not."""
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name!r} is not known.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}")
    return RECIPES[name]


# --- how a run went ---------------------------------------------------------------------------------------------------


def visits_of(folder: Path) -> list[GroupOutcome]:
    """Returns the groups of a run's training rollouts by step; answers without a reward, and those that were drawn with
    a variant of the prompt, do not count. Raises ConfigError where there is none.
    """
    run = RunFolder(folder)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in run.rollouts(columns=_COLUMNS).to_pylist():
        if row["reward"] is not None and not row["variant"] and row["sample_id"]:
            groups[row["step"], row["group_id"]].append(row)
    if not groups:
        more = f" ({run.notes[0]})" if run.notes else ""
        raise ConfigError(f"--from {folder}: it holds no scored rollouts{more}: name the folder of a run, with "
                          "store.rollouts as it is by default")
    return [GroupOutcome(id=first["sample_id"], category=first["category"] or "", step=step, row=first["sample"] or "",
                  rewards=tuple(r["reward"] for r in rows),
                  right=tuple(r["correct"] for r in rows if r["correct"] is not None))
            for (step, _), rows in sorted(groups.items()) for first in rows[:1]]


def visits_in(rows: Sequence[Mapping[str, Any]]) -> list[GroupOutcome]:
    """Returns a visit for each row that has a pass rate (column pass_at_k)."""
    counts = [(row, int(row.get("answers_scored") or 1)) for row in rows if row.get("pass_at_k") is not None]
    return [GroupOutcome(id=str(row["id"]), category=str(row.get("category") or ""),
                  right=tuple(i < round(row["pass_at_k"] * n) for i in range(n))) for row, n in counts]


# --- weaknesses (SwS) -------------------------------------------------------------------------------------------------


def is_weak(rates: Sequence[float]) -> bool:
    """Returns whether pass rates, in their order, stay below 1/2 and fall: the least-squares slope is negative.

    SwS: Self-aware Weakness-driven Problem Synthesis (arXiv 2506.08989), section 3.1.
    """
    known = np.array([rate for rate in rates if not math.isnan(rate)])
    if len(known) < 2 or known.max() >= WEAK:
        return False
    places = np.arange(len(known)) - (len(known) - 1) / 2
    return bool(places @ known < -_EVEN)


def weaknesses(visits: Sequence[GroupOutcome]) -> dict[str, tuple[list[str], float]]:
    """Returns category -> (its weak prompts, their share of its prompts), of categories that have some.

    Weak is a prompt by its visits. Where no prompt was visited twice it is a category by the four quarters of the run,
    with its prompts that were answered wrongly more often than not.
    """
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for visit in visits:
        rates[visit.category][visit.id].append(visit.pass_rate)
    if any(len(own) > 1 for prompts in rates.values() for own in prompts.values()):
        weak = {name: [id for id, own in prompts.items() if is_weak(own)] for name, prompts in rates.items()}
    else:
        last = max((visit.step for visit in visits), default=0)
        weak = {name: [id for id, own in prompts.items() if own[0] < WEAK] for name, prompts in rates.items()
                if is_weak(_quarters([v for v in visits if v.category == name], last + 1))}
    return {name: (ids, len(ids) / len(rates[name])) for name, ids in sorted(weak.items()) if ids}


def _quarters(visits: Sequence[GroupOutcome], steps: int) -> list[float]:
    parts: list[list[float]] = [[] for _ in range(_WINDOWS)]
    for visit in visits:
        if not math.isnan(visit.pass_rate):
            parts[visit.step * _WINDOWS // steps].append(visit.pass_rate)
    return [float(np.mean(part)) for part in parts if part]


def shared_out(count: int, shares: Sequence[float]) -> list[int]:
    """Returns whole numbers that add up to `count` in proportion to `shares`, by the largest remainders."""
    exact = count * np.array(shares) / np.sum(shares)
    whole = np.floor(exact).astype(int)
    whole[np.argsort(whole - exact, kind="stable")[:count - whole.sum()]] += 1
    return whole.tolist()


def sws(visits: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Returns a parent for each candidate: weak prompts, categories by their shares of weak prompts, each combined with
    another weak prompt of its category.

    SwS (arXiv 2506.08989). There a model first lists the concepts of all weak problems, and draws them by how often
    they occur together and by their embeddings: here a prompt of the same category stands for that.
    """
    weak = weaknesses(visits)
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


def informativeness(visits: Sequence[GroupOutcome]) -> dict[str, float]:
    """Returns id -> largest - smallest reward of the answers of its last visit.

    eva: Evolving Alignment via Asymmetric Self-Play (arXiv 2411.00062), section 3.2.
    """
    last = {visit.id: visit for visit in visits}
    return {id: max(visit.rewards) - min(visit.rewards) for id, visit in last.items() if visit.rewards}


def eva(visits: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Returns parents for four candidates each, drawn in proportion to their informativeness; 0 candidates: a quarter
    of the prompts.
    """
    worth = {id: value for id, value in informativeness(visits).items() if value > 0}
    wanted = math.ceil(candidates / VARIANTS) or math.ceil(DRAWN * len({visit.id for visit in visits}))
    if not worth:
        return []
    values = np.array([*worth.values()])
    drawn = rng.choice(len(worth), min(wanted, len(worth)), replace=False, p=values / values.sum())
    return [Parent(id=[*worth][i]) for i in drawn.tolist()]


# --- harder and easier (Synthetic Data RL) ----------------------------------------------------------------------------


def by_solved(visits: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Returns all prompts in a random order: of those that are solved, more often than not at their last visit, harder
    ones are made, of the others easier ones.

    Synthetic Data RL: Task Definition Is All You Need (arXiv 2505.17063).
    """
    last = {visit.id: visit.pass_rate for visit in visits if not math.isnan(visit.pass_rate)}
    ids = [*last]
    return [Parent(id=id, way="harder" if last[id] > WEAK else "easier")
            for id in (ids[i] for i in rng.permutation(len(ids)).tolist())]


_ONLY_RUN = "the rollouts of a run's folder"
RECIPES = {
    "sws": Recipe(choose=sws, needs=_ONLY_RUN, least=0.25, most=0.75),
    "eva": Recipe(choose=eva, needs=_ONLY_RUN, drawn=True),
    "synthetic_data_rl": Recipe(choose=by_solved, keep=500),
}
"""By name; constants are those of the papers where they give them (docs/data.md)."""
