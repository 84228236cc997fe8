"""Generation beside the update: what is drawn when and by which weights, what a checkpoint holds, errors, the end.

Whole runs, killed ones and those of two processes: tests/e2e/test_async.py."""

import dataclasses
import threading

import pytest
import torch

from tests.conftest import SAMPLES
from tests.engine.scripted import ScriptedEngine
from tests.helpers import Vowels, credited_groups, load, settings
from tests.rollout.test_group_source import BAD, Number
from tests.tables import each
from vlrl import config as configs
from vlrl import curriculum
from vlrl.algo.algorithm import Algorithm
from vlrl.config import validate
from vlrl.curriculum import Prompts, Sequential
from vlrl.engine.base import Request, Sampling
from vlrl.engine.copied_engine import Abandoned, CopiedEngine
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError
from vlrl.methods.asynchronous import source as async_source
from vlrl.methods.asynchronous.source import AsyncGroupSource
from vlrl.models.processing import PromptTooLong
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.error_limits import refuse_stale
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.store.checkpoint import load_state, save
from vlrl.training.build_engine import make_engine
from vlrl.training.update import make_optimizer, update
from vlrl.types import Prompt

WAIT = 60
"""Seconds after which something that should happen does not."""


def encode(task, sample):
    n = sample["n"]
    if n in BAD:
        raise BAD[n]
    return Prompt(sample_id=sample.id, text=str(n), ids=torch.arange(n + 3).numpy(),
                  raw_ids=torch.arange(n + 3).numpy(), positions=torch.arange(n + 3)[None].numpy())


class Stamped(ScriptedEngine):
    """Answers the right number, or with i = 0 the step of its weights; sync must not come while it writes."""

    def __init__(self):
        super().__init__(lambda prompt, i: prompt.text if i else f"step {self.step}")
        self.writing = threading.Lock()
        self.synced: list[int] = []

    def sync(self, policy, step):
        assert self.writing.acquire(blocking=False), "weights changed under a generation"
        self.writing.release()
        self.synced.append(step)
        super().sync(policy, step)

    def generate(self, requests, done=None):
        with self.writing:
            return super().generate(requests, done)


def source(staleness=1, engine=None, kind=AsyncGroupSource, task=None, algorithm=None, likelihoods=None, **more):
    BAD.clear()
    given = {"async": {"max_staleness": staleness}, "algo": {"correction": "token_truncate"}} if staleness else {}
    config = validate({"task": "x", "model": {"name": "x"}, "steps": 9, "rollout": {"group_size": 3}, **given, **more})
    task = task or Number()
    task.name = "number"
    samples = task.samples("train")
    generator = RolloutGenerator(config, task, engine or Stamped(), Clock(), algorithm or Algorithm(config),
                                 likelihoods=likelihoods)
    return kind(generator, encode, Sequential(Prompts(len(samples), 0)), samples)


def steps(s, first, last, count=2):
    """What each step is given."""
    for step in range(first, last):
        s.sync(None, step, now=False)
        yield s.next_groups(count, step)


def told(groups):
    return [(g.id, g.sample.id, [(r.policy_step, r.completion.text, r.reward) for r in (*g.rollouts, *g.aside)])
            for g in groups]


@each("staleness ages", [(1, [0, 1, 1, 1, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 1, 2, 1, 2, 1, 2]),
                                                 (3, [0, 1, 2, 3, 1, 2, 3, 1, 2]), (20, [*range(9)])])
def test_answers_are_of_the_weights_that_policy_step_says(staleness, ages):
    s, plain = source(staleness), source(0, kind=GroupSource)
    for step, (groups, same) in enumerate(zip(steps(s, 0, 9), steps(plain, 0, 9), strict=True)):
        assert [(g.id, g.sample.id) for g in groups] == [(g.id, g.sample.id) for g in same]
        for r in (r for g in groups for r in g.rollouts):
            assert step - r.policy_step == ages[step]
            assert r.index or r.completion.text == f"step {r.policy_step}"
        assert len(s.queue) <= staleness and all(step < batch.step < 9 for batch in s.queue)
        found = s.metrics()
        assert found["async/staleness_mean"] == found["async/staleness_max"] == ages[step]
    assert not s.queue and s.engine.synced == sorted({*range(0, 9, staleness), 8})
    assert s.drawn == 18
    s.close()


def test_a_step_is_drawn_beside_the_update_of_the_one_before():
    """Generation that waits for the update to begin: in the foreground it would wait for ever."""
    updating = threading.Event()
    class Waiting(Stamped):
        def generate(self, requests, done=None):
            assert threading.current_thread() is threading.main_thread() or updating.wait(WAIT)
            return super().generate(requests, done)
    s = source(engine=Waiting())
    given = steps(s, 0, 2)
    next(given)
    assert not s.queue[0].work.done()
    updating.set()
    assert {r.policy_step for g in next(given) for r in g.rollouts} == {0}
    assert [name for name, *_ in s.clock.take_spans()].count("ahead") == 1 and s.metrics()["time/ahead_s"] > 0
    s.close()


def test_weights_wait_for_what_is_being_generated(monkeypatch):
    begun, waited = threading.Event(), threading.Event()
    class Slow(Stamped):
        def generate(self, requests, done=None):
            with self.writing:
                begun.set()
                assert threading.current_thread() is threading.main_thread() or waited.wait(WAIT)
            return super().generate(requests, done)
    s, wait = source(3, engine=Slow()), async_source.concurrent.futures.wait
    given = steps(s, 0, 1)
    begun.clear()
    next(given)
    assert begun.wait(WAIT)
    monkeypatch.setattr(async_source.concurrent.futures, "wait", lambda work: (waited.set(), wait(work)))
    s.sync(None, 1, now=True)  # an evaluation is due; what is in the queue stays of older weights
    assert s.engine.synced == [0, 1] and all(batch.work.done() for batch in s.queue)
    assert [{r.policy_step for g in groups for r in g.rollouts} for groups in steps(s, 1, 6)] == [
        {0}, {0}, {0}, {3}, {3}]
    s.close()


def test_refills_are_of_the_current_weights():
    """Every second sample has equal rewards, and is replaced."""
    class Half(Stamped):
        def generate(self, requests, done=None):
            return [[dataclasses.replace(c, text="wrong") if int(r.prompt.text) % 2 else c for c in made]
                    for r, made in zip(requests, super().generate(requests), strict=True)]
    s = source(2, engine=Half(), curriculum={"keep": "mixed", "max_refills": 8})
    for step, groups in enumerate(steps(s, 0, 6, 4)):
        assert len(groups) == 4 and all(g.sample["n"] % 2 == 0 for g in groups)
        assert all(r.index or r.completion.text == f"step {r.policy_step}" for g in groups for r in g.rollouts)
        by = [{r.policy_step for r in g.rollouts} for g in groups]
        assert all(len(own) == 1 for own in by)
        assert {step} in by and (step == 0 or min(min(own) for own in by) < step)
    s.close()


def test_rejected_prompts_are_counted_when_their_step_comes():
    s = source()
    BAD[3] = PromptTooLong("sample 'train-3': prompt of 99 tokens")
    given = steps(s, 0, 3)
    next(given)
    assert s.metrics()["prompts/rejected"] == 0
    groups = next(given)
    assert sorted(g.sample["n"] for g in groups) == [2, 4] and s.metrics()["prompts/rejected"] == 1
    assert {g.sample["n"]: g.rollouts[0].policy_step for g in groups} == {2: 0, 4: 1}
    s.close()


def test_the_temperature_is_that_of_the_weights():
    class Hot(Stamped):
        heat = []
        def generate(self, requests, done=None):
            self.heat += [r.sampling.temperature for r in requests]
            return super().generate(requests, done)
    s = source(engine=Hot(), algorithm=type("Algorithm", (), {"temperature": 0.7, "requires": frozenset()})())
    write, changed = s._write, threading.Event()
    s._write = lambda batch, writer: write(batch, writer) if changed.wait(WAIT) else None
    next(steps(s, 0, 1))
    s.generator.algorithm.temperature = 9.0
    changed.set()
    s.sync(None, 1)
    assert s.engine.heat == [0.7] * 4
    s.close()


class Watched(Number):
    """Notes which thread scores."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def score(self, sample, answer):
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().score(sample, answer)


def test_a_task_of_the_main_thread_alone_is_scored_there():
    for ahead in (True, False):
        task = Watched()
        s = source(task=task, rollout={"group_size": 3, "score_ahead": ahead})
        given = steps(s, 0, 2)
        next(given)
        before = 6  # those of the first step; the thread may have scored some of the second already
        s.sync(None, 1)
        assert (len(task.threads) > before) == ahead
        next(given)
        s.sync(None, 2)
        assert all(task.threads[before:]) != ahead
        s.close()


def test_log_probabilities_are_read_in_the_main_thread():
    """It computes on all processes together."""
    asked = []
    def likelihoods(visits, split, step):
        assert threading.current_thread() is threading.main_thread()
        asked.append(len(visits))
        return [{} for _ in visits]
    likelihoods.metrics = lambda split: {}
    s = source(likelihoods=likelihoods)
    assert [{r.policy_step for g in groups for r in g.rollouts} for groups in steps(s, 0, 3)] == [{0}, {0}, {1}]
    assert asked == [2, 2, 2]
    s.close()


@pytest.mark.parametrize(("staleness", "ahead"), [(1, False), (3, True)])
def test_what_is_drawn_ahead_is_in_the_checkpoint(tmp_path, staleness, ahead):
    more: dict = {"algo": {"correction": "token_truncate", "advantage": "remax"},
                  "rollout": {"group_size": 3, "score_ahead": ahead}}
    for stop in (1, 2, 4):
        a, b = source(staleness, **more), source(staleness, **more)
        [*steps(a, 0, stop)]
        path = save(tmp_path / f"{stop}", stop, lambda folder: None, {"source": a.state_dict()}, 1)
        b.load_state_dict(load_state(path)["source"])
        assert [(x.step, x.policy_step) for x in b.queue] == [(x.step, x.policy_step) for x in a.queue] != []
        again = save(tmp_path / f"{stop}-again", stop, lambda folder: None, {"source": b.state_dict()}, 1)
        assert (path / "trainer_state.safetensors").read_bytes() == (again / "trainer_state.safetensors").read_bytes()
        for groups, same in zip(steps(a, stop, 9), steps(b, stop, 9), strict=True):
            assert told(groups) == told(same)
            for r, q in zip(groups[0].rollouts, same[0].rollouts, strict=True):
                assert r.completion.turns == q.completion.turns
                for name in ("tokens", "logprobs", "loss_mask"):
                    x, y = getattr(r.completion, name), getattr(q.completion, name)
                    assert x.dtype == y.dtype and x.tolist() == y.tolist()
        a.close(), b.close()


class Failing(Stamped):
    """Fails once, for the answers of step 2."""

    failed = False

    def generate(self, requests, done=None):
        if self.step == 1 and not self.failed and threading.current_thread() is not threading.main_thread():
            self.failed = True
            raise TrainingError("the engine is gone")
        return super().generate(requests, done)


def test_what_failed_is_raised_in_its_step_and_drawn_anew_after_a_resume():
    s = source(engine=Failing())
    given = steps(s, 0, 3)
    next(given)
    assert {r.policy_step for g in next(given) for r in g.rollouts} == {0}
    s.sync(None, 2)
    with pytest.raises(TrainingError, match="the engine is gone"):
        next(given)
    s.close()
    a, b, whole = source(engine=Failing()), source(), source()
    [*steps(a, 0, 2)]
    b.load_state_dict(a.state_dict())
    [*steps(whole, 0, 2)]
    (groups,), (other,) = steps(b, 2, 3), steps(whole, 2, 3)
    assert [(g.id, g.sample.id) for g in groups] == [(g.id, g.sample.id) for g in other]
    assert {r.policy_step for g in groups for r in g.rollouts} == {2}
    assert b.sampler.state_dict() == whole.sampler.state_dict()
    for s in (a, b, whole):
        s.close()


def test_the_end_does_not_wait_for_a_generation():
    class Endless(Stamped):
        given_up = threading.Event()
        def generate(self, requests, done=None):
            if threading.current_thread() is not threading.main_thread():
                assert self.given_up.wait(WAIT)
                raise Abandoned("over")
            return super().generate(requests, done)
        def abandon(self):
            self.given_up.set()
    s = source(3, engine=Endless())
    next(steps(s, 0, 1))
    s.close()
    assert all(batch.work.done() for batch in s.queue)


def test_staler_answers_than_allowed_are_refused():
    s = source(2)
    given = [*steps(s, 0, 3)]
    refuse_stale(given[2], 2, s.config)
    tight = validate({**s.config.model_dump(), "async": {"max_staleness": 1}})
    with pytest.raises(TrainingError, match=r"step 2 got completions .* after 0 completed steps.*requires at leas"):
        refuse_stale(given[2], 2, tight)
    refuse_stale([], 2, tight)
    s.close()


@each("more says", [
    ({"algo": {}}, r"with algo\.correction=none algo\.loss=ppo_clip .*algo\.correction=token_truncate.*decoupled_ppo"),
    ({"rollout": {"step_tokens": 8}}, r"rollout\.step_tokens=8\): remove rollout\.step_tokens"),
    ({"rollout": {"forget": {"lr": 1e-3}}}, r"rollout\.forget\.lr=0\.001 .*set rollout\.forget\.lr=0"),
    ({"async": {"max_staleness": -1}}, r"async\.max_staleness=-1"),
    ({"async": {"max_stale": 1}}, r"unknown setting 'async\.max_stale'.*max_staleness"),
    ({"asynchronous": {"max_staleness": 1}}, r"unknown setting 'asynchronous'")])
def test_settings_that_cannot_work_are_named(more, says):
    tree = {"task": "x", "model": {"name": "x"}, "async": {"max_staleness": 1},
            "algo": {"correction": "token_truncate"}, **more}
    with pytest.raises(ConfigError, match=says):
        validate(tree)
    if "max_staleness" in tree["async"] and "asynchronous" not in tree:
        validate({**tree, "async": {"max_staleness": 0}})


def test_objectives_that_correct_themselves_samplers_that_probe_and_the_name_of_the_section():
    for loss in ({"name": "vespo", "from_sampler": True}, "mine.py:loss"):
        validate({"task": "x", "model": {"name": "x"}, "async": {"max_staleness": 1}, "algo": {"loss": loss}})
    config = validate({"task": "x", "model": {"name": "x"}, "async": {"max_staleness": 2},
                       "algo": {"correction": "token_mask"}})
    assert validate(config.model_dump()) == config and "async:\n  max_staleness: 2" in configs.dump(config)
    other = validate({**config.model_dump(), "async": {"max_staleness": 1}})
    assert configs.differences(config, other) == ["async.max_staleness: 2 -> 1"]
    assert "async.max_staleness" in [name for name, *_ in configs.describe()]
    given = {"task": "x", "model": {"name": "x"}, "algo": {"correction": "token_truncate"}}
    for name, staleness in (("gvm", 1), ("uniform", 1), ("gvm", 0)):
        config = validate({**given, "curriculum": {"name": name}, "async": {"max_staleness": staleness}})
        sampler = curriculum.make(config.curriculum, Prompts(4, 0), {})
        if (name, staleness) == ("gvm", 1):
            with pytest.raises(ConfigError, match=r"async\.max_staleness=1: curriculum\.name=gvm .*max_staleness=0"):
                async_source.check(config, sampler)
        else:
            async_source.check(config, sampler)


LORA = {"lora": {"rank": 4, "target": "all_linear"}}


def near(found, wanted):
    """The same answers; weights that lie elsewhere in memory may change the last bits of their log-probabilities."""
    assert [(tokens, *rest) for tokens, _, *rest in found] == [(tokens, *rest) for tokens, _, *rest in wanted]
    for (_, one, *_), (_, other, *_) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def answers(engine, prompts, n=4):
    made = engine.generate([Request(prompt=p, n=n, sampling=Sampling(max_new_tokens=10), key=(0, i))
                            for i, p in enumerate(prompts)])
    return [(c.tokens.tolist(), c.logprobs.tolist(), c.text, c.finish_reason) for group in made for c in group]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA, {"feature_cache_mib": 8, "train": ["language"]}])
def test_the_copy_answers_as_the_policy_did_when_it_was_synced(tiny_models, model):
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), "train": ["language", "merger", "vision"], **model})
    policy, encode = load(config)
    prompts = [encode(Vowels(), SAMPLES[kind]) for kind in ("text", "image", "two images")]
    shared, copy = HFEngine(policy, 3), CopiedEngine(policy, 3)
    first = answers(copy, prompts)
    near(answers(shared, prompts), first)
    with torch.no_grad():
        for _, p in policy.trainable():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.05)
    assert answers(copy, prompts) == first
    copy.sync(policy, 4)
    second = answers(copy, prompts)
    near(answers(shared, prompts), second)
    assert second != first and copy.step == 4 and answers(CopiedEngine(policy, 3), prompts) == second
    assert not any(p.requires_grad for p in copy.policy.model.parameters()) and policy.trainable()
    assert policy.model.training and copy.policy.processor is not policy.processor


@pytest.mark.slow
def test_the_copy_generates_while_the_policy_learns(tiny_models):
    """The same answers, and the same gradients, as one after the other."""
    config = settings(tiny_models["qwen3_vl"])
    def learned(beside):
        policy, encode = load(config)
        prompts = [encode(Vowels(), SAMPLES[kind]) for kind in ("text", "image", "two images", "video")]
        groups, engine, found = credited_groups(policy, encode, config), CopiedEngine(policy, 3), []
        thread = threading.Thread(target=lambda: found.extend(answers(engine, prompts)))
        thread.start()
        if not beside:
            thread.join()
        update(policy, make_optimizer(policy, config), groups, config, 0)
        thread.join()
        return found, {n: p.detach().clone() for n, p in policy.trainable()}
    (apart, one), (beside, other) = learned(False), learned(True)
    assert apart == beside and len(apart) == 16
    assert all(torch.equal(p, other[n]) for n, p in one.items())


def test_a_generation_is_given_up_and_only_a_run_that_overlaps_has_a_copy(tiny_models, tmp_path):
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    engine = CopiedEngine(policy, 3)
    engine.abandon()
    with pytest.raises(Abandoned, match="the run is ending"):
        answers(engine, [encode(Vowels(), SAMPLES["text"])])
    policy, _ = load(settings(tiny_models["qwen3_vl"]))
    config = settings(tiny_models["qwen3_vl"])
    assert type(make_engine(config, policy, tmp_path)) is HFEngine
    assert type(make_engine(config, policy, tmp_path, apart=True)) is CopiedEngine
