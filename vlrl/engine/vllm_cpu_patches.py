# pyright: reportMissingImports=false
"""Attention heads of any size in vLLM's CPU build, whose kernels know some sizes alone (32, 64, 80, ...).

Tiny models have smaller ones, as the model that is shipped with vlrl (24). Queries, keys and values are widened with
zeros to the next size that is known, which changes no score and adds zeros to what comes out; these are cut off. The
cache takes the wider size too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F


def widen() -> None:
    """Widens heads of unknown sizes in models that are made from now on in this process; nothing on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.attention.attention import Attention

    if not hasattr(Attention, "_vlrl_widened"):
        Attention._vlrl_widened = True  # pyright: ignore[reportAttributeAccessIssue]
        Attention.__init__ = _init(Attention.__init__)
        Attention.forward = _forward(Attention.forward)


def known_size(size: int) -> int:
    """The least head size of at least `size` that the kernels know; `size` where it is above all of them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min((known for known in CPUAttentionBackend.get_supported_head_sizes() if known >= size), default=size)


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def made(self: Any, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        own_values = kwargs.get("head_size_v") not in (None, head_size)
        wide = head_size if own_values else known_size(head_size)
        original(self, num_heads, wide, *args, **{**kwargs, **({"head_size_v": None} if wide != head_size else {})})
        self._vlrl_size = head_size

    return made


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, query: torch.Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        size, wide = self._vlrl_size, self.head_size
        if size == wide:
            return original(self, query, key, value, *args, **kwargs)
        wider = [None if x is None else F.pad(x.reshape(len(x), -1, size), (0, wide - size)).flatten(1)
                 for x in (query, key, value)]
        out = original(self, *wider, *args, **kwargs)
        return out.view(len(out), -1, wide)[..., :size].flatten(1)

    return forward
