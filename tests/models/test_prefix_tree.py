"""Answers that begin alike share what they have in common, with the values and gradients of padded rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SAMPLES, TWO
from tests.helpers import Vowels, load, settings
from tests.models.test_episodes import OBSERVATIONS, RED, episode, values
from tests.models.test_packing import assert_equal
from vlrl.config import validate
from vlrl.models import prefix_tree
from vlrl.models.packing import continuation, join_prompts, make_batch, pieces_of
from vlrl.models.prefix_tree import Node, tree_of
from vlrl.types import Media, Observation


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(prefix_tree, "SHORTEST", 4)


@pytest.fixture(scope="module", params=TWO)
def tiny(request, tiny_models):
    return load(settings(tiny_models[request.param], train={"tokens_per_batch": 4096}))


def ids(*runs):
    """Tokens first..last of each run."""
    return np.concatenate([np.arange(first, last + 1) for first, last in runs])


def test_what_several_answers_begin_with_is_there_once():
    answers = [ids((1, 9)), ids((1, 6), (20, 21)), ids((40, 41)), ids((1, 6)), ids((1, 3), (50, 55)), ids((1, 9))]
    tree = tree_of(answers)
    assert tree.nodes == (Node(0, 0, 6, 0, 14), Node(0, 6, 9, 6, 9), Node(1, 6, 8, 9, 11), Node(5, 6, 9, 11, 14),
                          Node(2, 0, 2, 14, 16), Node(4, 0, 9, 16, 25))  # three tokens in common are not shared
    assert [p.tolist() for p in tree.positions] == [[*range(9)], [*range(6), 9, 10], [14, 15], [*range(6)],
                                                 [*range(16, 25)], [*range(6), 11, 12, 13]]
    assert tree.shared and not tree_of(answers[2:5]).shared


@given(st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=7), st.integers(1, 5))
def test_every_answer_is_found_in_the_row(answers, shortest):
    answers = [np.array(a, np.int64) for a in answers]
    tree = tree_of(answers, shortest=shortest)
    row = np.full(tree.tokens, -1)
    for node in tree.nodes:
        row[node.place:node.place + node.stop - node.start] = answers[node.answer][node.start:node.stop]
    for answer, places in zip(answers, tree.positions, strict=True):
        assert np.array_equal(row[places], answer)
        for place in places:  # the nodes above it are all that it goes on from
            over = [n for n in tree.nodes if n.place <= place < n.end]
            before = [p for n in over for p in range(n.place, min(n.place + n.stop - n.start, place + 1))]
            assert before == places[:len(before)].tolist() and len(before) == 1 + [*places].index(place)
    if shortest == 1:  # nothing is there twice
        assert tree.tokens == len({tuple(a[:n]) for a in answers for n in range(1, len(a) + 1)})


def grown(policy, encode, kinds):
    """Groups whose answers branch at several depths."""
    rng, prompts, answers = np.random.default_rng(5), [], []
    words = [t for t in range(40, 90) if t not in set(policy.banned.tolist())]
    for kind in kinds:
        prompt, trunk = encode(Vowels(), SAMPLES[kind]), rng.choice(words, 12)
        branch = np.append(trunk[:7], rng.choice(words, 9))
        made = [np.append(base, rng.choice(words, n)) for base, n in ((trunk, 3), (trunk, 1), (branch, 6), (branch, 2))]
        made += [trunk, rng.choice(words, 5), np.append(branch[:11], rng.choice(words, 4))]
        prompts += [prompt] * len(made)
        answers += made
    return prompts, answers


def test_the_limit_counts_what_is_computed(tiny):
    _, encode = tiny
    prompt, answer = encode(Vowels(), SAMPLES["text"]), np.arange(40, 90)
    cut = pieces_of([prompt] * 6, [answer] * 5 + [answer[::-1]], len(prompt) + 100)
    assert [p.rollouts for p in cut] == [(0, 1, 2, 3, 4, 5)] and cut[0].tokens == len(prompt) + 100
    (apart, rest) = pieces_of([prompt] * 3, [answer, answer[::-1], np.roll(answer, 7)], len(prompt) + 100)
    assert apart.tokens == len(prompt) + 100 and rest.tokens == len(prompt) + 50


@pytest.mark.parametrize("kinds", [("text",), ("image", "two images")], ids="+".join)
def test_a_tree_is_padded_rows(tiny, kinds):
    policy, encode = tiny
    prompts, answers = grown(policy, encode, kinds)
    (batch,) = assert_equal(policy, prompts, answers)
    assert batch.tokens < sum(map(len, answers)) + sum(len(p) for p in {id(p): p for p in prompts}.values())
    own = 7 + 5 + 3 + 1 + 4 + 5 + 6 + 2 + 4 + 5  # trunk, its end, two rests, the branch twice, three rests, another
    assert batch.shared is not None and len(batch.targets) == sum(map(len, answers))
    assert len(batch.shared.targets) <= len(kinds) * own


def test_masked_attention_of_a_tree_is_that_of_padded_rows(tiny):
    policy, encode = tiny
    prompts, answers = grown(policy, encode, ("image",))
    pieces = pieces_of(prompts, answers, 10**6)
    found = values(policy, make_batch(pieces, attention="masked"), encode)
    padded = values(policy, make_batch([p.take([i]) for p in pieces for i in range(len(p.answers))], "padded"), encode)
    for a, b in zip(found, padded, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())


def forked(encode, prompt, first, rest):
    """Episodes that have their first observations in common, as a branching rollout makes them."""
    trunk = episode(encode, prompt, first, 1)[1]
    made = []
    for seed, observations in enumerate(rest):
        rng, words = np.random.default_rng(seed), encode.answer_ids("a b c d e f g h")[:-1]
        whole, shown = trunk, []
        for observation in observations:
            shown.append(encode.observation(observation, "s"))
            whole = join_prompts(whole, shown[-1]).followed_by(np.append(rng.choice(words, 3 + seed), encode.end))
        made.append(continuation(whole, prompt, [*[encode.observation(o, "s") for o in first], *shown]))
    return made


@pytest.mark.parametrize("kind", ["image", "text"])
def test_observations_in_common_are_seen_once(tiny, kind):
    policy, encode = tiny
    prompt, picture = encode(Vowels(), SAMPLES[kind]), Observation("A wall.", [Media(source=RED)])
    other = Observation("A wall.", [Media(source=RED.transpose(0).point(lambda v: 255 - v))])
    shown = forked(encode, prompt, OBSERVATIONS[:2], [[picture, OBSERVATIONS[2]], [picture], [other], []])
    (piece,) = pieces_of([prompt] * 4, [one.ids for one in shown], 10**6, shown)
    batch = make_batch([piece])
    own = [len(one) for one in shown]
    assert piece.tree.shared and batch.tokens < len(prompt) + sum(own) - 2 * len(shown[3])
    grids = batch.inputs["image_grid_thw"]
    assert len(grids) == len(prompt.mm.get("image_grid_thw", ())) + 1 + 1 + 2 + 1  # first, picture, two more, other
    padded = make_batch([piece.take([i]) for i in range(4)], "padded")
    for a, b in zip(values(policy, batch, encode), values(policy, padded, encode), strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())
    # what is not known one by one is not shared
    (apart,) = pieces_of([prompt] * 4, piece.answers, 10**6, [replace(one, inserted=()) for one in shown])
    assert not apart.tree.shared


def test_the_same_tokens_with_another_picture_part_before_it(tiny):
    _, encode = tiny
    prompt = encode(Vowels(), SAMPLES["text"])
    one, two = (Observation("A wall.", [Media(source=p)]) for p in (RED, RED.point(lambda v: 255 - v)))
    a, b = (forked(encode, prompt, [], [[o]])[0] for o in (one, two))
    assert np.array_equal(a.ids, b.ids)
    (piece,) = pieces_of([prompt] * 2, [a.ids, b.ids], 10**6, [a, b])
    start = a.inserted[0].start
    assert piece.tree.tokens == start + 2 * (len(a) - start) if start >= 4 else not piece.tree.shared
    (same,) = pieces_of([prompt] * 2, [a.ids, a.ids], 10**6, [a, replace(a)])
    assert same.tree.tokens == len(a)


def test_a_token_of_several_answers_has_the_gradient_of_each(tiny):
    """Twice the same answer, with weights 1 and 2: three times the gradient of one."""
    policy, encode = tiny
    prompt, answer = encode(Vowels(), SAMPLES["image"]), np.arange(40, 52)
    def gradient(answers, weights):
        policy.model.zero_grad()
        batch = make_batch(pieces_of([prompt] * len(answers), answers, 10**6))
        (policy.logprobs(batch, 1.0).logprobs * torch.tensor(weights)[batch.rollout_id]).sum().backward()
        return batch.tokens, [p.grad.clone() for _, p in policy.trainable()]
    (once, one), (twice, two) = gradient([answer], [3.0]), gradient([answer] * 2, [1.0, 2.0])
    assert once == twice
    for a, b in zip(one, two, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(a.abs().max(), 1)


def test_cached_features_of_a_tree_are_those_of_padded_rows(tiny_models):
    """Of a frozen tower: each picture in common is looked up once, and stands where it did."""
    policy, encode = load(validate({"task": "x", "model": {
        "name": str(tiny_models["qwen3_vl"]), "train": ["language"], "feature_cache_mib": 8}}))
    prompt, picture = encode(Vowels(), SAMPLES["image"]), Observation("A wall.", [Media(source=RED)])
    shown = forked(encode, prompt, OBSERVATIONS[:2], [[picture, OBSERVATIONS[2]], [picture], []])
    (piece,) = pieces_of([prompt] * 3, [one.ids for one in shown], 10**6, shown)
    batch = make_batch([piece])
    assert len(batch.inputs["visuals"]) == 1 + 1 + 1 + 2  # of the prompt, the first turns, the wall, and two more
    padded = make_batch([piece.take([i]) for i in range(3)], "padded")
    for a, b in zip(values(policy, batch, encode), values(policy, padded, encode), strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())
