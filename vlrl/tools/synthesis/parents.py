"""The recipes of `vlrl data synthesize --recipe`. A recipe selects the parents (existing prompts that new prompts are
made from) and how each of them is varied. This module imports no torch.

    outcomes = outcomes_of_run(Path("runs/a"))               # the results of each group of a run
    parents = RECIPES["sws"].choose(outcomes, 64, rng)       # [Parent(id="7", variation="combined", other="12")]"""

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

VARIATIONS = {"similar": "of the same kind that asks something else",
              "harder": "of the same kind that is harder to solve",
              "easier": "of the same kind that is easier to solve",
              "combined": "that combines the concepts on which the two problems rest"}
"""Kind of variation -> how a new prompt differs from its parent, in the words used in requests to the generator."""
PER_PARENT = 4  # number of new prompts per parent in the recipe eva
DRAWN = 0.25  # share of the prompts that the recipe eva samples as parents
WEAK = 0.5
"""A prompt is weak if its pass rate always stays below this value. A prompt with a higher rate counts as solved."""
_WINDOWS = 4  # parts of a run with a pass rate per category, where no prompt was drawn twice
_EVEN = 1e-9  # largest magnitude of a slope that counts as 0
_COLUMNS = ("step", "group_id", "sample_id", "category", "reward", "correct", "variant", "sample")


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """The rewards and the correctness of the completions in one group, which answer the same prompt at one step."""

    id: str
    category: str = ""
    step: int = 0
    rewards: tuple[float, ...] = ()
    right: tuple[bool, ...] = ()
    row: str = ""  # the data row of the sample, as JSON

    @property
    def pass_rate(self) -> float:
        """The share of right completions; NaN if their correctness is not known."""
        return float(np.mean(self.right)) if self.right else math.nan


@dataclass(frozen=True, kw_only=True)
class Parent:
    """An existing prompt that new prompts are made from, and how they differ from it (`variation`, a key of
    VARIATIONS)."""

    id: str
    variation: str = "similar"
    other: str = ""  # Id of the second prompt, if the kind is "combined"


Choose = Callable[[Sequence[GroupOutcome], int, np.random.Generator], list[Parent]]
"""A function (outcomes sorted by step, number of candidates, random stream) -> parents. The candidates are made from
the parents in turn."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to select parents by their outcomes (`choose`) and to select the new prompts that are kept: those with pass
    rates from `least` to `most`, and at most `keep` rows."""

    choose: Choose
    needs: str = ""  # what the recipe needs in addition to a file of pass rates, for error messages; "" = nothing
    least: float = 0.0
    most: float = 1.0
    drawn: bool = False
    """Whether the recipe decides the number of parents. If so, each parent gets PER_PARENT candidates."""
    keep: int | None = None
    """Number of rows to keep, those with the lowest pass rates. None = all rows are kept, in their order."""


def recipe(name: str) -> Recipe:
    """The recipe with this name. Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name!r} is not known.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}")
    return RECIPES[name]


# --- outcomes of a run ------------------------------------------------------------------------------------------------


def outcomes_of_run(folder: Path) -> list[GroupOutcome]:
    """The outcomes of a run's training groups, sorted by step. Rollouts without a reward, or sampled with a variant of
    the prompt, are left out. Raises ConfigError if nothing remains."""
    run = RunFolder(folder)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in run.rollouts(columns=_COLUMNS).to_pylist():
        if row["reward"] is not None and not row["variant"] and row["sample_id"]:
            groups[row["step"], row["group_id"]].append(row)
    if not groups:
        more = f" ({run.notes[0]})" if run.notes else ""
        raise ConfigError(f"--from {folder}: the run has no scored rollouts{more}. Give the folder of a run with "
                          "store.rollouts=true")
    return [GroupOutcome(id=first["sample_id"], category=first["category"] or "", step=step, row=first["sample"] or "",
                  rewards=tuple(r["reward"] for r in rows),
                  right=tuple(r["correct"] for r in rows if r["correct"] is not None))
            for (step, _), rows in sorted(groups.items()) for first in rows[:1]]


def outcomes_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[GroupOutcome]:
    """The outcomes of the prompts in rows of a file. Only rows with a pass rate (column pass_at_k) are used."""
    counts = [(row, int(row.get("answers_scored") or 1)) for row in rows if row.get("pass_at_k") is not None]
    return [GroupOutcome(id=str(row["id"]), category=str(row.get("category") or ""),
                  right=tuple(i < round(row["pass_at_k"] * n) for i in range(n))) for row, n in counts]


# --- weaknesses (SwS) -------------------------------------------------------------------------------------------------


def is_weak(rates: Sequence[float]) -> bool:
    """Whether the pass rates of a prompt, in order of time, stay below 1/2 and decrease (negative least-squares slope).

    SwS: Self-aware Weakness-driven Problem Synthesis (arXiv 2506.08989), section 3.1."""
    known = np.array([rate for rate in rates if not math.isnan(rate)])
    if len(known) < 2 or known.max() >= WEAK:
        return False
    places = np.arange(len(known)) - (len(known) - 1) / 2
    return bool(places @ known < -_EVEN)


def weaknesses(outcomes: Sequence[GroupOutcome]) -> dict[str, tuple[list[str], float]]:
    """Category -> (ids of its weak prompts, share of weak prompts in the category), for categories that have weak
    prompts.

    Whether a prompt is weak is decided by `is_weak` from its pass rates over time. If no prompt was used twice,
    `is_weak` decides which categories are weak, from their pass rates in the four quarters of the run. The weak prompts
    of a weak category are then those with a pass rate below 1/2."""
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
    """Integers that are proportional to `shares` and add up to `count`, rounded by the method of largest remainders."""
    exact = count * np.array(shares) / np.sum(shares)
    whole = np.floor(exact).astype(int)
    whole[np.argsort(whole - exact, kind="stable")[:count - whole.sum()]] += 1
    return whole.tolist()


def sws(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Selects one weak prompt per candidate, combined with another weak prompt of the same category if there is one.
    Candidates are distributed over the categories in proportion to the shares of weak prompts in them.

    SwS (arXiv 2506.08989). In the paper, a model first extracts the concepts of all weak problems, and concepts are
    sampled by co-occurrence and embeddings. Here, a second prompt of the same category replaces the concepts."""
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
            parents.append(Parent(id=own, variation="combined" if other else "similar", other=other))
    return parents


# --- informativeness (eva) --------------------------------------------------------------------------------------------


def informativeness(outcomes: Sequence[GroupOutcome]) -> dict[str, float]:
    """Id of a prompt -> largest minus smallest reward in its last group.

    eva: Evolving Alignment via Asymmetric Self-Play (arXiv 2411.00062), section 3.2."""
    last = {outcome.id: outcome for outcome in outcomes}
    return {id: max(outcome.rewards) - min(outcome.rewards) for id, outcome in last.items() if outcome.rewards}


def eva(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Samples parents in proportion to their informativeness. There is one parent for every four candidates; if
    `candidates` is 0, a quarter of the prompts become parents."""
    worth = {id: value for id, value in informativeness(outcomes).items() if value > 0}
    wanted = math.ceil(candidates / PER_PARENT) or math.ceil(DRAWN * len({outcome.id for outcome in outcomes}))
    if not worth:
        return []
    values = np.array([*worth.values()])
    drawn = rng.choice(len(worth), min(wanted, len(worth)), replace=False, p=values / values.sum())
    return [Parent(id=[*worth][i]) for i in drawn.tolist()]


# --- harder and easier (Synthetic Data RL) ----------------------------------------------------------------------------


def by_solved(outcomes: Sequence[GroupOutcome], candidates: int, rng: np.random.Generator) -> list[Parent]:
    """Selects all prompts, in random order. Prompts that were solved in their last group (pass rate above 1/2) get
    harder variations, all others easier variations.

    Synthetic Data RL: Task Definition Is All You Need (arXiv 2505.17063)."""
    last = {outcome.id: outcome.pass_rate for outcome in outcomes if not math.isnan(outcome.pass_rate)}
    ids = [*last]
    return [Parent(id=id, variation="harder" if last[id] > WEAK else "easier")
            for id in (ids[i] for i in rng.permutation(len(ids)).tolist())]


_ONLY_RUN = "the folder of a run with rollouts"
RECIPES = {
    "sws": Recipe(choose=sws, needs=_ONLY_RUN, least=0.25, most=0.75),
    "eva": Recipe(choose=eva, needs=_ONLY_RUN, drawn=True),
    "synthetic_data_rl": Recipe(choose=by_solved, keep=500),
}
"""Name -> recipe, with the constants of its paper if the paper gives them (docs/data.md)."""
