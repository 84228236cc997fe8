"""The loss of a reward model, which learns to give the better of two answers to a prompt the higher score."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.algo.inputs import LossInputs, Metrics, requires
from vlrl.config.algo import HEAD_LR
from vlrl.config.base import NonNegative, Rate
from vlrl.config.schema import Config
from vlrl.models.heads import HeadSettings, RewardHead


@requires("pairs")
def bradley_terry(x: LossInputs, head_lr: Rate = HEAD_LR, centre: NonNegative = 0.0) -> tuple[torch.Tensor, Metrics]:
    """The policy term of a run that trains a reward model: [N] zeros. The reward head is trained by `pair_loss`
    instead, with the option `centre` and at the learning rate `head_lr`."""
    return torch.zeros_like(x.logprobs, requires_grad=False), {}


def pair_loss(x: LossInputs, values: torch.Tensor, centre: float = 0.0) -> tuple[torch.Tensor, Metrics]:
    """The reward model's loss on this process's pairs, and a dict of its metrics. The loss is -mean log sigmoid(s+ -
    s-) + centre mean (s+ + s-)^2 over the pairs of the optimizer step, with the weights of the data rows. The score
    s of an answer is the value at its last trained token; s+ is the score of the answer with the larger reward.
    `values` [N] are the head's outputs, with gradient.

    Bradley and Terry (1952), the usual loss of reward models since 2009.01325; `centre` is from 2312.09244. Metrics are
    scaled like those of the objective, which are divided by the number of trained tokens."""
    places = _places(x)
    better, worse = values[places[:, 0]], values[places[:, 1]]
    weights, margin, count = x.weights[places[:, 0]], better - worse, max(x.total_sequences / 2, 1.0)
    loss = -(torch.nn.functional.logsigmoid(margin) * weights).sum() / count
    if centre:
        loss = loss + centre * ((better + worse) ** 2 * weights).sum() / count
    share = x.total_tokens / count
    right = (margin > 0).float() + 0.5 * (margin == 0).float()
    return loss, {"pairs/loss": loss.detach() * x.total_tokens, "pairs/accuracy": right.sum() * share,
                  "pairs/margin": margin.detach().sum() * share}


def _places(x: LossInputs) -> torch.Tensor:
    """[P, 2] for each of the P pairs in this micro-batch: the positions of the last trained tokens of the better and of
    the worse answer."""
    assert x.group is not None and x.rewards is not None
    places = torch.arange(len(x.mask), device=x.mask.device)
    trained = torch.where(x.mask > 0, places, -1)
    last = torch.full_like(x.group, -1).scatter_reduce(0, x.rollout_id, trained, "amax")
    here = (last >= 0).nonzero()[:, 0]
    order = here[torch.argsort(-x.rewards[here], stable=True)]  # better answers first ...
    order = order[torch.argsort(x.group[order], stable=True)]  # ... of each group, one group after the other
    pairs = order.reshape(-1, 2)
    assert (x.group[pairs[:, 0]] == x.group[pairs[:, 1]]).all()
    return last[pairs]


class PairHead(RewardHead):
    """A reward head trained on pairs of answers, together with the model, at learning rate algo.loss.head_lr."""

    key = "critic"
    """The name of the head in checkpoints of reward models."""
    centre: float = 0.0

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return pair_loss(x, values, self.centre)


def of_run(config: Config, width: int, device: torch.device) -> PairHead:
    options = config.algo.loss.options
    head = PairHead(width, HeadSettings(options.get("head_lr", HEAD_LR)), device)
    head.centre = float(options.get("centre", 0.0))
    return head
