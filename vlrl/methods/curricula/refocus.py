"""Samplers that re-estimate difficulty during the run: batches from easy to hard, and the hardest share alone."""

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
    """From easy to hard in `batches` batches, each probed and sorted again with the current policy before it is drawn.

    A pass sorts all prompts by difficulty and cuts them into consecutive batches of equal size. Before a batch is
    drawn, each of its prompts is answered `probe_size` times (not trained on), and the batch is sorted by 1 - pass
    rate. Adaptive difficulty curriculum learning (2505.08364, "difficulty shift"). The number of batches and the passes
    after the first, sorted by the last pass rates, are ours.

    by: the field with the difficulty that sorts the first pass; ConfigError when no row has it, and rows without it
    come last until they are probed. null: all prompts are probed before the first step, at once: N * probe_size
    completions, for some thousands of prompts at most. Later each batch costs N / batches * probe_size completions, at
    the beginning of the step that may need it. They count in rollouts/total.

    Draws beyond the batch that was probed (the first step, refills) go by the difficulty known so far."""

    saved = ("order", "at", "sorted", "asked", "passes", "probed", "latest", "step", "unknown")

    def __init__(self, prompts: Prompts, batches: Positive = 4, probe_size: Positive = 4,
                 by: str | None = "difficulty"):
        super().__init__(prompts)
        size = prompts.size
        if batches > size:
            raise ValueError(f"batches={batches} are more than the {size} training rows")
        self.probe_size = probe_size
        self.field = np.full(size, np.nan, dtype=np.float32) if by is None else required_field(
            prompts, by, "adcl", ", or set curriculum.by=null to probe all prompts first")
        self.borders = np.arange(1, batches + 1) * size // batches
        """End of each batch."""
        self.order = np.argsort(self.field, kind="stable").astype(np.int32)
        """[N] the prompts of this pass in the order of their draws."""
        self.at, self.sorted, self.asked = 0, 0, 0
        """Draws in this pass; up to where `order` is probed and sorted, and up to where it is probed."""
        self.passes, self.probed, self.latest, self.step = 0, 0, prompts.per_step, -1
        """Completed passes; probes so far; draws of the last step (at first: of a full step), and its number."""
        self.unknown = by is None
        """Whether all prompts have to be probed first."""

    def difficulty(self, indices: np.ndarray) -> np.ndarray:
        """1 - the last pass rate, else the field; nan = unknown."""
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

    def pick(self, count: int, step: int, draw: np.random.Generator) -> np.ndarray:
        self._sort()
        self.latest, self.step = count + (self.latest if step == self.step else 0), step
        pieces: list[np.ndarray] = []
        while count:
            if self.at == self.prompts.size:
                self._next_pass()
                late = np.isin(self.order, pieces[-1:])  # none twice in a call while others are left
                self.order = np.concatenate([self.order[~late], self.order[late]])
            pieces.append(self.order[self.at:self.at + count].copy())
            self.at, count = self.at + len(pieces[-1]), count - len(pieces[-1])
        return np.concatenate(pieces)

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """The next draws, as far as they are sorted; draws nothing."""
        return uncounted_draws(self.history, self.order[self.at:min(self.at + count, max(self.sorted, self.at))])

    def _border(self, place: int) -> int:
        """The end of the batch that contains the draw before `place`."""
        return int(self.borders[np.searchsorted(self.borders, place)])

    def _sort(self) -> None:
        """Sorts each probed batch, or everything when nothing was known."""
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
        return f"curriculum.after={after} is not before steps={use.config.steps}{AS_UNIFORM}"
    if use.values["share"] == 1 and use.values["group_size"] == size:
        return f"curriculum.share=1 and curriculum.group_size={size} are those of the first stage{AS_UNIFORM}"
    return ""


@idle_when(_without_focus)
class HardFocus(Adaptive):
    """Shuffled passes over all prompts for `after` steps; then over the hardest `share` of them, in large groups.

    Hardest: the lowest pass rate of the last visit; unseen prompts count as hardest, rejected ones as easiest; ties are
    broken at random. The hardest are chosen again after every pass over them, at the beginning of a step. DRIVE
    (2511.06307): stage 1 with groups of 8, stage 2 with groups of 64 under a hard-focus curriculum that keeps the most
    difficult prompts; the share and the steps are ours.

    after: steps from 0 on; share: above 0, at most 1; group_size: group size in stage 2."""

    def __init__(self, prompts: Prompts, after: Count = 100, share: Annotated[float, Field(gt=0, le=1)] = 0.2,
                 group_size: Annotated[int, Field(ge=2)] = 64):
        super().__init__(prompts)
        self.after, self.share, self.group_size = after, share, group_size
        self.chosen = 0
        """How often the hardest were chosen; 0 = stage 1."""
        self.step = -1
        self.cycle = Cycle(np.arange(prompts.size, dtype=np.int32), prompts.seed, 4, 0)

    def pick(self, count: int, step: int, draw: np.random.Generator) -> np.ndarray:
        if self._ends(step):
            self.chosen += 1
            self.cycle = Cycle(self.hardest(), self.prompts.seed, 4, self.chosen)
        self.step = step
        return next_distinct(self.cycle, count, set())

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """What `next(count, step)` would give, unless the hardest are chosen anew then; draws nothing."""
        if self._ends(step):
            return []
        return uncounted_draws(self.history, next_distinct(copy.copy(self.cycle), count, set()), **self._sizes())

    def _ends(self, step: int) -> bool:
        """Whether the hardest are chosen when the draws of a step begin."""
        over = self.cycle.drawn >= len(self.cycle.members) if self.chosen else step >= self.after
        return over and step != self.step

    def _sizes(self) -> dict[str, Any]:
        return {"group_size": self.group_size} if self.chosen else {}

    def hardest(self) -> np.ndarray:
        """The prompts of stage 2, int32, in order."""
        size = self.prompts.size
        count = math.ceil(self.share * size)
        rate = np.nan_to_num(self.history.pass_rate, nan=-1.0).astype(np.float64)
        rate[self.history.rejected] = 2.0
        rate += 1e-9 * stream(self.prompts.seed, 5, self.chosen).random(size)  # less than between two pass rates
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
