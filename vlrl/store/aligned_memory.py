"""Tensors read from files, copied to memory that PyTorch allocates.

safetensors maps a file into memory, so a tensor starts at any address. Matrix kernels of CPUs differ in the last bits
at addresses that are not aligned to vectors: a resumed run would differ from an undisturbed one. Tensors from files are
copied here before they are used."""

from __future__ import annotations

from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in newly allocated memory with the same strides; on other devices than CPUs the tensor itself."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor


def align_weights(model: _Module) -> _Module:
    """The model with all parameters and buffers in newly allocated memory; tied ones stay tied."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = aligned_copy(tensor.data)
    return model
