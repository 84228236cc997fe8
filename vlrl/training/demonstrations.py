"""Demonstrations beside RL: which are shown in a step, and their micro-batches beside those of the objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.demonstrations import Demonstrated
from vlrl.algo.statistics import statistics
from vlrl.config.schema import Config
from vlrl.curriculum import Draw, Outcome
from vlrl.data import readable
from vlrl.distributed import comm
from vlrl.engine.base import Engine
from vlrl.errors import ConfigError
from vlrl.models import fsdp
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.rollout.demonstrations import demonstrated, has_demonstration
from vlrl.rollout.episodes import opened
from vlrl.rollout.generate import AcceptedDraw
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.given import given_answer
from vlrl.training.apart import learn_apart
from vlrl.training.minibatch import Minibatch, make_minibatch, split
from vlrl.types import Group, Sample

_STREAM = 11
"""Names the random numbers of the draws among those of a run's seed, and the resets of environments."""
_LOOKED_AT = 256
"""Rows that are searched for an answer before a run."""
_TRIES = 64
"""Rows that are drawn for one that has an answer."""


def check(config: Config, task: Task, samples: Sequence[Sample]) -> None:
    """Raises ConfigError where algo.demonstrations could show nothing, or gradients cannot be told apart."""
    if config.algo.demonstrations is None:
        return
    if fsdp.wanted(config):
        raise ConfigError(f"algo.demonstrations measures its gradient beside that of the answers, and train.sharding="
                          f"{config.train.sharding} has them summed by shards: set train.sharding=none, or "
                          "algo.demonstrations=null")
    episodes = any(map(has_environment, task.members))
    if not episodes and not any(given_answer(task, s) for s in islice(samples, _LOOKED_AT)):
        raise ConfigError(f"algo.demonstrations learns given answers beside the policy's own, and none of the first "
                          f"{_LOOKED_AT} training rows has one: give rows a `solution`, the task an oracle, "
                          "data.solutions a file, or set algo.demonstrations=null")


@dataclass(eq=False)
class Demonstrator:
    """Draws the demonstrations of a step from the training rows; the same ones on a resumed run."""

    config: Config
    task: Task
    encode: Encoder
    engine: Engine
    samples: Sequence[Sample]
    algorithm: Algorithm

    def __call__(self, step: int, outcomes: Sequence[Outcome] = ()) -> list[Group]:
        """Returns this process's share of a step's demonstrations, none where it shows none. `outcomes` are those of
        the step's draws, over all processes. Raises DataError where an environment does not take the actions of one.
        """
        mix, settings = self.algorithm.demonstrations, self.config.algo.demonstrations
        if mix is None or settings is None:
            return []
        if self.algorithm.interleaves:
            mix.function.collect(comm.on_main(partial(self._failed, step, outcomes)))
            places = mix.function.due()
        elif mix.function.shares(step, self.config.seed)[1]:
            places = comm.on_main(partial(self._places, step, settings.rows))
        else:
            return []
        return comm.together(partial(self._shown, step, [*enumerate(places)][comm.rank()::comm.world()]))

    def _failed(self, step: int, outcomes: Sequence[Outcome]) -> list[int]:
        """Returns places of rows that have an answer, and whose whole group is known to be wrong; one that was made
        with knobs is no row.
        """
        wrong = [o.draw.index for o in outcomes if o.failed and not o.draw.knobs]
        return [place for place in dict.fromkeys(wrong) if self._sample(step, place) is not None]

    def _places(self, step: int, count: int) -> list[int]:
        """Returns places of rows that have an answer, each once where there are so many rows."""
        draw = np.random.default_rng([self.config.seed, _STREAM, step])
        draws = draw.integers(len(self.samples), size=_TRIES * count)
        usable = (int(i) for i in dict.fromkeys(draws.tolist()) if self._sample(step, int(i)) is not None)
        places = [*islice(usable, count)]
        if not places:
            raise ConfigError(f"step {step}: none of {_TRIES * count} drawn training rows has an answer to learn from: "
                              "give more rows a `solution`, or set algo.demonstrations=null")
        return places

    def _sample(self, step: int, place: int) -> Sample | None:
        """Returns a row as it is asked in a step; None where it has no answer, or cannot be read."""
        sample = readable(self.samples, place) if self.config.data.quarantine else self.samples[place]
        if sample is None:
            return None
        sample = replace(sample, prompt=self.task.of(sample).template(sample, step))
        sample = opened(self.engine, self.task, sample, _STREAM, place)
        return sample if has_demonstration(self.task, sample) else None

    def _shown(self, step: int, places: Sequence[tuple[int, int]]) -> list[Group]:
        accepted = []
        for number, place in places:
            sample = self._sample(step, place)
            assert sample is not None
            try:
                accepted.append(AcceptedDraw(number, Draw(place, 0), sample, self.encode(self.task, sample)))
            except PromptTooLong:
                continue  # as one that is drawn to be answered
        return demonstrated(self.task, self.encode, self.engine, self.config, accepted, step)


@dataclass(eq=False)
class Shown:
    """The demonstrations of one optimizer step."""

    part: Minibatch
    share: float
    """Their weight beside the objective."""
    loss: float = 0.0
    """This process's share of the last pass, without the weight."""
    factor: float = 0.0
    """This process's sum of what the mix weighs each learned token with, where it does."""
    norm: float = 0.0
    """Of their gradient in the last pass, weight included; over all processes, as the other."""
    norm_rl: float = 0.0


def make_shown(policy: Policy, groups: Sequence[Group], config: Config, algorithm: Algorithm,
               step: int) -> list[Shown | None]:
    """Packs the demonstrations of each optimizer step of a pass; None where no process has any. Called on every
    process.
    """
    count = config.rollout.minibatches
    share = algorithm.shares(step)[1]
    if not share:
        return [None] * count
    parts = [make_minibatch(policy, split(groups[i::count], 1)[0], _whole(config)) for i in range(count)]
    return [Shown(part, share) if part.total_tokens else None for part in parts]


def learn(policy: Policy, shown: Shown, algorithm: Algorithm, weights: Sequence[torch.nn.Parameter]) -> int:
    """Forward and backward of every micro-batch, apart from the gradients that are there; then both are summed over
    processes and added up. Returns how many micro-batches were halved for lack of memory.
    """
    mix, part = algorithm.demonstrations, shown.part
    assert mix is not None
    more = statistics(["stat:entropy"]) if algorithm.interleaves else {}

    def work(b: int) -> None:
        micro = part.batches[b]
        stats = policy.logprobs(micro.batch, algorithm.temperature, more=more)
        given = replace(demonstrated_of(part, micro.order, stats.logprobs), entropy=stats.more.get("entropy"))
        loss = mix.function.loss(given)
        policy.backward(loss * shown.share)
        shown.loss += float(loss.detach())
        if hasattr(mix.function, "factor"):
            shown.factor += float((mix.function.factor(given) * given.mask).sum())

    def begin() -> None:
        shown.loss = shown.factor = 0.0

    cuts, shown.norm, shown.norm_rl = learn_apart(policy, part, weights, work, begin)
    return cuts


def interleave(policy: Policy, groups: Sequence[Group], config: Config, algorithm: Algorithm,
               norm_rl: float) -> dict[str, float]:
    """Takes the supervised step of a mix that interleaves them, where a process has demonstrations, and returns its
    metrics. Called on every process, once the gradients of the objective are gone, whose norm was `norm_rl`. A gradient
    that is not finite moves nothing.
    """
    mix = algorithm.demonstrations
    assert mix is not None
    out = {"demonstrations/applied": 0.0, **mix.function.metrics(0)}
    part = make_minibatch(policy, split(groups, 1)[0], _whole(config))
    if not part.total_tokens:
        return out
    shown, weights = Shown(part, 1.0), [p for _, p in policy.trainable()]
    cuts = learn(policy, shown, algorithm, weights)
    scale = policy.scaler.get_scale() if policy.scaler.is_enabled() else 1.0
    for p in weights:
        if p.grad is not None:
            p.grad /= scale
    torch.nn.utils.clip_grad_norm_([p for p in weights if p.grad is not None], config.train.max_grad_norm)
    optimizer, finite = mix.function.optimizer(weights), math.isfinite(shown.norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return out | {"demonstrations/applied": float(finite), "demonstrations/loss": comm.total(shown.loss)[0],
                  "demonstrations/grad_norm": shown.norm, "demonstrations/tokens": part.total_tokens,
                  "demonstrations/grad_share": shown.norm / (shown.norm + norm_rl) if shown.norm + norm_rl else 0.0,
                  **({"demonstrations/halved": float(cuts)} if cuts else {})}


def _whole(config: Config) -> Config:
    """Returns the settings without algo.mask_truncated: a given answer is never cut off."""
    return config.model_copy(update={"algo": config.algo.model_copy(update={"mask_truncated": False})})


def demonstrated_of(part: Minibatch, order: Sequence[int], logprobs: torch.Tensor) -> Demonstrated:
    """Returns what a mix sees of one micro-batch, whose rows are `order`."""
    rows = [part.rollouts[r] for r in order]

    def flat(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *values]).astype(np.float32)).to(logprobs.device)

    return Demonstrated(logprobs=logprobs, mask=flat([t.mask for t in rows]), total_tokens=part.total_tokens,
                        weights=flat([np.full(len(t.mask), t.group.sample.weight) for t in rows]))


def step_metrics(shown: Sequence[Shown | None], algorithm: Algorithm, step: int) -> dict[str, float]:
    """Returns the metrics of a step, means over its optimizer steps, and tells the mix the last gradient norm, its
    weight taken off. {} without algo.demonstrations.
    """
    if algorithm.demonstrations is None:
        return {}
    known = [s for s in shown if s is not None]
    out = {"demonstrations/share": algorithm.shares(step)[1], "demonstrations/applied": float(bool(known))}
    mix = algorithm.demonstrations.function
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
