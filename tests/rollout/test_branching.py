"""Answers that go on from each other's text: what they share was not written again, and is computed once."""

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
from vlrl.methods.tree.branching import BranchingGenerator, Leaf, surprise, uniform
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


@pytest.mark.parametrize("rollout, more, said", [
    ({"branch": {"at": "uniform"}}, {}, "rollout.branch.at=uniform applies to .*rollout.branch.roots"),
    ({"branch": {"tokens": 9}}, {}, "rollout.branch.tokens=9"),
    ({"branch": {"roots": 4}, "group_size": 4}, {}, "rollout.branch.roots=4 leaves none of the rollout.group_size=4"),
    ({"branch": {"roots": 2}, "step_tokens": 4, "max_new_tokens": 9}, {}, "rollout.step_tokens both decide how"),
    ({"branch": {"roots": 2}, "forget": {"lr": 1e-3}}, {"algo": {"correction": "none"}},
     "rollout.branch.roots=2 and rollout.forget.lr both decide how"),
    ({"branch": {"roots": 2}}, {"async": {"max_staleness": 1}, "algo": {"correction": "token_truncate"}},
     "does not work with async.max_staleness=1"),
])
def test_settings_that_cannot_act_are_refused(rollout, more, said):
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
