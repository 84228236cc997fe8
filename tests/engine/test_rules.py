"""Stop strings and the thinking budget, against their definition on whole texts."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from vlrl.algo.advantage import grpo
from vlrl.config import validate
from vlrl.engine.base import Request, Sampling
from vlrl.engine.decoding import DecodingBatch
from vlrl.engine.hf import HFEngine
from vlrl.engine.stop_rules import StopRules
from vlrl.errors import ConfigError
from vlrl.evaluation.evaluate import evaluate
from vlrl.models.packing import pack, pieces_of
from vlrl.models.token_text import TokenTexts
from vlrl.rollout.generate import make_group, sampling_of
from vlrl.rollout.prefetch import Prefetcher
from vlrl.training.advantages import credit
from vlrl.training.update import make_optimizer, update

PLAIN = Sampling(max_new_tokens=24)


@pytest.fixture(scope="module")
def parts(tiny_models):
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    return policy, encode(Vowels(), SAMPLES["text"]), TokenTexts(policy)


def generate(parts, *samplings, n=6, rows=64):
    policy, prompt, _ = parts
    return HFEngine(policy, 2, rows).generate([Request(prompt=prompt, n=n, sampling=s) for s in samplings])


def cut_at(texts, tokens, stops):
    """How many tokens there are up to the one that completes a stop string, by the whole text; all without one."""
    counts = (t for t in range(1, len(tokens) + 1) if any(stop in texts.decode(tokens[:t]) for stop in stops))
    return next(counts, len(tokens))


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(parts):
    policy, _, texts = parts
    (plain,) = generate(parts, PLAIN)
    words = [c.text[len(c.text) // 3:][:width] for c, width in zip(plain, (1, 2, 3, 5, 8, 13), strict=True)]
    stops = tuple(word for word in words if word and "\ufffd" not in word)
    cuts = [cut_at(texts, c.tokens, stops) for c in plain]
    crossing = [stop for stop in stops if not any(stop in texts.decode([int(t)]) for c in plain for t in c.tokens)]
    assert crossing and any(1 < cut < len(c.tokens) for c, cut in zip(plain, cuts, strict=True))
    for rows in (64, 4):
        (found,) = generate(parts, dataclasses.replace(PLAIN, stop=stops), rows=rows)
        for c, whole, cut in zip(found, plain, cuts, strict=True):
            assert c.tokens.tolist() == whole.tokens[:cut].tolist()
            ended = int(c.tokens[-1]) in policy.eos
            assert c.text == texts.decode(c.tokens[:-1] if ended else c.tokens) and c.loss_mask.all()
            assert c.finish_reason == ("stop" if ended or any(s in c.text for s in stops) else "length")


def test_a_request_keeps_to_its_own_stop_strings(parts):
    (plain,) = generate(parts, PLAIN)
    both = generate(parts, PLAIN, dataclasses.replace(PLAIN, stop=(plain[0].text[3:5],)))
    assert [c.tokens.tolist() for c in both[0]] == [c.tokens.tolist() for c in plain]
    assert both[1][0].text.startswith(plain[0].text[:5]) and len(both[1][0].tokens) < len(plain[0].tokens)
    free = [PLAIN, Sampling(max_new_tokens=3, temperature=0)]
    for sampling, some in ((free, False), ([*free, Sampling(max_new_tokens=3, stop=("x",))], True)):
        n = len(sampling)
        writing = DecodingBatch(sampling, np.zeros((n, 24), np.float32), parts[2], [None] * n)
        assert (writing._rules is not None) == some


@examples(max_examples=60)
@given(data=st.data())
def test_the_token_that_completes_a_stop_string_is_known(parts, data):
    """Whatever the tokens are: bytes of split characters, spaces, control tokens."""
    _, _, texts = parts
    ids = data.draw(st.lists(st.integers(0, len(texts.tokenizer) - 1), min_size=1, max_size=8))
    text = texts.decode(ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[start:start + data.draw(st.integers(1, 12))].replace("\ufffd", "")
    if stop and stop in text:
        assert texts.ending((stop,))[ids[cut_at(texts, ids, (stop,)) - 1]]
        texts._ending.clear()


def test_a_stop_string_may_be_written_letter_by_letter(parts):
    _, _, texts = parts
    stop = "</answer>\u00e9"  # the last letter is two bytes, each a token
    written = [i for letter in "so: " + stop for i in texts.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    tokens = torch.tensor([written])
    assert tokens.shape[1] > len(stop) + 4
    rules = StopRules([Sampling(max_new_tokens=99, stop=(stop,))], tokens, torch.tensor([0]), texts)
    row, live = torch.tensor([0]), torch.tensor([True])
    ended = [bool(rules.stopped(torch.tensor([t]), row, live, tokens)) for t in range(len(written))]
    assert ended == [False] * (len(written) - 1) + [True]
    assert not rules.stopped(torch.tensor([len(written) - 1]), row, ~live, tokens)
    assert texts.ending(("</answer>",)).sum() < len(texts.tokenizer) / 2


def test_thinking_over_budget_is_ended(parts):
    policy, prompt, texts = parts
    for end in ("\n</think>\n", "</think><answer>"):
        closing = texts.ids(end).tolist()
        (plain,) = generate(parts, PLAIN)
        (found,) = generate(parts, dataclasses.replace(PLAIN, thinking_budget=5, thinking_end=end))
        forced = slice(5, 5 + len(closing))
        for c, free in zip(found, plain, strict=True):
            assert c.tokens[:5].tolist() == free.tokens[:5].tolist(), end
            if len(free.tokens) <= 5:  # ended by itself
                assert c.tokens.tolist() == free.tokens.tolist() and c.loss_mask.all(), end
                continue
            assert c.tokens[forced].tolist() == closing and end in c.text, end
            assert np.flatnonzero(~c.loss_mask).tolist() == list(range(forced.start, forced.stop)), end
            assert len(c.tokens) <= 24 and c.text == texts.decode([t for t in c.tokens if int(t) not in policy.eos])
        assert any(len(c.tokens) > forced.stop for c in found), end
        (batch,) = pack(pieces_of([prompt] * len(found), [c.tokens for c in found], 10**6), 10**6)
        with torch.no_grad():
            trainer = policy.logprobs(batch, 1.0).logprobs.numpy()  # of forced tokens too: the model's own
        assert np.abs(trainer - np.concatenate([c.logprobs for c in found])).max() < 2e-5, end


def test_the_closing_text_counts_towards_the_length_and_may_stop_the_answer(parts):
    _, _, texts = parts
    (found,) = generate(parts, Sampling(max_new_tokens=7, thinking_budget=5))
    cut = [c for c in found if len(c.tokens) == 7]
    assert cut and all(c.tokens[5:].tolist() == texts.ids("\n</think>\n")[:2].tolist() for c in cut)
    assert all(c.loss_mask.tolist() == [True] * 5 + [False] * 2 and c.finish_reason == "length" for c in cut)
    (found,) = generate(parts, dataclasses.replace(PLAIN, thinking_budget=2, stop=("</think>",)))
    assert all(c.finish_reason == "stop" and c.text.rstrip("\n").endswith("</think>") for c in found
               if not c.loss_mask.all())
    assert not all(c.loss_mask.all() for c in found)


def test_only_what_is_open_and_being_written_is_closed(parts):
    _, _, texts = parts
    closed = texts.ids("a</think>b").tolist()
    budget = len(closed)
    tokens = torch.zeros(4, budget + 9, dtype=torch.long)
    tokens[0, :budget] = torch.tensor(closed)
    limits = [Sampling(max_new_tokens=budget + 9, thinking_budget=b) for b in (budget, budget, budget, None)]
    rules = StopRules(limits, tokens, torch.zeros(4, dtype=torch.long), texts)
    rows, live = torch.arange(4), torch.tensor([True, True, False, True])

    def forced(t):
        return rules.next(torch.full((4,), t), rows, live, tokens)

    assert forced(budget - 1) is None
    ids = forced(budget)
    first = int(texts.ids("\n</think>\n")[0])
    assert ids is not None and ids.tolist() == [-1, first, -1, -1]
    assert forced(budget + len(texts.ids("\n</think>\n"))) is None


def test_settings_that_cannot_work_are_named(parts):
    for rollout, says in (
            ({"thinking_budget": 512}, r"thinking_budget=512 is not below rollout\.max_new_tokens=512.*lower"),
            ({"thinking_end": "enough"}, r"thinking_end='enough' does not contain </think>.*add </think>"),
            ({"stop": [""]}, r"rollout\.stop")):
        with pytest.raises(ConfigError, match=says):
            validate({"task": "x", "model": {"name": "x"}, "rollout": rollout})
    said = r"^engine\.batch_rollouts=\S+: give a whole number of at least 1, or auto$"
    for rows in ("many", 0, 1.5):
        with pytest.raises(ConfigError, match=said):
            validate({"task": "x", "model": {"name": "x"}, "engine": {"batch_rollouts": rows}})
    ends = dataclasses.replace(PLAIN, thinking_budget=1, thinking_end="<|image_pad|></think>")
    with pytest.raises(ConfigError, match=r"rollout\.thinking_end='<\|image_pad\|></think>'.*remove this token"):
        generate(parts, ends)


def test_evaluations_sample_as_training_does(tiny_models):
    config = settings(tiny_models["qwen3_vl"], rollout={"stop": ["never"], "thinking_budget": 2, "max_new_tokens": 9},
                      eval={"samples": 2, "temperature": 1.0})
    policy, encode = load(config)

    class Two(Vowels):
        name = "two"

        def samples(self, split):
            return [SAMPLES["text"], SAMPLES["image"]]

    assert sampling_of(config.rollout, 0.5) == Sampling(max_new_tokens=9, temperature=0.5, stop=("never",),
                                                        thinking_budget=2)
    task = Two()
    _, groups = evaluate(task, Prefetcher(encode, task, 0), HFEngine(policy, 0), config, "heldout", 0)
    assert any(not c.loss_mask.all() for c in [g.rollouts[0].completion for g in groups])


def test_nothing_is_learned_from_forced_tokens(tiny_models):
    """Whatever log-probability is recorded for them, weights and metrics are the same; that of a sampled one shows."""
    config = settings(tiny_models["qwen3_vl"], rollout={"group_size": 2, "thinking_budget": 3, "max_new_tokens": 20})
    policy, encode = load(config)
    start = [p.detach().clone() for _, p in policy.trainable()]
    request = Request(prompt=encode(Vowels(), SAMPLES["text"]), n=4, sampling=sampling_of(config.rollout, 1.0))
    (answers,) = HFEngine(policy, 0).generate([request])
    assert any(not c.loss_mask.all() for c in answers)

    def learned(where):
        for (_, p), old in zip(policy.trainable(), start, strict=True):
            p.data.copy_(old)
        changed = [dataclasses.replace(c, logprobs=np.where(where(c), np.float32(-9), c.logprobs)) for c in answers]
        group = make_group(Vowels(), SAMPLES["text"], request.prompt, changed, group_id="0", split="train", step=0)
        stats, _ = update(policy, make_optimizer(policy, config), credit([group], grpo), config, 0)
        return stats, [p.detach().clone() for _, p in policy.trainable()]

    plain, weights = learned(lambda c: np.zeros(len(c.tokens), bool))
    forced, same = learned(lambda c: ~c.loss_mask)
    assert forced == plain and all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert learned(lambda c: c.loss_mask)[0]["mismatch/kl"] > plain["mismatch/kl"] + 1e-3
