"""Generation by the real vLLM beside the update: which weights sampled, what a kill leaves, and that it can be ended."""

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.e2e.runs import ROOT, kill_after, metrics, weights
from tests.helpers import Vowels, load, settings
from tests.vllm.conftest import ENGINE, trainer_logprobs
from vlrl import config as configs
from vlrl.engine.copied import Abandoned
from vlrl.loop import train
from vlrl.store import RunFolder
from vlrl.tools.measure import choose, measure
from vlrl.types import Request, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

PATIENT = 900
"""Seconds after which something that should happen does not."""
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = ("engine=vllm", "engine.max_model_len=512", "extends=algorithms/decoupled_ppo.yaml", "steps=5",
         "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "eval.samples=4",
         "eval.every=2", "save.every=1", "save.keep=9", "log.samples_every=0", "train.lr=3e-3")
LORA = ("model.lora.rank=4", "model.lora.dropout=0.2", "model.lora.target=all_linear")
CASES = {"full": ("async.max_staleness=1",), "lora": ("async.max_staleness=2", *LORA)}


@pytest.fixture(scope="module", params=CASES)
def runs(request, tmp_path_factory):
    """The folders of an unbroken run and of one that was killed and went on, and their settings."""
    root, words = tmp_path_factory.mktemp(request.param), (*SMALL, *CASES[request.param])
    assert kill_after(QUICKSTART, root / "broken", 3, *words, timeout=PATIENT) == -signal.SIGKILL
    for name in ("whole", "broken"):
        train(configs.load(str(QUICKSTART), [*words, f"run.dir={root / name}"]))
    return root / "whole", root / "broken", words


def ages(words):
    """Steps between weights and learning, in each step."""
    return [0, 1, 1, 1, 1] if "async.max_staleness=1" in words else [0, 1, 2, 1, 2]


def test_a_killed_run_goes_on_as_the_unbroken_one(runs):
    whole, broken, words = runs
    assert weights(whole, 5) == weights(broken, 5)
    assert metrics(whole) == metrics(broken) and len(metrics(whole)) == 5
    assert metrics(whole, "eval.jsonl") == metrics(broken, "eval.jsonl")
    assert RunFolder(whole).rollouts().equals(RunFolder(broken).rollouts())
    for line, age in zip(metrics(whole), ages(words), strict=True):
        assert line["async/staleness_mean"] == line["async/staleness_max"] == age
        assert (line["mismatch/kl"] > 1e-6) == (age > 0) and line["score_errors"] == 0
        assert (line["correction/weight"] != pytest.approx(1, abs=1e-6)) == (age > 0)


def test_answers_are_of_the_weights_that_policy_step_says(runs):
    """Their log-probabilities are those of the checkpoint of that step, and not those of the one that learned."""
    whole, _, words = runs
    rows = [r for r in RunFolder(whole).rollouts().to_pylist() if r["policy_step"]]
    assert {(r["step"], r["step"] - r["policy_step"]) for r in rows} == {
        (step, age) for step, age in enumerate(ages(words)) if step > age}
    for step in sorted({r["policy_step"] for r in rows}):
        own = [r for r in rows if r["policy_step"] == step]
        gaps = [np.abs(np.subtract(r["logprobs"], logprobs)).max()
                for r, logprobs in zip(own, read(whole, words, step, own), strict=True)]
        moved = [np.abs(np.subtract(r["logprobs"], r["trainer_logprobs"])).max() for r in own]
        assert max(gaps) < 1e-4 < 100 * max(gaps) < max(moved)


def read(folder, words, step, rows):
    """Log-probabilities of stored answers under a checkpoint."""
    from accelerate import Accelerator

    from vlrl import assemble, policy
    from vlrl.encode import Encoder
    from vlrl.offline import make_task, settle_coordinates
    from vlrl.task import task_samples

    config = configs.load(str(QUICKSTART), [*words, "engine=hf", "async.max_staleness=0"])
    assemble.seed_everything(config.seed)
    task, accelerator = make_task(config), Accelerator(cpu=True)
    model = policy.load(config, accelerator, folder / "checkpoints" / f"step-{step:06d}")
    settle_coordinates(task, config, model.family.coordinates)
    samples = {s.id: s for s in task_samples(task, "train")}
    encode = Encoder(model.processor, model.family, model.positions, config)
    ...
