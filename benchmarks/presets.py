"""How far is each preset's gradient from the default's, on the policy's own answers and on ones that it has moved from?

    python benchmarks/presets.py --out benchmarks/results/presets.md         # about three minutes on one core

Answers of the embedded model are drawn once. On-policy: the gradient at the weights that drew them. Off-policy: after a
random move of the weights, as later optimizer steps of the same batch see it, with log-probabilities of the engine that
differ from the trainer's. The reference is the model a little before. A preset is a file of
configs/algorithms/; the default is the config alone. Nothing is trained.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl import config as configs
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
FITTED = {"length_bonus": ["algo.shaping.0.low=1", "algo.shaping.0.high=20"],
          "brorl": ["rollout.group_size=8"]}
"""Options for the short answers and small groups of this batch."""
STEP = 150
"""rorecomp does not compensate in it, and kimi_length has begun."""
NOTES = (
    "- hold_entropy, e3 and grpo_care change how answers are drawn or what they are paid, not the gradient of a given "
    "batch; so does eepo, beside its correction.",
    "- dual_clip and two_sided act on tokens whose ratio is above 3 or 4; kl_cov and clip_cov on a few tokens in ten "
    "thousand, at least one.",
    "- kimi_length, rorecomp and grsp compare the answers of a group by length and paragraphs, hicra looks for English "
    "phrases: the answers here are all of one length and one paragraph, without any.",
    "- siren and skywork_or1: their entropy term as in the middle of a run; length_bonus: for answers of 1 to 20 "
    "tokens.",
    "- ppo, archer and vagen: the policy's term with a critic of 0 everywhere, as in the first step.",
    "- tis, icepop, mis and decoupled_ppo weigh what the engine computed otherwise, and without a gap do nothing.")
ROUNDING = 1e-5
"""Of the gradient in float32, relative to its norm: a smaller difference is none."""
Weights = Mapping[str, torch.Tensor]
Differs = tuple[bool, bool]
"""Whether a gradient differs from the default's on-policy, and off-policy."""


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


def compare(found: torch.Tensor, default: torch.Tensor) -> tuple[float, float]:
    """Cosine and ratio of norms; nan and 0 without a gradient."""
    norm = float(found.norm())
    cosine = float(found @ default / (found.norm() * default.norm())) if norm else float("nan")
    return cosine, norm / float(default.norm())


def row(name: str, made: Scene, preset: Config, defaults: Sequence[torch.Tensor]) -> tuple[str, Differs]:
    """A line of the table, and where the gradient differs."""
    cells, differs = [], []
    for off_policy, default in enumerate(defaults):
        found = gradient(made, preset, bool(off_policy))
        cosine, ratio = compare(found, default)
        cells += [f"{cosine:.4f}", f"{ratio:.4g}"]
        differs.append(float((found - default).norm()) > ROUNDING * float(default.norm()))
    updates = preset.rollout.updates * preset.rollout.minibatches
    return f"| {name} | {updates} | {' | '.join(cells)} |", (differs[0], differs[1])


def where(differ: Mapping[str, Differs]) -> list[str]:
    """Which presets differ where, a line for each kind."""
    kinds = {(True, True): "on-policy and off-policy", (True, False): "on-policy alone",
             (False, True): "off-policy alone", (False, False): "nowhere on this batch"}
    lines = [f"Gradients that differ from the default's by more than {ROUNDING:g} of its norm:", ""]
    for kind, words in kinds.items():
        names = [name for name, found in differ.items() if found == kind]
        lines.append(f"- {words} ({len(names)}): {', '.join(names) or 'none'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--presets", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--move", type=float, default=0.05, help="random step of the weights, relative to their size")
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = table(args, folder)
    if args.out:
        args.out.write_text(text)


def table(args: argparse.Namespace, folder: str) -> str:
    """Markdown: a row for each preset."""
    common = [f"run.dir={folder}", "data.workers=0", "limits.score_s=0", "rollout.group_size=8", "eval.samples=0"]

    def load(*words: str) -> Config:
        return configs.load(ROOT / args.config, [*common, *words])

    made = scene(load("algo.advantage=remax"), args.prompts, args.move)  # with a greedy answer to each prompt
    defaults = [gradient(made, load(), off_policy) for off_policy in (False, True)]
    rewards = [r.reward for g in made.groups for r in g.rollouts if r.reward is not None]
    names = args.presets or sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))
    lines = [f"# Gradients of the presets against the default's on {args.config}", "",
             f"One batch of {args.prompts} prompts x 8 answers of the embedded model, rewards {np.mean(rewards):.2f} "
             f"+- {np.std(rewards):.2f}. On-policy: at the weights that drew it. Off-policy: after a random move of "
             f"the weights by {args.move:g} of their size, with log-probabilities of the engine that differ by .3. "
             "Cosine: with the gradient of the default (grpo, ppo_clip, token_mean, no KL) on the same batch; norm: "
             "relative to it. Steps: optimizer steps of a batch of rollouts that the preset sets; with more than one, "
             "all but the first are off-policy.", "",
             "| preset | steps | on-policy cosine | norm | off-policy cosine | norm |", "|---|---|---|---|---|---|"]
    differ: dict[str, Differs] = {}
    for name in names:
        line, differ[name] = row(name, made, load(f"extends=algorithms/{name}.yaml", *FITTED.get(name, ())), defaults)
        lines.append(line)
        print(line, flush=True)
    return "\n".join([*lines, "", *where(differ), "", *NOTES,
                      f"- command: `python benchmarks/presets.py`, on {os.cpu_count()} cores, in "
                      "float32", ""])


if __name__ == "__main__":
    main()
