"""The gradient of a preset on one batch of answers, where they were sampled and after the weights have moved.

Answers of the embedded model are drawn once. On-policy: the gradient at the weights that drew them. Off-policy: after a
random move of the weights, as later optimizer steps of the same batch see it, with log-probabilities of the engine that
differ from the trainer's. The reference is the model a little before. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import Config
from vlrl.models.policy import Policy, make_head
from vlrl.training.advantages import Credit
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.minibatch import loss_inputs, make_minibatch, no_grad_passes, prepare
from vlrl.training.update import split
from vlrl.types import Group

ROOT = Path(__file__).resolve().parents[1]
BEGUN: Mapping[str, Any] = {"siren": {"anchor": 0.5}, "adaptive": {"coef": 0.1, "active": True}}
"""States of entropy terms in the middle of a run: in the first optimizer step they have no gradient."""
STEP = 150
"""rorecomp does not compensate in it, and kimi_length has begun."""
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """A model, three sets of its weights, and its answers to some prompts."""

    policy: Policy
    sampled: Weights
    """That drew the answers."""
    moved: Weights
    """Some optimizer steps later."""
    groups: Sequence[Group]


def scene(config: Config, prompts: int, move: float) -> Scene:
    """Draws the answers, a small random step away from the reference; `move` is the size of a larger one after it,
    relative to each tensor's own."""
    parts = assemble(config, make_accelerator(config))
    policy, generator = parts.policy, torch.Generator().manual_seed(1)
    policy.keep_reference(config.model.name)
    sampled = stepped(policy, 0.005, generator)
    with torch.no_grad():
        parts.source.sync(policy, 0)
        groups = parts.source.next_groups(prompts, 0)
    moved = stepped(policy, move, generator)
    parts.source.close()
    parts.engine.close()
    return Scene(policy, sampled, moved, groups)


def stepped(policy: Policy, size: float, generator: torch.Generator) -> Weights:
    """Moves the weights at random; returns copies of them."""
    with torch.no_grad():
        for _, weight in policy.trainable():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * size * weight.norm() / noise.norm().clamp(min=1e-9))
        return {name: weight.clone() for name, weight in policy.trainable()}


def use(policy: Policy, weights: Weights) -> None:
    with torch.no_grad():
        for name, weight in policy.trainable():
            weight.copy_(weights[name])


def with_gap(groups: Sequence[Group], spread: float) -> list[Group]:
    """The groups, with log-probabilities of the engine that differ from the trainer's by `spread` (a deviation)."""
    draw = np.random.default_rng(2)

    def other(rollout: Any) -> Any:
        logprobs = rollout.completion.logprobs
        gap = draw.normal(0, spread, len(logprobs)).astype(logprobs.dtype)
        return replace(rollout, completion=replace(rollout.completion, logprobs=np.minimum(logprobs + gap, 0)))
    return [replace(g, rollouts=tuple(map(other, g.rollouts))) for g in groups]


def gradient(made: Scene, config: Config, off_policy: bool, gap: float = 0.3) -> torch.Tensor:
    """The gradient of a config's loss on all answers as one optimizer step. -> [weights]."""
    policy, algorithm = made.policy, Algorithm(config)
    entropy = algorithm.objective.entropy
    if entropy and entropy.name in BEGUN:
        entropy.load_state_dict(BEGUN[entropy.name])
    use(policy, made.sampled)
    policy.head = make_head(config, policy.base, policy.device)
    groups = with_gap(made.groups, gap) if off_policy else made.groups
    groups = Credit(algorithm, config, policy)(groups, STEP)
    part = make_minibatch(policy, split(groups, 1)[0], config, "texts" in algorithm.objective.requires)
    no_grad_passes(policy, part, algorithm, several=off_policy)
    if off_policy:
        use(policy, made.moved)
    prepare(policy, part, config, algorithm, STEP)
    for _, weight in policy.trainable():
        weight.grad = None
    for micro in part.batches:
        stats = policy.logprobs(micro.batch, algorithm.temperature, more=algorithm.statistics)
        loss, _ = algorithm.objective(loss_inputs(part, micro, stats, config, algorithm, STEP), algorithm.kl.value)
        policy.backward(loss)
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten().double()
                      for _, w in policy.trainable()])
