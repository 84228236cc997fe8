"""Every fault of docs/long-runs.md in a whole run: what the user sees, and that nothing but the step in flight is lost.

The task does what the environment variable FAULT says; launchers below starve the allocator or fill a real small disk.
"""

import json
import os
import subprocess
import time

import pytest

from tests import huge
from tests.e2e import forked
from tests.e2e.faulty import STEPS, assert_same, small_disk, write
from tests.e2e.runs import ENV, ROOT, finished, metrics, run, weights
from tests.monitoring.test_alerts import come, hook
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
STARVED = '''
import sys, torch
from vlrl.cli import main as cli
from vlrl.models import policy as policies
from vlrl.models.sharding.fsdp import decoder_layers
load = policies.load
def starved(*given):
    """Asks the real allocator for a petabyte: of more than 4 answers side by side in generation, and in the middle of
    the backward pass of more than 90 tokens."""
    policy = load(*given)
    def forward(module, args, out):
        hidden = out[0] if isinstance(out, tuple) else out
        if not policy.model.training and len(hidden) > 4 and hidden.shape[1] == 1:
            torch.empty(2**50)
    def backward(module, grads):
        if grads[0].shape[0] * grads[0].shape[1] > 90:
            torch.empty(2**50)
    layer = decoder_layers(policy.base)[0]
    layer.register_forward_hook(forward)
    layer.register_full_backward_pre_hook(backward)
    return policy
policies.load = starved
sys.exit(cli.train_script(sys.argv[1:]))
'''


def written(folder, model):
    return write(folder, model, 24, "prompts_per_step: 3, group_size: 4, max_new_tokens: 8",
                 "quarantine: true, workers: 0", "save: {every: 1, keep: 9}\nlimits: {score_errors: 1}")


@pytest.fixture(scope="module")
def scene(tiny_models, tmp_path_factory):
    """A config, and the folder of a run that nothing disturbed."""
    root = tmp_path_factory.mktemp("faults")
    config = written(root, tiny_models["qwen3_vl"])
    finished(config, root / "whole")
    return config, root / "whole"


def goes_on(config, folder, whole, *words):
    """The same command without the fault ends as the undisturbed run did."""
    assert "resuming from" in finished(config, folder, *words).stdout
    assert_same(folder, whole)


def test_nan_in_one_step(scene, tmp_path):
    done = finished(scene[0], tmp_path / "run", huge.ADVANTAGE, FAULT="huge once")
    assert "step 2: the loss is not finite" in done.stderr and "In the batch: group" in done.stderr
    lines = metrics(tmp_path / "run")
    assert [m["skipped"] for m in lines] == [0, 0, 1, 0] and lines[2]["loss"] is None and lines[3]["loss"] is not None
    assert [m["step"] for m in lines] == [*range(STEPS)]
    assert weights(tmp_path / "run", 2) == weights(tmp_path / "run", 3) != weights(tmp_path / "run", 4)


def test_nan_in_every_step(scene, tmp_path):
    done = run(scene[0], tmp_path / "run", huge.ADVANTAGE, "limits.nonfinite_steps=1", FAULT="huge always")
    assert done.returncode == 1 and "more than limits.nonfinite_steps=1 allows" in done.stderr
    assert (tmp_path / "run/failed/rollouts/step-000001-rank-00000.parquet").exists()


def test_reward_collapse(scene, tmp_path):
    with hook() as server:
        done = run(scene[0], tmp_path / "run", "alerts.window=2", "alerts.reward_drop=0.6",
                   "alerts.constant_rewards=null", "alerts.zero_variance_above=null",
                   f"alerts.webhook={server.url}", FAULT="collapse")
        ((_, _, body),) = come(server.asked, 1)
    assert done.returncode == 0, done.stderr
    assert "ALERT at step 3: the mean reward of the last 2 steps is" in done.stdout and body["alert"] == "reward_drop"
    assert json.loads((tmp_path / "run/alerts.jsonl").read_text()) == body


def test_out_of_memory_in_generation_and_update(scene, tmp_path):
    config, whole = scene
    (tmp_path / "starved.py").write_text(STARVED)
    done = forked.run([tmp_path / "starved.py", config, f"run.dir={tmp_path}/run"], ENV, tmp_path, 300)
    assert done.returncode == 0, done.stderr
    assert "completions in a batch: " in done.stderr and "out of memory in the update" in done.stderr
    found, expected = metrics(tmp_path / "run"), metrics(whole)
    raw = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert raw[0]["memory/halved"] >= 1 and raw[-1].get("memory/halved", 0) < raw[0]["memory/halved"]
    for mine, other in zip(found, expected, strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_a_reward_that_hangs(scene, tmp_path):
    config, whole = scene
    asked = RunFolder(whole).rollouts(2).to_pylist()
    (tmp_path / "which").write_text(asked[0]["sample_id"])
    done = finished(config, tmp_path / "run", "limits.score_s=1", FAULT=f"hang:{tmp_path}/which")
    assert "no result within limits.score_s=1 s" in done.stderr
    rows = RunFolder(tmp_path / "run").rollouts(2).to_pylist()
    hung = [r for r in rows if r["error"]]
    assert {r["sample_id"] for r in hung} == {asked[0]["sample_id"]} and len(hung) == 4
    assert all(r["reward"] is None and "TimeoutError" in r["error"] for r in hung)
    assert metrics(tmp_path / "run")[2]["score_errors"] == pytest.approx(4 / 12)
    assert [(r["completion"], r["reward"]) for r in rows if not r["error"]] == [
        (r["completion"], r["reward"]) for r in asked if r["sample_id"] != asked[0]["sample_id"]]


def test_two_runs_on_one_folder(scene, tmp_path):
    config, whole = scene
    folder = tmp_path / "run"
    with (tmp_path / "said.txt").open("w") as said:
        first = forked.Process([str(ROOT / "train.py"), str(config), f"run.dir={folder}", "limits.score_s=0"],
                               {**ENV, "FAULT": f"wait:{tmp_path}"}, tmp_path, said, said)
    end = time.monotonic() + 300
    while not (tmp_path / "waiting").exists() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    second = run(config, folder)
    (tmp_path / "go").touch()
    assert first.wait(300) == 0, (tmp_path / "said.txt").read_text()
    assert second.returncode == 1 and f"is in use by process {first.pid} on" in second.stderr
    assert_same(folder, whole)


@pytest.mark.long
def test_stuck(scene, tmp_path):
    config, whole = scene
    words = ("limits.score_s=0", "rollout.score_ahead=false")
    done = run(config, tmp_path / "run", "limits.stuck_s=20", *words, FAULT="sleeps")
    assert done.returncode == 1 and "nothing has happened for more than limits.stuck_s=20 seconds" in done.stderr
    assert "in score" in (tmp_path / "run/stuck-rank-00000.txt").read_text()
    goes_on(config, tmp_path / "run", whole, *words)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as path:
        yield path


def test_disk_full(scene, disk):
    config, whole = scene
    size = sum(f.stat().st_size for f in (whole / f"checkpoints/step-{STEPS:06d}").rglob("*") if f.is_file())
    subprocess.run(["mount", "-o", f"remount,size={int(1.8 * size)}", str(disk)], check=True)
    full = run(config, disk / "run")
    assert full.returncode == 1 and "bytes" in full.stderr and "free" in full.stderr, full.stderr
    assert len(list((disk / "run/checkpoints").glob("step-*"))) == 1
    subprocess.run(["mount", "-o", f"remount,size={20 * size}", str(disk)], check=True)
    goes_on(config, disk / "run", whole)


def test_read_only(scene, disk):
    (disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = run(scene[0], disk / "run")
    assert done.returncode == 1 and "cannot write" in done.stderr and "Read-only file system" in done.stderr


def test_run_folder_vanished(scene, tmp_path):
    folder = tmp_path / "run"
    done = run(scene[0], folder, FAULT=f"vanish:{folder}")
    assert done.returncode == 1 and f"run folder {folder} has vanished" in done.stderr, done.stderr
    assert not (folder / "metrics.jsonl").exists() and not (folder / "heartbeat.json").exists()


def test_media_vanished_and_corrupt(tiny_models, tmp_path):
    config = written(tmp_path / "own", tiny_models["qwen3_vl"])
    done = finished(config, tmp_path / "run", "steps=6", "limits.rejected=0.9",
                    FAULT=f"some media:{tmp_path}/own/pictures")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["prompts/rejected"] > 0 and all(m["groups/count"] == 3 for m in lines)
    assert "left out: " in done.stdout and os.path.getsize(tmp_path / "run/rejected.jsonl")
