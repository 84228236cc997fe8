"""The loss on answers of held-out samples: metric `loss` in the evaluations of a supervised run."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from vlrl.curriculum import Draw
from vlrl.distributed import comm
from vlrl.engine.base import reset_sample
from vlrl.errors import DataError
from vlrl.evaluation.stats import mean_ci
from vlrl.models.oom import each_batch
from vlrl.models.processing import PromptTooLong
from vlrl.rollout.demonstrations import demonstrated, has_demonstration
from vlrl.rollout.generate import AcceptedDraw
from vlrl.task.interface import first_samples
from vlrl.training.build import Parts
from vlrl.training.minibatch import make_minibatch, split
from vlrl.types import Group, Sample

_CHUNK = 64
"""Number of answers in one pass of the model, over all ranks."""


def heldout_loss(parts: Parts, name: str, step: int) -> dict[str, float]:
    """Returns {"loss", "loss/ci95_low", "loss/ci95_high"}: the loss of the split `name` with its 95 % interval. The
    loss of a sample is the mean -log p per token of its answer in the data set; `loss` is the mean over samples. {}
    if no sample has an answer. Called on every rank."""
    samples = list(enumerate(first_samples(parts.task, name, parts.config.eval.samples)))
    known: dict[str, float] = {}
    with torch.no_grad(), parts.policy.evaluating():
        for start in range(0, len(samples), _CHUNK):
            mine = samples[start:start + _CHUNK][comm.rank()::comm.world()]
            groups = comm.together(lambda mine=mine: _answer_groups(parts, name, mine, step))
            known |= {id: value for part in comm.gather(_losses(parts, groups)) for id, value in part.items()}
    if not known:
        return {}
    mean, low, high = mean_ci([known[id] for id in sorted(known)])
    return {"loss": mean, "loss/ci95_low": low, "loss/ci95_high": high}


def _answer_groups(parts: Parts, name: str, samples: Sequence[tuple[int, Sample]], step: int) -> list[Group]:
    """Returns one group per sample, whose only completion is the sample's answer in the data set. Samples without an
    answer and samples with an unusable prompt are left out. name: the split."""
    accepted, stream = [], zlib.crc32(name.encode())
    for number, sample in samples:
        try:
            sample = reset_sample(parts.engine, parts.task, sample, stream, number)
            if has_demonstration(parts.task, sample):
                prompt = parts.encode(parts.task, sample)
                accepted.append(AcceptedDraw(number, Draw(number, 0), sample, prompt))
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not parts.config.data.quarantine:
                raise
    return demonstrated(parts.task, parts.encode, parts.engine, parts.config, accepted, step, name)


def _losses(parts: Parts, groups: Sequence[Group]) -> dict[str, float]:
    (numbered,) = split(groups, 1)
    part = make_minibatch(parts.policy, numbered, parts.config)
    sums, counts = np.zeros(len(groups)), np.zeros(len(groups))

    def work(b: int) -> None:
        micro = part.batches[b]
        logprobs = parts.policy.logprobs(micro.batch, parts.algorithm.temperature).logprobs.double().cpu().numpy()
        rows = [part.rollouts[r] for r in micro.order]
        masks = np.concatenate([np.zeros(0, bool), *(t.mask for t in rows)])
        units = np.concatenate([np.zeros(0, int), *(np.full(len(t.mask), t.unit) for t in rows)])
        np.add.at(sums, units, -logprobs * masks)
        np.add.at(counts, units, masks)

    each_batch(parts.policy, part.batches, work, part.halve)
    return {g.id: float(total / count) for g, total, count in zip(groups, sums, counts, strict=True) if count}
