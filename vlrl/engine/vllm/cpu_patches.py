# pyright: reportMissingImports=false
"""Patches of vLLM's CPU build in the current process. They have no effect on a GPU.

Head sizes (`widen_heads`): the CPU attention kernels support only some head sizes (32, 64, 80, ...), and tiny models
have smaller heads (24 in the model shipped with vlrl). Queries, keys and values are padded with zeros to the next
supported size, which changes no attention score. The zeros are cut off the output. The KV cache uses the padded size.

Random state (`use_own_generator`): the CPU sampler draws a number per completion from torch's global generator in every
step, even if the completion has its own seed and the number is not used. During an update in another thread (async.*)
this would change the dropout of the training thread.

Waiting (`wait_asleep`): after each message, an engine process and its worker process poll their shared memory without a
pause for one second, each occupying a CPU core. On a machine without a GPU these cores are needed for computation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

SPIN_S = 0.001  # for this number of seconds an engine or worker process polls for the next message before it sleeps


def widen_heads() -> None:
    """Pads attention heads of unsupported sizes in models that this process creates later. No effect on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.attention.attention import Attention

    if not hasattr(Attention, "_vlrl_widened"):
        Attention._vlrl_widened = True  # pyright: ignore[reportAttributeAccessIssue]
        Attention.__init__ = _init(Attention.__init__)
        Attention.forward = _forward(Attention.forward)


def supported_size(size: int) -> int:
    """The smallest supported head size that is at least `size`; `size` itself if every supported size is smaller."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min((known for known in CPUAttentionBackend.get_supported_head_sizes() if known >= size), default=size)


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        own_values = kwargs.get("head_size_v") not in (None, head_size)
        wide = head_size if own_values else supported_size(head_size)
        original(self, num_heads, wide, *args, **{**kwargs, **({"head_size_v": None} if wide != head_size else {})})
        self._vlrl_size = head_size

    return init


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


def use_own_generator() -> None:
    """Gives vLLM's sampler a separate random generator in this process. No effect on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.ops import topk_topp_sampler as module

    if not isinstance(module.torch, _Torch):
        module.torch = _Torch()


class _Torch:
    """Stands in for the module torch in vLLM's sampler; its `randint` draws from a private random generator."""

    def __init__(self) -> None:
        self._own = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randint(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.randint(*args, **{"generator": self._own, **kwargs})


def wait_asleep() -> None:
    """Makes engine and worker processes sleep while they wait for messages of each other. No effect on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast as module

    if not issubclass(module.SpinCondition, _Asleep):
        module.SpinCondition = type("SpinCondition", (_Asleep, module.SpinCondition), {})


class _Asleep:
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, busy_loop_s=SPIN_S)  # pyright: ignore[reportCallIssue]
