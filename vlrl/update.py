"""Scored groups -> new weights: micro-batches, accumulation, clipping, the optimizer step.

What is not needed is not computed: with one optimizer step per batch of rollouts the old log-probabilities are the
current ones, so there is no old-logprob pass; without KL there is no reference pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vlrl import dist
from vlrl.algo.loss import LOSSES, LossInputs, PolicyTerm, objective
from vlrl.balance import optimizer_steps
from vlrl.errors import TrainingError
from vlrl.families import Part
from vlrl.metrics import phase
from vlrl.packing import Batch, make_batch, pieces_of, plan, with_idle
from vlrl.plugins import resolve
from vlrl.policy import Policy
from vlrl.settings import Config, TrainSettings
from vlrl.types import Group, Rollout

PerToken = dict[str, list[np.ndarray | None]]
"""trainer_logprobs, entropies, ratio, clipped: one [T] array per rollout, in group order."""

_LEAST_SCALE = 1.0
"""Loss scale at which an overflow ends the run: below it float16 is no better than without scaling."""


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The rollouts of one optimizer step on this process, packed. R rollouts."""

    rollouts: Sequence[Rollout]
    numbers: Sequence[int]
    """[R] place of each among all rollouts of the update."""
    batches: Sequence[Batch]
    masks: Sequence[np.ndarray]
    """[R][T] bool, trained tokens."""
    weights: Sequence[float]
    """[R] of the samples."""
    total_tokens: float
    total_sequences: float
    old: list[torch.Tensor] = field(default_factory=list)
    """[batch][N] old log-probabilities; empty when they are the current ones."""
    reference: list[torch.Tensor] = field(default_factory=list)
    """[batch][N]; empty without KL."""


def update(policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[Group], config: Config,
           step: int) -> tuple[dict[str, float], PerToken]:
    """Trains on credited groups and returns step metrics and per-token arrays.

    rollout.updates passes over rollout.minibatches optimizer steps each. Raises NonFinite before a step that would
    write NaN into the weights. In float16 a step whose gradients overflow is skipped and the loss scale halved:
    metrics `skipped` (optimizer steps) and `loss_scale`.
    """
    # dropout is keyed by the step, so a resumed run draws the same
    torch.manual_seed(np.random.SeedSequence([config.seed, 3, step, dist.rank()]).generate_state(1)[0])
    several = config.rollout.updates * config.rollout.minibatches > 1
    with phase("pack"):
        parts = [_minibatch(policy, part, config) for part in _split(groups, config.rollout.minibatches)]
    with phase("reference"):
        for part in parts:
            _no_grad_passes(policy, part, config, several)
    meter = _Meter(sum(len(p.rollouts) for p in parts))
    term = resolve("algo.loss", config.algo.loss, LOSSES)
    rate = lr_at(step, config.steps, config.train)
    for _ in range(config.rollout.updates):
        for part in parts:
            if part.total_tokens:  # none on any process: there is nothing to learn from
                _accumulate(policy, part, term, config, meter)
                with phase("optimizer"):
                    _apply(policy, optimizer, rate, config, step, meter)
        meter.passes += 1
    stats = meter.summary(config, rate)
    if policy.scaler.is_enabled():
        stats |= {"loss_scale": policy.scaler.get_scale(), "skipped": float(meter.skipped)}
    return stats, meter.per_token


def make_optimizer(policy: Policy, config: Config) -> torch.optim.AdamW:
    """AdamW over what learns; one group per part of the model and per weight decay (matrices only).

    The fused kernel would make its state in a step that a loss scaler skips, so it is used without one.
    """
    groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in policy.trainable():
        groups.setdefault((policy.family.part_of(name), parameter.ndim >= 2), []).append(parameter)
    settings = config.train
    return torch.optim.AdamW(
        [{"params": params, "lr": settings.lr, "ratio": settings.part_lr.get(part, settings.lr) / settings.lr,
          "weight_decay": settings.weight_decay if matrix else 0.0} for (part, matrix), params in groups.items()],
        lr=settings.lr, betas=settings.betas, fused=not policy.scaler.is_enabled())


def lr_at(step: int, steps: int, settings: TrainSettings) -> float:
    """The learning rate of a step (0-based) of `steps`: warm-up from 0, then constant, linear or cosine."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    share = (step - warm) / max(steps - warm, 1)
    fall = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[settings.schedule]
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * fall)


class NonFinite(TrainingError):
    """Loss or gradient is NaN or infinite; the weights were not touched."""


_Numbered = tuple[int, Group, Rollout]
"""A rollout with its group and its place among all rollouts of the update."""


def _split(groups: Sequence[Group], count: int) -> list[list[_Numbered]]:
    """The rollouts of each optimizer step; it may have none on a process with few groups."""
    steps = optimizer_steps([g.id for g in groups], count)
    rollouts = [(step, g, r) for step, g in zip(steps, groups, strict=True) for r in g.rollouts]
    return [[(i, g, r) for i, (step, g, r) in enumerate(rollouts) if step == n] for n in range(count)]


def _minibatch(policy: Policy, part: Sequence[_Numbered], config: Config) -> Minibatch:
    rollouts = [r for _, _, r in part]
    drop = config.algo.mask_truncated
    masks = [r.completion.loss_mask & (not (drop and r.completion.truncated)) for r in rollouts]
    limit, layout = config.train.tokens_per_batch, policy.layout(config.train.packing)
    pieces = pieces_of([r.train_prompt or g.prompt for _, g, r in part], [r.completion.tokens for r in rollouts], limit)
    planned = plan(pieces, limit, layout, policy.cost)
    if policy.idle is not None:
        planned = with_idle(planned, max(dist.gather(len(planned))), policy.idle)
    batches = [make_batch(members, layout, config.train.attention) for members in planned]
    tokens, sequences = dist.total(float(sum(m.sum() for m in masks)), float(sum(m.any() for m in masks)))
    return Minibatch(rollouts, [i for i, _, _ in part], batches, masks, [g.sample.weight for _, g, _ in part],
                     tokens, sequences)


def _no_grad_passes(policy: Policy, part: Minibatch, config: Config, several: bool) -> None:
    """Fills in old and reference log-probabilities where the objective needs them: one loop over the batches, which
    go to the device once and, where the vision tower is the same in both passes, through it once."""
    temperature, kl = config.rollout.temperature, config.algo.kl_coef > 0
    if not (several or kl):
        return
    with torch.no_grad(), policy.evaluating():
        for batch in part.batches:
            batch = batch.to(policy.device)
            with policy.sharing_features() if several and kl else contextlib.nullcontext():
                if several:
                    part.old.append(policy.logprobs(batch, temperature).logprobs)
                if kl:
                    part.reference.append(policy.reference_logprobs(batch, temperature))


def _accumulate(policy: Policy, part: Minibatch, term: PolicyTerm, config: Config, meter: _Meter) -> None:
    """Forward and backward of every micro-batch; gradients add up."""
    for b, batch in enumerate(part.batches):
        with phase("forward"):
            stats = policy.logprobs(batch, config.rollout.temperature)
        order = torch.unique_consecutive(batch.rollout_id).tolist()
        inputs = _loss_inputs(part, b, order, stats.logprobs, policy.device, config)
        loss, sums = objective(inputs, term, config.algo.aggregation, config.algo.kl_coef)
        with phase("backward"):
            policy.scaler.scale(loss).backward()
        meter.add(part, order, loss.detach(), sums, inputs, stats.entropy)


def _loss_inputs(part: Minibatch, b: int, order: Sequence[int], logprobs: torch.Tensor, device: torch.device,
                 config: Config) -> LossInputs:
    def flat(arrays: Sequence[Any]) -> torch.Tensor:
        with np.errstate(over="ignore"):  # a huge reward becomes infinite, and is caught before the optimizer step
            return torch.from_numpy(_joined(arrays).astype(np.float32)).to(device)

    lengths = [len(part.rollouts[r].completion.tokens) for r in order]
    return LossInputs(
        logprobs=logprobs, old_logprobs=part.old[b] if part.old else logprobs.detach(),
        advantages=flat([np.broadcast_to(part.rollouts[r].advantage, n) for r, n in zip(order, lengths, strict=True)]),
        mask=flat([part.masks[r] for r in order]),
        weights=flat([np.full(n, part.weights[r]) for r, n in zip(order, lengths, strict=True)]),
        rollout_id=part.batches[b].rollout_id.to(device),
        lengths=flat([[m.sum() for m in part.masks]]),
        total_tokens=part.total_tokens, total_sequences=part.total_sequences,
        max_length=config.rollout.max_new_tokens, clip_low=config.algo.clip_low, clip_high=config.algo.clip_high,
        reference_logprobs=part.reference[b] if part.reference else None)


def _joined(arrays: Sequence[Any]) -> np.ndarray:
    """Side by side; an idle micro-batch has none."""
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _apply(policy: Policy, optimizer: torch.optim.Optimizer, rate: float, config: Config, step: int,
           meter: _Meter) -> None:
    """Sums gradients over processes, clips, steps; after an overflow of float16 only the loss scale changes."""
    parameters, scaler = [p for _, p in policy.trainable()], policy.scaler
    dist.sum_gradients(parameters)
    scaler.unscale_(optimizer)  # of the sum, so that every process sees the same overflow and keeps the same scale
    norm = float(dist.whole(torch.nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm)))
    overflow = not math.isfinite(norm)
    problem = _fatal(policy, meter, norm, config) if overflow else ""
    if problem:
        optimizer.zero_grad(set_to_none=True)
        raise NonFinite(f"step {step}: {problem}")
    for group in optimizer.param_groups:
        group["lr"] = rate * group["ratio"]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if overflow:
        meter.skipped += 1
    else:
        meter.grad_norm = norm


def _fatal(policy: Policy, meter: _Meter, norm: float, config: Config) -> str:
    """Why a gradient that is not finite ends the run; "" when a lower loss scale may mend it. Called on all ranks."""
    finite_loss = all(dist.gather(math.isfinite(meter.sums.get("loss", 0.0))))
    kept, remedy = "the weights were left as they were", "Set model.dtype=bfloat16, or float32 on a GPU without it."
    if not policy.scaler.is_enabled():
        return (f"the gradient norm is {norm}; {kept}. Often the learning rate (train.lr={config.train.lr}) is too "
                "high, or a reward is huge.")
    if not finite_loss:
        return (f"the loss is not finite under model.dtype=float16; {kept}. Activations above 65,504 overflow in "
                f"float16, or a reward is huge. {remedy}")
    if policy.scaler.get_scale() <= _LEAST_SCALE:
        return (f"gradients overflow under model.dtype=float16 even at a loss scale of {policy.scaler.get_scale():g}; "
                f"{kept}. {remedy}")
    return ""


class _Meter:
    """Sums over trained tokens, and per-token arrays for the store."""

    def __init__(self, rollouts: int):
        self.sums: dict[str, float] = {}
        self.grad_norm, self.passes, self.skipped = 0.0, 0, 0
        self.per_token: PerToken = {k: [None] * rollouts for k in
                                    ("trainer_logprobs", "entropies", "ratio", "clipped")}

    def add(self, part: Minibatch, order: Sequence[int], loss: torch.Tensor, sums: dict[str, Any], x: LossInputs,
            entropy: torch.Tensor) -> None:
        on_first_pass = self.passes == 0
        ratio = torch.exp((x.logprobs.detach() - x.old_logprobs).clamp(-20, 20))
        clipped = ((ratio > 1 + x.clip_high) & (x.advantages > 0)) | ((ratio < 1 - x.clip_low) & (x.advantages < 0))
        now = {"loss": loss, "tokens": x.mask.sum(), **sums}
        if on_first_pass:
            sampled = torch.from_numpy(_joined([part.rollouts[r].completion.logprobs for r in order]))
            sampled = sampled.to(x.mask.device)
            same = torch.from_numpy(_joined([np.full(len(part.rollouts[r].completion.tokens),
                                                     part.rollouts[r].train_prompt is None) for r in order]))
            same = same.to(x.mask.device) * x.mask
            gap = (x.old_logprobs - sampled).clamp(-20, 20)
            now |= {"entropy": (entropy * x.mask).sum(), "mismatch/tokens": same.sum(),
                    "mismatch/kl": ((gap.exp() - gap - 1) * same).sum()}
        for key, value in zip(now, torch.stack([v.float() for v in now.values()]).tolist(), strict=True):
            self.sums[key] = self.sums.get(key, 0.0) + value
        lengths = [len(part.rollouts[r].completion.tokens) for r in order]
        fresh = {"ratio": ratio, "clipped": clipped}
        if on_first_pass:
            fresh |= {"trainer_logprobs": x.old_logprobs, "entropies": entropy}
        for key, values in fresh.items():
            for r, piece in zip(order, values.detach().cpu().split(lengths), strict=True):
                self.per_token[key][part.numbers[r]] = piece.numpy()

    def summary(self, config: Config, rate: float) -> dict[str, float]:
        """Step metrics over all processes."""
        everyone = dist.gather(self.sums)
        total = {k: sum(s.get(k, 0.0) for s in everyone) for k in sorted({k for s in everyone for k in s})}
        tokens = max(total.get("tokens", 0.0), 1.0)
        first_pass = max(tokens / max(self.passes, 1), 1.0)
        steps = self.passes * config.rollout.minibatches
        return {
            "loss": total.get("loss", 0.0) / max(steps, 1), "grad_norm": self.grad_norm, "lr": rate,
            "kl": total.get("kl", 0.0) / tokens, "clip_frac": total.get("clip_frac", 0.0) / tokens,
            "entropy": total.get("entropy", 0.0) / first_pass,
            "mismatch/kl": total.get("mismatch/kl", 0.0) / max(total.get("mismatch/tokens", 0.0), 1.0)}
