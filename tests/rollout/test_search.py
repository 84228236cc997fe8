"""Answers found by a tree search: what is asked of the engine, what the group holds, what is kept for later visits, and
what is learned from it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings, started
from tests.rollout.test_branching import Counting
from tests.training.test_update import assert_close, gradients
from vlrl.algo.algorithm import Algorithm
from vlrl.curriculum import Draw
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError
from vlrl.methods.tree import branching, search
from vlrl.methods.tree.advantage import deepsearch
from vlrl.methods.tree.search import SearchGenerator
from vlrl.methods.tree.search_tree import search_nodes
from vlrl.models.packing import make_batch, pieces_of
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.error_limits import refuse_stale
from vlrl.rollout.generate import AcceptedDraw, RolloutGenerator
from vlrl.store import trainer_state
from vlrl.store.rollout_rows import _rows
from vlrl.task import Task
from vlrl.training.advantages import credit
from vlrl.types import Completion, Prompt

SEARCH = {"width": 3, "depth": 3, "by_entropy": 0.1}


def nodes_of(completion):
    return search_nodes(completion.extra)


def config_of(folder="y", size=4, tokens=None, **options):
    return settings(folder, rollout={"group_size": size, "max_new_tokens": 10, "prompts_per_step": 2,
                                     "branch": {"search": {**SEARCH, **options}, "tokens": tokens}},
                    algo={"advantage": "deepsearch"})


@pytest.fixture(scope="module")
def tiny(tiny_models):
    config = config_of(tiny_models["qwen3_vl"])
    return *load(config), config


class Early(Vowels):
    """About every second answer is right."""

    def correct(self, sample, answer, parts):
        return sum(map(ord, answer.text)) % 2 == 0


def answering(tiny, config, task=None):
    engine = Counting(HFEngine(tiny[0], seed=5, batch_rollouts=16))
    algorithm = started(config, *tiny[:2])
    return RolloutGenerator(config, task or Early(), engine, Clock(), algorithm, methods=algorithm.methods), engine


def asked(tiny, *numbers):
    kinds = ("text", "image")
    return [AcceptedDraw(n, Draw(n % 2, 0), SAMPLES[kinds[n % 2]], tiny[1](Early(), SAMPLES[kinds[n % 2]]))
            for n in numbers]


@pytest.fixture(scope="module")
def searched(tiny):
    """Groups of a search, what was asked of the engine for them, and the metrics."""
    answers, engine = answering(tiny, tiny[2])
    groups = answers.groups(asked(tiny, 0, 1), 0)
    (method,) = answers.methods
    return groups, engine, method.metrics(), method


def test_the_group_is_a_part_of_the_tree(searched):
    for group in searched[0]:
        assert len(group.rollouts) == 4
        values = {}
        for r in group.rollouts:
            done = r.completion
            ends = [n.end for n in nodes_of(done)]
            assert [n.start for n in nodes_of(done)] == [0, *ends[:-1]]
            assert ends[-1] == len(done.tokens) and not done.turns
            assert ends[:-1] == [4, 8][:len(ends) - 1] and len(done.tokens) <= 10  # 10 tokens in 3 pieces
            assert (done.finish_reason == "stop") or len(done.tokens) == 10
            assert nodes_of(done)[-1].value == (1.0 if r.correct else -1.0) and done.policy_step is None
            for node in nodes_of(done)[:-1]:
                found = values.setdefault(done.tokens[:node.end].tobytes(), node)
                assert found == node  # the same node, with one value
        assert {r.correct for r in group.rollouts} == {True, False}
        assert any(len(nodes_of(r.completion)) > 1 for r in group.rollouts)
    (group, _) = credit(searched[0], deepsearch)
    for row, r in zip(_rows(0, group, {i: [] for i in range(4)}), group.rollouts, strict=True):
        nodes = nodes_of(r.completion)
        assert [(t["start"], t["end"], t["info"]) for t in row["turns"]] == [
            (n.start, n.end, f'{{"value": {n.value}, "visits": {n.visits}}}') for n in nodes]
        assert row["turn_advantages"] == [pytest.approx(float(r.advantage[n.start])) for n in nodes]


def test_pieces_go_on_from_their_node(searched):
    engine = searched[1]
    first = engine.calls[0]
    assert [(r.key, r.n, r.begun, r.sampling.max_new_tokens) for r in first] == [((0, 0), 3, (), 4), ((0, 1), 3, (), 4)]
    for number in (0, 1):
        own = [r for call in engine.calls[1:] for r in call if r.key == (0, number)]
        indices = [b.index for r in own for b in r.begun]
        assert own and indices == list(range(3, 3 + len(indices)))  # a stream for each piece
        assert all(r.n == len(r.begun) == 3 and len({b.written.tokens.tobytes() for b in r.begun}) == 1 for r in own)
        assert all(r.sampling.max_new_tokens == min(len(r.begun[0].written.tokens) + 4, 10) for r in own)


def test_what_is_counted_and_log_probabilities(searched, tiny):
    groups, engine, metrics, search_ = searched
    total = sum(len(r.completion.tokens) for g in groups for r in g.rollouts)
    pieces = {(g.id, r.completion.tokens[:n.end].tobytes()): n.end - n.start
              for g in groups for r in g.rollouts for n in nodes_of(r.completion)}
    assert metrics == {
        "search/groups_frac": 1.0, "search/kept_frac": 0.0, "search/nodes_mean": sum(map(len, engine.calls)) / 2,
        "search/unused_frac": pytest.approx(1 - sum(pieces.values()) / engine.written),
        "branch/reused_frac": pytest.approx(1 - sum(pieces.values()) / total)}
    assert metrics["search/unused_frac"] > 0 and search_.metrics()["search/groups_frac"] == 0  # counted once
    for group in searched[0]:
        made = [r.completion for r in group.rollouts]
        batch = make_batch(pieces_of([group.prompt] * 4, [c.tokens for c in made], 10**6))
        with torch.no_grad():
            found = tiny[0].logprobs(batch, 1.0).logprobs.numpy()
        assert np.abs(found - np.concatenate([c.logprobs for c in made])).max() < 1e-5


def test_a_common_beginning_is_read_once(tiny, searched, monkeypatch):
    (request, *_) = [r for call in searched[1].calls for r in call if r.begun]
    engine, read = HFEngine(tiny[0], seed=5, batch_rollouts=16), []
    prefill = engine._prefill_all
    monkeypatch.setattr(engine, "_prefill_all", lambda prompts: read.append(len(prompts)) or prefill(prompts))
    (together,) = engine.generate([request])
    apart = engine.generate([replace(request, n=1, begun=(b,)) for b in request.begun])
    assert read == [1, 3]
    for a, (b,) in zip(together, apart, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5
    written = request.begun[0].written
    other = AnswerPrefix(index=9, written=replace(written, tokens=written.tokens[::-1].copy()))
    engine.generate([replace(request, begun=(request.begun[0], other, request.begun[1]))])
    assert read[-1] == 3  # those side by side alone


def test_packed_is_padded(tiny, searched):
    """Of searched and kept answers, whose log-probabilities under the sampler nobody knows."""
    policy, _, config = tiny
    groups = [replace(g, rollouts=(*g.rollouts[:3], replace(g.rollouts[3], completion=search._cached_answer(
        g.rollouts[3].completion.tokens, g.rollouts[3].completion.loss_mask, "", "stop", 0)))) for g in searched[0]]
    groups = credit(groups, deepsearch)
    assert any(len(set(r.advantage.tolist())) > 1 for g in groups for r in g.rollouts)
    def found(**train):
        steps, stats, _ = gradients(policy, groups, config.model_copy(update={
            "train": config.train.model_copy(update={"max_grad_norm": 1e9, **train})}))
        assert math.isfinite(stats["loss"])
        return steps[0]
    whole = found(tokens_per_batch=10**6)
    assert any(value.abs().max() > 0 for value in whole.values())
    assert_close(found(packing="padded", tokens_per_batch=300), whole)


def prompt_of(*ids):
    return Prompt(sample_id="a", text="", ids=np.array(ids), raw_ids=np.array(ids), positions=np.arange(len(ids))[None])


class Rolls:
    """An engine whose tokens are drawn from (key, number of the answer, place); an answer ends with a 0."""

    def __init__(self, ids=4):
        self.calls, self.ids = [], ids

    def generate(self, requests, done=None):
        self.calls.append([*requests])
        return [[self.answer(r, i) for i in range(r.n)] for r in requests]

    def answer(self, request, i):
        before = request.begun[i].written if request.begun else search.EMPTY
        place = request.begun[i].index if request.begun else i
        ids = np.random.default_rng([*request.key, place]).integers(0, self.ids, request.sampling.max_new_tokens)
        ids[:len(before.tokens)] = before.tokens
        ends = np.flatnonzero(ids[len(before.tokens):] == 0)
        n = len(before.tokens) + int(ends[0]) + 1 if len(ends) else len(ids)
        return Completion(tokens=ids[:n], logprobs=np.full(n, -1.0, np.float32), loss_mask=np.ones(n, bool),
                          text=str(ids[:n]), finish_reason="stop" if len(ends) else "length")


def request_of(number, *ids, n=4):
    return Request(prompt=prompt_of(*ids), n=n, sampling=Sampling(max_new_tokens=10), key=(0, number))


def judged(*shares):
    """Judges of the visits: which of the answers asked about in all are right, by number, and where None."""
    def make(which):
        seen = []

        def judge(request, made):
            seen.extend(made)
            return [which(k) for k in range(len(seen) - len(made), len(seen))]
        return judge
    return [make(which) for which in shares]


def test_right_answers_of_a_hard_prompt_begin_its_next_visit():
    finder, engine = SearchGenerator(config_of(hard=0.25)), Rolls()
    one, none, all_ = judged(lambda k: k == 0, lambda k: False, lambda k: True)
    (first,) = finder.generate(engine, [request_of(0, 5, 6)], one, 3)
    assert len(first) == 4 and nodes_of(first[0])[-1].value == 1 and sum(nodes_of(c)[-1].value for c in first) == -2
    # the same question again: the right answer, and three from the prompt in one call, no piece among them
    calls = len(engine.calls)
    (second,) = finder.generate(engine, [request_of(1, 5, 6)], none, 4)
    (asked_,) = engine.calls[calls]
    assert len(engine.calls) == calls + 1 and (asked_.n, asked_.begun, asked_.sampling.max_new_tokens) == (3, (), 10)
    assert second[0].tokens.tolist() == first[0].tokens.tolist() and second[0].text == first[0].text
    assert second[0].policy_step == 3 and np.isnan(second[0].logprobs).all() and second[0].finish_reason == "stop"
    assert [c.policy_step for c in second[1:]] == [None] * 3 and not any(c.extra for c in second)
    assert finder.metrics()["search/kept_frac"] == 0.5
    # it stays while the prompt is hard, and leaves once it is not; then the prompt is answered without a search
    (third,) = finder.generate(engine, [request_of(2, 5, 6)], all_, 5)
    assert third[0].policy_step == 3
    calls = len(engine.calls)
    (fourth,) = finder.generate(engine, [request_of(3, 5, 6)], none, 6)
    assert [r.n for r in engine.calls[calls]] == [4] and all(c.policy_step is None for c in fourth)
    # none was right: hard again, and nothing is known, so it is searched
    finder.generate(engine, [request_of(4, 5, 6)], none, 7)
    assert engine.calls[-1][0].begun


def test_other_prompts_have_visits_of_their_own():
    finder, engine = SearchGenerator(config_of(hard=1.0)), Rolls()
    media = replace(prompt_of(5, 6), media=(type("M", (), {"sha256": "b"}),))
    for number, request in enumerate((request_of(0, 5, 6), request_of(1, 6, 5),
                                      replace(request_of(2, 5, 6), prompt=media))):
        (made,) = finder.generate(engine, [request], *judged(lambda k: k == 0), number)
        assert all(c.policy_step is None for c in made)
    assert len(finder.visits) == 3 and finder.metrics()["search/groups_frac"] == 1
    # one kept answer less than the group has, whatever was right
    for step in range(3, 6):
        (made,) = finder.generate(engine, [request_of(step, 5, 6)], *judged(lambda k: True), step)
    assert [c.policy_step for c in made[:3]] == [0, 3, 3] and made[3].policy_step is None
    (two,) = finder.generate(engine, [request_of(9, 5, 6, n=2)], *judged(lambda k: True), 9)
    assert [c.policy_step for c in two] == [0, None]  # where a visit asks for fewer, too


def test_the_longest_unseen_leave_first_and_what_nobody_can_judge_is_not_remembered():
    finder, engine = SearchGenerator(config_of(cache=2)), Rolls()
    for number, ids in enumerate([(1,), (2,), (1,), (3,)]):
        finder.generate(engine, [request_of(number, *ids)], *judged(lambda k: False), number)
    assert list(finder.visits) == [search._key(prompt_of(i)) for i in (1, 3)]
    without = SearchGenerator(config_of(cache=0))
    without.generate(engine, [request_of(0, 1)], *judged(lambda k: False), 0)
    assert without.visits == {}
    finder = SearchGenerator(config_of())
    (made,) = finder.generate(Rolls(), [request_of(0, 1)], *judged(lambda k: None), 0)
    assert len(made) == 4 and {nodes_of(c)[-1].value for c in made} == {0.0} and finder.visits == {}


def test_a_resumed_search_remembers():
    finder = SearchGenerator(config_of(hard=0.25))
    finder.generate(Rolls(), [request_of(i, i + 1) for i in range(6)], *judged(lambda k: k % 9 == 0), 2)
    assert any(v.cached for v in finder.visits.values())
    again = SearchGenerator(config_of(hard=0.25))
    again.load_state_dict(trainer_state.decode(*trainer_state.freeze(finder.state_dict())))
    assert again.state_dict().keys() == finder.state_dict().keys() and list(again.visits) == list(finder.visits)
    requests = [request_of(6 + i, i + 1) for i in range(6)]
    found, other = (f.generate(Rolls(), requests, *judged(lambda k: False), 3) for f in (finder, again))
    for a, b in zip([c for g in found for c in g], [c for g in other for c in g], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.tokens.dtype == b.tokens.dtype and a.text == b.text
        assert (a.policy_step, a.finish_reason, a.extra) == (b.policy_step, b.finish_reason, b.extra)
        assert a.loss_mask.dtype == b.loss_mask.dtype and a.loss_mask.tolist() == b.loss_mask.tolist()


def test_a_budget_ends_a_search_and_what_has_ended_by_then_is_the_group():
    def found(tokens):
        engine = Counting(Rolls(ids=9))
        (made,) = SearchGenerator(config_of(size=8, tokens=tokens)).generate(engine, [request_of(0, 7, n=8)],
                                                                       *judged(lambda k: False), 0)
        return made, engine
    (whole, engine), (some, less), (least, _) = found(None), found(30), found(1)
    assert len(whole) == 8 and less.written < engine.written and 30 <= less.written < 30 + 3 * 4
    # what had ended by then is in the group
    assert 1 <= len(least) <= len(some) <= 8
    assert [c.tokens.tolist() for c in some[:2]] == [c.tokens.tolist() for c in whole[:2]]
    def found(ids):
        judge, seen = *judged(lambda k: False), []
        request = request_of(0, 7, n=8)
        (made,) = SearchGenerator(config_of(size=8, tokens=1)).generate(
            Rolls(ids), [request], lambda request, ends: seen.extend(ends) or judge(request, ends), 0)
        return made, seen
    made, seen = found(2)  # of three pieces some end at once
    assert len(made) == len(seen) >= 2 and {c.text for c in made} == {c.text for c in seen}
    assert all(len(nodes_of(c)) == 1 for c in made)
    made, seen = found(10**6)  # none ends before the limit
    assert len(made) == len(seen) == 3 and {len(c.tokens) for c in made} == {10}


def test_a_step_reads_and_tells(tiny):
    """Kept answers go through the loop: scored again, marked, of the weights that wrote them."""
    task, config = Early(), config_of(tiny[2].model.name, hard=1.0)
    answers, _ = answering(tiny, config, task)
    before = answers.groups(asked(tiny, 0, 1), 0)
    after = answers.groups(asked(tiny, 2, 3), 1)
    for old, new in zip(before, after, strict=True):
        kept = [r for r in new.rollouts if r.variant == "kept"]
        right = [r for r in old.rollouts if r.correct][:3]
        assert kept and [r.completion.tokens.tolist() for r in kept] == [r.completion.tokens.tolist() for r in right]
        assert all(r.correct and r.policy_step == 0 and r.train_prompt is None and r.reward is not None for r in kept)
        assert all(r.policy_step == 1 and r.variant == "" for r in new.rollouts[len(kept):])
        mean = np.mean([1.0 if r.correct else -1.0 for r in new.rollouts])
        for r in credit([new], deepsearch)[0].rollouts:
            assert r.advantage.tolist() == [pytest.approx((1 if r.correct else -1) - mean)] * len(r.completion.tokens)
    refuse_stale(after, 1, config)
    stale = [replace(after[0], rollouts=(replace(after[0].rollouts[-1], policy_step=0),))]
    with pytest.raises(TrainingError, match="weights after 0 completed steps"):
        refuse_stale(stale, 1, config)


def test_what_cannot_be_searched_is_refused():
    class World(Task):
        def environment(self, sample):
            return None
    class Varied(Vowels):
        def variants(self, sample, n, step):
            return []
    config = config_of()
    for task, generates, said in ((World(), True, "has an environment or tools"), (Varied(), True, "prompt variants"),
                                  (Vowels(), False, "supervised fine-tuning generates no answers")):
        with pytest.raises(ConfigError, match=rf"rollout\.branch\.search: .*{said}.*rollout\.branch\.search=null"):
            branching.check(config, task, generates)
    branching.check(config, Vowels(), True)
    branching.check(settings("y"), World(), True)
    with pytest.raises(ConfigError, match=r"algo\.advantage='deepsearch' reads .*rollout\.branch\.search=null"):
        Algorithm(settings("y", algo={"advantage": "deepsearch"}))
