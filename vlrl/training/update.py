"""Updates the weights from scored groups: micro-batches, gradient accumulation, clipping, the optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import LossInputs, Metrics
from vlrl.algo.method import Pass
from vlrl.algo.statistics import alternatives
from vlrl.config.schema import Config, TrainSettings
from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.models.families import Part
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy
from vlrl.models.shards import engine_of
from vlrl.monitoring.metrics import phase
from vlrl.training.minibatch import MicroBatch, Minibatch, loss_inputs, make_minibatch, no_grad_passes, prepare, split
from vlrl.types import Group

PerToken = dict[str, list[np.ndarray | None]]
"""For each name below, a list with the array [T] of each rollout (None if it has none), in the order of the groups.

Names: trainer_logprobs, entropies, ratio, clipped, and with store.alternatives top_ids and top_logprobs [T, k]."""

_log = logging.getLogger(__name__)
_NAMED = 8
"""Largest number of groups that a message names."""
_LEAST_SCALE = 1.0
"""At this loss scale an overflow ends the run, because float16 with a lower scale has no advantage."""


def update(policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[Group], config: Config, step: int,
           algorithm: Algorithm | None = None,
           own_groups: Mapping[str, Sequence[Group]] = MappingProxyType({})) -> tuple[dict[str, float], PerToken]:
    """Trains on groups with advantages; returns (metrics of the step, per-token arrays).

    Makes rollout.updates passes over the groups, with rollout.minibatches optimizer steps each. `algorithm` should be
    the algorithm of the run; if None, an algorithm is made from the config, and its state between steps is lost.
    `own_groups` are the groups of each method on this rank, by the method's section of the config.

    An optimizer step is skipped if its loss or gradient is NaN or infinite, or if gradients overflow in float16, which
    also halves the loss scale (metrics `skipped` and `loss_scale`). Raises NonFinite after more than
    limits.nonfinite_steps consecutive steps with NaN or infinity. A micro-batch that does not fit into memory is halved
    (metric `memory/halved`)."""
    policy.scatter()
    # dropout is keyed by the step, so a resumed run draws the same
    torch.manual_seed(np.random.SeedSequence([config.seed, 3, step, comm.rank()]).generate_state(1)[0])
    algorithm = algorithm or Algorithm(config)
    several = not config.rollout.one_update
    with phase("pack"):
        texts = "texts" in algorithm.objective.requires
        parts = [make_minibatch(policy, part, config, texts, algorithm.scores_pairs)
                 for part in split(groups, config.rollout.minibatches)]
        passes = [method.passes(policy, parts, own_groups.get(method.section, ()), step)
                  for method in algorithm.methods]
    meter = _Meter(sum(len(g.rollouts) for g in groups), config.store.alternatives)
    with phase("reference"):
        for part in parts:
            meter.halved += no_grad_passes(policy, part, algorithm, several, alternatives(config.store.alternatives))
    rate = lr_at(step, config.steps, config.train)
    for _ in range(config.rollout.updates):
        for i, part in enumerate(parts):
            also = [one for each in passes if (one := each[i]) is not None and one.active]
            if part.total_tokens or also:  # else no rank has anything to train on
                with phase("reference"):
                    meter.halved += prepare(policy, part, config, algorithm, step)
                _accumulate(policy, part, algorithm, config, step, meter, also)
                with phase("optimizer"):
                    taken = _apply(policy, optimizer, part, algorithm, rate, config, step, meter,
                                   any(one.separate_gradient for one in also))
                if taken and algorithm.watches_entropy:
                    algorithm.after_optimizer_step(comm.total(meter.entropy)[0] / max(part.total_tokens, 1.0))
        meter.passes, meter.also = meter.passes + 1, {}
    algorithm.nonfinite = algorithm.nonfinite + 1 if meter.nonfinite else 0
    stats = meter.summary(config, rate) | {"skipped": float(meter.skipped)}
    for method, own in zip(algorithm.methods, passes, strict=True):
        stats |= method.after_update(policy, own, own_groups.get(method.section, ()), step, stats)
    if policy.head:
        stats[f"{policy.head.key}/grad_norm"] = meter.head_norm
    if policy.scaler.is_enabled():
        stats["loss_scale"] = policy.scaler.get_scale()
    return stats, meter.per_token


def make_optimizer(policy: Policy, config: Config) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on matrices only. Each model part has one parameter group
    with weight decay and one without; the group of a head is the last. The fused kernel would create its state even in
    a step that the loss scaler skips, so it is not used with a loss scaler."""
    groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in policy.trainable():
        groups.setdefault((policy.family.part_of(name), parameter.ndim >= 2), []).append(parameter)
    settings = config.train
    rates = cast(Mapping[Part, float], settings.part_lr)
    listed = [{"params": params, "lr": settings.lr, "ratio": rates.get(part, settings.lr) / settings.lr,
               "weight_decay": settings.weight_decay if matrix else 0.0} for (part, matrix), params in groups.items()]
    if policy.head:
        listed.append({"params": list(policy.head.parameters()), "lr": settings.lr,
                       "ratio": policy.head.settings.lr / settings.lr, "weight_decay": 0.0})
    return torch.optim.AdamW(listed, lr=settings.lr, betas=settings.betas, fused=not policy.scaler.is_enabled())


def lr_at(step: int, steps: int, settings: TrainSettings) -> float:
    """Learning rate of step `step` (from 0) of `steps` steps: warmup from 0, then constant, linear or cosine decay."""
    warm = math.ceil(settings.warmup * steps)
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    share = (step - warm) / max(steps - warm, 1)
    fall = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[settings.schedule]
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * fall)


class NonFinite(TrainingError):
    """Raised if a loss or gradient is NaN or infinite. The weights were not changed."""


def _accumulate(policy: Policy, part: Minibatch, algorithm: Algorithm, config: Config, step: int,
                meter: _Meter, also: Sequence[Pass] = ()) -> None:
    """Accumulates the gradients of the objective over all micro-batches, then those of the additional losses `also` of
    methods. When a micro-batch runs out of memory, it is halved and the accumulation restarts. While only the head
    of the policy is trained, losses without a separate gradient are left out. If the weight of the objective is 0,
    its gradient is not computed."""
    draws, head = _random_state(policy.device), policy.head
    alone, share = head is not None and head.warming_up(step), algorithm.share(step)

    def work(b: int) -> None:
        micro = part.batches[b]
        more = {**algorithm.statistics, **(meter.also if micro.old is None else {})}
        with phase("forward"), torch.set_grad_enabled(not alone and share > 0):
            stats = policy.logprobs(micro.batch, algorithm.temperature, more=more, states=head is not None)
        inputs = loss_inputs(part, micro, stats, config, algorithm, step)
        loss, metrics = algorithm.objective(inputs, algorithm.kl.value)
        learned = loss
        if head:
            values, own = head.loss(inputs, head(stats.states))
            learned, metrics = loss + values, {**metrics, **own}
        with phase("backward"):
            if share:
                policy.backward(learned if share == 1 else learned * share)
        meter.add(part, micro, loss.detach(), learned.detach(), metrics, inputs)

    def again() -> None:
        for parameter in (*_weights(policy), *_head(policy)):
            parameter.grad = None
        _set_random_state(draws, policy.device)
        meter.begin()

    def objective() -> None:
        meter.begin()
        meter.halved += each_batch(policy, part.batches, work, part.halve, again)

    def anew() -> None:
        again()
        objective()

    objective()
    for one in sorted(also, key=lambda one: one.separate_gradient):
        if one.separate_gradient:
            from vlrl.training.separate_pass import accumulate_separately

            meter.halved += accumulate_separately(policy, one, _weights(policy))
        elif not alone:
            meter.halved += _accumulate_pass(policy, one, anew)


def _accumulate_pass(policy: Policy, one: Pass, anew: Callable[[], None]) -> int:
    """Adds the gradient of a method's additional loss `one` to the gradient of the objective. When a micro-batch of
    this loss is halved, both gradients are recomputed, that of the objective by `anew`. Returns how many
    micro-batches were halved."""
    def again() -> None:
        one.begin()
        anew()

    one.begin()
    cuts = each_batch(policy, one.part.batches, one.work, one.part.halve, again)
    one.end(math.nan, math.nan)
    return cuts


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _apply(policy: Policy, optimizer: torch.optim.Optimizer, part: Minibatch, algorithm: Algorithm, rate: float,
           config: Config, step: int, meter: _Meter, summed: bool = False) -> bool:
    """Sums gradients over ranks unless they are already summed (`summed`), clips them and takes the optimizer step. If
    gradients overflow in float16, only the loss scale changes. If the loss or a gradient is NaN or infinite for
    another reason, nothing changes and False is returned: the metrics of this optimizer step do not count."""
    scaler, engine = policy.scaler, engine_of(policy.shards)
    if engine:
        _set_rates(optimizer, rate)
        norm, head_norm = engine.step(), 0.0  # it skips non-finite gradients
    else:
        norm, head_norm = _clipped(policy, optimizer, config.train.max_grad_norm, summed)
    finite_loss, overflow = all(comm.gather(not meter.suspects)), not math.isfinite(norm + head_norm)
    if problem := _problem(policy, finite_loss, norm + head_norm, config):
        optimizer.zero_grad(set_to_none=True)
        scaler.update(scaler.get_scale() if scaler.is_enabled() else None)  # the same scale; forgets the gradients
        _leave_out(part, problem, algorithm, config, step, meter)
        return False
    if not engine:
        _set_rates(optimizer, rate)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    meter.keep()
    if overflow:
        meter.skipped += 1
    else:
        meter.norms.append(norm)
        meter.head_norm = head_norm
    return True


def _clipped(policy: Policy, optimizer: torch.optim.Optimizer, limit: float, summed: bool) -> tuple[float, float]:
    """Sums gradients over ranks unless they are already summed (`summed`). Clips the gradients of the policy to norm
    `limit`, and separately the gradients of its head. Returns (norm of the policy's gradients, norm of the head's
    gradients) before clipping."""
    weights, head = _weights(policy), _head(policy)
    if not summed:
        comm.sum_gradients([*weights, *head])
    policy.scaler.unscale_(optimizer)  # of the sum: every process sees the same overflow and keeps the same scale
    norm, own = (torch.nn.utils.clip_grad_norm_(of, limit) for of in (weights, head))
    return float(comm.full_tensor(norm)), float(own)


def _weights(policy: Policy) -> list[torch.nn.Parameter]:
    return [p for _, p in policy.trainable()]


def _head(policy: Policy) -> list[torch.nn.Parameter]:
    return list(policy.head.parameters()) if policy.head else []


def _set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["ratio"]


def _leave_out(part: Minibatch, problem: str, algorithm: Algorithm, config: Config, step: int, meter: _Meter) -> None:
    suspects = sorted(meter.suspects) or [r for r, t in enumerate(part.rollouts) if t.mask.any()]
    suspected = comm.gather((bool(meter.suspects), list(dict.fromkeys(part.rollouts[r].name for r in suspects))))
    # groups with a non-finite loss if there are any, else all groups behind the gradient
    sure = any(from_loss for from_loss, _ in suspected)
    names = list(dict.fromkeys(name for from_loss, own in suspected if from_loss or not sure for name in own))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    said = f"step {step}: {problem} In the batch: {', '.join(names[:_NAMED])}{more}."
    meter.skipped, meter.nonfinite = meter.skipped + 1, meter.nonfinite + 1
    in_a_row, limit = algorithm.nonfinite + 1, config.limits.nonfinite_steps
    if in_a_row > limit:
        raise NonFinite(said if not limit else f"{said} This is skipped step number {in_a_row} in a row, more than "
                        f"limits.nonfinite_steps={limit} allows.")
    if comm.is_main():
        _log.warning("%s This optimizer step is skipped (%d in a row; the run stops above "
                     "limits.nonfinite_steps=%d).", said, in_a_row, limit)


def _problem(policy: Policy, finite_loss: bool, norm: float, config: Config) -> str:
    """Explains why the optimizer step must not be taken; "" if it may be taken, or if a lower loss scale may help.
    finite_loss: whether the loss is finite. norm: the gradient norm."""
    outcome, remedy = "the weights were not changed", "Set model.dtype=bfloat16, or float32 on a GPU without it."
    if finite_loss and math.isfinite(norm):
        return ""
    if not policy.scaler.is_enabled():
        what = f"the gradient norm is {norm}" if finite_loss else "the loss is not finite"
        return (f"{what}; {outcome}. Often the learning rate (train.lr={config.train.lr}) is too high, or a reward is "
                "huge.")
    if not finite_loss:
        return (f"the loss is not finite under model.dtype=float16; {outcome}. Activations above 65,504 overflow in "
                f"float16, or a reward is huge. {remedy}")
    if policy.scaler.get_scale() <= _LEAST_SCALE:
        return (f"gradients overflow under model.dtype=float16 even at a loss scale of {policy.scaler.get_scale():g}; "
                f"{outcome}. {remedy}")
    return ""


class _Meter:
    def __init__(self, rollouts: int, k: int):
        self.sums: dict[str, float] = {}
        """Sums of metrics over the optimizer steps that were not skipped because of NaN or infinity."""
        self.fresh: dict[str, float] = {}
        """Sums of metrics in the current optimizer step."""
        self.suspects: set[int] = set()
        """Indices of this rank's rows in micro-batches with a non-finite loss, in the current optimizer step."""
        self.entropy = 0.0
        """Sum of the entropy over this rank's trained tokens in the current optimizer step."""
        self.widest = self.fresh_widest = 0.0
        """Largest difference between the log-probabilities of sampler and trainer for a token."""
        self.norms: list[float] = []
        """Gradient norms before clipping, of the optimizer steps that were taken."""
        self.head_norm, self.passes = 0.0, 0
        self.skipped = self.nonfinite = 0
        """Number of skipped optimizer steps. `nonfinite`: number of those skipped because of NaN or infinity."""
        self.halved = 0
        """Number of micro-batches halved for lack of memory."""
        self.also = alternatives(k)
        """Further statistics to store per token, computed with the weights before the update: in the pass for old
        log-probabilities if there is one, else in the first pass of the update."""
        names = ("trainer_logprobs", "entropies", "ratio", "clipped", *self.also)
        self.per_token: PerToken = {name: [None] * rollouts for name in names}

    def begin(self) -> None:
        self.fresh, self.suspects, self.entropy, self.fresh_widest = {}, set(), 0.0, 0.0

    def keep(self) -> None:
        self.widest = max(self.widest, self.fresh_widest)
        for key, value in self.fresh.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    def add(self, part: Minibatch, micro: MicroBatch, loss: torch.Tensor, learned: torch.Tensor, metrics: Metrics,
            x: LossInputs) -> None:
        assert x.entropy is not None and x.sampler_logprobs is not None
        on_first_pass, rollouts = self.passes == 0, [part.rollouts[r] for r in micro.order]
        said = {k: metrics[k] for k in ("ratio", "clipped") if k in metrics}
        fresh = {"ratio": torch.exp((x.logprobs.detach() - x.old_logprobs).clamp(-20, 20)),
                 "clipped": torch.zeros_like(x.mask, dtype=torch.bool), **said}
        now = {"loss": loss, "learned": learned, "tokens": x.mask.sum(), "clip_frac": (fresh["clipped"] * x.mask).sum(),
               "entropy now": (x.entropy * x.mask).sum(), **{k: v for k, v in metrics.items() if k not in said}}
        if on_first_pass:
            # an engine may not know a token's log-probability (NaN)
            same = torch.tensor([t.rollout.train_prompt is None for t in part.firsts], dtype=torch.bool)
            same = x.spread(same.to(x.mask.device)) * x.mask * x.sampler_logprobs.isfinite()
            gap = torch.where(same > 0, x.old_logprobs - x.sampler_logprobs, 0).clamp(-20, 20)
            now |= {"entropy": now["entropy now"], "mismatch/tokens": same.sum(),
                    "mismatch/kl": (gap.expm1() - gap).clamp_min(0).sum(), "mismatch/gap_mean": gap.abs().sum(),
                    "widest": gap.abs().amax() if gap.numel() else gap.sum()}
            fresh |= {"trainer_logprobs": x.old_logprobs, "entropies": x.entropy,
                      **{name: (x.stats if micro.old is None else x.old_stats)[name] for name in self.also}}
        values = dict(zip(now, torch.stack([v.detach().float() for v in now.values()]).tolist(), strict=True))
        if not math.isfinite(values.pop("learned")):
            self.suspects.update(micro.order)
        self.fresh_widest = max(self.fresh_widest, values.pop("widest", 0.0))
        for key, value in values.items():
            self.fresh[key] = self.fresh.get(key, 0.0) + value
        self.entropy += values["entropy now"]
        for key, tokens in fresh.items():
            pieces = tokens.detach().cpu().split([len(t.mask) for t in rollouts])
            for t, piece in zip(rollouts, pieces, strict=True):
                self.per_token[key][t.number] = t.into_rollout(self.per_token[key][t.number], piece.numpy())

    def summary(self, config: Config, rate: float) -> dict[str, float]:
        everyone, widest, halved = zip(*comm.gather((self.sums, self.widest, self.halved)), strict=True)
        total = {k: sum(s.get(k, 0.0) for s in everyone) for k in sorted({k for s in everyone for k in s})}
        tokens = max(total.pop("tokens", 0.0), 1.0)
        first_pass = max(tokens / max(self.passes, 1), 1.0)
        steps = self.passes * config.rollout.minibatches - self.nonfinite
        total.pop("entropy now", None)
        loss, entropy, known = (total.pop(k, 0.0) for k in ("loss", "entropy", "mismatch/tokens"))
        unknown = math.nan if self.nonfinite and not any(everyone) else 0.0
        return {
            "loss": loss / max(steps, 1) + unknown, "lr": rate,
            "grad_norm": sum(self.norms) / max(len(self.norms), 1) + unknown,
            "grad_norm/max": max(self.norms, default=0.0) + unknown,
            "kl": unknown, "clip_frac": unknown, "entropy": entropy / first_pass + unknown,
            **{k: total.pop(k, 0.0) / max(known, 1.0) for k in ("mismatch/kl", "mismatch/gap_mean")},
            "mismatch/gap_max": max(widest),
            **{k: v / tokens for k, v in total.items()},
            **({"memory/halved": float(sum(halved))} if any(halved) else {})}
