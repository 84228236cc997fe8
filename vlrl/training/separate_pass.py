"""Computes the gradient of a method's additional loss (Pass) separately, to measure its norm before it is added to the
gradient of the objective."""

from collections.abc import Sequence

import torch

from vlrl.algo.method import Pass
from vlrl.distributed import comm
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy


def accumulate_separately(policy: Policy, one: Pass, weights: Sequence[torch.nn.Parameter]) -> int:
    """Runs the additional loss `one`, and adds its gradients to the gradients of the objective, which `weights` already
    have. Both gradients are first summed over ranks. Then `one.end` gets the norms of the two gradients: that of the
    additional loss, that of the objective. Returns how many micro-batches were halved for lack of memory. Called on
    every rank."""
    comm.sum_gradients(weights)
    objective = [p.grad for p in weights]

    def restart() -> None:
        one.begin()
        for p in weights:
            p.grad = None

    restart()
    halved = each_batch(policy, one.part.batches, one.work, one.part.halve, restart)
    comm.sum_gradients(weights)
    scale = policy.scaler.get_scale() if policy.scaler.is_enabled() else 1.0
    norm, other = (_norm(g) / scale for g in ([p.grad for p in weights], objective))
    for p, before in zip(weights, objective, strict=True):
        p.grad = before if p.grad is None else p.grad if before is None else p.grad.add_(before)
    one.end(norm, other)
    return halved


def _norm(gradients: Sequence[torch.Tensor | None]) -> float:
    norms = [g.detach().float().norm() for g in gradients if g is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
