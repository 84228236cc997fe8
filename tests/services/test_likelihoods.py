"""services.policy_logprobs and reference_logprobs: what is read, against a plain forward of one answer at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.conftest import SAMPLES
from tests.helpers import load, settings
from tests.rollout.test_group_source import Number
from tests.rollout.test_group_source import source as scripted
from tests.tables import each
from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import AlgoSettings
from vlrl.curriculum import Draw
from vlrl.errors import TaskError
from vlrl.models.packing import pack, pieces_of
from vlrl.models.reference import Reference
from vlrl.rollout.generate import AcceptedDraw, UnscoredGroup, groups_without_variants, make_group
from vlrl.services.likelihoods import Likelihoods, answer_span
from vlrl.task.services import Key, Reading
from vlrl.types import Completion, Sample

SEVEN = Sample(id="7", row={"n": 7, "answer": "7"})


@each("text content", [
    ("<think>a</think><answer>no</answer><answer>cat</answer> end", "cat"), ("<answer>cat", "cat"), ("cat", ""),
    ("<answer></answer>x", ""), ("<answer>", ""), ("</answer><answer>ü b</answer>", "ü b"), ("", ""),
    ("<answer>bü</answer>ü", "bü"), ("ü<answer>ü😀", "ü😀")])
def test_the_tokens_of_the_last_answer(text, content):
    tokens = np.frombuffer(text.encode(), np.uint8)

    def decode(ids):
        return bytes(ids).decode("utf-8", "replace")
    start, end = answer_span(tokens, decode)
    assert decode(tokens[start:end]) == content


@each("pieces span", [
    (["<answer>", "ca", "t</", "answer>"], (1, 3)), (["<ans", "wer>c", "at", "</answer>"], (1, 3)),
    (["x<answer>y", "</answer>z"], (0, 1)), (["<answer>", "ab"], (1, 2)),
    (["<answer>", "", "ab", "", "</answer>"], (2, 4))])
def test_a_token_that_holds_part_of_a_tag_counts(pieces, span):
    def decode(ids):
        return "".join(pieces[i] for i in ids)
    assert answer_span(np.arange(len(pieces)), decode) == span


class Both(Number):
    """Reads its answers, and "a dog" in their place and alone."""

    needs = {"policy_logprobs", "reference_logprobs"}

    def readings(self, service, sample, answers):
        inside = [Reading(a, "a dog") for a in [*answers, None]]
        return [*answers, *inside] if service == "policy_logprobs" else answers[::2]


TEXTS = ("<think>no</think><answer>a cat</answer>", "none", "<think>" + "so " * 40 + "</think><answer>two dogs")


def completion(encode, text):
    ids = encode.answer_ids(text)
    return Completion(tokens=ids, logprobs=np.zeros(len(ids)), loss_mask=np.ones(len(ids), bool), text=text,
                      finish_reason="stop")


def plain(policy, encode, prompt, text, content):
    """Log-probabilities of the tokens of `content` at the end of a text, by a forward of this one row alone."""
    ids = encode.answer_ids(text)[:-1]
    with torch.no_grad(), policy.evaluating():
        (batch,) = pack(pieces_of([prompt], [ids], 10**6), 10**6, "padded")
        values = policy.logprobs(batch, 1.0).logprobs.numpy()
    decode, before = encode.processor.tokenizer.decode, len(text) - len(content)
    start = max(k for k in range(len(ids)) if len(decode(ids[:k])) <= before)
    return values[start:]


def made(tiny_models, task, **more):
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), **more}, train={"tokens_per_batch": 300})
    policy, encode = load(config)
    policy.keep_reference()
    return policy, encode, Likelihoods(Reference(policy, config), encode, task)


@pytest.fixture(scope="module")
def reader(tiny_models):
    _, encode, read = made(tiny_models, Both())
    return encode, read


@pytest.mark.parametrize("more", [{}, pytest.param({"lora": {"rank": 4}}, marks=pytest.mark.slow)])
def test_both_policies_equal_a_plain_forward(tiny_models, more):
    task = Both()
    policy, encode, read = made(tiny_models, task, **more)
    samples = [replace(SAMPLES[kind], row={"n": kind}) for kind in ("image", "text")]
    prompts = [encode(task, sample) for sample in samples]
    answers = [completion(encode, text) for text in TEXTS]

    def wanted(prompt):
        own = [plain(policy, encode, prompt, TEXTS[0].removesuffix("</answer>"), "a cat"), [],
               plain(policy, encode, prompt, TEXTS[2], "two dogs")]
        inside = [plain(policy, encode, prompt, text + "a dog", "a dog") for text in (
            "<think>no</think><answer>", TEXTS[2].removesuffix("two dogs"), "<answer>")]
        return own, [inside[0], [], *inside[1:]]
    before = [wanted(prompt) for prompt in prompts]
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the policy moves away, the reference stays
    found = read([UnscoredGroup(s, p, [("", c) for c in answers]) for s, p in zip(samples, prompts, strict=True)],
                 "train", 5)
    for i, (likely, prompt) in enumerate(zip(found, prompts, strict=True)):
        own, inside = wanted(prompt)
        keys = [*((k, None) for k in range(3)), *((k, "a dog") for k in (0, 1, 2, None))]
        assert [*likely["policy_logprobs"]] == keys and [*likely["reference_logprobs"]] == [(0, None), (2, None)]
        for key, value in zip(keys, [*own, *inside], strict=True):
            assert np.allclose(likely["policy_logprobs"][key], value, atol=1e-5), (i, key)
            assert len(likely["policy_logprobs"][key]) == len(value)
        for key in ((0, None), (2, None)):
            assert np.allclose(likely["reference_logprobs"][key], before[i][0][key[0]], atol=1e-5)
        assert np.abs(np.asarray(own[0]) - before[i][0][0]).max() > 1e-2
    counted = read.metrics("train")
    assert (counted["logprobs/texts"], counted["logprobs/policy_step"]) == (14, 5) and counted["logprobs/tokens"] > 100
    assert read.metrics("train")["logprobs/texts"] == 0


def test_what_stands_in_place_keeps_the_tokens_before_it(reader):
    """A policy may write a text in other tokens than its tokenizer would: these are read as they were sampled."""
    encode, read = reader
    decode = encode.processor.tokenizer.decode
    letters = np.concatenate([encode.processor.tokenizer(c, add_special_tokens=False)["input_ids"] for c in
                              "<think>no</think><answer>5"])
    whole = replace(completion(encode, ""), tokens=letters)
    row, (start, end) = read._instead(whole, "seven", "x")
    assert np.array_equal(row.tokens[:start], letters[:-1]) and decode(row.tokens[start:end]) == "seven"
    assert end == len(row.tokens)


@given(before=st.text(max_size=30), text=st.text(max_size=12))
@hypothesis_settings(max_examples=60)
def test_any_text_in_place_is_found_again(reader, before, text):
    encode, read = reader
    decode = encode.processor.tokenizer.decode
    row, (start, end) = read._instead(completion(encode, f"{before}<answer>x</answer>"), text, "x")
    shown = decode(encode.answer_ids(text)[:-1])
    assert shown in decode(row.tokens[start:end]) and 0 <= start <= end == len(row.tokens)
    begin = decode(encode.answer_ids(before)[:-1])[:5]
    assert not text or decode(row.tokens[:start]).startswith(begin)


class Sure(Number):
    rewards = {"right": 1.0, "sure": 0.5}
    needs = {"reference_logprobs"}
    copies = False

    def score_group(self, sample, answers, services):
        given = [replace(a) for a in answers] if self.copies else answers[::-1]
        return [{"sure": float(np.exp(v.mean()))} for v in services.reference_logprobs(given)[::-1]]


def test_the_group_is_handed_its_own_answers_values():
    task = Sure()
    answers = [Completion(tokens=np.arange(3), logprobs=np.zeros(3), loss_mask=np.ones(3, bool), text=text,
                          finish_reason="stop") for text in ("7", "8")]
    prompt = scripted(lambda prompt, i: "").encode(task, SEVEN)

    def group(*values):
        known: dict[Key, np.ndarray] = {(i, None): np.asarray(v) for i, v in enumerate(values)}
        likely = {"reference_logprobs": known} if values else None
        return make_group(task, SEVEN, prompt, answers, group_id="0", split="train", step=0, likely=likely)
    found = group(np.log([0.25, 1.0]), np.log([0.5]))
    assert [r.parts["sure"] for r in found.rollouts] == pytest.approx([0.5, 0.5])
    assert group().weights == {"right": 1.0}  # an evaluation without the service
    with pytest.raises(TaskError, match=r"asked for an answer, which Task\.readings did not return"):
        group(np.zeros(1))
    task.copies = True
    with pytest.raises(TaskError, match="and no copies of them"):
        group(np.zeros(1), np.zeros(1))


class Broken(Both):
    text: str = ""

    def readings(self, service, sample, answers):
        return [Reading(answers[0], self.text)] if self.text else answers[9]


def test_readings_that_fail_name_the_task(reader):
    task, (encode, other) = Broken(), reader
    read = Likelihoods(other.reader, encode, task)
    visits = groups_without_variants([(0, SEVEN, encode(Number(), replace(SEVEN, row={"n": 7})))],
                                     [[completion(encode, "7")]])
    with pytest.raises(TaskError, match=r"readings\(\) failed for sample '7': IndexError"):
        read(visits, "train", 0)
    task.text = "x"
    episode = replace(visits[0].members[0][1], episode_id="e")
    with pytest.raises(TaskError, match="is not possible for an episode"):
        read([replace(visits[0], members=[("", episode)])], "train", 0)


def test_the_greedy_answer_is_read_too():
    """It is the baseline of rewards that likelihoods are part of."""
    read = []

    def likelihoods(visits, split, step):
        read.append([len(visit.members) for visit in visits])
        return [{"reference_logprobs": {(i, None): np.log([0.5]) for i in range(len(v.members))}} for v in visits]
    s = scripted(lambda prompt, i: prompt.text)
    task = Sure()
    task.name = "number"
    s.task = s.generator.task = task
    s.generator.algorithm = Algorithm(s.config.model_copy(update={"algo": AlgoSettings.model_validate(
        {"advantage": "remax"})}))
    s.generator.likelihoods = likelihoods
    asked = [AcceptedDraw(i, Draw(i, 0), s.samples[i], s.encode(task, s.samples[i])) for i in range(2)]
    groups = s.generator.groups(asked, 0)
    assert read == [[3, 3], [1, 1]]
    for group in groups:
        (greedy,) = group.aside
        assert greedy.parts["sure"] == pytest.approx(0.5) and greedy.reward is not None
