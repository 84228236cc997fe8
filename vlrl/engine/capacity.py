"""Computes how many completions are decoded in one batch.

With `engine.batch_rollouts=auto` a batch may use a share of the device memory that remains after weights and optimizer
state. The size is estimated from the device's total memory and the requests, not from the free memory: the last bits of
the logits depend on the batch shape, and the same config and seed must give the same weights, even if the run is killed
and resumed. On a machine with a different amount of memory the batches may be split differently, unless MOST_ROWS or a
number set by the user is the tighter limit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from vlrl.engine.base import Request
from vlrl.engine.cache import ROOM
from vlrl.models.policy import Policy
from vlrl.types import Prompt

Job = tuple[int, list[int]]  # A part of a batch: (index of the request, indices of the request's rollouts)
GIB = 2**30
MOST_ROWS = 256
"""Maximum number of completions per batch. With small models this limit is reached before the memory is full, so their
batches are equal on every machine."""
LOGIT_COPIES = 3
"""Number of float32 copies of the logits [rows, vocabulary] that decoding.sample_tokens holds at the same time."""
_SHARE = {"cuda": 0.7}  # Share of the remaining memory that a batch may use. The rest is for prefill and fragmentation.
_OTHER_SHARE = 0.5  # the share of memory on other devices, where data, Python and other programs use the same memory
_TRAINING = 4
"""Memory that training needs, as a multiple of the size of the trained weights: both AdamW moments, a reference policy,
dtype casts."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The limits of one batch. All memory sizes are in bytes."""

    rows: int  # maximum number of completions
    total: float = math.inf  # maximum memory of the KV caches and logits of a batch
    token: int = 0  # size of the KV cache of one token
    logits: int = 0  # size of the logits for one completion's next token, including temporary copies
    shared: bool = True  # whether the completions of a group share one copy of their prompt's cache

    def fits(self, prompts: int, widest: int, rows: int, longest: int, shares: int = 1) -> bool:
        """Whether a batch with `prompts` prompts of up to `widest` tokens, and `rows` completions of up to `longest`
        tokens, fits into 1 / `shares` of the memory."""
        copies = prompts if self.shared else prompts + rows  # copied while the prompts' own are still there
        tokens = copies * widest + rows * (longest + ROOM)
        return rows <= self.rows and tokens * self.token + rows * self.logits <= self.total / shares


def automatic(policy: Policy) -> Capacity:
    """The Capacity for a policy, computed from the total memory of the policy's device."""
    text = policy.base.config.get_text_config(decoder=True)
    size, device = policy.dtype.itemsize, policy.device
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    trained = sum(p.numel() * p.element_size() for _, p in policy.trainable())
    left = device_bytes(device) - weights - _TRAINING * trained
    return Capacity(rows=MOST_ROWS, total=max(left, 0) * _SHARE.get(device.type, _OTHER_SHARE),
                    token=token_bytes(text, size, policy.lora), logits=logit_bytes(text, size),
                    shared=policy.family.shared)


def token_bytes(text: Any, size: int, adapter: bool) -> int:
    """Size in bytes of one token's KV cache in all layers. text: the config of the language model. size: bytes per
    value of the compute dtype. adapter: whether the policy uses LoRA; in full fine-tuning the keys are float32, because
    the rotary embedding returns float32."""
    kv_heads = largest(text, "num_key_value_heads") or text.num_attention_heads
    return head_width(text) * text.num_hidden_layers * kv_heads * ((size if adapter else 4) + size)


def logit_bytes(text: Any, size: int) -> int:
    """Size in bytes of the logits for the next token of one completion: one copy in the compute dtype and LOGIT_COPIES
    in float32. For `text` and `size` see token_bytes."""
    return text.vocab_size * (4 * LOGIT_COPIES + size)


def head_width(text: Any) -> int:
    """Size of an attention head of the language model with the config `text`; the largest if layers differ."""
    return largest(text, "head_dim") or text.hidden_size // text.num_attention_heads


def largest(text: Any, name: str) -> int | None:
    """The value of the field `name` in the config `text` of a language model. If layers differ (Gemma 4), the largest
    value. None if the config does not have the field."""
    if name not in (getattr(text, "per_layer_attributes", None) or ()):
        return getattr(text, name, None)
    return max(getattr(text.per_layer_config[i], name, None) or 0 for i in range(text.num_hidden_layers))


def device_bytes(device: torch.device) -> int:
    """Total memory in bytes of a device that this process may use, rounded down to whole GiB. The result is the same at
    every call. For a CPU this is the memory of the machine or the limit of its container (Linux cgroup v2), divided
    by the number of processes that torchrun started on the machine."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = min(psutil.virtual_memory().total, _container_bytes()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(total) // GIB * GIB


def _container_bytes(file: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


# --- batches and what is cut from them -------------------------------------------------------------------------------


def batches(requests: Sequence[Request], fits: Callable[[int, int, int, int], bool]) -> Iterator[list[Job]]:
    """Splits requests into batches of rollouts, in order. A large group may be split over several batches.

    A batch grows while `fits(prompts, tokens of the longest prompt, rollouts, tokens of the longest completion)` is
    true, and contains at least one rollout. If rollouts of a request continue different prefixes, each prefix is
    counted as a prompt of its own, with the tokens of prompt and prefix."""
    batch: list[Job] = []
    size = prompts, widest, rows, longest = (0, 0, 0, 0)
    for i, request in enumerate(requests):
        for k in range(request.n):
            begun = len(request.begun[k].written.tokens) if request.begun else 0
            width, length = len(request.prompt) + begun, request.sampling.max_new_tokens - begun
            first = not batch or batch[-1][0] != i
            more = first or not same_prefix(request, k - 1, k)
            size = (prompts + more, max(widest, width), rows + 1, max(longest, length))
            if batch and not fits(*size):
                yield batch
                batch, first, size = [], True, (1, width, 1, length)
            if first:
                batch.append((i, []))
            batch[-1][1].append(k)
            prompts, widest, rows, longest = size
    if batch:
        yield batch


def same_prefix(request: Request, a: int, b: int) -> bool:
    """Whether rollouts `a` and `b` of a request continue the same prefix; True if the request has no prefixes."""
    if not request.begun:
        return True
    one, other = request.begun[a].written.tokens, request.begun[b].written.tokens
    return one is other or np.array_equal(one, other)


def split_jobs(jobs: Sequence[Job], first: int) -> tuple[list[Job], list[Job]]:
    """Splits a batch after its first `first` rollouts, and returns both parts. A batch is a list of (index of the
    request, indices of its rollouts in this batch)."""
    head: list[Job] = []
    tail: list[Job] = []
    for i, rollouts in jobs:
        part, rest = rollouts[:first], rollouts[first:]
        first -= len(part)
        head += [(i, part)] if part else []
        tail += [(i, rest)] if rest else []
    return head, tail


def chunks(prompts: Sequence[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Splits prompts in order into chunks of at most `most` tokens with padding. A longer prompt is a chunk of its own.
    """
    chunk: list[Prompt] = []
    for prompt in prompts:
        if chunk and max(map(len, [*chunk, prompt])) * (len(chunk) + 1) > most:
            yield chunk
            chunk = []
        chunk.append(prompt)
    if chunk:
        yield chunk
