"""Scored groups -> new weights: micro-batches, accumulation, clipping, the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlrl import dist
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import LossInputs, Metrics
from vlrl.algo.statistics import alternatives
from vlrl.errors import TrainingError
from vlrl.families import Part
from vlrl.metrics import phase
from vlrl.passes import Minibatch, loss_inputs, make_minibatch, no_grad_passes, order_of, prepare, split
from vlrl.policy import Policy
from vlrl.settings import Config, TrainSettings
from vlrl.types import Group

PerToken = dict[str, list[np.ndarray | None]]
"""trainer_logprobs, entropies, ratio, clipped, and with store.alternatives top_ids and top_logprobs [T, k]: one array
per rollout, in group order."""

_LEAST_SCALE = 1.0
"""Loss scale at which an overflow ends the run: below it float16 is no better than without scaling."""


def update(policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[Group], config: Config, step: int,
           algorithm: Algorithm | None = None) -> tuple[dict[str, float], PerToken]:
    """Trains on credited groups and returns step metrics and per-token arrays.

    rollout.updates passes over rollout.minibatches optimizer steps each. `algorithm` is that of the run; without one
    it is made of the config, and what it learns from step to step is lost. Raises NonFinite before a step that would
    write NaN into the weights. In float16 a step whose gradients overflow is skipped and the loss scale halved:
    metrics `skipped` (optimizer steps) and `loss_scale`.
    """
    policy.scatter()
    # dropout is keyed by the step, so a resumed run draws the same
    torch.manual_seed(np.random.SeedSequence([config.seed, 3, step, dist.rank()]).generate_state(1)[0])
    algorithm = algorithm or Algorithm(config)
    several = config.rollout.updates * config.rollout.minibatches > 1
    with phase("pack"):
        texts = "texts" in algorithm.objective.requires
        parts = [make_minibatch(policy, part, config, texts) for part in split(groups, config.rollout.minibatches)]
    with phase("reference"):
        for part in parts:
            no_grad_passes(policy, part, algorithm, several, alternatives(config.store.alternatives))
    meter = _Meter(sum(len(p.rollouts) for p in parts), config.store.alternatives)
    rate = lr_at(step, config.steps, config.train)
    for _ in range(config.rollout.updates):
        for part in parts:
            if part.total_tokens:  # none on any process: there is nothing to learn from
                with phase("reference"):
                    prepare(policy, part, config, algorithm, step)
                _accumulate(policy, part, algorithm, config, step, meter)
                with phase("optimizer"):
                    _apply(policy, optimizer, rate, config, step, meter)
                if algorithm.watches_entropy:
                    algorithm.after_optimizer_step(dist.total(meter.entropy)[0] / part.total_tokens)
        meter.passes, meter.also = meter.passes + 1, {}
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


def _accumulate(policy: Policy, part: Minibatch, algorithm: Algorithm, config: Config, step: int,
                meter: _Meter) -> None:
    """Forward and backward of every micro-batch; gradients add up."""
    meter.entropy = 0.0
    for b, batch in enumerate(part.batches):
        with phase("forward"):
            more = algorithm.statistics if part.old else {**algorithm.statistics, **meter.also}
            stats = policy.logprobs(batch, algorithm.temperature, more=more)
        inputs = loss_inputs(part, b, stats, policy.device, config, algorithm, step)
        loss, metrics = algorithm.objective(inputs, algorithm.kl.value)
        with phase("backward"):
            policy.scaler.scale(loss).backward()
        meter.add(part, order_of(part, b), loss.detach(), metrics, inputs)


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

    def __init__(self, rollouts: int, k: int):
        self.sums: dict[str, float] = {}
        self.entropy = 0.0
        """Summed over this process's trained tokens of the optimizer step."""
        self.widest = 0.0
        """Largest difference between sampler and trainer of a token's log-probability."""
        self.grad_norm, self.passes, self.skipped = 0.0, 0, 0
        self.also = alternatives(k)
        """Statistics for the store, at the weights that sampled: of the old pass, or else of the first one."""
        names = ("trainer_logprobs", "entropies", "ratio", "clipped", *self.also)
        self.per_token: PerToken = {name: [None] * rollouts for name in names}

    def add(self, part: Minibatch, order: Sequence[int], loss: torch.Tensor, metrics: Metrics, x: LossInputs) -> None:
        """Takes one micro-batch of the rollouts `order`."""
        assert x.entropy is not None and x.sampler_logprobs is not None
        on_first_pass = self.passes == 0
        said = {k: metrics[k] for k in ("ratio", "clipped") if k in metrics}
        fresh = {"ratio": torch.exp((x.logprobs.detach() - x.old_logprobs).clamp(-20, 20)),
                 "clipped": torch.zeros_like(x.mask, dtype=torch.bool), **said}
        now = {"loss": loss, "tokens": x.mask.sum(), "clip_frac": (fresh["clipped"] * x.mask).sum(),
               "entropy now": (x.entropy * x.mask).sum(), **{k: v for k, v in metrics.items() if k not in said}}
        if on_first_pass:
            # an engine may not know a token's log-probability (NaN)
            same = _under_the_same_prompt(part, order).to(x.mask.device) * x.mask * x.sampler_logprobs.isfinite()
            gap = torch.where(same > 0, x.old_logprobs - x.sampler_logprobs, 0).clamp(-20, 20)
            now |= {"entropy": now["entropy now"], "mismatch/tokens": same.sum(),
                    "mismatch/kl": (gap.expm1() - gap).clamp_min(0).sum(), "mismatch/gap_mean": gap.abs().sum(),
                    "widest": gap.abs().amax() if gap.numel() else gap.sum()}
            fresh |= {"trainer_logprobs": x.old_logprobs, "entropies": x.entropy,
                      **{name: (x.old_stats if part.old else x.stats)[name] for name in self.also}}
        values = dict(zip(now, torch.stack([v.detach().float() for v in now.values()]).tolist(), strict=True))
        self.widest = max(self.widest, values.pop("widest", 0.0))
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.entropy += values["entropy now"]
        self._keep(part, order, fresh)

    def _keep(self, part: Minibatch, order: Sequence[int], fresh: Mapping[str, torch.Tensor]) -> None:
        lengths = [len(part.rollouts[r].completion.tokens) for r in order]
        for key, values in fresh.items():
            for r, piece in zip(order, values.detach().cpu().split(lengths), strict=True):
                self.per_token[key][part.numbers[r]] = piece.numpy()

    def summary(self, config: Config, rate: float) -> dict[str, float]:
        """Step metrics over all processes."""
        everyone, widest = zip(*dist.gather((self.sums, self.widest)), strict=True)
        total = {k: sum(s.get(k, 0.0) for s in everyone) for k in sorted({k for s in everyone for k in s})}
        tokens = max(total.pop("tokens", 0.0), 1.0)
        first_pass = max(tokens / max(self.passes, 1), 1.0)
        steps = self.passes * config.rollout.minibatches
        total.pop("entropy now", None)
        loss, entropy, known = (total.pop(k, 0.0) for k in ("loss", "entropy", "mismatch/tokens"))
        return {
            "loss": loss / max(steps, 1), "grad_norm": self.grad_norm, "lr": rate, "kl": 0.0, "clip_frac": 0.0,
            "entropy": entropy / first_pass,
            **{k: total.pop(k, 0.0) / max(known, 1.0) for k in ("mismatch/kl", "mismatch/gap_mean")},
            "mismatch/gap_max": max(widest),
            **{k: v / tokens for k, v in total.items()}}


def _under_the_same_prompt(part: Minibatch, order: Sequence[int]) -> torch.Tensor:
    """[N] bool: tokens trained under the prompt that they were sampled under."""
    rollouts = [part.rollouts[r] for r in order]
    same = [np.full(len(r.completion.tokens), r.train_prompt is None) for r in rollouts]
    return torch.from_numpy(np.concatenate(same) if same else np.zeros(0, bool))
