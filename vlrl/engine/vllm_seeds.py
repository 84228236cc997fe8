# pyright: reportMissingImports=false
"""Keeps vLLM's CPU sampler off torch's global generator.

It draws a number per answer from there in every step, also where each answer has a seed of its own and the number is
not used. Beside an update (async.*) that would move the dropout of the thread that learns.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_apart() -> None:
    """Gives the sampler a generator of its own, in this process; nothing on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.ops import topk_topp_sampler as module

    if not isinstance(module.torch, _Torch):
        module.torch = _Torch()


class _Torch:
    """torch, but for `randint` without a generator."""

    def __init__(self) -> None:
        self._own = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randint(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, from a generator of its own."""
        return torch.randint(*args, **{"generator": self._own, **kwargs})
