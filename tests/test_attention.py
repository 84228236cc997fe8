"""The merged attention against the masked one, and decoding over shared prompts against attention over copies."""

import pytest
import torch
import torch.nn.functional as F

from vlrl.attention import Layout, Merged, PromptCache, _masked, _next_token, attention

RAGGED = ((5, (2, 7, 1)), (20, (3,)), (6, (9, 9)))
EVEN = ((8, (4, 4)), (8, (4, 4)))


def layout_of(groups):
    """Layout of (prompt tokens, tokens of each answer) side by side."""
    spans, at = [], 0
    for prompt, answers in groups:
        start, at, places = at, at + prompt, []
        for n in answers:
            places.append((at, n))
            at += n
        spans.append((start, prompt, places))
    return Layout(spans, at)


def dense(q, k, v, layout):
    """By a T x T mask."""
    mask = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for start, prompt, places in layout.spans:
        for at, n in [(start, prompt), *places]:
            mask[at:at + n, start:start + prompt] = True
            mask[at:at + n, at:at + n] = torch.ones(n, n, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask).transpose(0, 1)


def inputs(tokens, dtype, heads=2, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, width, dtype=dtype, generator=generator, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("groups", [RAGGED, EVEN, RAGGED[:1]], ids=["ragged", "even", "one group"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_both_paths_equal_dense_attention(groups, dtype, tolerance):
    layout = layout_of(groups)
    qkv = inputs(layout.length, dtype)
    weight = torch.randn(layout.length, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = dense(*exact, layout)
    grads = torch.autograd.grad(expected, exact, weight.double())
    for path in (lambda: Merged.apply(*qkv, layout, None), lambda: _masked(*qkv, layout, None)):
        out = path()
        for found, right in zip((out, *torch.autograd.grad(out, qkv, weight)), (expected, *grads), strict=True):
            assert found.dtype == dtype
            assert (found - right).abs().max() <= tolerance * right.abs().max()


def test_gradients_by_finite_differences():
    layout = layout_of(((3, (1, 2)), (2, (2,))))
    assert torch.autograd.gradcheck(lambda *x: Merged.apply(*x, layout, 0.3), inputs(layout.length, torch.float64))


def test_large_scores_neither_overflow_nor_leak_from_padding():
    layout = layout_of(RAGGED)
    qkv = [(x * 60).detach().requires_grad_() for x in inputs(layout.length, torch.float32)]
    out = Merged.apply(*qkv, layout, 1.0)
    grads = torch.autograd.grad(out.square().sum(), qkv)
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "autocast"])
def test_query_heads_share_keys(kv_heads, rounded):
    layout, causal = layout_of(RAGGED), torch.nn.Identity()
    causal.is_causal = True  # type: ignore[assignment]
    q = inputs(layout.length, torch.float32, heads=4)[0]
    _, k, v = inputs(layout.length, torch.float32, heads=kv_heads)
    row = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        out, _ = attention(causal, *row, None, prefix_layout=layout)
    expected = dense(q, *(x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)), layout)
    assert out.dtype == (torch.bfloat16 if rounded else torch.float32)
    assert (out[0] - expected).abs().max() < (2e-2 if rounded else 2e-6)


@pytest.mark.parametrize("owner", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2], [0, 2]], ids=["even", "ragged", "one done"])
@pytest.mark.parametrize("padded", [False, True])
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
