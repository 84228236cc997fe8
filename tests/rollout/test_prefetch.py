"""Prompts made ahead: the same prompts, errors where they belong, and no thread left behind."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SAMPLES
from tests.engine.scripted import ScriptedEngine
from tests.helpers import Vowels, load, settings
from tests.rollout.test_group_source import Number
from tests.tables import each
from vlrl.config import validate
from vlrl.curriculum import ForeseeingSampler, Prompts, Sequential, Uniform
from vlrl.errors import DataError, TaskError
from vlrl.evaluation import evaluate as evaluation
from vlrl.models.processing import PromptTooLong
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import task_messages
from vlrl.types import Prompt


class Encode:
    """Encodes numbers, says in which kind of thread, and fails at some."""

    def __init__(self):
        self.made: list[tuple[int, bool]] = []
        """(number, in the main thread)"""
        self.bad: dict[int, Exception] = {}

    def copy(self):
        return self

    def __call__(self, task, sample):
        return self.prompt(sample, task_messages(task, sample))

    def prompt(self, sample, messages, tools=()):
        n = sample["n"]
        self.made.append((n, threading.current_thread() is threading.main_thread()))
        if n in self.bad:
            raise self.bad[n]
        return Prompt(sample_id=sample.id, text=str(n), ids=np.arange(n + 3), raw_ids=np.arange(n + 3),
                      positions=np.arange(n + 3)[None])


def source(workers=2, sampler=Sequential, task=Number, steps=100, **more):
    config = validate({"task": "x", "model": {"name": "x"}, "steps": steps,
                       "rollout": {"group_size": 2, "prompts_per_step": 3}, **more})
    task, encode = task(), Encode()
    task.name, samples = "number", task.samples("train")
    prefetch = Prefetcher(encode, task, workers)
    generator = RolloutGenerator(config, task, ScriptedEngine(lambda prompt, i: prompt.text if i else "no"), Clock())
    return GroupSource(generator, encode, sampler(Prompts(len(samples), 0)), samples, prefetch), encode, prefetch


def numbers(groups):
    return [g.sample["n"] for g in groups]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_the_next_step_is_encoded_ahead_and_the_last_looks_no_further():
    s, encode, prefetch = source()
    with prefetch:
        assert numbers(s.next_groups(3, 0)) == [0, 1, 2]
        assert numbers(s.next_groups(3, 1)) == [3, 4, 5]
        assert [k.index for k in prefetch._begun] == [6, 7, 8]  # one step, no more
    assert {n for n, _ in encode.made} >= {0, 1, 2, 3, 4, 5} and not any(main for _, main in encode.made)
    assert len(encode.made) == len({n for n, _ in encode.made})  # each once
    s, encode, prefetch = source(steps=2)
    with prefetch:
        s.next_groups(3, 0)
        s.next_groups(3, 1)
        assert not prefetch._begun and len(encode.made) == 6


@each("keep", ["all", "mixed"])
def test_groups_are_those_without_workers(keep):
    found = []
    for workers in (0, 2):
        s, _, prefetch = source(workers, sampler=Uniform, curriculum={"keep": keep})
        with prefetch:
            found.append([(g.id, g.sample["n"], g.rewards) for step in range(6) for g in s.next_groups(3, step)])
            state = s.state_dict()
            again, _, other = source(workers, sampler=Uniform, curriculum={"keep": keep})
            again.load_state_dict(state)
            with other:
                assert numbers(again.next_groups(3, 6)) == numbers(s.next_groups(3, 6))
    assert found[0] == found[1]


@each("workers", [0, 2])
def test_errors_are_raised_where_the_sample_is_used(workers):
    s, encode, prefetch = source(workers)
    encode.bad[4] = DataError("4.png cannot be read")
    with prefetch:
        assert numbers(s.next_groups(3, 0)) == [0, 1, 2] and s.rejected.count == 0
        with pytest.raises(DataError, match=r"4\.png cannot be read"):
            s.next_groups(3, 1)
    s, encode, prefetch = source(workers)
    encode.bad[4] = PromptTooLong("4 is too long")
    with prefetch:
        s.next_groups(3, 0)
        assert numbers(s.next_groups(3, 1)) == [3, 5, 6] and s.rejected.take() == ["4 is too long"]


class Broken(Number):
    def messages(self, sample):
        if sample["n"] == 4:
            raise KeyError("four")
        return super().messages(sample)


def test_errors_of_the_task_are_raised_where_the_sample_is_used():
    s, _, prefetch = source(task=Broken)
    with prefetch:
        assert numbers(s.next_groups(3, 0)) == [0, 1, 2]
        with pytest.raises(TaskError, match="four"):
            s.next_groups(3, 1)


class Blind(Sequential):
    """Tells nothing ahead."""

    upcoming = None

    def next(self, count, step):
        draws = Sequential.upcoming(self, count, step)
        self.drawn += count
        return draws


class Turning(Sequential):
    """Jumps by what it observes, which it could not foresee."""

    def observe(self, outcomes, step):
        self.drawn += 2


def test_what_was_not_foreseen_is_encoded_when_it_is_needed():
    s, encode, prefetch = source(sampler=Turning)
    with prefetch:
        assert numbers(s.next_groups(3, 0)) == [0, 1, 2]
        assert numbers(s.next_groups(3, 1)) == [5, 6, 7]
        assert [k.index for k in prefetch._begun] == [8, 9, 0]
    s, encode, prefetch = source(sampler=Blind)
    with prefetch:
        assert numbers(s.next_groups(3, 0)) == [0, 1, 2] and len(encode.made) == 3 and not prefetch._begun


@given(st.lists(st.integers(0, 9), max_size=6), st.sampled_from([Sequential, Uniform]), st.integers(1, 7))
def test_upcoming_is_what_next_gives(counts, kind, size):
    sampler = kind(Prompts(size, 3))
    assert isinstance(sampler, ForeseeingSampler)
    for count in counts:
        state, expected = sampler.state_dict(), sampler.upcoming(count, 0)
        sampler.upcoming(2 * count, 0)
        assert sampler.state_dict() == state and sampler.next(count, 0) == expected


def test_prompts_of_threads_are_the_same(tiny_models):
    _, encode = load(settings(tiny_models["qwen3_vl"], model={"name": str(tiny_models["qwen3_vl"])}))
    task, own = Vowels(), torch.get_num_threads()
    wanted = {(kind, i): (lambda kind=kind: SAMPLES[kind]) for i in range(4) for kind in SAMPLES}
    assert encode.copy().processor.tokenizer is not encode.processor.tokenizer  # two threads cannot use one at once
    with Prefetcher(encode, task, 3) as prefetch:
        prefetch.begin(wanted)
        assert len(prefetch._begun) == len(wanted)
        expected = {kind: encode(task, SAMPLES[kind]) for kind in SAMPLES}  # beside the threads
        for (kind, i), sample_of in wanted.items():
            sample, prompt = prefetch.take((kind, i), sample_of)
            other = expected[kind]
            assert sample is SAMPLES[kind] and prompt.text == other.text
            assert (prompt.ids == other.ids).all() and (prompt.positions == other.positions).all()
            assert prompt.mm.keys() == other.mm.keys()
            assert all(torch.equal(v, other.mm[k]) for k, v in prompt.mm.items())
    assert torch.get_num_threads() == own


def test_an_evaluation_is_the_same_with_workers(monkeypatch):
    monkeypatch.setattr(evaluation, "_CHUNK", 4)
    found = []
    for workers in (0, 2):
        s, encode, prefetch = source(workers, eval={"samples": 10}, data={"quarantine": True})
        encode.bad[7] = DataError("7")
        with prefetch:
            record, groups = evaluation.evaluate(s.task, prefetch, s.engine, s.config, "heldout", 0)
        found.append((record, [(g.id, g.rewards) for g in groups]))
        assert record["n"] == 9 and record["rejected"] == 1
    assert found[0] == found[1]
