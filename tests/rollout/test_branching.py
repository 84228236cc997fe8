"""Answers that go on from each other's text, by surprise or where meanings differ most."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from vlrl.algo.named import Bound
from vlrl.config import validate
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError
from vlrl.methods.tree import branching
from vlrl.methods.tree.branching import (
    ALIKE,
    BranchingGenerator,
    Leaf,
    Meaning,
    semantic_entropy,
    surprise,
    uniform,
    words,
)
from vlrl.models import prefix_tree
from vlrl.models.packing import make_batch, pieces_of
from vlrl.task import Task
from vlrl.types import Completion

LONG = Sampling(max_new_tokens=24)


@pytest.fixture(scope="module")
def tiny(tiny_models):
    return load(settings(tiny_models["qwen3_vl"]))


def branched(group_size, **branch):
    return validate({"task": "x", "model": {"name": "y"}, "rollout": {"group_size": group_size,
                                                                      "branch": {"roots": 2, **branch}}})


class Counting:
    """An engine that counts the tokens it writes."""

    def __init__(self, engine):
        self.engine, self.calls, self.written = engine, [], 0

    def generate(self, requests, done=None):
        made = self.engine.generate(requests, done)
        self.calls.append([*requests])
        for request, answers in zip(requests, made, strict=True):
            before = [len(b.written.tokens) for b in request.begun] or [0] * len(answers)
            self.written += sum(len(c.tokens) - b for c, b in zip(answers, before, strict=True))
        return made


def drawn(tiny, **branch):
    policy, encode = tiny
    config = branched(group_size=6, **branch)
    engine = Counting(HFEngine(policy, seed=5, batch_rollouts=16))
    prompts = [encode(Vowels(), SAMPLES[kind]) for kind in ("text", "image")]
    requests = [Request(prompt=p, n=6, sampling=LONG, key=(0, i)) for i, p in enumerate(prompts)]
    branches = BranchingGenerator(config)
    return prompts, branches.generate(engine, requests), engine, branches


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def test_the_others_begin_with_tokens_of_the_first_and_part_at_the_most_surprising_one(tiny):
    _, groups, engine, branches = drawn(tiny)
    for made in groups:
        assert len(made) == 6 and all(len(c.tokens) == len(c.logprobs) == len(c.loss_mask) for c in made)
        for place, c in enumerate(made[2:], 2):
            assert max(common(c.tokens, other.tokens) for other in made[:place]) >= 1
            assert c.loss_mask.all() and c.turns == () and c.text
    first, second = engine.calls
    assert [r.n for r in first] == [2, 2] and [r.n for r in second] == [4, 4] and not any(r.begun for r in first)
    total = sum(len(c.tokens) for made in groups for c in made)
    assert engine.written < total
    assert branches.metrics() == {"branch/reused_frac": pytest.approx(1 - engine.written / total)}
    assert branches.metrics() == {"branch/reused_frac": 0.0}  # counted once
    _, groups, engine, _ = drawn(tiny)
    for made, request in zip(groups, engine.calls[1], strict=True):
        able = [c for c in made[:2] if len(c.tokens) > 1]
        for i, begun in enumerate(request.begun):
            parent, turn = able[i % len(able)], i // len(able)
            place = 1 + int(np.argsort(parent.logprobs[1:], kind="stable")[turn % (len(parent.tokens) - 1)])
            assert begun.written.tokens.tolist() == parent.tokens[:place].tolist()
            assert begun.index == 2 + i


def test_log_probabilities_of_shared_tokens_are_those_of_the_trainer(tiny, monkeypatch):
    monkeypatch.setattr(prefix_tree, "SHORTEST", 1)
    policy, _ = tiny
    prompts, groups, *_ = drawn(tiny)
    for prompt, made in zip(prompts, groups, strict=True):
        batch = make_batch(pieces_of([prompt] * 6, [c.tokens for c in made], 10**6))
        with torch.no_grad():
            found = policy.logprobs(batch, 1.0).logprobs.numpy()
        assert np.abs(found - np.concatenate([c.logprobs for c in made])).max() < 1e-5
        assert batch.tokens < len(prompt) + sum(len(c.tokens) for c in made)


def test_a_budget_of_tokens_ends_a_group(tiny):
    _, groups, engine, _ = drawn(tiny, tokens=40)
    assert engine.written < drawn(tiny)[2].written and all(2 <= len(made) <= 6 for made in groups)
    assert all(request.n <= 2 for call in engine.calls for request in call)  # as many as there are roots at a time


def completion(*logprobs):
    n = len(logprobs)
    return Completion(tokens=np.arange(n), logprobs=np.array(logprobs, np.float32), loss_mask=np.ones(n, bool), text="",
                      finish_reason="stop")


def test_points():
    rng = np.random.default_rng(0)
    answer = completion(-9.0, -1.0, -5.0, np.nan, -2.0)
    all_but_first = np.arange(1, 5)
    # a token of no log-probability comes last
    assert [surprise(answer, all_but_first, k, rng) for k in range(5)] == [2, 4, 1, 3, 2]
    assert {uniform(answer, np.array([2, 4]), 0, rng) for _ in range(100)} == {2, 4}
    forced = replace(completion(-1.0, -2.0, -99.0, -3.0), loss_mask=np.array([True, True, False, True]))
    assert Leaf(forced, 1).places.tolist() == [1, 3] and Leaf(forced, 2).places.tolist() == [3]


def test_a_point_of_ones_own_is_checked():
    branches = BranchingGenerator(branched(4))
    for point, said in (
            (lambda *_: 0, "returned 0: it must return one of the 2 token positions that it was given, 1 to 2"),
            (lambda *_: None, "returned None"), (lambda *_: 1 / 0, "ZeroDivisionError")):
        branches.point = Bound("surprise", point)
        with pytest.raises(ConfigError, match=rf"rollout\.branch\.at='surprise'.*{said}"):
            branches._place(Leaf(completion(-1.0, -2.0, -3.0), 1), np.random.default_rng(0))


def test_an_answer_of_one_token_is_written_from_the_prompt():
    class One:
        def generate(self, requests, done=None):
            self.asked = requests
            return [[completion(-1.0)] * r.n for r in requests]
    engine, branches = One(), BranchingGenerator(branched(5))
    request = Request(prompt=None, n=5, sampling=LONG, key=(0, 3))  # type: ignore[arg-type]
    (made,) = branches.generate(engine, [request])
    assert len(made) == 5 and engine.asked[0].n == 3 and engine.asked[0].begun == ()
    assert engine.asked[0].key != request.key


LATE = {"async": {"max_staleness": 1}, "algo": {"correction": "token_truncate"}}
REFUSED = [
    ({"branch": {"at": "uniform"}}, {}, "rollout.branch.at=uniform applies to .*rollout.branch.roots"),
    ({"branch": {"tokens": 9}}, {}, "rollout.branch.tokens=9 .*rollout.branch.roots or search"),
    ({"branch": {"roots": 4}, "group_size": 4}, {}, "rollout.branch.roots=4 leaves none of the rollout.group_size=4"),
    ({"branch": {"roots": 2}, "step_tokens": 4, "max_new_tokens": 9}, {}, "rollout.step_tokens both decide how"),
    ({"branch": {"roots": 2}, "forget": {"lr": 1e-3}}, {"algo": {"correction": "none"}},
     "rollout.branch.roots=2 and rollout.forget.lr both decide how"),
    ({"branch": {"roots": 2}}, LATE, "does not work with async.max_staleness=1"),
    ({"branch": {"roots": 2, "search": {}}}, {}, "rollout.branch.roots=2 and rollout.branch.search both decide"),
    ({"branch": {"search": {}, "at": "uniform"}}, {}, "rollout.branch.at=uniform applies .* from roots, but"),
    ({"branch": {"search": {"cache": 0, "hard": 0.5}}}, {}, "search.hard=0.5 has no effect with .*search.cache=0"),
    ({"branch": {"search": {}}, "step_tokens": 4, "max_new_tokens": 9}, {},
     "rollout.branch.search and rollout.step_tokens both decide .*rollout.branch.search=null"),
    ({"branch": {"search": {}}}, LATE, "rollout.branch.search does not work with async.max_staleness=1"),
    ({"branch": {"search": {"width": 1}}}, {}, "rollout.branch.search.width"),
    ({"branch": {"search": {"depth": 1}}}, {}, "rollout.branch.search.depth")]


def test_settings_that_cannot_act_are_refused():
    for rollout, more, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            validate({"task": "x", "model": {"name": "y"}, "rollout": rollout, **more})


def test_tasks_that_cannot_branch_are_refused():
    class World(Task):
        def environment(self, sample):
            return None
    config = branched(4)
    branching.check(config, World(), True)
    with pytest.raises(ConfigError, match=r"rollout\.branch\.at=meaning reads continuations of single answers"):
        branching.check(branched(4, at="meaning"), World(), True)
    with pytest.raises(ConfigError, match="supervised fine-tuning generates no answers"):
        branching.check(config, Vowels(), False)
    branching.check(config, Vowels(), True)
    for early in (BranchingGenerator, lambda config: branching.check(config, Vowels(), True)):
        with pytest.raises(ConfigError, match=r"rollout\.branch\.at='nowhere' is not known"):
            early(branched(4, at="nowhere"))


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


def branched_by_meaning(tiny, at=AT, **branch):
    policy, encode = tiny
    engine = Counting(HFEngine(policy, seed=5, batch_rollouts=16))
    prompts = [encode(Vowels(), SAMPLES[kind]) for kind in ("text", "image")]
    requests = [Request(prompt=p, n=5, sampling=LONG, key=(0, i)) for i, p in enumerate(prompts)]
    branches = BranchingGenerator(branched(5, at=at, **branch), policy.processor.tokenizer.decode)
    return branches.generate(engine, requests), engine, branches


def test_an_answer_branches_where_its_continuations_differ(tiny):
    groups, engine, branches = branched_by_meaning(tiny)
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
    groups, engine, _ = branched_by_meaning(tiny, at={**AT, "root": 1.0})
    assert all(b.written.tokens.size == 0 for r in engine.calls[2] for b in r.begun)
    for made in groups:
        assert len({c.tokens.tobytes() for c in made}) > 1 and all(c.loss_mask.all() for c in made)
    groups, engine, _ = branched_by_meaning(tiny, tokens=60)
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
