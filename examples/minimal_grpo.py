"""GRPO on a vision-language model, the whole method on one page: a script to learn from and to take apart.

    python examples/minimal_grpo.py                      # one to two minutes on two CPU cores, no download
    python examples/minimal_grpo.py --seed 1 --steps 20

The model, a Qwen3-VL of 1 M parameters that comes with the package, sees a coloured shape and is asked for its box. It
has learned from careless boxes, so its completions are well formed and its boxes are poor. Nobody shows it better ones:
it is only told how good its own are. One step:

    1. sample     PROMPTS questions, GROUP completions of each at temperature 1
    2. reward     IoU of the box that a completion names with the true one: checked by code, no reward model
    3. advantage  (reward - mean of its group) / standard deviation of its group: the group takes the place of a critic
    4. update     the clipped objective, UPDATES times over the batch

GRPO is eq. 3 of DeepSeekMath (arXiv 2402.03300), here without the KL term, which keeps a model near its start.
Of vlrl this script takes what has little to do with the method: loading a model, encoding pictures, sampling, and
log-probabilities of completions. The steps above are written out. The real loop is vlrl/training/loop.py; this task
trains there, too, and tests/docs/test_examples.py compares the gradients of both:

    vlrl train configs/tiny.yaml task=examples/minimal_grpo.py:FindShape"""

from __future__ import annotations

from vlrl import Config, Media, Sample, Task, load_config  # isort: skip  # before torch, whose idle threads then sleep

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageDraw

from vlrl.data import Drawn
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.models import policy as policies
from vlrl.models.packing import Batch
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.rewards.boxes import format_box, iou, parse_box
from vlrl.rewards.text import parse_answer
from vlrl.types import Answer, Completion, Prompt

PROMPTS, GROUP = 16, 8
"""Questions in a step, completions of each. With fewer than about 4 the mean of a group is a noisy baseline."""
UPDATES = 2
"""Optimizer steps on one batch of completions. With 1 the ratio below is always 1 and nothing is ever clipped."""
CLIP = 0.2
LEARNING_RATE = 2e-4
"""High, as the model is tiny. A model of billions of parameters wants about 1e-6."""
MAX_NORM = 1.0
TEMPERATURE = 1.0
MAX_NEW_TOKENS = 24
HELDOUT = 128
"""Pictures of the evaluation; none of them is trained on."""


# --- the task: what is asked, and what an answer is worth -------------------------------------------------------------

SIDE = 128
"""Of a picture, in pixels."""
THOUSAND = 1000
"""Qwen3-VL writes coordinates in thousandths of the picture's side."""
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")


class FindShape(Task):
    """Where is the red circle? The reward is verifiable: code that knows the true box computes it."""

    prompt = "Locate the {shape}. Answer with its box as [x1, y1, x2, y2]."  # {shape} is filled from the row
    rewards = {"iou": 1.0}

    def samples(self, split: str) -> Sequence[Sample]:
        return Drawn(4096, lambda i: draw(f"{split}-{i}"))

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        box = parse_box(answer.final)  # a text of the model: anything may stand in it
        found = [at * SIDE / THOUSAND for at in box or ()]
        return {"iou": iou(found, sample["box"])}  # continuous, so a near miss earns something; 0 without a box

    def oracle(self, sample: Sample) -> str:
        return format_box([round(at * THOUSAND / SIDE) for at in sample["box"]])


def draw(name: str) -> Sample:
    """A picture of one shape. The name alone decides it: it is the same every time, and each split draws its own."""
    rng = random.Random(name)
    picture = Image.new("RGB", (SIDE, SIDE), (248, 248, 248))
    pen, colour, shape = ImageDraw.Draw(picture), rng.choice(sorted(COLOURS)), rng.choice(SHAPES)
    side = rng.randint(25, 55)
    x, y = rng.randint(14, SIDE - 14 - side), rng.randint(14, SIDE - 14 - side)
    inside = (x, y, x + side - 1, y + side - 1)  # Pillow paints both ends
    if shape == "circle":
        pen.ellipse(inside, COLOURS[colour])
    elif shape == "square":
        pen.rectangle(inside, COLOURS[colour])
    else:
        pen.polygon([(x + side / 2, y), (x, y + side - 1), (x + side - 1, y + side - 1)], COLOURS[colour])
    row = {"shape": f"{colour} {shape}", "box": [x, y, x + side, y + side]}
    return Sample(id=name, media=(Media(source=picture),), row=row)


# --- 1 to 3: completions, rewards, advantages -------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """All completions of one prompt."""

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: np.ndarray
    """[GROUP]."""

    @property
    def advantages(self) -> np.ndarray:
        """[GROUP]: how much better than its siblings a completion is. Where all earn the same, nothing can be learned
        and every advantage is 0; the 1e-4 keeps that from being 0 / 0."""
        return (self.rewards - self.rewards.mean()) / (self.rewards.std(ddof=1) + 1e-4)


def sample_groups(task: FindShape, samples: Sequence[Sample], encode: Encoder, engine: HFEngine, step: int,
                  size: int = GROUP, temperature: float = TEMPERATURE) -> list[Group]:
    """Writes and scores `size` completions for each sample."""
    prompts = [encode(task, sample) for sample in samples]  # chat template, tokens, pixels
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
    # the key names the random stream of a group: the same step draws the same, whatever ran before
    requests = [Request(prompt=p, n=size, sampling=sampling, key=(step, i)) for i, p in enumerate(prompts)]
    written = engine.generate(requests)
    return [Group(prompt, own, np.array([task.score(sample, parse_answer(c.text))["iou"] for c in own]))
            for sample, prompt, own in zip(samples, prompts, written, strict=True)]


# --- 4: the update ----------------------------------------------------------------------------------------------------


def clipped_objective(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor,
                      clip: float = CLIP) -> torch.Tensor:
    """The loss of each token, [N] like its arguments: -min(r A, clip(r, 1 - clip, 1 + clip) A), r = p_new / p_old.

    At r = 1 its gradient is that of REINFORCE, -A grad log p. After the first optimizer step the weights are no longer
    those that sampled: r corrects for that, and the minimum takes the gradient from a token that has already moved by
    more than `clip` in the direction that its advantage asks for. It never takes it from one that moved the wrong way.
    """
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def update(policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[Group], config: Config,
           updates: int = UPDATES) -> dict[str, float]:
    """`updates` optimizer steps on the same completions; returns means over them."""
    completions = [c for group in groups for c in group.completions]
    advantages = torch.tensor(np.concatenate([group.advantages for group in groups]), dtype=torch.float32)
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.float32)
    advantages, lengths = advantages.to(policy.device), lengths.to(policy.device)
    old: list[torch.Tensor] = []
    losses, clipped = [], []
    for _ in range(updates):
        loss = torch.zeros(())
        for i, batch in enumerate(micro_batches(policy, groups, config)):
            of = batch.rollout_id.to(policy.device)  # [N] which completion each of the N tokens belongs to
            new = policy.logprobs(batch, TEMPERATURE).logprobs  # [N], with gradient
            if len(old) == i:  # the weights are still those that sampled: these are the old log-probabilities
                old.append(new.detach())
            per_token = clipped_objective(new, old[i], advantages[of])
            # mean over the tokens of a completion, then over completions: GRPO's eq. 3. Divided by the number of all
            # completions and not by that of this micro-batch, so gradients of micro-batches add up to the whole
            share = (per_token / lengths[of]).sum() / len(completions)
            share.backward()
            loss += share.detach().cpu()
            clipped.append(((new - old[i]).exp() - 1).abs().gt(CLIP).float().mean().item())
        torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable()], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": float(np.mean(losses)), "beyond_clip": float(np.mean(clipped))}


def micro_batches(policy: Policy, groups: Sequence[Group], config: Config) -> Iterator[Batch]:
    """The tokens of all completions behind their prompts, a prompt and its picture once per group, in as many forward
    passes as memory needs. The same in every call."""
    pairs = [(group.prompt, c.tokens) for group in groups for c in group.completions]
    for pieces in policy.plan([prompt for prompt, _ in pairs], [tokens for _, tokens in pairs], config.train):
        yield policy.pack(pieces, config.train)


# --- the loop ---------------------------------------------------------------------------------------------------------


def heldout_reward(task: FindShape, encode: Encoder, engine: HFEngine, count: int = HELDOUT) -> float:
    """Mean reward of the likeliest completion (temperature 0) on pictures that are never trained on."""
    groups = sample_groups(task, task.samples("heldout")[:count], encode, engine, step=0, size=1, temperature=0.0)
    return float(np.mean([group.rewards.mean() for group in groups]))


def train(steps: int = 40, seed: int = 0, count: int = HELDOUT) -> tuple[float, float]:
    """Trains and returns the held-out reward before and after."""
    config = load_config("configs/tiny.yaml", task=f"{__file__}:FindShape")  # the embedded model; all of it learns
    policy = policies.load(config, Accelerator())  # a GPU where there is one
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    engine = HFEngine(policy, seed=seed)  # generates with the weights that are trained: no copy to keep in step
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0)
    task, rng = FindShape(), random.Random(seed)
    samples = task.samples("train")
    before = heldout_reward(task, encode, engine, count)
    print(f"held-out reward before: {before:.3f}")
    for step in range(steps):
        began = time.perf_counter()
        chosen = [samples[i] for i in rng.sample(range(len(samples)), PROMPTS)]
        groups = sample_groups(task, chosen, encode, engine, step)
        metrics = update(policy, optimizer, groups, config)
        engine.sync(policy, step + 1)  # the weights have changed
        print(f"step {step + 1}/{steps}  reward {np.mean([g.rewards for g in groups]):.3f}  loss {metrics['loss']:+.4f}"
              f"  beyond the clip {metrics['beyond_clip']:.1%}  {time.perf_counter() - began:.1f} s")
    after = heldout_reward(task, encode, engine, count)
    print(f"held-out reward: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a vision-language model, small.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    train(words.steps, words.seed)
