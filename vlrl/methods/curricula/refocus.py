"""Samplers that measure difficulty again during the run. ADCL goes from easy to hard in batches; HardFocus ends with
only the hardest prompts."""

from __future__ import annotations

import copy
import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vlrl.algo.effect import FunctionUse, idle_when
from vlrl.config.base import Count, Positive
from vlrl.curriculum.base import AS_UNIFORM, Prompts, stream
from vlrl.curriculum.drawing import Adaptive, Cycle, next_distinct
from vlrl.curriculum.types import Draw
from vlrl.methods.curricula.ordered import required_field
from vlrl.methods.curricula.staged import uncounted_draws


class ADCL(Adaptive):
    """Goes from easy to hard in `batches` batches. Before a batch is drawn, its prompts are probed with the current
    policy and sorted again.

    A pass sorts all prompts by difficulty and cuts them into consecutive batches of equal size. To probe a batch, each
    of its prompts is answered `probe_size` times; these completions are not trained on. The batch is then sorted by 1 -
    pass rate. Adaptive difficulty curriculum learning (2505.08364, "difficulty shift"). Our choices: the number of
    batches, and that passes after the first are sorted by the last pass rates.

    by: the field that holds the difficulty for the first pass. Raises ConfigError if no row has the field. Rows without
    the field come last until they are probed. With by=null, all prompts are probed together before the first step,
    which takes N * probe_size completions and suits a few thousand prompts at most. After that each batch takes N /
    batches * probe_size completions, at the beginning of the step that may need the batch. Probe completions count in
    rollouts/total.

    If a step draws prompts beyond the probed batch (in the first step, or to replace filtered groups), the additional
    prompts are ordered by the difficulty known so far."""

    saved = ("order", "at", "sorted", "asked", "passes", "probed", "latest", "step", "unknown")

    def __init__(self, prompts: Prompts, batches: Positive = 4, probe_size: Positive = 4,
                 by: str | None = "difficulty"):
        super().__init__(prompts)
        size = prompts.size
        if batches > size:
            raise ValueError(f"batches={batches} is more than the number of training rows, {size}: lower "
                             "curriculum.batches")
        self.probe_size = probe_size
        self.field = np.full(size, np.nan, dtype=np.float32) if by is None else required_field(
            prompts, by, "adcl", ", or set curriculum.by=null to probe all prompts first")
        self.borders = np.arange(1, batches + 1) * size // batches
        """[batches] for each batch, the position in `order` after the batch's last prompt."""
        self.order = np.argsort(self.field, kind="stable").astype(np.int32)
        """[N] the prompts of this pass, in the order in which they are drawn."""
        self.at, self.sorted, self.asked = 0, 0, 0
        """Three positions in `order`. The prompts before `at` are drawn, those before `sorted` are probed and sorted,
        and for those before `asked` probes are requested."""
        self.passes, self.probed, self.latest, self.step = 0, 0, prompts.per_step, -1
        """Number of completed passes; number of probed prompts; number of draws of the last step (at first: of a full
        step); number of the last step."""
        self.unknown = by is None
        """Whether all prompts still have to be probed, because there is no difficulty to start from."""

    def difficulty(self, indices: np.ndarray) -> np.ndarray:
        """[n] difficulty of the prompts `indices` [n]: 1 - the last pass rate, or the field `by` for a prompt without a
        pass rate; NaN = unknown."""
        measured = 1 - self.history.pass_rate[indices]
        return np.where(np.isnan(measured), self.field[indices], measured)

    def probes(self, step: int) -> list[Draw]:
        if self.at == self.prompts.size:
            self._next_pass()
        start = max(self.asked, self.at)
        wanted = self.prompts.size if self.unknown else self._border(min(self.at + self.latest, self.prompts.size))
        self.asked = max(self.asked, wanted)
        self.probed += max(0, self.asked - start)
        return self.draws(self.order[start:self.asked], group_size=self.probe_size)

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        self._sort()
        self.latest, self.step = count + (self.latest if step == self.step else 0), step
        pieces: list[np.ndarray] = []
        while count:
            if self.at == self.prompts.size:
                self._next_pass()
                late = np.isin(self.order, pieces[-1:])  # no prompt twice in one call while others are left
                self.order = np.concatenate([self.order[~late], self.order[late]])
            pieces.append(self.order[self.at:self.at + count].copy())
            self.at, count = self.at + len(pieces[-1]), count - len(pieces[-1])
        return np.concatenate(pieces)

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns what `next(count, step)` would return, up to the first prompt that is not sorted yet. Changes
        nothing."""
        return uncounted_draws(self.history, self.order[self.at:min(self.at + count, max(self.sorted, self.at))])

    def _border(self, position: int) -> int:
        """The end of a batch, as the position in `order` after the batch's last prompt. The batch is the one that
        contains the prompt at `position` - 1."""
        return int(self.borders[np.searchsorted(self.borders, position)])

    def _sort(self) -> None:
        """Sorts each batch that has been probed, or all prompts if none had a difficulty."""
        if self.unknown:
            self._by_difficulty(0, self.prompts.size)
            self.sorted = self.asked = self._border(1)
            self.unknown = False
        while self.sorted < self.asked:
            end = self._border(self.sorted + 1)
            self._by_difficulty(max(self.sorted, self.at), end)
            self.sorted = end
        self.asked = self.sorted

    def _by_difficulty(self, start: int, end: int) -> None:
        part = self.order[start:end]
        self.order[start:end] = part[np.argsort(self.difficulty(part), kind="stable")]

    def _next_pass(self) -> None:
        self.passes, self.at, self.sorted, self.asked = self.passes + 1, 0, 0, 0
        self.order.sort()
        self._by_difficulty(0, self.prompts.size)

    def metrics(self) -> dict[str, float]:
        batch = int(np.searchsorted(self.borders, max(self.at, 1))) + 1
        return {"curriculum/epoch": self.passes + self.at / self.prompts.size, "curriculum/batch": float(batch),
                "curriculum/probes": float(self.probed)}




def _without_focus(use: FunctionUse) -> str:
    after, size = use.values["after"], use.config.rollout.group_size
    if after >= use.config.steps:
        return f"curriculum.after={after} is not below steps={use.config.steps}{AS_UNIFORM}"
    if use.values["share"] == 1 and use.values["group_size"] == size:
        return f"curriculum.share=1 and curriculum.group_size={size} are those of the first stage{AS_UNIFORM}"
    return ""


@idle_when(_without_focus)
class HardFocus(Adaptive):
    """Draws shuffled passes over all prompts for `after` steps (stage 1), then over the hardest prompts, a fraction
    `share` of all, in large groups (stage 2).

    The hardest prompts are those with the lowest pass rate in their last group. Unseen prompts count as hardest and
    rejected prompts as easiest; ties are broken at random. The hardest prompts are chosen again after every pass over
    them, at the beginning of a step. DRIVE (2511.06307) has stage 1 with groups of 8, and stage 2 with groups of 64
    under a hard-focus curriculum that keeps the most difficult prompts; the share and the number of steps are ours.

    after: number of steps in stage 1. share: above 0, at most 1. group_size: group size in stage 2."""

    def __init__(self, prompts: Prompts, after: Count = 100, share: Annotated[float, Field(gt=0, le=1)] = 0.2,
                 group_size: Annotated[int, Field(ge=2)] = 64):
        super().__init__(prompts)
        self.after, self.share, self.group_size = after, share, group_size
        self.chosen = 0
        """How often the hardest prompts have been chosen so far; 0 = stage 1."""
        self.step = -1
        self.cycle = Cycle(np.arange(prompts.size, dtype=np.int32), prompts.seed, 4, 0)

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        if self._ends(step):
            self.chosen += 1
            self.cycle = Cycle(self.hardest(), self.prompts.seed, 4, self.chosen)
        self.step = step
        return next_distinct(self.cycle, count, set())

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns what `next(count, step)` would return, and changes nothing. Returns [] if that call would choose the
        hardest prompts again."""
        if self._ends(step):
            return []
        return uncounted_draws(self.history, next_distinct(copy.copy(self.cycle), count, set()), **self._sizes())

    def _ends(self, step: int) -> bool:
        over = self.cycle.drawn >= len(self.cycle.members) if self.chosen else step >= self.after
        return over and step != self.step

    def _sizes(self) -> dict[str, Any]:
        return {"group_size": self.group_size} if self.chosen else {}

    def hardest(self) -> np.ndarray:
        """Returns the indices of the hardest prompts (the fraction `share` of all), ascending, as int32."""
        size = self.prompts.size
        count = math.ceil(self.share * size)
        rate = np.nan_to_num(self.history.pass_rate, nan=-1.0).astype(np.float64)
        rate[self.history.rejected] = 2.0
        rate += 1e-9 * stream(self.prompts.seed, 5, self.chosen).random(size)  # breaks ties only
        return np.sort(np.argpartition(rate, count - 1)[:count]).astype(np.int32)

    def draws(self, indices: Any, **more: Any) -> list[Draw]:
        return super().draws(indices, **self._sizes(), **more)

    def state(self) -> dict[str, Any]:
        members = self.cycle.members if self.chosen else np.zeros(0, dtype=np.int32)
        return {"chosen": self.chosen, "step": self.step, "drawn": self.cycle.drawn, "kept": members}

    def restore(self, state: dict[str, Any]) -> None:
        self.chosen, self.step = int(state["chosen"]), int(state["step"])
        members = np.asarray(state["kept"] if self.chosen else np.arange(self.prompts.size), dtype=np.int32)
        self.cycle = Cycle(members, self.prompts.seed, 4, self.chosen)
        self.cycle.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"curriculum/stage": 2.0 if self.chosen else 1.0,
                "curriculum/left": len(self.cycle.members) / self.prompts.size,
                "curriculum/epoch": self.cycle.drawn / len(self.cycle.members)}
