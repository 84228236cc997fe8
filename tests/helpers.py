"""Tasks and groups for tests; importable by scripts that torchrun starts."""

import numpy as np
from accelerate import Accelerator

from tests.conftest import SAMPLES, kinds_of
from vlrl.algo.advantage import grpo
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.method import Run
from vlrl.config import validate
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.models import policy as policies
from vlrl.models.processing import Encoder
from vlrl.rollout.generate import make_group
from vlrl.task import Task
from vlrl.task.scoring import score_all
from vlrl.training.advantages import credit
from vlrl.training.minibatch import make_minibatch
from vlrl.types import Completion, Group, Prompt, Rollout, Sample

MIXED = ("image", "two images", "text", "video", "image", "text")


class Vowels(Task):
    """Rewards the share of vowels: something that any text has to some degree."""

    prompt = "{q}"
    rewards = {"vowels": 1.0}

    def score(self, sample, answer):
        return {"vowels": sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)}


def settings(folder, rollout=None, **more):
    """The config of a short run. `rollout` adds to its small groups and 8 tokens; other sections replace its own."""
    return validate({"task": "x", "model": {"name": str(folder), "train": ["language", "merger", "vision"]},
                     "rollout": {"group_size": 3, "prompts_per_step": 6, "max_new_tokens": 8, **(rollout or {})},
                     "train": {"lr": 1e-3, "max_grad_norm": 1e9}, **more})


def load(config):
    policy = policies.load(config, Accelerator(cpu=True))
    return policy, Encoder(policy.processor, policy.family, policy.positions, config)


def credited_groups(policy, encode, config, kinds=MIXED):
    """Real rollouts of the tiny model, scored and credited; kinds of media that it does not take are left out."""
    kinds = kinds_of(policy.family, kinds)
    task, engine = Vowels(), HFEngine(policy, seed=5, batch_rollouts=16)
    prompts = [encode(task, SAMPLES[kind]) for kind in kinds]
    sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens)
    answers = engine.generate([Request(prompt=p, n=config.rollout.group_size, sampling=sampling, key=(0, i))
                               for i, p in enumerate(prompts)])
    groups = [make_group(task, SAMPLES[kind], prompt, completions, group_id=str(i), split="train", step=0)
              for i, (kind, prompt, completions) in enumerate(zip(kinds, prompts, answers, strict=True))]
    return credit(groups, grpo)


def started(config, policy, encode, task=None, samples=(), engine=None, score=score_all):
    """The algorithm of a config, its methods started as a run does."""
    algorithm = Algorithm(config)
    for method in algorithm.methods:
        method.start(Run(task, policy, encode, samples, engine, score))
    return algorithm


def made_group(name, text="x", rewards=(0.5,), *, prompt="?", media=(), row=None, done=None, of=None, **group):
    """A group without a model, of one rollout for each reward; `done` and `of` go to completions and rollouts."""
    n = np.arange(3)
    asked = Prompt(sample_id=name, text=prompt, ids=n, raw_ids=n, positions=n[None], media=media)
    completion = Completion(tokens=n, logprobs=np.zeros(3, np.float32), loss_mask=np.ones(3, bool), text=text,
                            finish_reason="stop", **(done or {}))
    known = {"id": name, "task": "t", "split": "heldout", "weights": {"iou": 1.0}, **group}
    rollouts = tuple(Rollout(group_id=known["id"], index=i, completion=completion, policy_step=0, reward=r,
                             **{"parts": {"iou": r}, **(of or {})}) for i, r in enumerate(rewards))
    return Group(**known, sample=Sample(id=name, row=row or {}), prompt=asked, rollouts=rollouts)


def second_of(policy, part, config):
    """The pass of second attempts of one optimizer step; None where there are none."""
    (method,) = Algorithm(config).methods
    return method.passes(policy, [make_minibatch(policy, part, config)], (), 0)[0]
