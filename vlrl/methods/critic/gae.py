"""Advantage estimators with a critic (algo.critic), and the critic's loss. An estimator maps `Scores` with the critic's
values to `Estimates`.

The value of a token is the value of the state before that token: prompt, images and all earlier tokens. Untrained
tokens (observations, a forced end of thinking) are not decisions, so discounting and sums run from one trained token,
or turn, to the next. The weighted reward parts of a turn are paid at its last trained token, and the rest of the reward
at the end of the last turn. The value after the last token is 0, also for truncated completions, because the task has
scored the truncated text. The papers' implementations (verl, VAGEN) do the same: a token limit is part of the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlrl.algo.grouped import whitened
from vlrl.algo.inputs import Estimates, LossInputs, Metrics, Scores, requires, turn_rewards
from vlrl.config.base import Fraction, NonNegative, Positive
from vlrl.config.schema import Config
from vlrl.models.heads import Head, HeadSettings


@dataclass(frozen=True, eq=False)
class _Decisions:
    """The trained tokens of one rollout: L tokens in D turns."""

    paid: np.ndarray
    """[L] reward of each token; the reward of a turn is at its last trained token."""
    penalty: np.ndarray
    """[L] the KL penalty of each token, which is subtracted from its reward."""
    values: np.ndarray
    """[L] the critic's value of each token."""
    first: np.ndarray
    """[D] for each turn, the index of the turn's first trained token among the L tokens."""

    @property
    def last(self) -> np.ndarray:
        return np.append(self.first[1:], len(self.values)) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(np.append(self.first, len(self.values)))


Estimate = tuple[np.ndarray, np.ndarray]
"""Advantages [L] and value targets [L] of the trained tokens of one rollout."""


@requires("turns", "values", "token_kl")
def gae(s: Scores, normalize: bool = True, eps: NonNegative = 1e-8) -> Estimates:
    """Generalized advantage estimation over the trained tokens: A_t = sum_{k >= 0} (gamma lam)^k delta_{t+k} with
    delta_t = r_t + gamma V_{t+1} - V_t. The critic's targets are A_t + V_t.

    normalize: the advantages become (A - mean) / sqrt(var + eps) over all trained tokens of the step, with Bessel's
    correction, as in verl. The targets use the advantages before normalization. GAE (arXiv 1506.02438) eq. 16, PPO
    (1707.06347) eq. 11."""
    def one(d: _Decisions) -> Estimate:
        advantages = discounted(d.paid - d.penalty, d.values, s.gamma, s.lam)
        return advantages, advantages + d.values

    return _estimates(s, one, normalize, eps)


@requires("turns", "values", "token_kl")
def turn_gae(s: Scores, normalize: bool = True, eps: NonNegative = 1e-8) -> Estimates:
    """GAE over turns instead of tokens. All tokens of turn t have the advantage A_t = sum_{k >= 0} (gamma lam)^k
    delta_{t+k} with delta_t = r_t + gamma V(s_{t+1}) - V(s_t), where s_t is the state before the turn's first token.
    The critic has a target at that token only: A_t + V(s_t).

    This treats turns as the utterances of ArCHer (arXiv 2402.19446), but the critic is a state-value function learned
    on policy by TD(lam), where ArCHer has an off-policy Q. At lam=0 the advantage is ArCHer's, r + gamma V(s') - V(s).
    normalize: as in gae, over the tokens of all turns."""
    def one(d: _Decisions) -> Estimate:
        values, targets = d.values[d.first], np.full(len(d.values), np.nan)
        advantages = discounted(np.add.reduceat(d.paid - d.penalty, d.first), values, s.gamma, s.lam)
        targets[d.first] = advantages + values
        return advantages.repeat(d.sizes), targets

    return _estimates(s, one, normalize, eps)


@requires("turns", "values", "token_kl")
def bilevel_gae(s: Scores, token_gamma: Fraction = 1.0, token_lam: Fraction = 1.0, normalize: bool = True,
                eps: NonNegative = 1e-8) -> Estimates:
    """GAE on two levels. First, turns get advantages by GAE over the values at their last tokens. Then, within each
    turn, from its last token to its first, A_i = delta_i + token_gamma token_lam A_{i+1} with delta_i = r_i +
    token_gamma V_{i+1} - V_i; the last token has the turn's advantage. Here r_i is minus the token's KL penalty,
    without any other reward. All tokens have the target A + V.

    algo.critic.gamma and algo.critic.lam apply per turn. Bi-Level GAE of VAGEN (arXiv 2510.16907), as in its code.
    normalize: as in gae."""
    def one(d: _Decisions) -> Estimate:
        values = d.values[d.last]
        turns = discounted(np.add.reduceat(d.paid, d.first), values, s.gamma, s.lam)
        rewards = -d.penalty
        rewards[d.last] += turns + values  # no value follows within the turn, so its advantage is that of the turn
        advantages = np.concatenate([discounted(r, v, token_gamma, token_lam) for r, v in zip(
            np.split(rewards, d.first[1:]), np.split(d.values, d.first[1:]), strict=True)])
        return advantages, advantages + d.values

    return _estimates(s, one, normalize, eps)


@requires("turns", "values", "token_kl")
def macro_gae(s: Scores, tokens: Positive = 5, normalize: bool = True, eps: NonNegative = 1e-8) -> Estimates:
    """GAE over macro actions. All tokens of a macro action have the same advantage A, and the critic has the target A +
    V on each of them.

    A macro action is `tokens` consecutive trained tokens, or fewer at the end of a turn. Its reward is the sum of its
    tokens' rewards, and its value V is the mean of their values. gamma and lam apply per macro action. With tokens=1
    this is gae. MA-RLHF (arXiv 2410.02743) with fixed n-grams and equally weighted values. The paper's code takes the
    mean of the tokens' KL where the sum is taken here. normalize: as in gae, over the tokens of all macro actions."""
    def one(d: _Decisions) -> Estimate:
        first = np.concatenate([np.arange(a, b, tokens) for a, b in zip(d.first, d.last + 1, strict=True)])
        sizes = np.diff(np.append(first, len(d.values)))
        values = np.add.reduceat(d.values, first) / sizes
        advantages = discounted(np.add.reduceat(d.paid - d.penalty, first), values, s.gamma, s.lam)
        return advantages.repeat(sizes), (advantages + values).repeat(sizes)

    return _estimates(s, one, normalize, eps)


def discounted(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The GAE advantages [L] of L consecutive decisions, from their rewards [L] and values [L]. The value after the
    last decision is 0."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    out, later = np.empty(len(deltas)), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        out[t] = later = deltas[t] + gamma * lam * later
    return out


def value_loss(x: LossInputs, values: torch.Tensor, clip: float | None = None) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss, and a dict of its metrics. The loss is this process's share of 1/2 mean (V - target)^2, over
    all tokens of the optimizer step that have a target. The squared errors are multiplied by the weights of the data
    rows.

    `values` [N] are the critic's current values, with gradient. With clip=c the squared error is the larger of (V -
    target)^2 and (V_old + clip(V - V_old, -c, c) - target)^2, as in OpenAI's PPO2 and verl. Metrics are scaled like
    those of the objective, which are divided by the number of trained tokens."""
    before, targets = x.per_token["values"], x.per_token["targets"]
    known = (x.mask > 0) & ~targets.isnan()
    targets = torch.where(known, targets, 0.0)
    errors, clipped = (values - targets) ** 2, torch.zeros_like(known)
    if clip is not None:
        near = (before + (values - before).clamp(-clip, clip) - targets) ** 2
        clipped, errors = known & (near > errors), torch.maximum(near, errors)
    count = max(x.known["targets"], 1.0)
    loss = 0.5 * (errors * known * x.weights).sum() / count
    share = x.total_tokens / count
    return loss, {"critic/loss": loss.detach() * x.total_tokens, "critic/clip_frac": clipped.sum() * share}


def _estimates(s: Scores, estimate: Callable[[_Decisions], Estimate], normalize: bool, eps: float) -> Estimates:
    """Applies `estimate`, a function from the _Decisions of a rollout to an Estimate, to each rollout and collects the
    results. A rollout that is unscorable or has no trained tokens gets advantage 0 and no targets. With `normalize`,
    the advantages become (A - mean) / sqrt(var + eps) over all trained tokens."""
    trained = [np.flatnonzero(mask) if reward == reward else np.zeros(0, np.int64)
               for mask, reward in zip(s.masks, s.rewards.tolist(), strict=True)]
    estimates = [estimate(_decisions(s, i, places)) if len(places) else (np.zeros(0), np.zeros(0))
                 for i, places in enumerate(trained)]
    flat = torch.from_numpy(np.concatenate([np.zeros(0), *(advantages for advantages, _ in estimates)]))
    flat = whitened(flat, torch.ones_like(flat), eps) if normalize else flat
    advantages, targets = [], []
    for mask, places, own, (_, target) in zip(s.masks, trained, flat.split([len(p) for p in trained]), estimates,
                                              strict=True):
        advantages.append(torch.zeros(len(mask), dtype=torch.float64))
        targets.append(torch.full((len(mask),), torch.nan, dtype=torch.float64))
        advantages[-1][places], targets[-1][places] = own, torch.from_numpy(target)
    return Estimates(advantages, targets)


def _decisions(s: Scores, i: int, trained: np.ndarray) -> _Decisions:
    ends = np.array([turn.end for turn in s.turns[i]])
    paid = np.zeros(len(trained))
    # the reward of a turn without trained tokens goes to the turn before it, or else to the first trained token
    np.add.at(paid, (np.searchsorted(trained, ends) - 1).clip(0), turn_rewards(s.turns[i], float(s.rewards[i])))
    penalty = s.kl_coef * np.asarray(s.kl[i], np.float64)[trained] if s.kl else np.zeros(len(trained))
    _, first = np.unique(np.searchsorted(ends, trained, side="right"), return_index=True)
    return _Decisions(paid, penalty, np.asarray(s.per_token[i]["values"], np.float64)[trained], first)


class Critic(Head):
    """A value head trained by the value loss at learning rate algo.critic.lr. The policy's weights receive
    algo.critic.coef times the gradient of that loss, or none during algo.critic.warmup."""

    key = "critic"
    reads = ("values", "targets")
    clip: float | None = None

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(x, values, self.clip)


def of_run(config: Config, width: int, device: torch.device) -> Critic:
    settings: Any = config.algo.critic
    critic = Critic(width, HeadSettings(settings.lr, settings.coef, settings.warmup), device)
    critic.clip = settings.clip
    return critic
