"""Every sampler in a group source: what it draws and says is the same after a resume at any step.

With two processes: tests/e2e/test_curricula.py."""

import json

import pytest

from tests.curriculum.sourced import BROKEN, CASES, LONG, run
from tests.e2e.runs import metrics, write_config
from vlrl import config
from vlrl.curriculum import SAMPLERS
from vlrl.training.sft import train


def lines(found):
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("case", [case if case == "partial" else pytest.param(case, marks=pytest.mark.slow)
                                  for case in CASES])
def test_a_run_resumed_at_every_step_is_the_unbroken_one(case, tmp_path):
    """partial: with filters, rejected prompts, and steps in which nothing is drawn."""
    steps = 6 if case == "partial" else 7
    for name in SAMPLERS:
        whole = lines(run(name, case, steps))
        assert lines(run(name, case, steps, tmp_path / name)) == whole, name
        assert sum(map(len, (line["trained"] for line in whole))) > 0
        assert all({"rollouts/total", "groups/wasted"} <= line["metrics"].keys() for line in whole)
        assert "partial" not in case or any(line["held"] for line in whole), name


def test_broken_and_long_prompts_are_left_out():
    found = [reason for line in lines(run("sequential", "filters", 4)) for reason in line["reasons"]]
    assert any(f"train-{BROKEN}:" in reason for reason in found) and any(f"train-{LONG}:" in r for r in found)


def test_supervised_steps_learn_whatever_the_filters_are(tiny_models, tmp_path):
    """A group of one given answer is neither mixed nor of a middle pass rate."""
    words = [f"run.dir={tmp_path / 'run'}", "steps=1", "eval.samples=0", "save.every=0", "rollout.prompts_per_step=2",
             "curriculum.keep=mixed", "curriculum.oversample=2"]
    train(config.load(write_config(tmp_path, tiny_models["qwen3_vl"]), words))
    (line,) = metrics(tmp_path / "run")
    assert line["loss"] > 0 and line["groups/wasted"] == 0 and line["rollouts/total"] == 2
