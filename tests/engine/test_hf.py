"""The HF engine against transformers' own generate, and against the trainer's log-probabilities."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.conftest import FAMILIES, SAMPLES, kinds_of
from vlrl.config import validate
from vlrl.engine.base import Request, Sampling
from vlrl.engine.cache import CopiedRows, SharedRows, answer_rows
from vlrl.engine.capacity import Capacity, batches
from vlrl.engine.decoding import DecodedBatch, sample_tokens
from vlrl.engine.hf import HFEngine
from vlrl.models import policy as policies
from vlrl.models.packing import pack, pieces_of
from vlrl.models.processing import Encoder
from vlrl.task import Task


class Ask(Task):
    prompt = "{q}"


@pytest.fixture(scope="module", params=FAMILIES)
def parts(request, tiny_models):
    config = validate({"task": "x", "model": {"name": str(tiny_models[request.param])}})
    policy = policies.load(config, Accelerator(cpu=True))
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    return policy, {kind: encode(Ask(), SAMPLES[kind]) for kind in kinds_of(policy.family)}


def request(prompt, n=1, temperature=1.0, length=12, key=(0,)):
    return Request(prompt=prompt, n=n, sampling=Sampling(max_new_tokens=length, temperature=temperature), key=key)


def test_greedy_equals_plain_generate(parts, monkeypatch):
    policy, prompts = parts
    engine = HFEngine(policy, seed=0, batch_rollouts=64)
    ours = engine.generate([request(p, temperature=0) for p in prompts.values()])  # left-padded side by side
    for prompt, (answer,) in zip(prompts.values(), ours, strict=True):
        ids = torch.from_numpy(prompt.ids)[None]
        known, more = policy.base.config, {}
        if policy.family.mrope:
            more["mm_token_type_ids"] = (ids == known.image_token_id).long() + 2 * (ids == known.video_token_id).long()
            delta = torch.tensor([[prompt.next_position - len(prompt)]])  # its own are wrong behind videos
            at = torch.from_numpy(prompt.positions)[:, None], delta
            monkeypatch.setattr(policy.base.model, "get_rope_index", lambda *_, at=at, **__: at)
        with torch.no_grad(), policy.evaluating():
            out = policy.base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **more,
                                       **prompt.mm, do_sample=False, max_new_tokens=12,
                                       eos_token_id=sorted(policy.eos), suppress_tokens=policy.banned.tolist())
        assert answer.tokens.tolist() == out[0, len(prompt):].tolist()


def test_sampler_and_trainer_agree(parts):
    """Log-probabilities of the sampled tokens, at the sampled temperature and with the same banned ids."""
    policy, prompts = parts
    lengths = (3, 12, 7, 12)  # rows of one prompt leave before those of the next
    answers = HFEngine(policy, seed=3, batch_rollouts=5).generate([
        request(p, n=4, temperature=0.7, length=n) for p, n in zip(prompts.values(), lengths, strict=False)])
    flat = [(p, c) for p, group in zip(prompts.values(), answers, strict=True) for c in group]
    (batch,) = pack(pieces_of([p for p, _ in flat], [c.tokens for _, c in flat], 10**6), 10**6)
    with torch.no_grad():
        trainer = policy.logprobs(batch, 0.7).logprobs.numpy()
    sampler = np.concatenate([c.logprobs for _, c in flat])
    assert np.abs(trainer - sampler).max() < 2e-5


def test_one_copy_of_a_prompt_is_as_good_as_many(parts):
    """Over rows of different length that leave one by one, and prompts that are done before others or one by one."""
    policy, prompts = parts
    requests = [request(p, n=n, length=length, key=(0, i)) for i, (p, n, length) in
                enumerate(zip(prompts.values(), (1, 4, 2, 3), (3, 14, 9, 14), strict=False))]
    held = []

    def generate(shared, prefill=10**6):
        def choose(*args):
            held.append(answer_rows(*args[:-1], shared))
            return held[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vlrl.engine.hf.answer_rows", choose)
            return [c for group in HFEngine(policy, 7, 64, prefill).generate(requests) for c in group]

    for one, *others in zip(generate(True), generate(False), generate(False, 1), strict=True):
        for other in others:
            assert one.tokens.tolist() == other.tokens.tolist() and np.abs(one.logprobs - other.logprobs).max() < 2e-5
    assert [type(h) for h in held] == [SharedRows, CopiedRows, CopiedRows]


def test_streams_do_not_depend_on_the_batch(parts):
    policy, prompts = parts
    requests = [request(prompts[kind], n=4, key=(0, i)) for i, kind in enumerate(("text", "image"))]
    wide = HFEngine(policy, seed=1, batch_rollouts=64).generate(requests)
    narrow = HFEngine(policy, seed=1, batch_rollouts=3).generate(requests[::-1])[::-1]
    pairs = [(a, b) for x, y in zip(wide, narrow, strict=True) for a, b in zip(x, y, strict=True)]
    # the last bits of the logits differ with the batch shape, and may in principle tip a draw; nearly all are equal
    assert sum(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs) >= len(pairs) - 1
    other = HFEngine(policy, seed=2, batch_rollouts=64).generate(requests)
    assert any(a.tokens.tolist() != b.tokens.tolist() for x, y in zip(wide, other, strict=True)
               for a, b in zip(x, y, strict=True))
    assert len({tuple(c.tokens.tolist()) for c in wide[0]}) > 1  # answers of one group differ


def test_limits_and_finish_reasons(parts):
    policy, prompts = parts
    answers = HFEngine(policy, seed=0, batch_rollouts=64).generate(
        [request(prompts["text"], n=40, length=30), request(prompts["image"], n=3, length=2)])
    assert all(len(c.tokens) <= 2 for c in answers[1])
    for c in answers[0] + answers[1]:
        assert len(c.tokens) == len(c.logprobs) == len(c.loss_mask) and np.isfinite(c.logprobs).all()
        assert c.finish_reason == ("stop" if int(c.tokens[-1]) in policy.eos else "length")
        assert not any(int(t) in policy.eos for t in c.tokens[:-1])


def test_vision_tokens_are_never_sampled(parts):
    policy, _ = parts
    logits = torch.zeros(400, policy.base.config.get_text_config().vocab_size)
    logits[:, policy.banned] = 50.0
    draws = torch.linspace(0, 1 - 1e-7, 400)
    token, logp = sample_tokens(logits, torch.ones(400), draws, policy.banned)
    assert not torch.isin(token, policy.banned).any() and torch.isfinite(logp).all()
    token, _ = sample_tokens(logits, torch.zeros(400), draws, policy.banned)
    assert not torch.isin(token, policy.banned).any()


def test_pick_follows_the_distribution():
    logits, draws = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])), torch.arange(1000) / 1000 + 5e-4
    none = torch.tensor([], dtype=torch.long)
    token, logp = sample_tokens(logits.expand(1000, 4), torch.ones(1000), draws, none)
    assert torch.bincount(token, minlength=4).tolist() == [500, 0, 300, 200]
    assert logp[0].item() == pytest.approx(np.log(0.5), abs=1e-6)
    hot, _ = sample_tokens(logits.expand(1000, 4), torch.full((1000,), 0.5), draws, none)
    expected = [1000 * 25 / 38, 0, 1000 * 9 / 38, 1000 * 4 / 38]
    assert torch.bincount(hot, minlength=4).tolist() == pytest.approx(expected, abs=1)
    edge, _ = sample_tokens(logits.expand(2, 4), torch.ones(2), torch.tensor([0.0, 1.0]), none)
    assert edge.tolist() == [0, 3]
    token, logp = sample_tokens(logits[None], torch.ones(1), torch.zeros(1), torch.tensor([0]))  # the first is banned
    assert token.tolist() == [2] and logp.item() == pytest.approx(np.log(0.6), abs=1e-6)
    for top_p, kept in ((1.0, [0.5, 0, 0.3, 0.2]), (0.81, [0.5, 0, 0.3, 0.2]), (0.7, [0.625, 0, 0.375, 0]),
                        (0.4, [1, 0, 0, 0]), (1e-6, [1, 0, 0, 0])):
        token, logp = sample_tokens(logits.expand(1000, 4), torch.ones(1000), draws, none, None,
                                    torch.full((1000,), top_p))
        assert torch.bincount(token, minlength=4).tolist() == pytest.approx([1000 * p for p in kept], abs=1)
        assert logp[0].item() == pytest.approx(np.log(kept[0]), abs=1e-6)
    mixed, _ = sample_tokens(logits.expand(2, 4), torch.ones(2), torch.full((2,), 0.99), none, None,
                             torch.tensor([0.4, 1.0]))
    assert mixed.tolist() == [0, 3]


def test_every_answer_of_every_request_has_a_stream_of_its_own():
    def draws(seed, key, index, count=4):
        return HFEngine._draws(SimpleNamespace(seed=seed), request((), n=2, key=key), index, count).tolist()

    own = [draws(seed, (step, i), k) for seed in (0, 1) for step in (0, 1) for i in (2, 3) for k in (0, 1)]
    assert len({tuple(d) for d in own}) == 16 and own[0] == draws(0, (0, 2), 0) == draws(0, (0, 2), 0, 9)[:4]
    requests = [request((), n=n) for n in (3, 5, 1)]
    assert list(batches(requests, Capacity(rows=4).fits)) == [
        [(0, [0, 1, 2]), (1, [0])], [(1, [1, 2, 3, 4])], [(2, [0])]]
    texts = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)))
    engine = SimpleNamespace(policy=SimpleNamespace(eos={9}), _texts=texts)
    tokens = np.array([[5, 6, 9], [5, 6, 7]])
    written = DecodedBatch(tokens, np.zeros((2, 3), np.float32), np.ones((2, 3), bool), np.array([3, 3]))
    ended, cut = (HFEngine._completion(engine, written, row, request((), length=3), None) for row in (0, 1))
    assert (ended.text, ended.finish_reason, ended.tokens.tolist()) == ("56", "stop", [5, 6, 9])
    assert (cut.text, cut.finish_reason, cut.tokens.tolist()) == ("567", "length", [5, 6, 7])
