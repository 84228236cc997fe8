"""Copies tensors that were read from files to memory that PyTorch allocates.

safetensors maps a file into memory, so a tensor may start at any address. The results of CPU matrix kernels differ in
the last bits if an address is not aligned to vectors, and then a resumed run would differ from an uninterrupted run. So
tensors from files are copied before they are used."""

from __future__ import annotations

from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a CPU tensor in newly allocated memory, with the same strides; other tensors unchanged."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor


def align_weights(model: _Module) -> _Module:
    """Moves all parameters and buffers of a model to newly allocated memory, and returns the model. Tied parameters
    stay tied."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = aligned_copy(tensor.data)
    return model
