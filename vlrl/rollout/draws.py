"""Encodes drawn prompts for the engine, those of the next step ahead of time, and rejects unusable prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from vlrl.curriculum import Draw
from vlrl.distributed import comm
from vlrl.engine.base import reset_sample, reset_sample_again
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
    """Counts rejected prompts, over all processes."""

    drawn: int = 0
    count: int = 0
    in_a_row: int = 0  # number of draws since a prompt was last accepted
    fresh: list[str] = field(default_factory=list)  # why prompts were rejected since the last call of `take`

    def note(self, reasons: Sequence[str], drawn: int, accepted: bool, limit: float, samples: int) -> None:
        """Counts `drawn` further drawn prompts. reasons: why some of these were rejected, one reason per rejected
        prompt. accepted: whether at least one was accepted. samples: number of samples in the split. Raises
        TrainingError if the rejected share of all drawn prompts exceeds `limit`, or if the last `samples` prompts
        were all rejected."""
        self.drawn, self.count = self.drawn + drawn, self.count + len(reasons)
        self.in_a_row = 0 if accepted else self.in_a_row + drawn
        self.fresh += reasons
        if reasons and (self.count > max(8, limit * self.drawn) or self.in_a_row >= samples):
            raise TrainingError(f"{self.count} of {self.drawn} drawn prompts were rejected "
                                f"(limits.rejected={limit}{', none accepted' if self.in_a_row >= samples else ''}). "
                                f"First reason in this step: {reasons[0]}")

    def take(self) -> list[str]:
        """Returns the reasons for prompts rejected since the last call."""
        out, self.fresh = self.fresh, []
        return out


@dataclass(eq=False)
class DrawBatch:
    """Drawn prompts that are encoded together, and whose completions are generated together."""

    draws: Mapping[int, Draw]  # draws of all processes by group number, including draws of carried-over groups
    fresh: int  # number of new draws
    carried_over: Mapping[int, PartialGroup] = field(default_factory=dict)
    """Unfinished groups of earlier steps, by group number."""
    accepted: list[AcceptedDraw] = field(default_factory=list)  # the draws of this process whose prompts were encoded
    refused: list[str] = field(default_factory=list)  # why prompts of this process were rejected
    encoded: bool = False


class DrawEncoder:
    """Makes a sample and an encoded prompt from each Draw (a drawn prompt). If the policy samples the completions
    (`generates`), the task's variants of the sample are encoded too."""

    def __init__(self, generator: RolloutGenerator, samples: Sequence[Sample], prefetch: Prefetcher, generates: bool):
        self.generator, self.samples, self.prefetch = generator, samples, prefetch
        self.task, self.engine = generator.task, generator.engine
        self.varies = generates and has_variants(self.task)
        self._opened: dict[Draw, Sample] = {}
        """Samples of this step and the next, by draw. They are cached, because variants need them too, and making a
        sample may run code."""

    def encode(self, drawn: DrawBatch, step: int) -> None:
        """Encodes this process's share of the batch `drawn`. Adds usable draws to `drawn.accepted`, and for each
        unusable draw the reason why it is unusable to `drawn.refused`."""
        mine = list(drawn.draws.items())[comm.rank()::comm.world()]

        def encode() -> None:
            self.prefetch.begin(self._wanted([draw for _, draw in mine], step))
            for number, draw in mine:
                try:
                    accepted = self._accepted(number, draw, step)
                    drawn.accepted.append(replace(accepted, carried_over=drawn.carried_over.get(number)))
                except DataError as error:
                    if not isinstance(error, PromptTooLong) and not self.generator.config.data.quarantine:
                        raise
                    drawn.refused.append(str(error))

        comm.together(encode)
        drawn.encoded = True

    def ahead(self, draws: Sequence[Draw], step: int) -> None:
        """Starts encoding these draws of a later step. Drops encoding work that was begun for other draws."""
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
            self._opened[draw] = reset_sample(self.engine, self.task, sample, draw.index, draw.visit)
        return self._opened[draw]

    def _variants(self, draw: Draw, sample: Sample, step: int) -> list[tuple[Variant, Hashable, Callable[[], Sample]]]:
        if not self.varies:
            return []
        variants = variants_of(self.task.of(sample), sample, self.generator.group_size(draw), step)
        return [(v, (draw, step, v.name),
                 partial(lambda v: reset_sample_again(self.engine, with_media_of(sample, v)), v)) for v in variants]

    def _wanted(self, draws: Sequence[Draw], step: int) -> dict[Hashable, Callable[[], Sample]]:
        wanted: dict[Hashable, Callable[[], Sample]] = {}
        for draw in draws:
            wanted[draw] = partial(self._sample, draw)
            if self.varies and self.prefetch.workers:
                with contextlib.suppress(Exception):  # raised again by `encode`
                    wanted |= {key: show for _, key, show in self._variants(draw, self._sample(draw), step)}
        return wanted


def variant_metrics(rewards: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Metrics for each variant (modified samples): mean reward of the variant's completions, and their share of all
    sampled completions. rewards: {name of the variant: rewards}; "" = unmodified samples."""
    out: dict[str, float] = {}
    count = sum(map(len, rewards.values()))
    for name in sorted(rewards.keys() - {""}):
        known = [r for r in rewards[name] if r is not None]
        out |= {f"variants/{name}/reward": float(np.mean(known)) if known else float("nan"),
                f"variants/{name}/share": len(rewards[name]) / count}
    return out
