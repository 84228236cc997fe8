"""Attention of rows in which several completions share a prefix. It is exact and builds no T x T mask.

Training (`Layout`): a row consists of runs of tokens that form trees. Each run attends causally to itself, and to all
its ancestors: a completion attends to its prompt and to prefixes that it shares with other completions of the group.

Generation (`PromptCache`): each new token attends to the tokens of its own completion and to the cached prompt. The
cache holds one copy of the prompt for all completions of a group.

Training has several implementations (`IMPLEMENTATIONS`), equal up to rounding:

- `merged` (CPU): calls PyTorch's flash kernel once for each run over itself, and once for all descendants of a run over
  that run. The results are merged by their log-sum-exp. The keys of a prompt are never copied;
- `varlen` (CUDA, 16 bits): like `merged`, but with one kernel call for all runs over themselves, and one call per depth
  of the tree;
- `flex` (CUDA): one call of FlexAttention, which skips fully masked blocks;
- `masked` (any device): scaled dot-product attention of each run over [ancestors | run], with a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from vlrl.config.registry import Table
from vlrl.errors import ConfigError

ATTENTION = "vlrl_prefix_shared"

Run = tuple[int, int, int]  # (offset, length, end of the last descendant) of a run of tokens in a row
Span = tuple[int, int]  # (offset, length) of a run of tokens in a row


@dataclass(frozen=True, eq=False)
class Grid:
    """A batch of R runs of tokens of similar length, padded to the longest length A."""

    index: torch.Tensor
    """[R * A] index in the row of the token at each entry of the batch; padding repeats the run's last token."""
    shape: tuple[int, int]
    valid: torch.Tensor | None  # [R * A] bool, False on padding; None if there is no padding
    positions: torch.Tensor  # [tokens] position in the row of each token, without padding, in the order of `flat`

    def take(self, x: torch.Tensor, padding: float | None = None) -> torch.Tensor:
        """Gathers tokens of a row into the batch: [T, H, ...] -> [R, H, A, ...]. `padding`: value of padded entries."""
        x = x.index_select(0, self.index)
        if padding is not None and self.valid is not None:
            x[~self.valid] = padding
        return x.view(*self.shape, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Removes the padding of a batch: [R, H, A, ...] -> [tokens, H, ...]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.valid is None else x[self.valid]


@dataclass(frozen=True, eq=False)
class Bucket:
    """A batch of the implementation `masked`: R runs of up to A tokens, each with up to P tokens of its ancestors."""

    runs: Grid
    ancestors: Grid | None  # [R, P] the ancestors' tokens of each run; None for runs without ancestors
    mask: torch.Tensor | None
    """[R, 1, A, P + A] bool: whether each query may attend to each key; None without ancestors."""


class Layout:
    """The runs of tokens in a row of T tokens, passed to the attention as a keyword of the model's forward. `runs`
    lists all runs without gaps, each directly followed by its descendants. `kind` names the implementation. Tensors
    that an implementation derives from the layout are cached, so that all layers share them."""

    def __init__(self, runs: Sequence[Run], length: int, kind: str = "auto"):
        self.row, self.length, self.kind = tuple(runs), length, kind
        self._memo: dict[tuple[Any, torch.device], Any] = {}

    @cached_property
    def ancestors(self) -> tuple[tuple[Run, ...], ...]:
        """For each run of the row, in order, its ancestors, beginning with the prompt. A prompt has no ancestors."""
        out: list[tuple[Run, ...]] = []
        open_: list[Run] = []
        for run in self.row:
            while open_ and open_[-1][2] <= run[0]:
                open_.pop()
            out.append(tuple(open_))
            open_.append(run)
        return tuple(out)

    @cached_property
    def leaves(self) -> tuple[Grid, ...]:
        """The leaves of the tree (runs with ancestors and without descendants), in batches of similar length."""
        last = [(start, n) for (start, n, end), over in zip(self.row, self.ancestors, strict=True)
                if over and start + n == end]
        return tuple(_grid(alike) for alike in _alike(last))

    @cached_property
    def inner(self) -> tuple[Run, ...]:
        """All runs that are not leaves: prompts, and runs with descendants."""
        return tuple(run for run, over in zip(self.row, self.ancestors, strict=True)
                     if not over or run[0] + run[1] < run[2])

    def masked(self, device: torch.device) -> tuple[tuple[Bucket, ...], torch.Tensor]:
        """The buckets of the implementation `masked`, and [T] the index of each token in the concatenated outputs of
        the buckets."""
        return self.cached(_buckets, device)

    def cached(self, make: Callable[[Layout, torch.device], Any], device: torch.device) -> Any:
        """The result of `make(layout, device)`, computed once per device and then cached."""
        if (make, device) not in self._memo:
            self._memo[make, device] = make(self, device)
        return self._memo[make, device]


@dataclass(eq=False)
class PromptCache:
    """KV cache of P prompts of up to L tokens, shared by the R completions that are being generated. It is passed as a
    keyword of the model's forward."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [P, H_kv, L, d] of each layer
    bias: torch.Tensor | None
    """[P, 1, 1, L] attention bias: -inf on the padding of a prompt, else 0; None if there is no padding."""
    owner: torch.Tensor  # [R] index of each completion's prompt, in ascending order
    grid: torch.Tensor | None = field(init=False)
    """[P * G] indices of the completions, grouped by prompt and padded to G per prompt, where G is the largest number
    of completions of a prompt. None if every prompt has G completions."""
    inverse: torch.Tensor = field(init=False)  # [R] index in `grid` of each completion

    def __post_init__(self) -> None:
        self._arrange()

    def select(self, rows: torch.Tensor) -> None:
        """Drops all completions except `rows` (ascending indices), and the prompts that have no completion left."""
        owners, self.owner = self.owner[rows].unique_consecutive(return_inverse=True)
        if len(owners) < len(self.layers[0][0]):
            self.layers = [(k[owners], v[owners]) for k, v in self.layers]
            self.bias = None if self.bias is None else self.bias[owners]
        self._arrange()

    def _arrange(self) -> None:
        count = self.owner.bincount()
        widest, rows = int(count.max()), torch.arange(len(self.owner), device=self.owner.device)
        rank = rows - (count.cumsum(0) - count)[self.owner]
        self.inverse = self.owner * widest + rank
        self.grid = None
        if len(rows) < len(count) * widest:
            self.grid = torch.zeros(len(count) * widest, dtype=torch.long, device=rows.device)
            self.grid[self.inverse] = rows


def _alike(runs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields lists of runs (offset, length, ...) whose lengths differ by less than a quarter, longest first."""
    rest = sorted(runs, key=lambda run: -run[1])
    while rest:
        count = sum(run[1] >= 0.75 * rest[0][1] for run in rest)
        yield sorted(rest[:count])
        rest = rest[count:]


def _grid(runs: Sequence[Span], device: torch.device | None = None) -> Grid:
    steps = torch.arange(max(n for _, n in runs), device=device)
    offset, length = torch.tensor(runs, device=device).T[..., None]
    index, valid = (offset + torch.minimum(steps, length - 1)).flatten(), (steps < length).flatten()
    full = bool(valid.all())
    return Grid(index, (len(runs), len(steps)), None if full else valid, index if full else index[valid])


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              prefix_layout: Layout | PromptCache | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: query [B, H, T, d], key and value [B, H_kv, T, d] -> [B, T, H, d]. Causal
    attention uses `prefix_layout`. The vision tower (which receives the layout too) and padded rows (which have
    none) use transformers' sdpa attention."""
    if prefix_layout is None or not getattr(module, "is_causal", False):
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, scaling=scaling,
                                            dropout=dropout, **kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(prefix_layout, PromptCache):
        return _next_token(query, key, value, prefix_layout, int(getattr(module, "layer_idx", 0)), scaling), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kind = prefix_layout.kind
    if kind == "auto":
        kind = "merged" if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] else "masked"
    return IMPLEMENTATIONS[kind](q, k, v, prefix_layout, scaling)[None], None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# --- implementations -------------------------------------------------------------------------------------------------

Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float | None], torch.Tensor]
"""Attention of a row: (q [T, H, d], k and v [T, H_kv, d], layout, scale) -> output [T, H, d]."""


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None) -> torch.Tensor:
    return Merged.apply(q, _repeated(k, q), _repeated(v, q), layout, scale)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None) -> torch.Tensor:
    return _masked(q, _repeated(k, q), _repeated(v, q), layout, scale)


IMPLEMENTATIONS = Table({"merged": merged, "masked": masked, "varlen": "vlrl.models.attention_kernels:varlen",
                         "flex": "vlrl.models.attention_kernels:flex"})
"""The attention function for each value of train.attention."""
DEVICES = {"merged": ("cpu",), "masked": ("cpu", "cuda"), "varlen": ("cuda",), "flex": ("cuda",)}
"""The devices on which each implementation can train."""


def check(kind: str, device: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if train.attention=kind cannot train on this device with this compute type."""
    possible = ["auto", *(name for name, devices in DEVICES.items() if device in devices)]
    if kind not in possible:
        raise ConfigError(f"train.attention={kind} does not run on this device ({device}): choose one of "
                          f"{', '.join(possible)}")
    if kind == "varlen" and dtype == torch.float32:
        raise ConfigError("train.attention=varlen computes in 16 bits, but model.dtype is float32: set "
                          "model.dtype=bfloat16 or train.attention=auto")


def _repeated(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    repeat = q.shape[1] // keys.shape[1]
    return keys.repeat_interleave(repeat, 1) if repeat > 1 else keys


# --- two parts merged by their log-sum-exp ---------------------------------------------------------------------------


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool = False,
           bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's flash kernel for CPUs: output [B, H, T, d] and log-sum-exp [B, H, T]."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias,
                                                                          scale=scale)
    scores = (q @ k.mT).float() * (scale if scale is not None else q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def _merge(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> torch.Tensor:
    """Combines attention over two disjoint sets of keys. Each set is given by its output [..., d] and log-sum-exp
    [...]. Returns the output and log-sum-exp over both sets."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    return torch.lerp(b.to(share.dtype), a.to(share.dtype), share).to(a.dtype)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


class Merged(torch.autograd.Function):
    """Attention of a shared row on a CPU: (q, k, v [T, H, d], layout, scale) -> [T, H, d]. The gradient of softmax
    attention depends on the keys only through the output and the log-sum-exp of each query. So each part uses the flash
    kernel's own backward pass, called with the merged output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout,
                scale: float | None) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for grid in layout.leaves:
            own, own_lse = _flash(grid.take(q), grid.take(k), grid.take(v), scale, causal=True)
            out.index_copy_(0, grid.positions, grid.flat(own))
            lse.index_copy_(0, grid.positions, grid.flat(own_lse))
        views = [_heads(x) for x in (q, k, v, out, lse)]
        for start, n, _ in layout.inner:
            mine, keys, values, at, at_lse = (x.narrow(2, start, n) for x in views)
            result, result_lse = _flash(mine, keys, values, scale, causal=True)
            at.copy_(result)
            at_lse.copy_(result_lse)
        for start, n, below in _forks(layout):
            keys, values = (x.narrow(2, start, n) for x in views[1:3])
            mine, own, own_lse = (views[i].narrow(2, start + n, below) for i in (0, 3, 4))
            over, over_lse = _flash(mine, keys, values, scale)
            own.copy_(_merge(own, own_lse, over, over_lse))
            torch.logaddexp(own_lse, over_lse, out=own_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, layout, scale = ctx.saved_tensors, ctx.layout, ctx.scale
        grads = [torch.empty_like(x) for x in saved[:3]]
        for grid in layout.leaves:
            parts = _flash_backward(grid.take(grad, padding=0), [grid.take(x) for x in saved], scale, causal=True)
            for whole, part in zip(grads, parts, strict=True):
                whole.index_copy_(0, grid.positions, grid.flat(part))
        views, sums = [_heads(x) for x in (grad, *saved)], [_heads(x) for x in grads]
        for start, n, _ in layout.inner:
            given, *parts = (x.narrow(2, start, n) for x in views)
            for whole, part in zip(sums, _flash_backward(given, parts, scale, causal=True), strict=True):
                whole.narrow(2, start, n).copy_(part)
        for start, n, below in _forks(layout):
            keys = [x.narrow(2, start, n) for x in views[2:4]]
            given, q, out, lse = (views[i].narrow(2, start + n, below) for i in (0, 1, 4, 5))
            over = _flash_backward(given, [q, *keys, out, lse], scale)
            mine = [sums[0].narrow(2, start + n, below), *(x.narrow(2, start, n) for x in sums[1:])]
            for whole, part in zip(mine, over, strict=True):
                whole.add_(part)
        return *grads, None, None


def _flash_backward(grad: torch.Tensor, saved: Sequence[torch.Tensor], scale: float | None,
                    causal: bool = False) -> Sequence[torch.Tensor]:
    """Gradients of q, k, v [B, H, T, d]. `saved` = (q, k, v, output, log-sum-exp), the last two over all keys."""
    q, k, v, out, lse = saved
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel ignores its strides
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _forks(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yields (offset, length, total length of all descendants) of each run that has descendants."""
    for start, n, end in layout.inner:
        if start + n < end:
            yield start, n, end - start - n


# --- one masked attention ---------------------------------------------------------------------------------------------


def _buckets(layout: Layout, device: torch.device) -> tuple[tuple[Bucket, ...], torch.Tensor]:
    pairs = [*zip(layout.row, layout.ancestors, strict=True)]
    roots = [run[:2] for run, over in pairs if not over]
    buckets = [Bucket(_grid(alike, device), None, None) for alike in _alike(roots)]
    others = [(start, sum(m for _, m, _ in over), n, over) for (start, n, _), over in pairs if over]
    buckets += [_bucket(alike, device) for alike in _alike(others)]
    order = torch.cat([b.runs.positions for b in buckets])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(layout.length, device=device)
    return tuple(buckets), inverse


def _bucket(runs: Sequence[tuple[int, int, int, Sequence[Run]]], device: torch.device) -> Bucket:
    """Makes a Bucket of runs, each given as (offset, total length of its ancestors, length, ancestors)."""
    own = _grid([(start, n) for start, _, n, _ in runs], device)
    (r, a), p = own.shape, max(m for _, m, _, _ in runs)
    index = np.zeros((r, p), np.int64)
    for row, (_, m, _, over) in zip(index, runs, strict=True):
        row[:m] = np.concatenate([np.arange(start, start + n) for start, n, _ in over])
    places = torch.from_numpy(index).to(device)
    visible = torch.arange(p, device=device) < torch.tensor([m for _, m, _, _ in runs], device=device)[:, None]
    before = Grid(places.flatten(), (r, p), None, places.flatten())  # padding is masked
    reach = torch.ones(a, a, dtype=torch.bool, device=device).tril()
    return Bucket(own, before, torch.cat([visible[:, None].expand(r, a, p), reach.expand(r, a, a)], -1)[:, None])


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None) -> torch.Tensor:
    buckets, inverse = layout.masked(q.device)
    outputs = []
    for bucket in buckets:
        own, before = bucket.runs, bucket.ancestors
        keys, values = own.take(k), own.take(v)
        if before is None:
            out = F.scaled_dot_product_attention(own.take(q), keys, values, is_causal=True, scale=scale)
        else:
            keys, values = torch.cat([before.take(k), keys], 2), torch.cat([before.take(v), values], 2)
            out = F.scaled_dot_product_attention(own.take(q), keys, values, attn_mask=bucket.mask, scale=scale)
        outputs.append(own.flat(out))
    return torch.cat(outputs).index_select(0, inverse)


# --- generation -------------------------------------------------------------------------------------------------------


def _next_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: PromptCache, layer: int,
                scale: float | None) -> torch.Tensor:
    """Attention of each completion's new token to its prompt and its own tokens: query [R, H, 1, d] -> [R, 1, H, d].
    `key` and `value`: of the completions' own tokens; those of the prompts are in `cache.layers[layer]`."""
    (rows, heads, _, d), kv_heads = query.shape, key.shape[1]
    keys, values = cache.layers[layer]
    q = query.view(rows, kv_heads, heads // kv_heads, d)  # query heads that share a key head become further queries
    own, own_lse = _flash(q, key, value, scale)
    queries = (q if cache.grid is None else q[cache.grid]).view(len(keys), -1, *q.shape[1:])  # [P, G, H_kv, h, d]
    over, over_lse = _flash(queries.transpose(1, 2).flatten(2, 3), keys, values, scale, bias=cache.bias)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(2, queries.shape[1:4:2]).transpose(1, 2).flatten(0, 1)  # [P * G, H_kv, h, ...]
        return x if cache.grid is None else x[cache.inverse]

    return _merge(own, own_lse, by_row(over), by_row(over_lse)).view(rows, 1, heads, d)
