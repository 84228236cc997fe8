"""Attention of shared rows by kernels for GPUs: flash attention over many lengths, and FlexAttention.

Both read the keys of a prompt where they lie, once for all its answers, and keys of fewer heads without repeating them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Positions along a side of a block of FlexAttention."""


# --- flash attention over many lengths -------------------------------------------------------------------------------


class Spans(Protocol):
    """What the kernels need of a row's layout (attention.Layout)."""

    spans: tuple[tuple[int, int, Sequence[tuple[int, int]]], ...]
    """Of each prompt: its first place, its length, and (first place, length) of each of its answers."""
    length: int


@dataclass(frozen=True, eq=False)
class Lengths:
    """Runs of tokens one after the other."""

    edges: torch.Tensor
    """[runs + 1] int32, where each begins and the last ends."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Lengths:
        edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        return Lengths(edges, max(lengths, default=0))


@dataclass(frozen=True, eq=False)
class Runs:
    """A row taken apart into its prompts and its answers."""

    prompts: torch.Tensor
    """Places of the prompts' tokens in the row."""
    answers: torch.Tensor
    """Places of the answers' tokens."""
    per_prompt: Lengths
    per_answer: Lengths
    per_group: Lengths
    """All answers of a prompt."""

    @staticmethod
    def of(layout: Spans, device: torch.device) -> Runs:
        edges = [(offset, offset + n, offset + n + sum(m for _, m in places)) for offset, n, places in layout.spans]
        steps = np.arange(layout.length)
        prompts, answers = [steps[:0]], [steps[:0]]
        for start, middle, stop in edges:
            prompts.append(steps[start:middle])
            answers.append(steps[middle:stop])
        return Runs(torch.from_numpy(np.concatenate(prompts)).to(device),
                    torch.from_numpy(np.concatenate(answers)).to(device),
                    Lengths.of([n for _, n, _ in layout.spans], device),
                    Lengths.of([n for _, _, places in layout.spans for _, n in places], device),
                    Lengths.of([stop - middle for _, middle, stop in edges], device))


def _flash(qkv: Sequence[torch.Tensor], of_q: Lengths, of_k: Lengths, scale: float | None,
           causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, d] and log-sum-exp [H, T] float32 of runs of queries over the runs of keys of the same number."""
    q, k, v = qkv
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, of_q.edges, of_k.edges, of_q.longest, of_k.longest, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(grad: torch.Tensor, saved: Sequence[torch.Tensor], of_q: Lengths, of_k: Lengths,
                    scale: float | None, causal: bool = False) -> Sequence[torch.Tensor]:
    """Returns gradients of q, k, v; saved are q, k, v, and output and log-sum-exp over all keys."""
    q, k, v, out, lse = saved
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, of_q.edges, of_k.edges, of_q.longest, of_k.longest, 0.0, causal, state,
        torch.empty(0, device=q.device), scale=scale)


class Varlen(torch.autograd.Function):
    """Attention of a shared row: (q [T, H, d], k and v [T, H_kv, d], runs, scale) -> [T, H, d].

    Prompts, answers over themselves, and answers over their prompt: three calls for the whole row. The last two are
    merged as in attention.Merged, and so are their gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Runs,
                scale: float | None) -> torch.Tensor:
        prompts, answers = ([x.index_select(0, places) for x in (q, k, v)] for places in (runs.prompts, runs.answers))
        p, a, g = runs.per_prompt, runs.per_answer, runs.per_group
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        prompts += _flash(prompts, p, p, scale, causal=True)
        out.index_copy_(0, runs.prompts, prompts[3])
        if len(runs.answers):
            own, own_lse = _flash(answers, a, a, scale, causal=True)
            over, over_lse = _flash([answers[0], *prompts[1:3]], g, p, scale)
            share = torch.sigmoid(over_lse - own_lse).T[..., None]
            answers += [torch.lerp(own.float(), over.float(), share).to(own.dtype), torch.logaddexp(own_lse, over_lse)]
            out.index_copy_(0, runs.answers, answers[3])
        ctx.save_for_backward(*prompts, *answers)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, runs, scale = ctx.saved_tensors, ctx.runs, ctx.scale
        prompts, answers = saved[:5], saved[5:]
        p, a, g = runs.per_prompt, runs.per_answer, runs.per_group
        parts = [_flash_backward(grad.index_select(0, runs.prompts), prompts, p, p, scale, causal=True)]
        if len(runs.answers):
            over = grad.index_select(0, runs.answers)
            own = _flash_backward(over, answers, a, a, scale, causal=True)
            q, _, _, out, lse = answers
            across = _flash_backward(over, [q, *prompts[1:3], out, lse], g, p, scale)
            parts = [(parts[0][0], parts[0][1] + across[1], parts[0][2] + across[2]),
                     (own[0] + across[0], own[1], own[2])]
        grads = [x.new_empty(grad.shape[0], *x.shape[1:]) for x in prompts[:3]]
        for places, part in zip((runs.prompts, runs.answers), parts, strict=False):
            for whole, value in zip(grads, part, strict=True):
                whole.index_copy_(0, places, value)
        return *grads, None, None


# --- FlexAttention ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Blocks:
    """A row's BlockMask."""

    mask: BlockMask

    @staticmethod
    def of(layout: Spans, device: torch.device) -> Blocks:
        return Blocks(block_mask(layout, device))


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float | None) -> torch.Tensor:
    """FlexAttention (arXiv 2412.05496): q [T, H, d], k and v [T, H_kv, d] -> [T, H, d]. Compiled on CUDA; elsewhere
    without gradient."""
    call = _compiled() if q.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = call(q, k, v, block_mask=blocks.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: Spans, device: torch.device) -> BlockMask:
    """Returns the BlockMask of a row, by counting the pairs of positions in each block that see each other.

    `create_block_mask` would build a mask of T x T.
    """
    run, prompt = np.zeros(layout.length, np.int64), np.zeros(layout.length, np.int64)
    count = np.zeros((-(-layout.length // BLOCK),) * 2, np.int64)
    for offset, n, places in layout.spans:
        stop = offset + n + sum(m for _, m in places)
        prompt[offset:stop] = offset
        for at, m in [(offset, n), *places]:  # a run is named by its first place
            run[at:at + m] = at
            _add_causal(count, at, at + m)
        _add_all(count, (offset + n, stop), (offset, offset + n))
    runs, prompts = (torch.from_numpy(x).to(device) for x in (run, prompt))

    def sees(_: Any, __: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q >= kv) & ((runs[kv] == runs[q]) | (runs[kv] == prompts[q]))

    full = count == BLOCK**2
    return BlockMask.from_kv_blocks(*_listed((count > 0) & ~full, device), *_listed(full, device), BLOCK_SIZE=BLOCK,
                                    mask_mod=sees, seq_lengths=(layout.length, layout.length))


def _shares(start: int, stop: int) -> tuple[slice, np.ndarray]:
    """Returns the blocks that start..stop touches, and its positions in each."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    edges = np.clip(np.arange(first, last + 1) * BLOCK, start, stop)
    return slice(first, last), np.diff(edges)


def _add_all(count: np.ndarray, queries: tuple[int, int], keys: tuple[int, int]) -> None:
    (rows, q), (columns, k) = _shares(*queries), _shares(*keys)
    count[rows, columns] += np.outer(q, k)


def _add_causal(count: np.ndarray, start: int, stop: int) -> None:
    places, n = _shares(start, stop)
    count[places, places] += np.tril(np.outer(n, n), -1) + np.diag(n * (n + 1) // 2)


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of marked blocks in each row [1, 1, n], and their columns first [1, 1, n, n]; int32."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return tuple(torch.from_numpy(x.astype(np.int32)).to(device)[None, None]  # pyright: ignore[reportReturnType]
                 for x in (blocks.sum(1), order))
