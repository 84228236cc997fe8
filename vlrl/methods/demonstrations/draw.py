"""Draws the demonstrations that a step trains on, and computes their loss in micro-batches separate from the
objective's, or in a separate optimizer step. A demonstration is a training row's `solution`, or the task's perfect
answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import bind
from vlrl.algo.statistics import statistics
from vlrl.config.schema import Config
from vlrl.curriculum import Draw, Outcome
from vlrl.data.samples import readable
from vlrl.distributed import comm
from vlrl.engine.base import Engine, reset_sample
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations.mixes import MIXES, DemonstrationBatch, interleaves
from vlrl.models import shards
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.rollout.demonstrations import demonstrated, has_demonstration
from vlrl.rollout.generate import AcceptedDraw
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.interface import given_answer
from vlrl.training.minibatch import Minibatch, make_minibatch, split
from vlrl.training.separate_pass import accumulate_separately
from vlrl.types import Group, Sample

_STREAM = 11
"""Key of the random stream that selects the demonstrations and the seeds of their environments."""
_LOOKED_AT = 256
"""Number of training rows that are searched for a demonstration before the run starts."""
_TRIES = 64
"""Number of rows that are tried for each demonstration that a step needs."""


def check(config: Config, task: Task, samples: Sequence[Sample]) -> None:
    """Raises ConfigError if none of the first training rows has a demonstration, or if train.sharding prevents
    measuring the gradient norm of the demonstrations."""
    if shards.is_sharded(config):
        raise ConfigError(f"algo.demonstrations needs the gradient norm of its loss, which train.sharding="
                          f"{config.train.sharding} does not compute: set train.sharding=none, or "
                          "algo.demonstrations=null")
    episodes = any(map(has_environment, task.members))
    if not episodes and not any(given_answer(task, s) for s in islice(samples, _LOOKED_AT)):
        raise ConfigError(f"algo.demonstrations trains on given answers, but none of the first {_LOOKED_AT} training "
                          "rows has one: give rows a `solution`, give the task an oracle, set data.solutions to a "
                          "file, or set algo.demonstrations=null")


@dataclass(eq=False)
class DemonstrationSampler:
    """Draws the demonstrations of a step from the training rows. A resumed run draws the same demonstrations."""

    config: Config
    task: Task
    encode: Encoder
    engine: Engine
    samples: Sequence[Sample]
    mix: Any
    """The instance of the class that algo.demonstrations.mix names."""

    @property
    def settings(self) -> Any:
        return self.config.algo.demonstrations

    def __call__(self, step: int, outcomes: Sequence[Outcome] = ()) -> list[Group]:
        """Returns this process's share of a step's demonstrations, as groups of one completion; [] if the step has no
        demonstrations. `outcomes` are the results of the step's draws on all processes. Raises DataError if an
        environment rejects the actions of a demonstration."""
        mix, settings = self.mix, self.settings
        if interleaves(mix):
            mix.collect(comm.on_main(partial(self._failed, step, outcomes)))
            places = mix.due()
        elif mix.shares(step, self.config.seed)[1]:
            places = comm.on_main(partial(self._places, step, settings.rows))
        else:
            return []
        return comm.together(partial(self._shown, step, [*enumerate(places)][comm.rank()::comm.world()]))

    def _failed(self, step: int, outcomes: Sequence[Outcome]) -> list[int]:
        """Indices of the training rows that have a demonstration, and whose completions in this step include a wrong
        one and none known to be correct. Generated samples are left out, because they are not rows."""
        wrong = [o.draw.index for o in outcomes if o.failed and not o.draw.knobs]
        return [place for place in dict.fromkeys(wrong) if self._sample(step, place) is not None]

    def _places(self, step: int, count: int) -> list[int]:
        draw = np.random.default_rng([self.config.seed, _STREAM, step])
        draws = draw.integers(len(self.samples), size=_TRIES * count)
        usable = (int(i) for i in dict.fromkeys(draws.tolist()) if self._sample(step, int(i)) is not None)
        places = [*islice(usable, count)]
        if not places:
            raise ConfigError(f"step {step}: none of {_TRIES * count} drawn training rows has a given answer: "
                              "give more rows a `solution`, or set algo.demonstrations=null")
        return places

    def _sample(self, step: int, place: int) -> Sample | None:
        sample = readable(self.samples, place) if self.config.data.quarantine else self.samples[place]
        if sample is None:
            return None
        sample = replace(sample, prompt=self.task.of(sample).template(sample, step))
        sample = reset_sample(self.engine, self.task, sample, _STREAM, place)
        return sample if has_demonstration(self.task, sample) else None

    def _shown(self, step: int, places: Sequence[tuple[int, int]]) -> list[Group]:
        accepted = []
        for number, place in places:
            sample = self._sample(step, place)
            assert sample is not None
            try:
                accepted.append(AcceptedDraw(number, Draw(place, 0), sample, self.encode(self.task, sample)))
            except PromptTooLong:
                continue  # skipped, like a prompt that is drawn for generation
        return demonstrated(self.task, self.encode, self.engine, self.config, accepted, step)


class Demonstrations(Method):
    """The method behind algo.demonstrations: the loss is rl * L_RL + share * L_demonstrations, with the weights `rl`
    and `share` from algo.demonstrations.mix."""

    state_at = "algorithm.demonstrations"

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.bound = bind("algo.demonstrations.mix", settings.mix, MIXES)
        self.mix = self.bound.function

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        check(self.config, task, samples)

    def start(self, run: Run) -> None:
        self.demonstrator = DemonstrationSampler(self.config, run.task, run.encode, run.engine, run.samples, self.mix)

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        return self.demonstrator(step, outcomes)

    def share(self, step: int) -> float:
        return self.mix.shares(step, self.config.seed)[0]

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[DemonstrationPass | None]:
        shown = () if interleaves(self.mix) else drawn
        return make_passes(policy, shown, self.algorithm, self.mix, step)

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        if interleaves(self.mix):
            return interleave(policy, drawn, self.algorithm, self.mix, stats["grad_norm"])
        return step_metrics(passes, self.mix, self.config.seed, step)

    def state_dict(self) -> dict[str, Any]:
        return self.bound.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bound.load_state_dict(state)


@dataclass(eq=False)
class DemonstrationPass:
    """Computes the demonstrations' loss and its gradient for one optimizer step (see algo.method.Pass)."""

    policy: Policy
    algorithm: Objectives
    mix: Any
    """The instance of the class that algo.demonstrations.mix names."""
    part: Minibatch
    share: float
    """Weight of the demonstrations' loss."""
    loss: float = 0.0
    """This process's share of the loss in the last epoch over the batch, before it is multiplied by `share`."""
    factor: float = 0.0
    """Sum of the weights that `mix.factor` gives to the tokens on this process; 0 if the mix has no such weights."""
    norm: float = 0.0
    """Norm of the demonstrations' gradient (times `share`) in the last epoch over the batch, over all processes."""
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
    """Takes the supervised optimizer step of an interleaving mix, if any process has demonstrations, and returns the
    metrics of that step. Called on every process, after the gradients of the objective are cleared; `norm_rl` is the
    norm of those gradients. The weights stay unchanged if the gradient of the demonstrations is not finite."""
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
    """Makes the DemonstrationBatch of one micro-batch, which consists of the rows `order` of the minibatch `part`.
    `logprobs` [N] are the log-probabilities of the rows' tokens."""
    rows = [part.rollouts[r] for r in order]

    def flat(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *values]).astype(np.float32)).to(logprobs.device)

    return DemonstrationBatch(logprobs=logprobs, mask=flat([t.mask for t in rows]), total_tokens=part.total_tokens,
                        weights=flat([np.full(len(t.mask), t.group.sample.weight) for t in rows]))


def step_metrics(passes: Sequence[DemonstrationPass | None], mix: Any, seed: int, step: int) -> dict[str, float]:
    """Returns metrics of a step's demonstrations, as means over the step's optimizer steps (`passes`). Also calls
    `mix.observe`, if the mix has this method, with the last gradient norm divided by the weight of the
    demonstrations' loss."""
    known = [s for s in passes if s is not None]
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
