"""The loss of demonstrations, computed in micro-batches separate from the objective's, or in a separate optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Objectives
from vlrl.algo.statistics import statistics
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.methods.demonstrations.mixes import DemonstrationBatch, interleaves
from vlrl.models.policy import Policy
from vlrl.training.minibatch import Minibatch, make_minibatch, split
from vlrl.training.separate_pass import accumulate_separately
from vlrl.types import Group


@dataclass(eq=False)
class DemonstrationPass:
    """Computes the loss of the demonstrations of one optimizer step and its gradient; a Pass of the training loop."""

    policy: Policy
    algorithm: Objectives
    mix: Any
    """The instance of the class that algo.demonstrations.mix names."""
    part: Minibatch
    share: float
    """Weight of the demonstrations' loss."""
    loss: float = 0.0
    """This process's share of the loss in the last epoch, before it is multiplied by `share`."""
    factor: float = 0.0
    """Sum of the token weights `mix.factor` on this process; 0 if the mix has none."""
    norm: float = 0.0
    """Norm of the demonstrations' gradient (times `share`) in the last epoch, over all processes."""
    norm_rl: float = 0.0
    active = True
    separate_gradient = True

    def begin(self) -> None:
        self.loss = self.factor = 0.0

    def work(self, b: int) -> None:
        micro, mix = self.part.batches[b], self.mix
        more = statistics(["stat:entropy"]) if interleaves(mix) else {}
        stats = self.policy.logprobs(micro.batch, self.algorithm.temperature, more=more)
        given = replace(demonstration_batch(self.part, micro.order, stats.logprobs), entropy=stats.more.get("entropy"))
        loss = mix.loss(given)
        self.policy.backward(loss * self.share)
        self.loss += float(loss.detach())
        if hasattr(mix, "factor"):
            self.factor += float((mix.factor(given) * given.mask).sum())

    def end(self, norm: float, others: float) -> None:
        self.norm, self.norm_rl = norm, others


def make_passes(policy: Policy, groups: Sequence[Group], algorithm: Objectives, mix: Any,
                step: int) -> list[DemonstrationPass | None]:
    """Packs the demonstrations of each optimizer step. Returns one DemonstrationPass per optimizer step, or None for a
    step in which no process has demonstrations. Called on every process."""
    config = algorithm.config
    count, share = config.rollout.minibatches, mix.shares(step, config.seed)[1]
    if not share:
        return [None] * count
    config = _without_truncation_mask(config)
    parts = [make_minibatch(policy, split(groups[i::count], 1)[0], config) for i in range(count)]
    return [DemonstrationPass(policy, algorithm, mix, part, share) if part.total_tokens else None for part in parts]


def interleave(policy: Policy, groups: Sequence[Group], algorithm: Objectives, mix: Any,
               norm_rl: float) -> dict[str, float]:
    """Takes the supervised optimizer step of an interleaving mix, if any process has demonstrations, and returns its
    metrics. Called on every process, after the gradients of the objective are cleared; `norm_rl` is their norm. The
    weights stay unchanged if the gradient is not finite."""
    config, out = algorithm.config, {"demonstrations/applied": 0.0, **mix.metrics(0)}
    part = make_minibatch(policy, split(groups, 1)[0], _without_truncation_mask(config))
    if not part.total_tokens:
        return out
    shown, weights = DemonstrationPass(policy, algorithm, mix, part, 1.0), [p for _, p in policy.trainable()]
    cuts = accumulate_separately(policy, shown, weights)
    scale = policy.scaler.get_scale() if policy.scaler.is_enabled() else 1.0
    for p in weights:
        if p.grad is not None:
            p.grad /= scale
    torch.nn.utils.clip_grad_norm_([p for p in weights if p.grad is not None], config.train.max_grad_norm)
    optimizer, finite = mix.optimizer(weights), math.isfinite(shown.norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return out | {"demonstrations/applied": float(finite), "demonstrations/loss": comm.total(shown.loss)[0],
                  "demonstrations/grad_norm": shown.norm, "demonstrations/tokens": part.total_tokens,
                  "demonstrations/grad_share": shown.norm / (shown.norm + norm_rl) if shown.norm + norm_rl else 0.0,
                  **({"demonstrations/halved": float(cuts)} if cuts else {})}


def _without_truncation_mask(config: Config) -> Config:
    """The config with algo.mask_truncated=false, because a demonstration is never truncated."""
    return config.model_copy(update={"algo": config.algo.model_copy(update={"mask_truncated": False})})


def demonstration_batch(part: Minibatch, order: Sequence[int], logprobs: torch.Tensor) -> DemonstrationBatch:
    """Makes the DemonstrationBatch of one micro-batch, from its rows `order` of `part` and their log-probabilities."""
    rows = [part.rollouts[r] for r in order]

    def flat(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *values]).astype(np.float32)).to(logprobs.device)

    return DemonstrationBatch(logprobs=logprobs, mask=flat([t.mask for t in rows]), total_tokens=part.total_tokens,
                        weights=flat([np.full(len(t.mask), t.group.sample.weight) for t in rows]))


def step_metrics(shown: Sequence[DemonstrationPass | None], mix: Any, seed: int, step: int) -> dict[str, float]:
    """Metrics of the demonstrations in a step, as means over its optimizer steps. Also reports the last gradient norm,
    divided by its weight, to the mix."""
    known = [s for s in shown if s is not None]
    out = {"demonstrations/share": mix.shares(step, seed)[1], "demonstrations/applied": float(bool(known))}
    out |= mix.metrics(step) if hasattr(mix, "metrics") else {}
    if not known:
        return out
    loss, factor = comm.total(sum(s.loss for s in known), sum(s.factor for s in known))
    tokens = sum(s.part.total_tokens for s in known)
    norm, rl = (float(np.mean(values)) for values in zip(*((s.norm, s.norm_rl) for s in known), strict=True))
    if hasattr(mix, "observe") and math.isfinite(known[-1].norm):
        mix.observe(step, known[-1].norm / known[-1].share)
    return out | {"demonstrations/loss": loss / len(known), "demonstrations/grad_norm": norm,
                  "demonstrations/grad_share": norm / (norm + rl) if norm + rl else 0.0,
                  **({"demonstrations/factor": factor / tokens} if hasattr(mix, "factor") else {}),
                  "demonstrations/tokens": tokens}
