"""Drawn prompts on the way to the engine: encoded, those of the next step too, and rejected where they cannot be
used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from vlrl.curriculum import Draw
from vlrl.distributed import comm
from vlrl.engine.base import opened, reopened
from vlrl.errors import DataError, TrainingError
from vlrl.models.processing import PromptTooLong
from vlrl.monitoring.metrics import phase
from vlrl.rollout.generate import AcceptedDraw, RolloutGenerator
from vlrl.rollout.partial import PartialGroup
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import generated
from vlrl.task.variants import has_variants, same_pixels, variants_of, with_media_of
from vlrl.types import Sample, Variant


@dataclass
class RejectionCount:
    """Prompts left out, over all processes."""

    drawn: int = 0
    count: int = 0
    in_a_row: int = 0
    """Draws since a prompt was last accepted."""
    fresh: list[str] = field(default_factory=list)
    """Why, for each one since `take`."""

    def note(self, reasons: Sequence[str], drawn: int, accepted: bool, limit: float, samples: int) -> None:
        """Takes what became of some draws; TrainingError when more than `limit` of all prompts are rejected, or when
        none of the split's `samples` can be used."""
        self.drawn, self.count = self.drawn + drawn, self.count + len(reasons)
        self.in_a_row = 0 if accepted else self.in_a_row + drawn
        self.fresh += reasons
        if reasons and (self.count > max(8, limit * self.drawn) or self.in_a_row >= samples):
            raise TrainingError(f"{self.count} of {self.drawn} drawn prompts were rejected (limits.rejected={limit}"
                                f"{', none accepted' if self.in_a_row >= samples else ''}). "
                                f"First of this step: {reasons[0]}")

    def take(self) -> list[str]:
        """Returns the reasons since the last call."""
        out, self.fresh = self.fresh, []
        return out


@dataclass(eq=False)
class DrawBatch:
    """Draws that are answered together: drawn, then encoded, then answered."""

    draws: Mapping[int, Draw]
    """Those of all processes by number, groups that go on included."""
    fresh: int
    """How many of them are new."""
    carried_over: Mapping[int, PartialGroup] = field(default_factory=dict)
    """Groups by number that go on."""
    accepted: list[AcceptedDraw] = field(default_factory=list)
    """The accepted draws of this process, encoded."""
    refused: list[str] = field(default_factory=list)
    """Why others of this process were rejected."""
    encoded: bool = False


class DrawEncoder:
    """Makes samples and prompts of draws, with variants where the answers are drawn from the policy and the task has
    some."""

    def __init__(self, answering: RolloutGenerator, samples: Sequence[Sample], prefetch: Prefetcher, generates: bool):
        self.answering, self.samples, self.prefetch = answering, samples, prefetch
        self.task, self.engine = answering.task, answering.engine
        self.varies = generates and has_variants(self.task)
        self._opened: dict[Draw, Sample] = {}
        """Samples of this step and the next; some are drawn by code, and a variant needs its sample too."""

    def encode(self, drawn: DrawBatch, step: int) -> None:
        """Encodes this process's share of some draws, and notes there which are accepted."""
        mine = list(drawn.draws.items())[comm.rank()::comm.world()]

        def encode() -> None:
            self.prefetch.begin(self._wanted([draw for _, draw in mine], step))
            for number, draw in mine:
                try:
                    accepted = self._accepted(number, draw, step)
                    drawn.accepted.append(replace(accepted, carried_over=drawn.carried_over.get(number)))
                except DataError as error:
                    if not isinstance(error, PromptTooLong) and not self.answering.config.data.quarantine:
                        raise
                    drawn.refused.append(str(error))

        comm.together(encode)
        drawn.encoded = True

    def ahead(self, draws: Sequence[Draw], step: int) -> None:
        """Starts on draws of a step to come; what was begun for others is dropped."""
        wanted = self._wanted(draws, step)
        self.prefetch.keep(wanted)
        self.prefetch.begin(wanted)
        self._opened = {draw: self._opened[draw] for draw in draws if draw in self._opened}

    def _accepted(self, number: int, draw: Draw, step: int) -> AcceptedDraw:
        with phase("encode"):
            sample, prompt = self.prefetch.take(draw, partial(self._sample, draw))
            variants = [(v, *self.prefetch.take(key, show)) for v, key, show in self._variants(draw, sample, step)]
            variants = [one for one in variants if one[0].trained or not same_pixels(one[2], prompt)]
        return AcceptedDraw(number, draw, sample, prompt, tuple(variants))

    def _sample(self, draw: Draw) -> Sample:
        if draw not in self._opened:
            sample = generated(self.task, draw.index, dict(draw.knobs)) if draw.knobs else self.samples[draw.index]
            task = self.task.of(sample)
            more = {name: value for name, value in draw.fields if name in task.stage_fields}
            more |= {} if draw.weight == 1 else {"weight": sample.weight * draw.weight}
            sample = replace(sample, prompt=task.template(sample, draw.visit), row={**sample.row, **more})
            self._opened[draw] = opened(self.engine, self.task, sample, draw.index, draw.visit)
        return self._opened[draw]

    def _variants(self, draw: Draw, sample: Sample,
                  step: int) -> list[tuple[Variant, Hashable, Callable[[], Sample]]]:
        """Returns what variants of a draw show, each with its key."""
        if not self.varies:
            return []
        variants = variants_of(self.task.of(sample), sample, self.answering.group_size(draw), step)
        return [(v, (draw, step, v.name), partial(self._as_variant, sample, v)) for v in variants]

    def _as_variant(self, sample: Sample, variant: Variant) -> Sample:
        return reopened(self.engine, with_media_of(sample, variant))

    def _wanted(self, draws: Sequence[Draw], step: int) -> dict[Hashable, Callable[[], Sample]]:
        """Returns what is to be encoded for draws of a step, by key: the samples, and what their variants show."""
        wanted: dict[Hashable, Callable[[], Sample]] = {}
        for draw in draws:
            wanted[draw] = partial(self._sample, draw)
            if self.varies and self.prefetch.workers:
                with contextlib.suppress(Exception):  # `encode` meets it again, where it belongs
                    wanted |= {key: show for _, key, show in self._variants(draw, self._sample(draw), step)}
        return wanted


def variant_metrics(rewards: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """The mean reward of each variant's answers, and their share of all answers that were drawn; of rewards by variant,
    "" = answers to samples as they are."""
    out: dict[str, float] = {}
    count = sum(map(len, rewards.values()))
    for name in sorted(rewards.keys() - {""}):
        known = [r for r in rewards[name] if r is not None]
        out |= {f"variants/{name}/reward": float(np.mean(known)) if known else float("nan"),
                f"variants/{name}/share": len(rewards[name]) / count}
    return out
