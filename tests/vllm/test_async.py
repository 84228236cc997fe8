"""Generation by the real vLLM beside the update: which weights sampled, what a kill leaves, how it is given up."""

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
from vlrl import config as configs
from vlrl.engine.base import Request, Sampling
from vlrl.engine.copied_engine import Abandoned
from vlrl.models import policy as policies
from vlrl.store import RunFolder
from vlrl.training.loop import train
from vlrl.training.session import Session

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

PATIENT = 900
"""Seconds after which something that should happen does not."""
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = ("engine=vllm", "engine.max_model_len=2048", "extends=algorithms/decoupled_ppo.yaml",
         "rollout.minibatches=1", "steps=5",
         "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=4", "eval.every=2", "save.every=1",
         "save.keep=9", "log.samples_every=0", "train.lr=5e-4")
LORA = ("model.lora.rank=4", "model.lora.dropout=0.2", "model.lora.target=all_linear", "train.lr=5e-3")
CASES = {"full": ("async.max_staleness=1", "steps=3"), "lora": ("async.max_staleness=2", *LORA)}
AGES = {"full": [0, 1, 1], "lora": [0, 1, 2, 1, 2]}
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
    root, words = tmp_path_factory.mktemp(request.param), (*SMALL, *CASES[request.param])
    if request.param == "lora":
        assert kill_after(QUICKSTART, root / "broken", 3, *words, timeout=PATIENT) == -signal.SIGKILL
    made = [train(configs.load(str(QUICKSTART), [*words, f"run.dir={root / name}"]), make_session=Keeping)
            for name in (["whole", "broken"] if request.param == "lora" else ["whole"])]
    return made[0], made[-1], AGES[request.param], words


def test_a_killed_run_goes_on_as_the_unbroken_one(runs):
    whole, broken, ages = runs[0].folder.path, runs[1].folder.path, runs[2]
    steps = len(ages)
    assert (0 < runs[1].start < 5 and weights(whole, 5) == weights(broken, 5)) or runs[0] is runs[1]
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
    config, by_step = configs.load(str(QUICKSTART), [*words]), {}
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
