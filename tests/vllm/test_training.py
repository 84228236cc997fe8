"""Whole runs with vLLM (its CPU build) in the training process: they learn from the policy that sampled, also where it
generates beside the update; then what a kill leaves, and how generation is given up."""

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.e2e.runs import ROOT, kill_after, metrics, weights
from tests.vllm.conftest import trainer_logprobs
from tests.vllm.serve import PATIENT
from vlrl import config as configs
from vlrl.engine.base import Request, Sampling
from vlrl.engine.copied_engine import Abandoned
from vlrl.models import policy as policies
from vlrl.store import RunFolder
from vlrl.tools.evaluation.measure import choose_model, measure
from vlrl.training.loop import train
from vlrl.training.session import Session

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SMALL = ("engine=vllm", "steps=4", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=8",
         "eval.every=2", "save.every=2", "log.samples_every=0")
LORA = ("model.lora.rank=4", "model.lora.target=all_linear")
MODES = {"full": (), "lora": (*LORA, "train.lr=1e-3")}


def start(folder, *words, **more):
    return train(configs.load(QUICKSTART, [*SMALL, *words, f"run.dir={folder}"]), **more)


@pytest.fixture(scope="module", params=MODES)
def run(request, tmp_path_factory):
    words = MODES[request.param]
    return start(tmp_path_factory.mktemp(request.param) / "whole", *words).folder.path, words


def test_the_engine_samples_from_the_policy_that_learns(run):
    whole, _ = run
    lines = metrics(whole)
    assert len(lines) == 4 and len({line["reward/mean"] for line in lines}) > 1
    for line in lines:
        assert line["grad_norm"] > 0 and line["score_errors"] == 0
        assert 0 <= line["mismatch/kl"] < 1e-6 and line["mismatch/gap_max"] < 1e-3
    for row in RunFolder(whole).rollouts().to_pylist():
        assert np.allclose(row["logprobs"], row["trainer_logprobs"], atol=1e-4) and row["policy_step"] == row["step"]
        assert row["finish_reason"] in ("stop", "length") and len(row["token_ids"]) <= 24
    assert not (whole / "engine").exists()


def test_evaluations_are_of_the_weights_of_their_step(run):
    """Another engine (with an adapter: the same one) gives a checkpoint the greedy answers that the run wrote down."""
    whole, words = run
    evals = metrics(whole, "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 2, 4] and all(e["n"] == 8 for e in evals)
    settings = configs.load(QUICKSTART, [*SMALL, *words, f"engine={'vllm' if words else 'hf'}", f"run.dir={whole}"])
    ((record, _),) = measure(settings, choose_model(settings, folder=whole / "checkpoints" / "step-000004"))
    assert record["iou"] == pytest.approx(evals[-1]["iou"], abs=1e-6)
    assert json.loads((whole / "heartbeat.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("words", [("rollout.forget.lr=1e-2", "algo.correction=none"), ("rollout.step_tokens=8",),
                                   ("model.dtype=float16", "algo.correction=token_truncate")], ids=str)
def test_answers_of_changed_weights_in_pieces_and_in_half_precision(tmp_path, words):
    """Sample-then-forget syncs within a step; partial answers go on under new weights; with float16 engine and trainer
    compute each in its own way, and a correction weighs what is left."""
    lines = metrics(start(tmp_path / "run", *words, "steps=2", "eval.samples=0", "save.every=0").folder.path)
    kls = [line["mismatch/kl"] for line in lines]
    assert len(lines) == 2
    if "rollout.step_tokens=8" in words:
        assert sum(line["partial/held"] for line in lines) > 0 and max(kls) < 1e-6
    elif "model.dtype=float16" in words:
        assert all(0 < kl < 1e-3 for kl in kls) and all(line["mismatch/gap_max"] < 0.5 for line in lines)
        for line in lines:
            assert line["correction/weight"] == pytest.approx(1, abs=0.05) and line["correction/outside"] < 0.05
    else:  # the second half of a group was sampled by other weights than those that learn from it
        assert all(1e-6 < kl < np.inf for kl in kls)


ASYNC = ("engine.max_model_len=2048", "extends=algorithms/decoupled_ppo.yaml", "rollout.minibatches=1",
         "eval.samples=4", "save.every=1", "save.keep=9", "train.lr=5e-4")
CASES = {"full": ("async.max_staleness=1", "steps=3"),
         "lora": ("async.max_staleness=2", *LORA, "model.lora.dropout=0.2", "train.lr=5e-3", "steps=4")}
AGES = {"full": [0, 1, 1], "lora": [0, 1, 2, 1]}
"""Steps between the weights that sampled and those that learn, in each step."""


class Keeping(Session):
    """Also keeps the groups that were learned from, and what generated them."""

    def resume(self, parts):
        self.groups, self.last = [], {}
        return super().resume(parts)

    def write(self, step, groups, per_token):
        self.groups += groups
        super().write(step, groups, per_token)

    def finish(self):
        super().finish()
        self.last = given_up(self.parts.engine, self.groups[0].prompt)


def given_up(engine, prompt):
    """What a thread's generation leaves behind: random states that it moved, its error when it is given up, and
    whether vLLM still works on it."""
    def ask(tokens, key):
        return engine.generate([Request(prompt=prompt, n=8, sampling=Sampling(max_new_tokens=tokens), key=(key,))])

    def states():
        return [torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]]

    vllm, before = engine.llm.llm_engine, states()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ask, 8, 0).result(PATIENT)
        moved = states() != before
        work = thread.submit(ask, 1800, 1)
        while not vllm.has_unfinished_requests():
            assert not work.done()
        engine.abandon()
        return {"moved": moved, "error": work.exception(PATIENT), "left": vllm.has_unfinished_requests()}


@pytest.fixture(scope="module", params=CASES)
def runs(request, tmp_path_factory):
    """The sessions of an unbroken run and, with an adapter, of one that was killed and went on; ages and settings."""
    root, words = tmp_path_factory.mktemp(request.param), (*ASYNC, *CASES[request.param])
    whole = broken = start(root / "whole", *words, make_session=Keeping)
    if request.param == "lora":
        assert kill_after(QUICKSTART, root / "broken", 2, *SMALL, *words, timeout=PATIENT) == -signal.SIGKILL
        broken = start(root / "broken", *words, make_session=Keeping)
    return whole, broken, AGES[request.param], words


def test_a_killed_run_goes_on_as_the_unbroken_one(runs):
    whole, broken, ages = runs[0].folder.path, runs[1].folder.path, runs[2]
    steps = len(ages)
    assert (0 < runs[1].start < steps and weights(whole, steps) == weights(broken, steps)) or runs[0] is runs[1]
    assert len({weights(whole, step + 1) for step in range(steps)}) == steps
    assert metrics(whole) == metrics(broken) and len(metrics(whole)) == steps
    assert metrics(whole, "eval.jsonl") == metrics(broken, "eval.jsonl")
    assert RunFolder(whole).rollouts().equals(RunFolder(broken).rollouts())
    for line, age in zip(metrics(whole), ages, strict=True):
        assert line["async/staleness_mean"] == line["async/staleness_max"] == age and line["score_errors"] == 0
        assert (line["mismatch/kl"] > 1e-6) == (age > 0) == (abs(line["correction/weight"] - 1) > 2e-6)


def test_answers_are_of_the_weights_that_policy_step_says(runs):
    """Their log-probabilities are those of the checkpoint of that step, and not of the one that learns from them; the
    pictures came along (verl#5160 lost them beside the update)."""
    whole, _, ages, words = runs
    config, by_step = configs.load(QUICKSTART, [*SMALL, *words]), {}
    for group in whole.groups:
        by_step.setdefault(group.rollouts[0].policy_step, []).append(group)
    assert sorted(by_step) == sorted({step - age for step, age in enumerate(ages)})
    for step in sorted(by_step.keys() - {0}):
        saved = policies.load(config, Accelerator(cpu=True), whole.folder.checkpoints / f"step-{step:06d}")
        later = policies.load(config, Accelerator(cpu=True), whole.folder.checkpoints / f"step-{step + 1:06d}")
        pairs = [(group.prompt, r.completion) for group in by_step[step] for r in group.rollouts]
        sampled = np.concatenate([c.logprobs for _, c in pairs])
        with saved.evaluating(), later.evaluating():  # without dropout, as answers are sampled
            gap, moved = (np.abs(trainer_logprobs(p, pairs) - sampled).max() for p in (saved, later))
        assert gap < 1e-4 < moved / 10, step


def test_generation_takes_place_beside_the_update_and_the_end_does_not_wait(runs):
    lines = [json.loads(line) for line in (runs[0].folder.path / "timeline.jsonl").read_text().splitlines()]
    ahead = {r["step"]: r for r in lines if r["phase"] == "ahead"}
    train = {r["step"]: r for r in lines if r["phase"] == "train"}  # the last span of a step: the update
    assert [*ahead] == [*train][1:] and [*train] == [*range(len(runs[2]))]
    for step, r in ahead.items():
        assert r["start"] < train[step - 1]["end"] and r["end"] < train[step]["start"]
    for session in runs[:2]:
        assert isinstance(session.last["error"], Abandoned) and not session.last["left"]
        assert not session.last["moved"]  # else the dropout of an update would depend on how fast both are
