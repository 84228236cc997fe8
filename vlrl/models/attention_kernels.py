"""Attention of shared rows by GPU kernels: variable-length flash attention, and FlexAttention.

Both read the keys of a prompt once for all its completions, and support grouped-query attention without copies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vlrl.models.attention import Layout, Run

BLOCK = 128  # block size of FlexAttention, in positions


# --- flash attention over many lengths -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lengths:
    """Boundaries of consecutive runs of tokens, in the format of variable-length flash attention."""

    edges: torch.Tensor  # [runs + 1] int32: the start of each run, then the end of the last run
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Lengths:
        edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        return Lengths(edges, max(lengths, default=0))


@dataclass(frozen=True, eq=False)
class Level:
    """Attention to the runs at one depth of the tree that have descendants. The M tokens of these runs are the keys,
    the Q tokens of their descendants are the queries."""

    keys: torch.Tensor  # [M] positions in the row of the runs' tokens
    queries: torch.Tensor  # [Q] positions in the row of all descendants' tokens
    per_run: Lengths
    below: Lengths


@dataclass(frozen=True, eq=False)
class RowRuns:
    """The runs of a row, in row order (`each`) and grouped by their depth in the tree (`levels`)."""

    each: Lengths
    levels: tuple[Level, ...]  # one Level per depth of the tree; the first holds the prompts

    @staticmethod
    def of(layout: Layout, device: torch.device) -> RowRuns:
        by_depth: dict[int, list[Run]] = {}
        for run, over in zip(layout.row, layout.ancestors, strict=True):
            if run[0] + run[1] < run[2]:
                by_depth.setdefault(len(over), []).append(run)
        return RowRuns(Lengths.of([n for _, n, _ in layout.row], device),
                    tuple(_level(by_depth[depth], device) for depth in sorted(by_depth)))


def _level(runs: Sequence[Run], device: torch.device) -> Level:
    keys = np.concatenate([np.arange(start, start + n) for start, n, _ in runs])
    queries = np.concatenate([np.arange(start + n, end) for start, n, end in runs])
    return Level(torch.from_numpy(keys).to(device), torch.from_numpy(queries).to(device),
                 Lengths.of([n for _, n, _ in runs], device),
                 Lengths.of([end - start - n for start, n, end in runs], device))


def _flash(qkv: Sequence[torch.Tensor], of_q: Lengths, of_k: Lengths, scale: float | None,
           causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in which run i of the queries (boundaries `of_q`) attends to run i of the keys (boundaries `of_k`).
    Returns the output [T, H, d] and the log-sum-exp [H, T] in float32."""
    q, k, v = qkv
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, of_q.edges, of_k.edges, of_q.longest, of_k.longest, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(grad: torch.Tensor, saved: Sequence[torch.Tensor], of_q: Lengths, of_k: Lengths,
                    scale: float | None, causal: bool = False) -> Sequence[torch.Tensor]:
    """Gradients of q, k, v. `saved` = (q, k, v, output, log-sum-exp), the last two over all keys."""
    q, k, v, out, lse = saved
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, of_q.edges, of_k.edges, of_q.longest, of_k.longest, 0.0, causal, state,
        torch.empty(0, device=q.device), scale=scale)


class Varlen(torch.autograd.Function):
    """Attention of a shared row: (q [T, H, d], k and v [T, H_kv, d], runs, scale) -> [T, H, d]. One kernel call
    computes the attention of all runs over themselves. One call per depth of the tree computes the attention of the
    descendants over the runs of that depth. Outputs and gradients are merged as in attention.Merged."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: RowRuns,
                scale: float | None) -> torch.Tensor:
        out, lse = _flash([q, k, v], runs.each, runs.each, scale, causal=True)
        for level in runs.levels:
            keys, values = (x.index_select(0, level.keys) for x in (k, v))
            over, over_lse = _flash([q.index_select(0, level.queries), keys, values], level.below, level.per_run, scale)
            own, own_lse = out.index_select(0, level.queries), lse.index_select(1, level.queries)
            share = torch.sigmoid(over_lse - own_lse).T[..., None]
            out.index_copy_(0, level.queries, torch.lerp(own.float(), over.float(), share).to(out.dtype))
            lse.index_copy_(1, level.queries, torch.logaddexp(own_lse, over_lse))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (q, k, v, out, lse), runs, scale = ctx.saved_tensors, ctx.runs, ctx.scale
        grads = [*_flash_backward(grad, [q, k, v, out, lse], runs.each, runs.each, scale, causal=True)]
        for level in runs.levels:
            given, q_below, own = (x.index_select(0, level.queries) for x in (grad, q, out))
            saved = [q_below, *(x.index_select(0, level.keys) for x in (k, v)), own, lse.index_select(1, level.queries)]
            parts = _flash_backward(given, saved, level.below, level.per_run, scale)
            for whole, places, part in zip(grads, (level.queries, level.keys, level.keys), parts, strict=True):
                whole.index_add_(0, places, part)
        return *grads, None, None


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None) -> torch.Tensor:
    return Varlen.apply(q, k, v, layout.cached(RowRuns.of, q.device), scale)


# --- FlexAttention ---------------------------------------------------------------------------------------------------


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None) -> torch.Tensor:
    """Attention of a shared row by FlexAttention (arXiv 2412.05496): q [T, H, d], k and v [T, H_kv, d] -> [T, H, d].
    The kernel is compiled on CUDA. On other devices it is not compiled and has no gradient."""
    call, at = _compiled() if q.is_cuda else flex_attention, q.device
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = call(q, k, v, block_mask=layout.cached(block_mask, at), scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """The BlockMask of a row, computed from the number of visible (query, key) pairs of each block. PyTorch's
    `create_block_mask` would build a T x T mask."""
    last = np.zeros(layout.length, np.int64)
    count = np.zeros((-(-layout.length // BLOCK),) * 2, np.int64)
    for start, n, end in layout.row:
        last[start:start + n] = end
        (keys, k), (later, q) = _shares(start, start + n), _shares(start + n, end)
        count[keys, keys] += np.tril(np.outer(k, k), -1) + np.diag(k * (k + 1) // 2)
        count[later, keys] += np.outer(q, k)
    ends = torch.from_numpy(last).to(device)

    def sees(_: Any, __: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q >= kv) & (q < ends[kv])

    full = count == BLOCK**2
    return BlockMask.from_kv_blocks(*_listed((count > 0) & ~full, device), *_listed(full, device), BLOCK_SIZE=BLOCK,
                                    mask_mod=sees, seq_lengths=(layout.length, layout.length))


def _shares(start: int, stop: int) -> tuple[slice, np.ndarray]:
    """Returns the slice of blocks that overlap the positions start..stop, and how many positions lie in each block."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    edges = np.clip(np.arange(first, last + 1) * BLOCK, start, stop)
    return slice(first, last), np.diff(edges)


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a mask of blocks [n, n] to the arguments of BlockMask, two int32 tensors. The first [1, 1, n] has the
    number of marked blocks in each row. The second [1, 1, n, n] lists the column indices of each row, beginning with
    the marked blocks."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return tuple(torch.from_numpy(x.astype(np.int32)).to(device)[None, None]  # pyright: ignore[reportReturnType]
                 for x in (blocks.sum(1), order))
