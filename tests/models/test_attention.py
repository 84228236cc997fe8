"""Every attention of shared rows against a T x T mask, and decoding over shared prompts against attention over copies.

The kernels of `varlen` are for CUDA: here a CPU kernel, one run at a time, takes their place."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from tests.tables import each
from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.models import attention as attentions
from vlrl.models import attention_kernels
from vlrl.models.attention import DEVICES, IMPLEMENTATIONS, Layout, Merged, PromptCache, _next_token, attention, check

RAGGED = ((5, (2, 7, 1)), (20, (3,)), (6, (9, 9)))
EVEN = ((8, (4, 4)), (8, (4, 4)))
IDLE = ((6, ()), (5, (2, 3)), (4, ()))
TREES = ((5, (4, (3, (2,), (6,)), (1,)), (7,)), (6,), (9, (3, (8,))), (4, (5,), (2, (2, (2, (2,), (3,))), (130,))))
"""Prompts whose answers have beginnings in common, down to four levels."""


def layout_of(groups):
    """Layout of (prompt tokens, tokens of each answer) side by side."""
    return layout_of_trees([(prompt, *((n,) for n in answers)) for prompt, answers in groups])


def layout_of_trees(trees):
    """Layout of runs (tokens, *runs that go on from it) side by side."""
    row = []

    def add(tree, at):
        n, *below = tree
        place = len(row)
        row.append(None)
        end = at + n
        for one in below:
            end = add(one, end)
        row[place] = (at, n, end)
        return end

    at = 0
    for tree in trees:
        at = add(tree, at)
    return Layout(row, at)


def dense(q, k, v, layout, scale=None):
    """By a T x T mask."""
    mask = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for start, n, end in layout.row:
        mask[start + n:end, start:start + n] = True
        mask[start:start + n, start:start + n] = torch.ones(n, n, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask,
                                          scale=scale).transpose(0, 1)


def inputs(tokens, dtype, heads=2, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, width, dtype=dtype, generator=generator, requires_grad=True) for _ in range(3)]


def per_run(of_q, of_k):
    for a, b, c, d in zip(of_q.edges, of_q.edges[1:], of_k.edges, of_k.edges[1:], strict=False):
        yield slice(int(a), int(b)), slice(int(c), int(d))


def flash_of_runs(qkv, of_q, of_k, scale, causal=False):
    q, k, v = qkv
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for own, seen in per_run(of_q, of_k):
        if own.stop > own.start:
            k_run, v_run = (attentions._repeated(x[seen], q) for x in (k, v))
            run = [x.transpose(0, 1)[None] for x in (q[own], k_run, v_run)]
            part, part_lse = attentions._flash(*run, scale, causal=causal)
            out[own], lse[:, own] = part[0].transpose(0, 1), part_lse[0].float()
    return out, lse


def flash_of_runs_backward(grad, saved, of_q, of_k, scale, causal=False):
    q, k, v, out, lse = saved
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for own, seen in per_run(of_q, of_k):
        if own.stop > own.start:
            k_run, v_run = (attentions._repeated(x[seen], q) for x in (k, v))
            run = [x.transpose(0, 1)[None] for x in (grad[own], q[own], k_run, v_run, out[own])]
            own_lse = lse[None, :, own].to(torch.promote_types(q.dtype, torch.float32))
            parts = attentions._flash_backward(run[0], [*run[1:], own_lse], scale, causal)
            grads[0][own] = parts[0][0].transpose(0, 1)
            for whole, part in zip(grads[1:], parts[1:], strict=True):
                whole[seen] = part[0].transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2)
    return grads


@pytest.fixture
def kernels(monkeypatch):
    """A CPU kernel in place of those of `varlen`."""
    monkeypatch.setattr(attention_kernels, "_flash", flash_of_runs)
    monkeypatch.setattr(attention_kernels, "_flash_backward", flash_of_runs_backward)


LAYOUTS = {"ragged": layout_of(RAGGED), "even": layout_of(EVEN), "one group": layout_of(RAGGED[:1]),
           "some idle": layout_of(IDLE), "all idle": layout_of(IDLE[:1]), "trees": layout_of_trees(TREES)}


@pytest.mark.parametrize("kind", ["merged", "masked", "varlen"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_dense_attention(kernels, layout, kind):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        if kind == "varlen":
            tolerance = max(tolerance, 2e-6)  # its log-sum-exp is float32
        for kv_heads in (1, 2):
            compare_with_dense(LAYOUTS[layout], kind, dtype, tolerance, kv_heads)


def compare_with_dense(layout, kind, dtype, tolerance, kv_heads):
    q, _, _ = inputs(layout.length, dtype)
    _, k, v = inputs(layout.length, dtype, heads=kv_heads)
    weight = torch.randn(layout.length, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = dense(exact[0], *(x.repeat_interleave(2 // kv_heads, 1) for x in exact[1:]), layout)
    grads = torch.autograd.grad(expected, exact, weight.double())
    out = IMPLEMENTATIONS[kind](q, k, v, layout, None)
    for found, right in zip((out, *torch.autograd.grad(out, (q, k, v), weight)), (expected, *grads), strict=True):
        assert found.dtype == dtype
        assert (found - right).abs().max() <= tolerance * right.abs().max()


LONG = ((130, (200, 64)), (256, (128,)), (40, ()), (17, (1, 300)))


@pytest.mark.parametrize("layout", [
    layout_of(RAGGED), layout_of_trees(TREES), pytest.param(layout_of(LONG), marks=pytest.mark.slow),
    pytest.param(layout_of(IDLE), marks=pytest.mark.slow)],
    ids=["ragged", "trees", "several blocks", "some idle"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_equals_dense_attention(layout):
    q, _, _ = (x.detach() for x in inputs(layout.length, torch.float32))
    _, k, v = (x.detach() for x in inputs(layout.length, torch.float32, heads=1))
    out = IMPLEMENTATIONS["flex"](q, k, v, layout, 0.3)
    expected = dense(q, *(x.repeat_interleave(2, 1) for x in (k, v)), layout, 0.3)
    assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()


@each("layout", [*map(layout_of, [RAGGED, LONG, IDLE]), layout_of_trees(TREES)])
def test_blocks_of_flex_are_those_of_its_own_function(layout):
    found = attention_kernels.block_mask(layout, torch.device("cpu"))
    right = create_block_mask(found.mask_mod, None, None, layout.length, layout.length, device="cpu")
    assert torch.equal(found.to_dense(), right.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name
    n = found.full_kv_num_blocks[0, 0]
    listed = [found.full_kv_indices[0, 0, row, :count].tolist() for row, count in enumerate(n)]
    assert listed == [right.full_kv_indices[0, 0, row, :count].tolist() for row, count in enumerate(n)]
    assert (np.array(found.shape[-2:]) == layout.length).all()


def test_the_setting_knows_the_table_and_the_device():
    assert set(DEVICES) == set(IMPLEMENTATIONS)
    for kind in ("auto", *IMPLEMENTATIONS):
        made = validate({"task": "x", "model": {"name": "y"}, "train": {"attention": kind}})
        if kind in ("auto", "merged", "masked"):
            check(made.train.attention, "cpu", torch.float32)
        else:
            with pytest.raises(ConfigError, match=f"train.attention={kind}.*cpu.*merged"):
                check(made.train.attention, "cpu", torch.float32)
    check("flex", "cuda", torch.float32)
    with pytest.raises(ConfigError, match=r"train\.attention=varlen.*model\.dtype"):
        check("varlen", "cuda", torch.float32)


def test_rows_derive_once_and_answers_of_similar_length_lie_side_by_side():
    layout, device = layout_of(RAGGED), torch.device("cpu")
    assert layout.masked(device) is layout.masked(device)
    layout = layout_of(((4, (3, 10, 7)), (5, (8,))))  # 8 is at least three quarters of 10, and 7 is not
    assert [grid.shape for grid in layout.leaves] == [(2, 10), (1, 7), (1, 3)]


def test_large_scores_neither_overflow_nor_leak_from_padding():
    layout = layout_of(RAGGED)
    qkv = [(x * 60).detach().requires_grad_() for x in inputs(layout.length, torch.float32)]
    out = Merged.apply(*qkv, layout, 1.0)
    grads = torch.autograd.grad(out.square().sum(), qkv)
    assert all(x.isfinite().all() for x in (out, *grads))


def test_query_heads_share_keys():
    layout, causal = layout_of(RAGGED), torch.nn.Identity()
    causal.is_causal = True  # type: ignore[assignment]
    q = inputs(layout.length, torch.float32, heads=4)[0]
    for kv_heads, rounded in itertools.product((1, 2, 4), (False, True)):
        _, k, v = inputs(layout.length, torch.float32, heads=kv_heads)
        row = [x.transpose(0, 1)[None] for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            out, _ = attention(causal, *row, None, prefix_layout=layout)
        expected = dense(q, *(x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)), layout)
        assert out.dtype == (torch.bfloat16 if rounded else torch.float32)
        assert (out[0] - expected).abs().max() < (2e-2 if rounded else 2e-6), kv_heads


@each("owner", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2], [0, 2]])
@each("padded", [False, True])
def test_a_new_token_over_its_prompt_and_its_answer(owner, padded):
    prompts, length, answer, heads, kv_heads, width = 3, 7, 4, 4, 2, 8
    make = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, prompts, kv_heads, length, width, generator=make)
    bias = torch.zeros(prompts, 1, 1, length)
    if padded:
        bias[1, ..., :3] = -torch.inf
    everyone = torch.arange(prompts).repeat_interleave(4)
    kept = torch.tensor([4 * p + i % 4 for i, p in enumerate(owner)]).sort()[0]
    cache = PromptCache([(keys, values)], bias if padded else None, everyone)
    cache.select(kept)
    rows, prompt_of = len(kept), everyone[kept]
    q = torch.randn(rows, heads, 1, width, generator=make)
    k, v = torch.randn(2, rows, kv_heads, answer, width, generator=make)
    found = _next_token(q, k, v, cache, 0, None)
    both = [torch.cat([old[prompt_of], new], 2) for old, new in ((keys, k), (values, v))]
    mask = torch.cat([bias[prompt_of], torch.zeros(rows, 1, 1, answer)], -1)
    expected = F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in both), attn_mask=mask)
    assert (found - expected.transpose(1, 2)).abs().max() < 2e-6


def test_prompts_without_rows_leave_the_cache():
    keys = torch.randn(3, 1, 5, 4)
    cache = PromptCache([(keys, keys)], None, torch.tensor([0, 0, 1, 2, 2]))
    cache.select(torch.tensor([0, 3, 4]))
    assert cache.owner.tolist() == [0, 1, 1] and torch.equal(cache.layers[0][0], keys[[0, 2]])
