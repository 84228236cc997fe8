"""The benchmarks and the report on a GPU run here, and say what they measured and what went wrong; how fast anything
is, is not tested."""

import importlib.util
import json
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
from vlrl.models import attention

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


DONE = """
import json, os, signal, sys, time
name, path = sys.argv[1:3]
def write(**content):
    open(path, "w").write(json.dumps({"rows": [{"n": 1}], **content}))
write(state="running")
print("about to", name)
sys.stdout.flush()
if name == "doctor":
    time.sleep(600)
if name == "tests":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "attention":
    import not_installed_anywhere
write(state="ok")
"""


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return module("gpu_parts")


def run(parts, tmp_path, name):
    code = parts.main(name, str(tmp_path / "part.json"), "--tiny")
    return code, json.loads((tmp_path / "part.json").read_text())


def test_attention_is_compared_with_a_whole_mask_and_what_is_not_installed_left_out(parts, tmp_path, monkeypatch):
    code, part = run(parts, tmp_path, "attention")
    assert code == 0 and part["state"] == "ok"
    assert [(row["attention"], row["verdict"]) for row in part["rows"]] == [("merged", "right"), ("masked", "right")]
    assert all(row[name] < 1e-5 for row in part["rows"] for name in ("output", "dq", "dk", "dv"))
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    for name, package in (("vllm", "vllm"), ("update-3b-qlora", "bitsandbytes"), ("trl", "vlrl[bench]")):
        monkeypatch.setattr(parts, "_need_cuda", lambda: None)
        code, part = run(parts, tmp_path, name)
        assert code == 0 and part["state"] == "skipped" and package in part["reason"].lower()


@pytest.mark.parametrize("gradient", [False, True])
def test_a_kernel_that_is_wrong_and_one_without_memory_are_rows(parts, tmp_path, monkeypatch, gradient):
    masked = attention.IMPLEMENTATIONS["masked"]

    def wrong(q, k, v, layout, scale):
        return masked(q, k if gradient else 1.01 * k, v.detach() + 0.99 * (v - v.detach()), layout, scale)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "masked", wrong)
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "merged", full)
    code, part = run(parts, tmp_path, "attention")
    assert code == 1 and part["state"] == "failed" and "merged, masked: see the table" in part["reason"]
    verdicts = [row["verdict"] for row in part["rows"]]
    assert "OutOfMemoryError: CUDA out of memory" in verdicts[0] and verdicts[1].startswith("wrong")


def test_a_side_without_memory_is_a_row(parts, tmp_path, monkeypatch):
    import gpu_step

    for side, error, state in (("trl", "OutOfMemoryError: CUDA out of memory", "ok"), ("", "", "ok"),
                               ("vlrl", "OutOfMemoryError: CUDA out of memory", "failed"),
                               ("trl", "TypeError: unexpected keyword", "failed")):
        def measured(step, limit, side=side, error=error):
            seconds = [2.0, 3.0] if step.side == "vlrl" else [8.0, 12.0]
            return {"error": error} if step.side == side else {"seconds": seconds, "generating": 1.0, "gib": 4.0,
                                                               "tensors": 3.0}

        monkeypatch.setattr(gpu_step.Step, "measured", measured)
        _, part = run(parts, tmp_path, "trl")
        failed = [row for row in part["rows"] if "failed" in str(row["s a step"])]
        assert part["state"] == state and {row["side"] for row in failed} == ({f"{side}, lora"} if side else set())
        ratios = [row["s a step"] for row in part["rows"] if row["side"] == "TRL / vlrl"]
        assert ratios == ([] if side else [4.0])


def test_memory_of_a_step_is_its_own_and_limits_add_up(parts, tmp_path, monkeypatch):
    import gpu_step
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 600\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    gib = 2**30
    for name, value in (("mem_get_info", (60 * gib, 80 * gib)), ("memory_reserved", 10 * gib),
                        ("max_memory_reserved", 15 * gib), ("max_memory_allocated", 12 * gib)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    card = torch.device("cuda")
    assert gpu_step.used(card) == 600 * 2**20 and gpu_step.used(torch.device("cpu")) == 0
    assert gpu_step.memory(card, 8 * gib) == (2 * gib + 15 * gib, 12 * gib)
    limits = module("gpu_report").LIMITS
    assert sum(limits.values()) <= 40 * 60 and max(limits.values()) < 9 * 60
    assert set(limits) == set(module("gpu_parts").PARTS)
    report = module("gpu_report")
    path = tmp_path / "report.json"
    one = {"state": "ok", "rows": [], "seconds": 1.0, "limit": 60, "tiny": True}
    report.write(tmp_path, report.merge(path, {"doctor": one, "tests": one}))
    report.write(tmp_path, report.merge(path, {"tests": {**one, "seconds": 2.0}}))
    parts = json.loads(path.read_text())["parts"]
    assert {name: part["seconds"] for name, part in parts.items()} == {"doctor": 1.0, "tests": 2.0}
    path.write_text("{")
    assert list(report.merge(path, {"tests": one})["parts"]) == ["tests"]


@pytest.mark.slow
def test_a_step_stands_beside_its_plan_and_one_that_hangs_is_said(parts, tmp_path, monkeypatch):
    import gpu_step
    monkeypatch.setattr(gpu_step.subprocess, "run", forked.in_place_of_subprocess_run)
    _, part = run(parts, tmp_path, "plan")
    (row,) = part["rows"]
    assert row["generating: s"] + row["the rest: s"] == pytest.approx(row["s a step"]) and row["GiB / plan"] > 0
    step = gpu_step.Step("vlrl", "lora", "tiny", 3, tmp_path)  # without a model
    assert "not done within 0 s" in step.measured(0.01)["error"]
    assert "FileNotFoundError" in step.measured(60)["error"]


@pytest.mark.slow
def test_a_part_that_hangs_dies_or_breaks_leaves_the_others(tmp_path, monkeypatch):
    report = module("gpu_report")
    (tmp_path / "gpu_parts.py").write_text(DONE)
    monkeypatch.setattr(report, "__file__", str(tmp_path / "gpu_report.py"))
    monkeypatch.setattr(report, "LIMITS", {"doctor": 4, "tests": 60, "attention": 60, "quickstart": 60})
    out = tmp_path / "out"
    assert report.main(["--out", str(out), "--tiny"]) == 1
    parts = json.loads((out / "report.json").read_text())["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {
        "doctor": "hung", "tests": "failed", "attention": "failed", "quickstart": "ok"}
    assert "about to doctor" in parts["doctor"]["reason"] and "exit code -9" in parts["tests"]["reason"]
    assert "not_installed_anywhere" in parts["attention"]["reason"]
    assert all(part["rows"] == [{"n": 1}] for part in parts.values())
    text = (out / "report.md").read_text()
    assert "| doctor | hung | 4 | 4 |" in text and "| quickstart | ok |" in text and "ModuleNotFoundError" in text
    assert f"- python: {sys.version.split()[0]}" in text
