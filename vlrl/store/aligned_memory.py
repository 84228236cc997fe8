"""Tensors read from files, in memory as PyTorch allocates it.

safetensors maps a file into memory, so a tensor read from it starts wherever it stands there. Matrix kernels of CPUs
answer differently in the last bits at addresses that are no multiples of a vector's width: a resumed run would not be
the undisturbed one. Whatever goes on computing with tensors of a file takes them through here."""

from __future__ import annotations

from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in memory of its own, of the same strides; on other devices than CPUs the tensor itself."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor


def align_weights(model: _Module) -> _Module:
    """Returns the model, each of its parameters and buffers moved to memory of its own; what is tied stays tied."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = aligned_copy(tensor.data)
    return model
