"""Branches where the meanings of short continuations differ most: the entropy by hand and by another way, the choice,
and what is written for it."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from tests.rollout.test_branching import LONG, Counting, branched, common, completion
from vlrl.engine.base import Request
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError
from vlrl.methods.tree.branching import ALIKE, BranchingGenerator, Leaf, Meaning, semantic_entropy, words

AT = {"name": "meaning", "continuations": 3, "tokens": 5, "candidates": 4, "root": 0.0}


def test_semantic_entropy(tmp_path):
    same = ALIKE["exact"]
    assert semantic_entropy(["Red.", "red", "blue", "RED"], same) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert semantic_entropy(["a", "b", "c", "d"], same) == pytest.approx(math.log(4))
    assert semantic_entropy(["a", "a"], same) == 0 and math.copysign(1, semantic_entropy(["a"], same)) == 1
    near = lambda a, b: abs(int(a) - int(b)) <= 1  # noqa: E731
    # 1 and 3 begin clusters; 2 is like both firsts and joins that of 1; 4 joins 3; 5 is not like 3
    assert semantic_entropy(["1", "3", "2", "4", "5"], near) == pytest.approx(
        -(2 * 0.4 * math.log(0.4) + 0.2 * math.log(0.2)))
    # Where alike is an equivalence, clusters are its classes.
    rng = random.Random(0)
    for _ in range(50):
        texts = [rng.choice("abcdef") for _ in range(rng.randint(1, 12))]
        shares = [n / len(texts) for n in Counter(texts).values()]
        wanted = math.log(2) * -sum(p * math.log2(p) for p in shares)
        assert semantic_entropy(texts, ALIKE["exact"]) == pytest.approx(wanted, abs=1e-6)
    (tmp_path / "mine.py").write_text("def alike(a, b):\n    return a[0] == b[0]\n")
    rule = Meaning(alike=f"{tmp_path}/mine.py:alike")
    assert rule.entropy(["ab", "ac", "b"]) == pytest.approx(-(2 / 3 * math.log(2 / 3) + math.log(1 / 3) / 3))


def test_alike():
    assert words("the red car", "A red car!") and words("", "") and words("Left turn", "left")
    assert not words("red car", "blue sky") and not words("", "red")
    assert words("a b c d", "a b x y") and not words("a b c d", "a x y z")  # from one half on
    assert ALIKE["exact"]("Red car.", "red car") and not ALIKE["exact"]("red car", "car red")


def test_places_are_spread_and_the_largest_entropy_comes_first():
    rule = Meaning(candidates=3)
    assert rule.candidates(np.arange(1, 10)) == [1, 5, 9]
    assert rule.candidates(np.array([4, 7])) == [4, 7] and rule.candidates(np.array([6])) == [6]
    assert rule.candidates(np.array([], int)) == [] and Meaning(candidates=1).candidates(np.arange(3, 9)) == [3]
    rng, rule = np.random.default_rng(0), Meaning(root=0.0)
    entropies = {2: 0.5, 5: 1.0, 9: 1.0, 7: 0.0}
    assert [rule(entropies, k, rng) for k in range(6)] == [5, 9, 2, 7, 5, 9]
    roots = [Meaning(root=0.25)(entropies, 0, rng) == 0 for _ in range(2000)]
    assert 0.21 < np.mean(roots) < 0.29 and Meaning(root=1.0)(entropies, 0, rng) == 0


@pytest.fixture(scope="module")
def tiny(tiny_models):
    return load(settings(tiny_models["qwen3_vl"]))


def drawn(tiny, at=AT, **branch):
    policy, encode = tiny
    engine = Counting(HFEngine(policy, seed=5, batch_rollouts=16))
    prompts = [encode(Vowels(), SAMPLES[kind]) for kind in ("text", "image")]
    requests = [Request(prompt=p, n=5, sampling=LONG, key=(0, i)) for i, p in enumerate(prompts)]
    branches = BranchingGenerator(branched(5, at=at, **branch), policy.processor.tokenizer.decode)
    return branches.generate(engine, requests), engine, branches


def test_an_answer_branches_where_its_continuations_differ(tiny):
    groups, engine, branches = drawn(tiny)
    _, probes, last = engine.calls
    read = tiny[0].processor.tokenizer.decode
    again = HFEngine(tiny[0], seed=5, batch_rollouts=16).generate(probes)
    for number, (made, request) in enumerate(zip(groups, last, strict=True)):
        for leaf in range(2):
            own = [(p, m) for p, m in zip(probes, again, strict=True) if p.key[1:3] == (number, leaf)]
            places = [p.begun[0].written.tokens.size for p, _ in own]
            assert len(places) == 4 and places[0] == 1 and places[-1] == len(made[leaf].tokens) - 1
            assert all(p.n == 3 and p.sampling.max_new_tokens == min(place + 5, 24)
                       for (p, _), place in zip(own, places, strict=True))
            entropies = {place: semantic_entropy([read(c.tokens[place:]) for c in m], words)
                         for place, (_, m) in zip(places, own, strict=True)}
            order = sorted(entropies, key=lambda place: (-entropies[place], place))
            mine = [b.written for b in request.begun[leaf::2]]
            assert [len(c.tokens) for c in mine] == order[:len(mine)]
            assert all(common(c.tokens, made[leaf].tokens) == len(c.tokens) for c in mine)
    counted = branches.metrics()
    answers, probed = sum(len(c.tokens) for made in groups for c in made), sum(
        len(c.tokens) - p.begun[0].written.tokens.size for p, m in zip(probes, again, strict=True) for c in m)
    assert counted["branch/probed_frac"] == pytest.approx(probed / engine.written)
    assert counted["branch/reused_frac"] == pytest.approx(1 - (engine.written - probed) / answers)
    assert branches.metrics() == {"branch/reused_frac": 0.0, "branch/probed_frac": 0.0}


def test_from_the_root_an_answer_is_written_anew_and_continuations_count(tiny):
    groups, engine, _ = drawn(tiny, at={**AT, "root": 1.0})
    assert all(b.written.tokens.size == 0 for r in engine.calls[2] for b in r.begun)
    for made in groups:
        assert len({c.tokens.tobytes() for c in made}) > 1 and all(c.loss_mask.all() for c in made)
    groups, engine, _ = drawn(tiny, tokens=60)
    assert all(len(made) <= 4 for made in groups) and len(engine.calls) == 3


def test_options_are_checked():
    for at, said in (({"name": "meaning", "continuations": 1}, r"rollout\.branch\.at\.continuations"),
                     ({"name": "meaning", "alike": "vague"}, r"rollout\.branch\.at\.alike='vague' is not known"),
                     ({"name": "meaning", "depth": 1}, r"branch\.at\.depth=1: 'meaning' has no option 'depth'"),
                     ({"name": "surprise", "tokens": 1}, r"'surprise' has no option 'tokens'")):
        with pytest.raises(ConfigError, match=said):
            BranchingGenerator(branched(5, at=at))


class Tails:
    """An engine whose continuations have nothing in common but what was there."""

    def generate(self, requests, done=None):
        return [[replace(b.written, tokens=np.append(b.written.tokens, [100 + b.index, 200 + b.index]))
                 for b in r.begun] for r in requests]


def test_what_was_there_before_is_no_meaning():
    branches = BranchingGenerator(branched(5, at=AT), lambda tokens: " ".join(map(str, tokens)))
    leaf, spent = Leaf(completion(*[-1.0] * 9), 1), [10]
    request = Request(prompt=None, n=5, sampling=LONG, key=(0, 3))  # type: ignore[arg-type]
    branches._probe(Tails(), branches.point.function, [request], [[leaf]], [0], spent)
    assert leaf.entropies == {place: pytest.approx(math.log(3)) for place in (1, 3, 6, 8)}
    assert spent == [10 + 4 * 3 * 2]
    branches._probe(Tails(), branches.point.function, [request], [[leaf]], [0], spent)
    assert spent == [34]  # once an answer
