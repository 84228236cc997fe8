"""Whole runs with vLLM (its CPU build) in the training process: they learn from the very policy that sampled."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from tests.e2e.runs import metrics, weights
from vlrl import config as configs
from vlrl.store import RunFolder
from vlrl.tools.evaluation.measure import choose_model, measure
from vlrl.training.loop import train

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

SMALL = ("engine=vllm", "steps=4", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=8",
         "eval.every=2", "save.every=2", "log.samples_every=0")
LORA = ("model.lora.rank=4", "model.lora.target=all_linear", "train.lr=1e-3")


def start(folder, *words):
    return train(configs.load("configs/quickstart.yaml", [*SMALL, *words, f"run.dir={folder}"])).folder.path


@pytest.fixture(scope="module", params=["full", "lora"])
def runs(request, tmp_path_factory):
    words, root = LORA if request.param == "lora" else (), tmp_path_factory.mktemp(request.param)
    return start(root / "whole", *words), words


def test_the_engine_samples_from_the_policy_that_learns(runs):
    whole, _ = runs
    lines = metrics(whole)
    assert len(lines) == 4 and len({line["reward/mean"] for line in lines}) > 1
    for line in lines:
        assert line["grad_norm"] > 0 and line["score_errors"] == 0
        assert 0 <= line["mismatch/kl"] < 1e-6 and line["mismatch/gap_max"] < 1e-3
    for row in RunFolder(whole).rollouts().to_pylist():
        assert np.allclose(row["logprobs"], row["trainer_logprobs"], atol=1e-4) and row["policy_step"] == row["step"]
        assert row["finish_reason"] in ("stop", "length") and len(row["token_ids"]) <= 24
    assert not (whole / "engine").exists()


def test_a_resumed_run_equals_the_unbroken_one(runs, tmp_path):
    whole, words = runs
    if words:
        return
    start(tmp_path / "broken", "steps=2")
    broken = start(tmp_path / "broken")
    assert weights(whole, 2) == weights(broken, 2) and weights(whole, 4) == weights(broken, 4)
    assert weights(whole, 2) != weights(whole, 4)
    assert metrics(whole) == metrics(broken)
    assert metrics(whole, "eval.jsonl") == metrics(broken, "eval.jsonl")
    assert RunFolder(whole).rollouts().equals(RunFolder(broken).rollouts())


def test_evaluations_are_of_the_weights_of_their_step(runs):
    """Both engines give a checkpoint the greedy answers that the run wrote down for it."""
    whole, words = runs
    evals = metrics(whole, "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 2, 4] and all(e["n"] == 8 for e in evals)
    for engine in ("vllm", "hf"):
        settings = configs.load("configs/quickstart.yaml", [*SMALL, *words, f"engine={engine}", f"run.dir={whole}"])
        ((record, _),) = measure(settings, choose_model(settings, folder=whole / "checkpoints" / "step-000004"))
        assert record["iou"] == pytest.approx(evals[-1]["iou"], abs=1e-6), engine
        assert json.loads((whole / "heartbeat.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("more", [("rollout.forget.lr=1e-2", "algo.correction=none"), ("rollout.step_tokens=8",)],
                         ids=["forget", "partial"])
def test_answers_of_changed_weights_and_in_pieces(tmp_path, more):
    """Sample-then-forget syncs within a step; partial answers go on under new weights."""
    folder = start(tmp_path / "run", *more, "steps=2", "eval.samples=0", "save.every=0")
    lines = metrics(folder)
    assert len(lines) == 2 and all(np.isfinite(line["mismatch/kl"]) for line in lines)
    if "forget" in more[0]:  # the second half of a group was sampled by other weights than those that learn from it
        assert all(line["mismatch/kl"] > 1e-6 for line in lines)
    else:
        assert sum(line["partial/held"] for line in lines) > 0
        assert all(line["mismatch/kl"] < 1e-6 for line in lines)


def test_float16(tmp_path):
    """Engine and trainer compute in half precision, each in its own way; a correction weighs what is left."""
    folder = start(tmp_path / "run", "model.dtype=float16", "algo.correction=token_truncate", "steps=2",
                   "eval.samples=0", "save.every=0")
    for line in metrics(folder):
        assert 0 < line["mismatch/kl"] < 1e-3 and line["mismatch/gap_max"] < 0.5
        assert line["correction/weight"] == pytest.approx(1, abs=0.05) and line["correction/outside"] < 0.05
