"""Each preset's gradient on one batch: it differs from the default's where its paper says that it differs."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tests.algo.flat import random_step
from tests.algo.made import scores
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.tables import LOSSES
from vlrl.config.schema import Config

FOLDER = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in (FOLDER / "algorithms").glob("*.yaml"))
ELSEWHERE = {"hold_entropy": "the temperature that samples", "e3": "the temperature that samples",
             "grpo_care": "the reference that a reward reads", "rlpr": "which groups are kept",
             "agent_rlvr": "second attempts, which have a loss of their own",
             "gkd": "the answers beside their teacher's",
             **dict.fromkeys(("ghpo", "egsr", "expo", "critique_grpo"), "second attempts"),
             **dict.fromkeys(("chord", "chord_phi", "sasr", "relift"),
                             "demonstrations, which have a loss of their own"),
             **dict.fromkeys(("swarm_sapo", "a_lol"), "stored answers, which have one too")}
"""Presets that change what the gradient is taken of."""
BEGUN = {"siren": {"anchor": 0.1}, "adaptive": {"coef": 0.1, "active": True}}
"""Entropy terms that have no gradient in the first optimizer step, in the middle of a run."""
SHORT = {"length_bonus": ["algo.shaping.0.low=2", "algo.shaping.0.high=5"]}
"""Options for answers of a few tokens."""
ROLLOUTS = {n: config.load(FOLDER / "quickstart.yaml", [f"extends=algorithms/{n}.yaml"]).rollout for n in NAMES}
OF_A_RATIO = [n for n, r in ROLLOUTS.items() if n not in ("clip_cov", "simko") and r.minibatches * r.updates > 1]
GROUPS, SIZE, STEP = 6, 4, 150


@cache
def batch():
    """LossInputs of 24 answers whose ratios to the policy that sampled spread by 1, and features of each token."""
    x = random_step(7, GROUPS, SIZE, longest=8, gap=1.0)
    features = torch.randn(len(x.mask), 40, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 0.1
    return replace(x, texts=[" wait " if i % 5 == 0 else "a" for i in range(len(x.mask))], max_length=8,
                   outcome=x.rewards > 0.5), features


@cache
def paid():
    """The Scores of the same answers: graded rewards of two parts, a greedy answer, texts of several paragraphs."""
    x, _ = batch()
    draw, count = np.random.default_rng(9), GROUPS * SIZE
    runs = [x.rollout_id == r for r in range(count)]
    parts = {"iou": (0.8 * x.rewards + 0.1 * torch.rand(count, generator=torch.Generator().manual_seed(1))).tolist(),
             "format": draw.integers(0, 2, count).tolist()}
    rewards = [a + 0.1 * b for a, b in zip(*parts.values(), strict=True)]
    return scores([rewards[i:i + SIZE] for i in range(0, count, SIZE)], lengths=x.lengths.tolist(), step=STEP,
                  outcome=x.outcome,
                  greedy=draw.random(count).tolist(), parts=parts, part_weights={"iou": 1.0, "format": 0.1},
                  tokens=[draw.integers(0, 3, int(own.sum())) for own in runs], max_length=8,
                  masks=[(x.mask[own] > 0).numpy() for own in runs],
                  kl=[draw.normal(size=int(own.sum())) for own in runs], kl_coef=0.1,
                  steps=[[(0, int(own.sum()), v)] for own, v in zip(runs, draw.random(count), strict=True)],
                  per_token=[{"values": np.full(int(own.sum()), 0.3)} for own in runs],
                  texts=["\n\n".join(["so then"] * int(n)) + "<answer>1</answer>" for n in draw.integers(1, 6, count)])


def credited(found: Config, algorithm: Algorithm):
    """The batch with what the preset makes of the rewards: an advantage, and which answers are trained on."""
    x, features = batch()
    s = replace(paid(), kl=paid().kl if found.algo.kl_in == "reward" and found.algo.kl_coef else ())
    for shape in algorithm.shaping:
        s = replace(s, rewards=shape(s))
    given = algorithm.advantage(s)
    given = getattr(given, "advantages", given)  # with a critic there are targets too
    advantages = given[x.rollout_id] if torch.is_tensor(given) else torch.cat(
        [x.mask.new_zeros(0), *(torch.as_tensor(a, dtype=torch.float64) for a in given)])
    mask = x.mask * algorithm.batch(s)[x.rollout_id]
    lengths = torch.zeros_like(x.lengths).index_add(0, x.rollout_id, mask)
    return replace(x, advantages=advantages, mask=mask, lengths=lengths, rewards=paid().rewards,
                   total_tokens=float(mask.sum()), total_sequences=float((lengths > 0).sum())), features


@cache
def slope(words: tuple[str, ...], on_policy: bool) -> torch.Tensor:
    """d loss / d weights [40] of a policy whose log-probabilities and statistics are linear in them."""
    found = config.load(FOLDER / "quickstart.yaml", words)
    algorithm = Algorithm(found)
    if algorithm.objective.entropy and algorithm.objective.entropy.name in BEGUN:
        algorithm.objective.entropy.load_state_dict(BEGUN[algorithm.objective.entropy.name])
    x, features = credited(found, algorithm)
    weights = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    drift = features @ weights
    others = features.roll(1, 0) @ weights  # of statistics
    moved = {"entropy": x.entropy + others, "nucleus_entropy:0.8": x.entropy ** 2 + others,
             **{k: v + (others if v.dim() == 1 else others[:, None]) for k, v in x.stats.items()}}
    x = replace(x, logprobs=x.logprobs.detach() + drift, stats=moved)
    if on_policy:
        x = replace(x, old_logprobs=x.logprobs.detach(), sampler_logprobs=x.logprobs.detach(), old_stats={})
    loss, _ = algorithm.objective(replace(x, prepared=algorithm.objective.prepare(x)), found.algo.kl_coef)
    (gradient,) = torch.autograd.grad(loss, weights)
    return gradient


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def of(name: str, on_policy: bool, *more: str) -> torch.Tensor:
    return slope((f"extends=algorithms/{name}.yaml", *SHORT.get(name, ()), *more), on_policy)


def test_a_preset_has_another_gradient_than_the_default():
    assert {name for name in NAMES if apart(of(name, False), slope((), False)) < 1e-9} == {*ELSEWHERE}


def test_a_preset_of_the_ratio_acts_off_policy_and_is_given_several_optimizer_steps():
    plain = ["algo.loss=reinforce", "algo.weights=[]"]
    for name in OF_A_RATIO:
        towards = [torch.cosine_similarity(of(name, on_policy), of(name, on_policy, *plain), dim=0)
                   for on_policy in (True, False)]
        assert towards[0] > 1 - 1e-6 or name in ("top_entropy", "siren", "stable_reinforce", "deepseek_v3_2"), name
        assert towards[1] < 1 - 1e-4, name
    losses = {config.load(FOLDER / "quickstart.yaml", [f"extends=algorithms/{n}.yaml"]).algo.loss.name
              for n in OF_A_RATIO}
    assert {name for name in LOSSES if hasattr(LOSSES[name], "ratio")} - {"clip_cov", "simko"} <= losses
