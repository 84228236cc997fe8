"""What fits side by side, batches that turn out too large, finished requests, answers at two batch shapes, and the
cache of rows that are being written."""

import functools
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests import others
from tests.conftest import SAMPLES, kinds_of
from tests.helpers import Vowels, load, settings
from vlrl.curriculum import Prompts, Sequential
from vlrl.engine import capacity
from vlrl.engine.base import Request, Sampling
from vlrl.engine.cache import ROOM, RoomyLayer, cache_argument
from vlrl.engine.capacity import GIB, Capacity, batches, chunks, split_jobs
from vlrl.engine.hf import HFEngine
from vlrl.errors import TaskError, TrainingError
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.overlap import OverlappedWork
from vlrl.tools.machine.plan import architecture

SAMPLING = Sampling(max_new_tokens=5)


@pytest.fixture(scope="module")
def parts(tiny_models):
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    requests = [Request(prompt=encode(Vowels(), SAMPLES[kind]), n=n, sampling=SAMPLING, key=(0, i))
                for i, (kind, n) in enumerate((("text", 3), ("image", 4), ("text", 1)))]
    return policy, encode, requests


def tokens_of(answers):
    return [[c.tokens.tolist() for c in group] for group in answers]


def test_what_fits():
    """Two prompts of 10 tokens and four answers of 20, at 2 bytes a token and 5 for the logits of an answer."""
    text = architecture("Qwen/Qwen2.5-VL-3B-Instruct").get_text_config()
    assert capacity.token_bytes(text, 2, adapter=True) == 36 * 2 * 128 * (2 + 2) == 36_864
    assert capacity.token_bytes(text, 2, adapter=False) == 36 * 2 * 128 * (4 + 2)  # keys stay float32
    assert capacity.logit_bytes(text, 2) == 151936 * 14
    shared, copied = (2 * (prompts * 10 + 4 * (20 + ROOM)) + 4 * 5 for prompts in (2, 2 + 4))
    for total, shares in ((shared, True), (copied, False)):
        enough = Capacity(rows=4, total=total, token=2, logits=5, shared=shares)
        assert enough.fits(2, 10, 4, 20)
        assert not any(enough.fits(*size) for size in ((3, 10, 4, 20), (2, 11, 4, 20), (2, 10, 4, 21), (2, 10, 5, 20)))
    assert Capacity(rows=4).fits(10**6, 10**6, 4, 10**6) and not Capacity(rows=4).fits(1, 1, 5, 1)


def test_the_automatic_capacity_follows_the_whole_memory(parts, monkeypatch):
    policy, _, requests = parts
    wide = capacity.automatic(policy)
    assert wide == capacity.automatic(policy) and wide.rows == 256 and wide.fits(32, 400, 256, 512)
    weights = sum(4 * p.numel() for p in policy.model.parameters())
    trained = sum(4 * p.numel() for _, p in policy.trainable())
    one = 2 * len(requests[1].prompt) * wide.token
    monkeypatch.setattr(capacity, "device_bytes", lambda device: weights + 4 * trained + 2 * one)
    small = HFEngine(policy, 0, "auto")
    assert small.capacity.total == one  # half of what is left on a CPU
    assert next(batches(requests, small.capacity.fits)) == [(0, [0])]
    assert tokens_of(small.generate(requests)) == tokens_of(HFEngine(policy, 0, 64).generate(requests))
    monkeypatch.setattr(capacity, "device_bytes", lambda device: weights)
    assert capacity.automatic(policy).total == 0  # a row at a time


def test_memory_is_that_of_the_container_and_shared_by_its_processes(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{6 * GIB + 5}\n")
    assert capacity._container_bytes(limit) == 6 * GIB + 5
    limit.write_text("max\n")
    assert capacity._container_bytes(limit) == capacity._container_bytes(tmp_path / "none") == float("inf")
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(total=9 * GIB + 7))
    for held, processes, gib in ((float("inf"), 1, 9), (6 * GIB + 5, 1, 6), (6 * GIB + 5, 4, 1)):
        monkeypatch.setattr(capacity, "_container_bytes", lambda held=held: held)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert capacity.device_bytes(torch.device("cpu")) == gib * GIB


def asked(widths, counts, longest) -> list[Any]:
    return [SimpleNamespace(prompt=range(w), n=n, sampling=Sampling(max_new_tokens=t), begun=())
            for w, n, t in zip(widths, counts, longest, strict=False)]


numbers = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@examples(max_examples=40)
@given(widths=numbers, counts=numbers, longest=numbers, total=st.integers(1, 2000), rows=st.integers(1, 9),
       first=st.integers(0, 60))
def test_every_answer_is_in_one_batch_that_fits(widths, counts, longest, total, rows, first):
    requests, held = asked(widths, counts, longest), Capacity(rows=rows, total=total, token=1)

    def size(jobs):
        of = [requests[i] for i, _ in jobs]
        return (len(jobs), max(len(r.prompt) for r in of), sum(len(k) for _, k in jobs),
                max(r.sampling.max_new_tokens for r in of))

    made = list(batches(requests, held.fits))
    flat = [(i, k) for jobs in made for i, rollouts in jobs for k in rollouts]
    assert flat == [(i, k) for i, r in enumerate(requests) for k in range(r.n)]
    assert all(held.fits(*size(jobs)) or size(jobs)[2] == 1 for jobs in made)
    head, tail = split_jobs([(i, list(range(r.n))) for i, r in enumerate(requests)], first)
    assert [(i, k) for i, rollouts in [*head, *tail] for k in rollouts] == flat
    assert sum(len(rollouts) for _, rollouts in head) == min(first, len(flat)) and all(k for _, k in [*head, *tail])


@examples(max_examples=40)
@given(widths=numbers, most=st.integers(1, 40))
def test_prompts_are_computed_within_the_budget(widths, most):
    prompts: list[Any] = [range(w) for w in widths]
    made = list(chunks(prompts, most))
    assert [p for chunk in made for p in chunk] == prompts
    assert all(len(chunk) == 1 or len(chunk) * max(map(len, chunk)) <= most for chunk in made)
    assert all(max(map(len, [*a, b[0]])) * (len(a) + 1) > most for a, b in itertools.pairwise(made))


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_caches_of_other_kinds_are_put_side_by_side(name, tmp_path):
    """Sliding windows (of 20 tokens) and states of linear attention."""
    policy, encode = load(settings(others.build(name, tmp_path / name)))
    prompts = [encode(Vowels(), SAMPLES[kind]) for kind in kinds_of(policy.family, ("text", "image", "two images"))]
    requests = [Request(prompt=p, n=2, sampling=Sampling(max_new_tokens=8, temperature=0)) for p in prompts]
    whole, single = (HFEngine(policy, 0, 64, most).generate(requests) for most in (10**6, 1))
    assert tokens_of(whole) == tokens_of(single)
    drift = [np.abs(a.logprobs - b.logprobs).max() for x, y in zip(whole, single, strict=True)
             for a, b in zip(x, y, strict=True)]
    assert max(drift) < 2e-5


def fails_above(engine, rows, monkeypatch):
    """Makes the engine run out of memory with more rows than these; returns the numbers of rows it tried."""
    tried, step = [], engine._next

    def limited(token, position, held):
        tried.append(len(token))
        if len(token) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(token, position, held)

    monkeypatch.setattr(engine, "_next", limited)
    return tried


def test_a_batch_too_large_for_the_memory_is_halved(parts, monkeypatch, caplog):
    policy, _, requests = parts
    engine = HFEngine(policy, 0, 64)
    tried = fails_above(engine, 2, monkeypatch)
    assert tokens_of(engine.generate(requests)) == tokens_of(HFEngine(policy, 0, 2).generate(requests))
    assert tried[:3] == [8, 4, 2] and engine.capacity.rows == 2
    assert "8 completions in a batch: later batches have at most 4" in caplog.text
    tried.clear()
    engine.generate(requests)
    assert max(tried) == 2  # remembered
    engine = HFEngine(policy, 0, 4)
    fails_above(engine, 0, monkeypatch)
    with pytest.raises(TrainingError, match=r"a single completion .*CUDA out of memory.*model\.max_pixels"):
        engine.generate(requests)


def test_requests_are_told_as_soon_as_they_are_whole(parts):
    """Of 3, 4 and 1 answers; those of the last batch are not told."""
    policy, _, requests = parts
    for rows, told in ((64, []), (7, [0, 1]), (4, [0]), (2, [0]), (1, [0, 1])):
        engine, seen = HFEngine(policy, 0, rows), []
        out = engine.generate(requests, lambda *one, seen=seen: seen.append(one))
        assert [i for i, _ in seen] == told, (rows, told)
        assert all(completions is out[i] and len(completions) == requests[i].n for i, completions in seen), (rows, told)


def test_watching_changes_no_answer(parts):
    """Not a bit of it, and what is watched are the answers up to some token; a watcher may end the generation."""
    policy, _, requests = parts
    for rows in (64, 3):
        plain, seen = HFEngine(policy, 0, rows).generate(requests), []
        watched = HFEngine(policy, 0, rows).generate(requests, watch=lambda so_far, seen=seen: seen.append(so_far()))
        assert tokens_of(watched) == tokens_of(plain), rows
        for a, b in zip(itertools.chain(*watched), itertools.chain(*plain), strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes() and a.text == b.text, rows
        last = {name: text for texts in seen for name, text in texts.items()}
        whole = {(i, k): c.text for i, group in enumerate(plain) for k, c in enumerate(group)}
        assert {name: text.rstrip("\ufffd") for name, text in whole.items()} == last, rows
        assert all(whole[name].startswith(text) for texts in seen for name, text in texts.items()), rows
        assert len(seen) == sum(max(len(plain[i][k].tokens) for i, of in jobs for k in of)
                                for jobs in batches(requests, Capacity(rows=rows).fits))
    engine = HFEngine(policy, 0, 64)

    def stop(so_far):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(requests, watch=stop)
    assert policy.model.training and tokens_of(engine.generate(requests)) == tokens_of(
        HFEngine(policy, 0, 64).generate(requests))


class Where(Vowels):
    """Notes the threads it is scored in."""

    name = "where"

    def __init__(self, **settings):
        super().__init__(**settings)
        self.threads = []

    def samples(self, split):
        return [SAMPLES[kind] for kind in ("text", "image", "text", "two images")]

    def score(self, sample, answer):
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().score(sample, answer)


def next_groups(parts, rows, ahead=True, task=None):
    policy, encode, _ = parts
    config = settings("x", rollout={"group_size": 3, "prompts_per_step": 4, "max_new_tokens": 8, "score_ahead": ahead})
    task = task or Where()
    samples = task.samples("train")
    generator = RolloutGenerator(config, task, HFEngine(policy, 0, rows), Clock())
    source = GroupSource(generator, encode, Sequential(Prompts(4, 0)), samples)
    with source.clock("rollout"):
        groups = source.next_groups(4, 0)
    return groups, task, source.clock


def test_scoring_beside_generation_changes_nothing(parts):
    plain, task, _ = next_groups(parts, 6, ahead=False)
    assert all(task.threads) and len(task.threads) == 12
    streamed, task, clock = next_groups(parts, 6)  # two groups side by side
    assert not any(task.threads) and len(task.threads) == 12
    assert [g.rewards for g in streamed] == [g.rewards for g in plain]
    assert [g.id for g in streamed] == [g.id for g in plain] == [f"{i:08d}" for i in range(4)]
    assert tokens_of([[r.completion for r in g.rollouts] for g in streamed]) == \
        tokens_of([[r.completion for r in g.rollouts] for g in plain])
    times = clock.take()
    assert times["time/score_s"] > 0 and times["time/rollout_s"] > 0
    assert times["time/score_s"] + times["time/rollout_s"] <= times["time/total_s"]
    _, task, _ = next_groups(parts, 64)  # a single batch
    assert all(task.threads)


class Broken(Where):
    def score(self, sample, answer):
        raise TaskError(f"task 'where' is broken at {sample.id}")


def test_the_first_error_of_scoring_is_raised_and_ends_the_work(parts):
    with pytest.raises(TaskError, match="broken at text"):
        next_groups(parts, 6, task=Broken())
    ran = []

    def work(i, value):
        ran.append(i)
        if i == 0:
            raise TaskError("broken")
        until = time.monotonic() + 5
        while not ahead._begun[3].cancelled() and time.monotonic() < until:
            time.sleep(0.001)

    with pytest.raises(TaskError, match="broken"), OverlappedWork(work, Clock(), "score") as ahead:
        for i in range(4):
            ahead.begin(i, None)
        ahead.results([None] * 4)
    assert ran in ([0], [0, 1])


def test_work_ahead_counts_as_its_own_phase():
    """And not as the one that it ran beside: the first value is done before the results are asked for."""
    clock, start = Clock(), time.perf_counter()

    def work(i, value):
        time.sleep(0.005)
        return i * value

    with clock("rollout"), OverlappedWork(work, clock, "score") as ahead:
        ahead.begin(0, 7)
        ahead._begun[0].result()
        assert ahead.results([7, 8, 9]) == [0, 8, 18]
    passed = time.perf_counter() - start
    assert clock.seconds["score"] >= ahead._spent >= 0.015
    assert clock.seconds["rollout"] >= 0 and sum(clock.seconds.values()) <= passed


def test_a_layer_keeps_its_tokens_when_it_grows_and_when_rows_leave():
    layer, number = RoomyLayer(), 3 * ROOM
    tokens = torch.arange(2.0 * number).view(2, 1, number, 1)  # two rows
    layer.update(tokens[:, :, :5], -tokens[:, :, :5])
    for t in range(5, number):
        if t == 2 * ROOM:
            layer.batch_select_indices(torch.tensor([1]))
            tokens = tokens[1:]
        keys, values = layer.update(tokens[:, :, t:t + 1], -tokens[:, :, t:t + 1])
        assert torch.equal(keys, tokens[:, :, :t + 1]) and torch.equal(values, -keys)
    assert layer.get_seq_length() == number


class Renamed:
    @functools.wraps(lambda self, input_ids, cache=None, **kwargs: None)
    def forward(self, *args, **kwargs):
        """As transformers wraps it, for callers who give the former name."""


class Former:
    def forward(self, input_ids, past_key_values=None, **kwargs):
        ...


def test_the_cache_goes_under_the_name_that_the_model_has():
    for model, name in ((Renamed, "cache"), (Former, "past_key_values")):
        assert cache_argument(model) == name, (model, name)
