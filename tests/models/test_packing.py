"""Prefix-shared packing equals separate padded rows, in log-probabilities and gradients."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.conftest import FAMILIES, SAMPLES, kinds_of, random_answers
from tests.tables import each
from vlrl.config import validate
from vlrl.models import policy as policies
from vlrl.models.packing import Piece, aligned_inputs, make_batch, pack, pieces_of, plan, sizes, with_idle
from vlrl.models.processing import Encoder
from vlrl.task import Task
from vlrl.types import Prompt

TOLERANCE = 1e-5


class Ask(Task):
    prompt = "{q}"


def load(folder, **model):
    """A policy of its own, to be changed."""
    config = validate({"task": {"name": "x"}, "model": {"name": str(folder), **model}})
    policy = policies.load(config, Accelerator(cpu=True))
    return policy, Encoder(policy.processor, policy.family, policy.positions, config)


@cache
def shared(folder, train=("language",)):
    """A policy that no test changes but for its gradients, loaded once."""
    return load(folder, train=list(train))


ALL = ("language", "merger", "vision")


def groups(policy, encode, kinds, group_size=3):
    prompts, answers = [], []
    banned = set(policy.banned.tolist())
    for i, kind in enumerate(kinds_of(policy.family, kinds)):
        prompt = encode(Ask(), SAMPLES[kind])
        made = random_answers(i, group_size + i % 2, len(policy.processor.tokenizer), banned)
        prompts += [prompt] * len(made)
        answers += made
    return prompts, answers


def run(policy, batches, count):
    """Log-probabilities by rollout and gradients by name of a weighted sum over all tokens."""
    policy.model.zero_grad(set_to_none=True)
    out = [None] * count
    for batch in batches:
        stats = policy.logprobs(batch, temperature=0.8)
        (stats.logprobs * torch.cos(batch.targets.float() + batch.rollout_id.float())).sum().backward()
        order = torch.unique_consecutive(batch.rollout_id).tolist()
        for r, piece in zip(order, stats.logprobs.detach().split(
                [int((batch.rollout_id == r).sum()) for r in order]), strict=True):
            out[r] = piece
    return out, {n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None}


def assert_equal(policy, prompts, answers, limit=100_000):
    pieces = pieces_of(prompts, answers, limit)
    batches = pack(pieces, limit)
    logps, grads = run(policy, batches, len(answers))
    expected, oracle = run(policy, pack(pieces, limit, "padded"), len(answers))
    for a, b in zip(logps, expected, strict=True):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()
    assert grads.keys() == oracle.keys() and grads
    for name in grads:
        # without rotary positions softmax does not see a key's bias: its gradient is rounding noise of the weight's
        scale = oracle[name.replace("k_proj.bias", "k_proj.weight")].abs().max()
        assert (grads[name] - oracle[name]).abs().max() <= TOLERANCE * scale + 1e-9, name
    return batches


MIXED = ("image", "two images", "text", "video", "image")


@pytest.mark.parametrize("family", FAMILIES)
def test_full_with_vision(tiny_models, family):
    policy, encode = shared(tiny_models[family], ALL)
    for kinds in (("video",), ("text",), MIXED):
        if kinds_of(family, kinds):
            assert len(assert_equal(policy, *groups(policy, encode, kinds))) == 1, kinds  # several groups share one row


@pytest.mark.parametrize("target, family", [("language", FAMILIES[0]), *(("vision_language", f) for f in FAMILIES)])
def test_lora(tiny_models, family, target):
    policy, encode = load(tiny_models[family], lora={"rank": 4, "target": target})
    for name, p in policy.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)  # a fresh adapter does nothing: half of its gradients would be zero
    assert_equal(policy, *groups(policy, encode, MIXED))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(tiny_models, family):
    policy, encode = load(tiny_models[family], train=["language", "merger", "vision"], gradient_checkpointing=True)
    assert_equal(policy, *groups(policy, encode, MIXED))


def test_small_budget_cuts_groups(tiny_models):
    policy, encode = shared(tiny_models["qwen3_vl"])
    prompts, answers = groups(policy, encode, ("image", "text", "image"), group_size=5)
    limit = max(map(len, prompts)) + 20
    batches = assert_equal(policy, prompts, answers, limit)
    assert len(batches) > 3 and all(b.tokens <= limit for b in batches)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_models_own_positions(tiny_models, family):
    """Against the plain transformers forward, which numbers positions itself."""
    policy, encode = shared(tiny_models[family])
    prompts, answers = groups(policy, encode, ("two images",), group_size=2)
    ours, _ = run(policy, pack(pieces_of(prompts, answers, 10**6), 10**6), len(answers))
    image_id = policy.base.config.image_token_id
    for prompt, answer, logps in zip(prompts, answers, ours, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt.ids, answer]))[None]
        types = (ids == image_id).long()
        logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types,
                              **prompt.mm).logits[0, len(prompt) - 1:-1].float() / 0.8
        logits[:, policy.banned] = -torch.inf
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(answer)[:, None])[:, 0]
        assert (logps - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_pieces_are_cut_at_the_limit_and_an_idle_prompt_fills_only_what_is_empty(tiny_models):
    _, encode = shared(tiny_models["qwen3_vl"])
    prompt = encode(Ask(), SAMPLES["text"])
    cut = pieces_of([prompt] * 7, [np.arange(10) for _ in range(7)], len(prompt) + 25)
    assert [p.rollouts for p in cut] == [(0, 4), (1, 5), (2, 6), (3,)]
    assert isinstance(cut[0], Piece) and all(p.tokens <= len(prompt) + 25 for p in cut)
    _, encode = shared(tiny_models["qwen3_vl"])
    idle = encode(Ask(), SAMPLES["text"])
    own = [Piece(replace(idle), (np.arange(3),), (0,))]
    assert with_idle([own], 1, idle) == [own]
    assert [len(part) for part in with_idle([own], 3, idle)] == [1, 1, 1]


def test_padded_rows_fit_with_their_padding():
    """Rows of 5, 8 and 4 tokens: two of up to 8 fill 16 places, three would take 24."""
    prompt = Prompt(sample_id="a", text="", ids=np.arange(3), raw_ids=np.arange(3), positions=np.arange(3)[None])
    pieces = pieces_of([prompt] * 3, [np.arange(n) for n in (2, 5, 1)], 100)
    batches = plan(pieces, 16, "padded")
    assert [[row.tokens for row in rows] for rows in batches] == [[5, 8], [4]]
    assert sizes(pieces, 16, "padded") == [16, 4] == [make_batch(rows, "padded").tokens for rows in batches]
    assert [[row.tokens for row in rows] for rows in plan(pieces, 24, "padded")] == [[5, 8, 4]]


def test_a_large_group_is_cut_into_equal_pieces(tiny_models):
    """64 answers of which 50 fit into a row: twice 32, with the log-probabilities and gradients of one row."""
    policy, encode = shared(tiny_models["qwen3_vl"])
    prompt, rng = encode(Ask(), SAMPLES["image"]), np.random.default_rng(0)
    answers = [rng.integers(40, 90, 6) for _ in range(64)]
    cut = pieces_of([prompt] * 64, answers, len(prompt) + 50 * 6)
    assert [len(p.answers) for p in cut] == [32, 32]
    parts, grads = run(policy, pack(cut, len(prompt) + 50 * 6), 64)
    whole, expected = run(policy, pack(pieces_of([prompt] * 64, answers, 10**6), 10**6), 64)
    assert max((a - b).abs().max() for a, b in zip(parts, whole, strict=True)) <= TOLERANCE
    for name, grad in grads.items():
        assert (grad - expected[name]).abs().max() <= TOLERANCE * expected[name].abs().max() + 1e-9, name


def test_micro_batches_are_of_similar_cost(tiny_models):
    _, encode = shared(tiny_models["qwen3_vl"])
    text, image = (encode(Ask(), SAMPLES[kind]) for kind in ("text", "image"))
    pieces = [Piece(replace(p), (np.arange(5),), (i,)) for i, p in enumerate([image, text, image, text])]
    limit = sum(piece.tokens for piece in pieces) // 2 + 10
    dear = plan(pieces, limit, cost=lambda prompt, _: 10.0 if prompt.mm else 1.0)
    assert [[bool(p.prompt.mm) for p in part] for part in dear] == [[True, False]] * 2
    assert sizes(pieces, limit) == [b.tokens for b in pack(pieces, limit)]


@each("layout", ["shared", "padded"])
@pytest.mark.parametrize("kinds", [("text",), ("image", "text")])
def test_idle_media_change_nothing(tiny_models, layout, kinds):
    """A prompt without answers: no token more is read, and what it passes gets a gradient of zero."""
    policy, encode = shared(tiny_models["qwen3_vl"], ALL)
    prompts, answers = groups(policy, encode, kinds)
    idle, part = encode(Ask(), SAMPLES["image"]), pieces_of(prompts, answers, 10**6)
    (own,) = plan(part, 10**6, layout)
    filled = with_idle([own], 2, idle)
    assert [[p.prompt is idle for p in f][-1] for f in filled] == ["image" not in kinds, True] and len(filled) == 2
    plain, expected = run(policy, [make_batch(own, layout)], len(answers))
    found, grads = run(policy, [make_batch(f, layout) for f in filled], len(answers))
    assert max((a - b).abs().max() for a, b in zip(found, plain, strict=True)) <= TOLERANCE
    assert grads.keys() == {n for n, _ in policy.trainable()} > expected.keys() or "image" in kinds
    for name, grad in grads.items():
        right = expected.get(name, torch.zeros_like(grad))
        assert (grad - right).abs().max() <= TOLERANCE * right.abs().max() + 1e-9, name


def test_an_empty_answer_takes_no_place(tiny_models):
    policy, encode = shared(tiny_models["qwen3_vl"])
    prompt = encode(Ask(), SAMPLES["image"])
    answers = [np.array([40, 41, 42]), np.array([], dtype=np.int64), np.array([43])]
    for layout in ("shared", "padded"):
        (batch,) = pack(pieces_of([prompt] * 3, answers, 10**6), 10**6, layout)
        assert batch.rollout_id.tolist() == [0, 0, 0, 2] and len(policy.logprobs(batch, 1.0).logprobs) == 4


def test_token_types_beside_the_ids_are_filled_as_the_prompt_says():
    def piece(*ids, **more):
        tokens = np.array(ids)
        return Prompt(sample_id="a", text="", ids=tokens, raw_ids=tokens, positions=tokens[None], **more)
    line = [piece(1, 2, aligned={"kind": np.array([0, 1])}, aligned_answer={"kind": 3}), piece(5)]
    assert aligned_inputs([line], 5)["kind"].tolist() == [[0, 1, 3, 3, 3]]
    assert aligned_inputs([line], 5, right=True)["kind"].tolist() == [[3, 3, 0, 1, 3]]
