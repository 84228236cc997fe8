"""Finds NaN and infinite weights: a model with such weights generates nothing useful, whatever its metrics say."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.errors import ConfigError


def not_finite(model: Any) -> str:
    """A description of the model's tensors that contain NaN or infinity; "" if there are none."""
    bad = [(name, tensor) for name, tensor in model.named_parameters() if not _is_finite(tensor)]
    if not bad:
        return ""
    name, tensor = bad[0]
    count = int((~tensor.detach().isfinite()).sum())
    more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    return f"{name} holds NaN or inf in {count:,} of its {tensor.numel():,} values{more}"


def check_finite(model: Any, what: str) -> None:
    """Raises ConfigError if a tensor of the model contains NaN or infinity. `what` names the model in the message."""
    if bad := not_finite(model):
        raise ConfigError(f"{what} cannot be used: {bad}. Copy the weights again, or use an earlier checkpoint.")


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor.detach()))
