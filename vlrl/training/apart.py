"""The gradient of a loss beside the objective, taken apart so that its norm is known, and then added to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlrl.algo.method import Pass
from vlrl.distributed import comm
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy
from vlrl.training.minibatch import Minibatch


def learn_apart(policy: Policy, part: Minibatch, weights: Sequence[torch.nn.Parameter], work: Callable[[int], None],
                begin: Callable[[], None]) -> tuple[int, float, float]:
    """Runs `work` (forward and backward) on every micro-batch, apart from the gradients that are there; both are summed
    over processes and added up. `begin` comes before the first micro-batch, and again after one was halved.

    Returns how many micro-batches were halved for lack of memory, and the norms of the new gradient and of the other,
    over all processes. Called on every process.
    """
    comm.sum_gradients(weights)
    objective = [p.grad for p in weights]

    def again() -> None:
        begin()
        for p in weights:
            p.grad = None

    again()
    cuts = each_batch(policy, part.batches, work, part.halve, again)
    comm.sum_gradients(weights)
    scale = policy.scaler.get_scale() if policy.scaler.is_enabled() else 1.0
    norm, other = (_norm(g) / scale for g in ([p.grad for p in weights], objective))
    for p, before in zip(weights, objective, strict=True):
        p.grad = before if p.grad is None else p.grad if before is None else p.grad.add_(before)
    return cuts, norm, other


def apart(policy: Policy, one: Pass, weights: Sequence[torch.nn.Parameter]) -> int:
    """Runs a pass whose gradient is summed over processes by itself; returns how many micro-batches were halved."""
    cuts, norm, others = learn_apart(policy, one.part, weights, one.work, one.begin)
    one.end(norm, others)
    return cuts


def _norm(gradients: Sequence[torch.Tensor | None]) -> float:
    norms = [g.detach().float().norm() for g in gradients if g is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
