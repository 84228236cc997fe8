"""The benchmarks run, and say what they measured; how fast anything is, is not tested."""

import importlib.util
import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(name):
    """A benchmark as a module; task files find their classes by its path."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ):  # they set variables for their own process
        spec.loader.exec_module(made)
    return made


@pytest.mark.slow
def test_gpu_update_on_a_cpu(tmp_path, monkeypatch):
    gpu_update = module("gpu_update")
    size = replace(gpu_update.TINY, packed=(2,))
    monkeypatch.setattr(gpu_update, "peak_of", lambda *_: gpu_update.Peak(0.01, "said so"))
    monkeypatch.setattr(gpu_update, "bandwidth", lambda device: 1e9)
    gpu_update.build(tmp_path, size, torch.device("cpu"))
    bench = gpu_update.Bench(gpu_update.settings("lora", size, tmp_path), size)
    assert {len(g.prompt) for g in bench.groups} == {8 + 30}  # visual and text tokens
    assert {len(r.completion.tokens) for g in bench.groups for r in g.rollouts} == {6}
    sides = bench.sides()
    assert [side.name for side in sides] == ["padded", "packed, masked", "packed, merged"]
    for side in sides:
        bench.choose(side)
    broken = gpu_update.Side("broken", [bench.config.model_copy(update={"rollout": None})])
    bench.choose(broken)
    assert broken.config is None and "AttributeError" in broken.error
    bench.measure(sides, 1)
    for side in sides:
        assert len(side.seconds) == 1 and abs(side.logprobs - sides[0].logprobs).max() < 0.02  # bfloat16
        assert side.grad_norm == pytest.approx(sides[0].grad_norm, rel=0.02)
    assert bench.useful() > 0
    speed, bound = bench.decode(3)
    assert speed > 0 and bound > 0


@pytest.mark.slow
def test_planted_faults_of_environments_are_counted(tmp_path):
    """200 episodes of which 2 hang and 2 end their process: no group is lost, and no process is left."""
    episodes = module("episodes")
    page = "\n".join(episodes.faults(Namespace(folder=str(tmp_path), episodes=200, step_s=10.0)))
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in page.splitlines() if line.startswith("|")][2:]
    assert rows == [["25"] * 2, ["2"] * 2, ["2"] * 2, ["196"] * 2, ["0"] * 2, ["4"] * 2, ["0"] * 2]


@pytest.mark.slow
def test_episodes_are_measured_into_sections():
    words = ["cache", "arrival", "--waiting", "4", "--wait-s", "0.02", "--words", "4"]
    done = forked.run([FOLDER / "episodes.py", *words], ENV, ROOT, 600)
    done.check_returncode()
    assert all(f"## {module('episodes').TITLES[name]}\n" in done.stdout for name in ("arrival", "cache"))
    assert "32 of 32 episodes are alike" in done.stdout


