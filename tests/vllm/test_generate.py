"""vLLM in this process against the HF engine and the trainer: the same policy, the same meaning of every setting."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import noise
from tests.helpers import Vowels
from tests.vllm.conftest import trainer_logprobs
from vlrl.config import validate
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.errors import ConfigError, TrainingError
from vlrl.methods.tree.branching import BranchingGenerator
from vlrl.types import Media, Sample

pytestmark = pytest.mark.vllm
LENGTH = 12
PLAIN = Sampling(max_new_tokens=LENGTH)


def ask(prompt, n=1, key=(0,), **sampling):
    return Request(prompt=prompt, n=n, sampling=dataclasses.replace(PLAIN, **sampling), key=key)


def texts(tiny):
    return tiny.vllm.rules.texts


def close_to_trainer(tiny, requests, answers, temperature=1.0):
    pairs = [(r.prompt, c) for r, group in zip(requests, answers, strict=True) for c in group]
    found = np.concatenate([c.logprobs for _, c in pairs])
    return np.abs(trainer_logprobs(tiny.policy, pairs, temperature) - found).max() < 1e-5


def test_sampler_and_trainer_agree(tiny):
    """Image, two images, text and video; siblings differ, a seed draws the same answers, and no prompt is cut."""
    for temperature in (1.0, 0.7):
        requests = [ask(p, 4, (0, i), temperature=temperature) for i, p in enumerate(tiny.prompts.values())]
        answers = tiny.vllm.generate(requests)
        assert [len(group) for group in answers] == [4] * len(requests), temperature
        assert close_to_trainer(tiny, requests, answers, temperature), temperature
        assert all(len({tuple(c.tokens) for c in group}) > 1 for group in answers), temperature
        again = tiny.vllm.generate(requests)
        assert [[c.tokens.tolist() for c in g] for g in again] == [[c.tokens.tolist() for c in g] for g in answers]
    text = [tiny.vllm.generate([ask(tiny.prompts["text"], 3, (0, key))])[0] for key in (1, 99)]
    assert [c.tokens.tolist() for c in text[0]] != [c.tokens.tolist() for c in text[1]]
    pick = np.random.default_rng(0)
    longer = [tiny.prompts["text"].followed_by(pick.integers(100, 200, 180)) for _ in range(64)]
    requests = [ask(p, 1, (0, i), max_new_tokens=4) for i, p in enumerate(longer)]
    assert close_to_trainer(tiny, requests, tiny.vllm.generate(requests))


def test_greedy_answers_are_the_hf_engines(tiny):
    """Of every kind, with a budget for thinking, and with stop strings within the text, one of them over several
    tokens."""
    image = tiny.prompts["image"]
    text = tiny.hf.generate([ask(image, temperature=0.0, max_new_tokens=24)])[0][0].text.replace("\ufffd", " ")
    ends = [*({"thinking_budget": 5, **end} for end in (
        {"max_new_tokens": 7}, {"stop": ("</think>",)}, {"max_new_tokens": 20})),
        *({"max_new_tokens": 24, "stop": (text[at:at + width], "never")} for at, width in ((4, 1), (7, 3), (9, 8)))]
    requests = [*(ask(p, temperature=0.0) for p in tiny.prompts.values()),
                *(ask(image, temperature=0.0, **end) for end in ends)]
    ours = tiny.vllm.generate(requests)
    for request, (a,), (b,) in zip(requests, ours, tiny.hf.generate(requests), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5, request
        assert (a.text, a.finish_reason, a.turns) == (b.text, b.finish_reason, b.turns), request
        assert a.tokens.dtype == b.tokens.dtype and a.logprobs.dtype == b.logprobs.dtype
        assert a.loss_mask.tolist() == b.loss_mask.tolist(), request
    assert sum(c.finish_reason == "stop" and len(c.tokens) < 24 for (c,) in ours[-3:]) > 1
    mixed = [ask(image, temperature=0.0), ask(image, 3, temperature=0.5)]
    greedy, sampled = tiny.vllm.generate(mixed)
    assert close_to_trainer(tiny, mixed[:1], [greedy]) and close_to_trainer(tiny, mixed[1:], [sampled], 0.5)


def test_end_tokens_and_limits(tiny):
    """The end token is part of the tokens and not of the text."""
    requests = [ask(tiny.prompts["text"], 40, max_new_tokens=30), ask(tiny.prompts["image"], 3, max_new_tokens=2)]
    answers = tiny.vllm.generate(requests)
    assert all(len(c.tokens) <= 2 for c in answers[1])
    ended = [int(c.tokens[-1]) in tiny.policy.eos for c in answers[0]]
    assert any(ended) and not all(ended)
    for c, has_end in zip(answers[0], ended, strict=True):
        assert c.finish_reason == ("stop" if has_end else "length") and c.loss_mask.all()
        assert len(c.tokens) == len(c.logprobs) and (has_end or len(c.tokens) == 30)
        assert c.text == texts(tiny).decode(c.tokens[:-1] if has_end else c.tokens)
    assert close_to_trainer(tiny, requests, answers)


def test_loved_vision_tokens_are_never_sampled(tiny):
    """Nor do they take probability from the others. EasyR1#110, R1-V#91 and #180, trl#3847: a policy wrote one, and
    the model met a token more than its images have."""
    policy, prompt = tiny.policy, tiny.prompts["text"]
    head = policy.base.get_output_embeddings().weight
    pad = policy.base.config.image_token_id
    before = head.data.clone()
    with torch.no_grad(), policy.evaluating():
        inputs = {"input_ids": torch.from_numpy(prompt.ids)[None], "position_ids": torch.from_numpy(prompt.positions)}
        inputs["position_ids"] = inputs["position_ids"][:, None]
        h = policy.base.model(**inputs).last_hidden_state[0, -1]
        head.data[pad] = 300 * h / h.square().sum()
        assert policy.base(**inputs).logits[0, -1].argmax() == pad
    try:
        tiny.vllm.sync(policy, 1)
        requests = [ask(prompt, 16), ask(prompt, temperature=0.0)]
        answers = tiny.vllm.generate(requests)
        assert not any(np.isin(c.tokens, policy.banned.numpy()).any() for group in answers for c in group)
        assert close_to_trainer(tiny, requests, answers)
        assert answers[1][0].tokens.tolist() == tiny.hf.generate(requests[1:])[0][0].tokens.tolist()
    finally:
        head.data.copy_(before)
        tiny.vllm.sync(policy, 2)


def test_thinking_over_budget_is_ended(tiny):
    """Sampled answers are those without a budget up to it; log-probabilities of forced tokens are the model's own."""
    closing = texts(tiny).ids(PLAIN.thinking_end).tolist()
    forced = slice(5, 5 + len(closing))
    requests, unbounded = ([ask(tiny.prompts[kind], 4, (0, i), max_new_tokens=20, temperature=0.7,
                                thinking_budget=budget) for i, kind in enumerate(("image", "text"))]
                           for budget in (5, None))
    free, found = tiny.vllm.generate(unbounded), tiny.vllm.generate(requests)
    for c, plain in zip([c for g in found for c in g], [c for g in free for c in g], strict=True):
        assert c.tokens[:5].tolist() == plain.tokens[:5].tolist()
        if len(plain.tokens) <= 5:
            assert c.tokens.tolist() == plain.tokens.tolist() and c.loss_mask.all()
            continue
        assert c.tokens[forced].tolist() == closing and len(c.tokens) <= 20 and len(c.turns) == 1
        assert np.flatnonzero(~c.loss_mask).tolist() == list(range(forced.start, forced.stop))
    assert any(len(c.tokens) > forced.stop for group in found for c in group)
    assert close_to_trainer(tiny, requests, found, 0.7)


def test_answers_go_on_from_their_own_text(tiny):
    """Greedy ones become what they would have become; sampled ones keep what they have."""
    prompt = tiny.prompts["video"]
    whole = ask(prompt, temperature=0.0, thinking_budget=4, max_new_tokens=16)
    (unbroken,), = tiny.vllm.generate([whole])
    first, key = dataclasses.replace(whole.sampling, max_new_tokens=5), (0, 7)  # within the closing text
    (begun,), = tiny.vllm.generate([dataclasses.replace(whole, sampling=first)])
    assert len(begun.tokens) == 5 and begun.truncated
    (after,), = tiny.vllm.generate([dataclasses.replace(whole, begun=(AnswerPrefix(index=0, written=begun),))])
    assert after.tokens.tolist() == unbroken.tokens.tolist() and [t.end for t in after.turns] == [5, len(after.tokens)]
    assert after.loss_mask.tolist() == unbroken.loss_mask.tolist()
    (parts,) = tiny.vllm.generate([ask(prompt, 6, key, max_new_tokens=4)])
    rest = [AnswerPrefix(index=i, written=c) for i, c in enumerate(parts) if c.truncated]
    request = dataclasses.replace(ask(prompt, len(rest), key), begun=tuple(rest))
    (grown,) = tiny.vllm.generate([request])
    for c, b in zip(grown, rest, strict=True):
        assert c.tokens[:4].tolist() == b.written.tokens.tolist() and len(c.tokens) > 4
        assert [(t.start, t.end) for t in c.turns] == [(0, 4), (4, len(c.tokens))]
    assert close_to_trainer(tiny, [request], [grown]) and len({tuple(c.tokens[4:]) for c in grown}) > 1


def test_answers_go_on_from_each_other(tiny):
    """rollout.branch: shared beginnings have one sampler, and the trainer agrees on every token of every answer."""
    config = validate({"task": "x", "model": {"name": "y"}, "rollout": {"group_size": 6, "branch": {"roots": 2}}})
    requests = [ask(prompt, 6, (0, i)) for i, prompt in enumerate(tiny.prompts.values())]
    groups = BranchingGenerator(config).generate(tiny.vllm, requests)
    for made in groups:
        assert len(made) == 6
        assert all(any(c.tokens[0] == other.tokens[0] for other in made[:k]) for k, c in enumerate(made) if k >= 2)
    assert close_to_trainer(tiny, requests, groups)


def test_whole_requests_are_handed_on_and_global_random_states_are_left_alone(tiny):
    prompts = list(tiny.prompts.values())
    calls = []
    requests = [ask(prompts[0], 2, max_new_tokens=14), ask(prompts[1], 3, max_new_tokens=2), ask(prompts[2], 0)]
    answers = tiny.vllm.generate(requests, lambda i, made: calls.append((i, made)))
    assert [i for i, _ in calls] == [2, 1] and answers[2] == [] and calls[1][1] is answers[1]
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state(legacy=True)
    tiny.vllm.generate([ask(tiny.prompts["text"], 3)])
    assert torch.equal(torch.get_rng_state(), before[0]) and str(np.random.get_state(legacy=True)) == str(before[1])
    assert torch.set_num_threads.__name__ == "set_num_threads" and "vllm" not in torch.set_num_threads.__module__


def test_what_cannot_be_is_named_and_the_engine_goes_on(tiny):
    prompt = tiny.prompts["image"]
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=256 .*Set it to \d+ or more"):
        tiny.vllm.generate([ask(prompt, max_new_tokens=256)])
    with pytest.raises(ConfigError, match=r"temperature is 3.*lower rollout\.temperature"):
        tiny.vllm.generate([ask(prompt), ask(prompt, temperature=3.0)])
    other = dataclasses.replace(prompt, ids=np.append(prompt.ids, 5))
    with pytest.raises(TrainingError, match=rf"converts the prompt to {len(prompt)} tokens.* to {len(prompt) + 1}"):
        tiny.vllm.generate([ask(prompt, 2), ask(other, max_new_tokens=1)])

    def fail(i, made):
        raise RuntimeError("scoring failed")

    with pytest.raises(RuntimeError, match="scoring failed"):
        tiny.vllm.generate([ask(prompt, 2), ask(prompt, max_new_tokens=1)], fail)
    assert not tiny.vllm.llm.llm_engine.has_unfinished_requests() and len(tiny.vllm.generate([ask(prompt, 2)])[0]) == 2


def test_a_forced_token_is_told_among_all(tiny, monkeypatch):
    monkeypatch.setattr(tiny.vllm, "rules", dataclasses.replace(tiny.vllm.rules, top_k=1))
    prompt = tiny.prompts["text"]
    sampled, greedy = tiny.vllm.generate([ask(prompt, 2), ask(prompt, temperature=0.0)])
    assert all(c.tokens.tolist() == greedy[0].tokens.tolist() and not c.logprobs.any() for c in sampled)
    for kept in ({"top_k": 1}, {"top_p": 1e-4}):
        monkeypatch.setattr(tiny.vllm, "rules", dataclasses.replace(tiny.vllm.rules, **kept))
        request = ask(tiny.prompts["text"], temperature=1.0, thinking_budget=3, max_new_tokens=12)
        ((c,),) = tiny.vllm.generate([request])
        forced = ~c.loss_mask
        assert forced.any() and not c.logprobs[~forced].any(), kept
        told = trainer_logprobs(tiny.policy, [(request.prompt, c)])
        assert np.abs(c.logprobs - told)[forced].max() < 1e-5 and (told[forced] < -1e-3).all(), kept


def test_a_start_that_fails_names_the_setting(tiny, tmp_path):
    from vlrl.engine.vllm.engine import VLLMEngine

    config = tiny.config.model_copy(update={"engine": tiny.config.engine.model_copy(update={"max_model_len": 10**6})})
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=1000000 \(lower this setting"):
        VLLMEngine(tiny.policy, config, tmp_path)
    config = tiny.config.model_copy(update={"engine": tiny.config.engine.model_copy(update={"memory": 50.0})})
    with pytest.raises(ConfigError, match=r"engine\.memory=50"):
        VLLMEngine(tiny.policy, config, tmp_path)


def test_processes_of_an_engine_wait_asleep(installed, monkeypatch):
    """On a CPU; a reader of vLLM's own looks for the next message for a whole second."""
    from vllm.distributed.device_communicators import shm_broadcast

    from vlrl.engine.vllm.cpu_patches import SPIN_S, wait_asleep

    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)  # put back at the end
    for _ in range(2):
        wait_asleep()
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert reader._spin_condition.busy_loop_s == SPIN_S


@pytest.mark.parametrize("tiny", ["qwen2_vl", "smolvlm", "internvl"], indirect=True)
def test_pictures_are_expanded_once(tiny):
    """trl#6294, OpenRLHF#1220: ids that were expanded already were expanded again. What vLLM reports is the trainer's
    prompt, else `generate` raises (test_inputs.py), and both read the same answers alike after two syncs. Of families
    that the other tests leave out; vLLM 0.32 refuses LLaVA-OneVision as transformers 5 names its weights."""
    asked = []
    for sizes in ([(84, 84)], [(84, 84), (112, 56), (60, 100)], [(300, 100)]):  # one, three, one in tiles
        media = tuple(Media(source=noise(i, *size)) for i, size in enumerate(sizes))
        prompt = tiny.encode(Vowels(), Sample(id=str(sizes), media=media, row={"q": "Which?"}))
        assert len(prompt.raw_ids) < len(prompt)
        asked.append(ask(prompt, 2, max_new_tokens=6))
    for step in range(2):
        tiny.vllm.sync(tiny.policy, step)
        assert close_to_trainer(tiny, asked, tiny.vllm.generate(asked))
