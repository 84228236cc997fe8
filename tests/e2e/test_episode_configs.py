"""The configs of episodes run from the models that are shipped, in several turns; zoom's calls its tool."""

import json

import pytest

from tests.e2e.runs import ROOT
from vlrl import config as configs
from vlrl.store import RunFolder
from vlrl.training import sft
from vlrl.training.loop import train

SMALL = ("steps=1", "rollout.prompts_per_step=2", "rollout.group_size=4", "eval.samples=4")


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("zoom", 3), ("recall", 3), ("drive", 6), ("repair", 2)])
def test_it_acts_in_several_turns(tmp_path, name, most):
    config = configs.load(ROOT / "configs" / f"{name}.yaml", [*SMALL, f"run.dir={tmp_path}/run"])
    run = RunFolder(train(config).folder.path)
    rows = run.rollouts().to_pylist()
    turns = [[t for t in row["turns"] if t["role"] == "assistant"] for row in rows]
    assert len(rows) == 8 and {len(t) for t in turns} <= set(range(1, most + 1)) and max(map(len, turns)) > 1
    assert all(row["error"] is None and row["reward"] is not None for row in rows)
    assert run.metrics()[0]["grad_norm"] >= 0 and len(run.evals()) == 2
    if name == "zoom":
        called = [json.loads(t[0]["info"])["calls"] for t in turns]
        assert sum(bool(calls) and not calls[0].get("error") for calls in called) >= 4  # it begins as one that looks


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [("zoom", []), ("recall", []), ("drive", ["task.solvable=true"])])
def test_its_demonstrations_are_learned_from(tmp_path, name, words):
    """Where a scene has no demonstration, the run says so and ends; solvable ones all have one."""
    given = [*SMALL, "eval.samples=0", f"run.dir={tmp_path}/run", *words]
    config = configs.load(ROOT / "configs" / f"{name}.yaml", given)
    (line,) = RunFolder(sft.train(config).folder.path).metrics()
    assert 0 < line["loss"] < 5 and line["episode/success"] == 1


@pytest.mark.slow
def test_a_reward_teaches_it_to_recall(tmp_path):
    """On held-out sequences, in few of the config's steps."""
    config = configs.load(ROOT / "configs" / "recall.yaml", ["steps=7", "eval.samples=64", "eval.every=0",
                                                             f"run.dir={tmp_path}/run"])
    first, *_, last = RunFolder(train(config).folder.path).evals()
    assert last["accuracy"] > first["accuracy"] + 0.25  # from .34 to .70 and more
