"""Checkpoints beside the training, the best one, and signals: what is on disk afterwards."""

import json
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.runs import metrics
from tests.helpers import load, settings
from tests.training.test_loop import start
from vlrl.config.schema import SaveSettings
from vlrl.errors import RunError
from vlrl.monitoring import trackers
from vlrl.store import RunFolder, checkpoint
from vlrl.training import loop, session
from vlrl.training.checkpointing import RunCheckpoints, Saver, estimate, fits_in_memory
from vlrl.training.update import make_optimizer

QUIET = ("eval.samples=0", "store.media=none")


def contents(folder):
    """sha256 of every file of every checkpoint."""
    return {path.parent.name: json.loads(path.read_bytes())["files"]
            for path in sorted(folder.glob("checkpoints/*/manifest.json"))}


@pytest.fixture(scope="module")
def whole(tiny_models, tmp_path_factory):
    """A run of four steps that waits for each of its checkpoints."""
    path = tmp_path_factory.mktemp("whole")
    words = ("save.background=false", "save.every=1", "save.keep=9", "steps=4")
    return start(path, tiny_models["qwen3_vl"], *QUIET, *words).folder.path


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tiny_models, tmp_path, whole):
    """Of a run of four steps the last checkpoint is gone and the one before is damaged: it goes on from the second."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    weights = tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    words = ("save.background=false", "save.every=1", "save.keep=9", "steps=4")
    run = start(whole.parent, tiny_models["qwen3_vl"], *QUIET, *words, f"run.dir={tmp_path}/run")
    assert run.start == 2 and contents(run.folder.path) == contents(whole)
    assert metrics(run.folder.path) == metrics(whole)


@pytest.fixture
def policy(tiny_models, request):
    model = {"name": str(tiny_models["qwen3_vl"]), "train": ["language", "merger", "vision"]}
    return load(settings("", model={**model, **getattr(request, "param", {})}))[0]


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4}}], indirect=True,
                         ids=["full", "lora"])
def test_what_is_written_is_what_was_there_when_it_began(policy, tmp_path):
    optimizer = make_optimizer(policy, settings("x"))
    for _, p in policy.trainable():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "seen": [1]}
    checkpoint.save(tmp_path / "plain" / "checkpoints", 7, policy.save, state, 1)
    saver, gate = Saver(tmp_path / "beside" / "checkpoints", SaveSettings()), threading.Event()
    saver.start()
    saver._submit(lambda: gate.wait(60))
    saver.wait, wait = lambda: None, saver.wait  # the gate is no save that is to be over first
    saver.begin(7, policy, state)
    optimizer.step()
    state["seen"].append(2)
    assert saver.has(7) and saver.busy and not (tmp_path / "beside").exists()
    gate.set()
    wait()
    saver.wait = wait
    saver.close()
    assert contents(tmp_path / "beside") == contents(tmp_path / "plain") and saver.has(7) and not saver.busy


def test_where_memory_is_short_training_waits(policy, tmp_path, monkeypatch):
    assert fits_in_memory(policy, {})
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    Saver(tmp_path, SaveSettings()).begin(3, policy, {})  # there is not even a thread
    assert checkpoint.latest(tmp_path).step == 3
    # Weights of 8 bytes and moments of 80.
    small = SimpleNamespace(shards=None, trainable=lambda: [("w", torch.zeros(2))])
    for free, fit in ((110, False), (111, True)):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert fits_in_memory(small, {"optimizer": {"state": {0: (torch.zeros(10, dtype=torch.float64), 3)}}}) == fit


def test_an_error_in_the_background_ends_the_run_at_the_next_step(tiny_models, tmp_path, monkeypatch):
    """What a save writes has been tried; what is in its way comes after that."""
    def tried(saves):
        try_saving(saves)
        (tmp_path / "run" / "checkpoints").rmdir()
        (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    try_saving = RunCheckpoints.try_saving
    monkeypatch.setattr(RunCheckpoints, "try_saving", tried)
    with pytest.raises(RunError, match=r"cannot save checkpoint .*step-000001"):
        start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "save.every=1", "steps=9")
    assert len(metrics(tmp_path / "run")) <= 2
    assert not [t for t in threading.enumerate() if t.name == "saver"]


def test_rollouts_are_written_before_the_checkpoint_of_their_step(tiny_models, tmp_path, monkeypatch):
    """However slow the disk is: a resumed run never lacks the rollouts of a completed step."""
    save, write, seen = checkpoint.save, RunFolder.write_rollouts, {}
    def after(folder, step, *more):
        seen[step] = sorted({row["step"] for row in RunFolder(tmp_path / "run").rollouts().to_pylist()})
        return save(folder, step, *more)
    def slowly(*args, **more):
        time.sleep(0.3)
        return write(*args, **more)
    monkeypatch.setattr(checkpoint, "save", after)
    monkeypatch.setattr(RunFolder, "write_rollouts", slowly)
    start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "save.every=1", "steps=2", "save.background=false")
    assert seen == {1: [0], 2: [0, 1]}


def test_the_best_is_kept_beside_the_newest(tmp_path):
    def save(step):
        checkpoint.save(tmp_path, step, lambda path: (path / "model.safetensors").write_bytes(b"x"), {}, 1)
    def names():
        return sorted(p.name for p in tmp_path.iterdir())
    save(1)
    checkpoint.mark_best(tmp_path, 1, {"value": 0.5}, 1)
    for step in (2, 3):
        save(step)
    assert names() == ["best.json", "step-000001", "step-000003"]
    assert checkpoint.find(tmp_path / "best").step == 1 and checkpoint.latest(tmp_path).step == 3
    checkpoint.mark_best(tmp_path, 3, {"value": 0.6}, 1)
    assert names() == ["best.json", "step-000003"] and checkpoint.best_record(tmp_path)["value"] == 0.6
    save(2)  # the run was started over from before: its best is of a past that is gone
    assert names() == ["step-000002"] and checkpoint.best_record(tmp_path) == {}
    with pytest.raises(RunError, match="not a folder"):
        checkpoint.find(tmp_path / "best")


@pytest.mark.slow
def test_a_run_keeps_its_best(tiny_models, tmp_path):
    words = ("eval.every=1", "save.every=0", "save.keep=1", "save.best=vowels", "steps=4", "store.media=none")
    folder = start(tmp_path, tiny_models["qwen3_vl"], *words).folder
    best = max([e for e in folder.evals() if e["step"]], key=lambda e: e["vowels"])
    found = checkpoint.find(folder.checkpoints / "best")
    assert found.step == best["step"] and checkpoint.problems(found.path) == []
    assert checkpoint.best_record(folder.checkpoints) == {
        "step": best["step"], "metric": "vowels", "value": best["vowels"], "split": "heldout"}
    assert {p.name for p in folder.checkpoints.glob("step-*")} == {"step-000004", found.path.name}
    (folder.checkpoints / "best.json").unlink()  # killed after the evaluation, before the mark
    start(tmp_path, tiny_models["qwen3_vl"], *words)  # nothing is left to do
    assert (checkpoint.best_record(folder.checkpoints) != {}) == (best["step"] == 4)
    with pytest.raises(RunError, match=r"save.best='length' is not a metric in eval.jsonl; .* heldout are .*vowels"):
        start(tmp_path, tiny_models["qwen3_vl"], *words, "save.best=length")


def test_which_evaluation_is_best():
    for evals, best in (([(0, 0.9), (1, 0.2), (2, 0.4), (3, 0.4)], 2), ([(0, 0.9)], None),
                        ([(1, float("nan")), (2, 0.1)], 2), ([(1, None), (2, None)], None)):
        lines = [{"step": step, "split": "heldout", "iou": value} for step, value in evals]
        found = trackers.best_of([*lines, {"step": 5, "split": "train", "iou": 1.0}], "heldout", "iou")
        assert (found and found["step"]) == best, evals
    lines = [{"step": step, "split": "heldout", "loss": value} for step, value in ((0, 0.1), (1, 3.0), (2, 2.0))]
    assert trackers.best_of(lines, "heldout", "loss") == lines[2]  # of a loss the lowest is best
    # The judge was away: nothing is known of a metric, until an evaluation that scored has another one.
    away = {"step": 0, "split": "heldout", "n": 2, "completion/length_mean": 3.0, "short": 0.1}
    assert trackers.best_of([away], "heldout", "reward/mean") is None
    lost = {"step": 0, "split": "heldout", "n": 2, "unscorable": 2}  # no environment could be reset
    assert trackers.best_of([lost], "heldout", "reward/mean") is None
    scored = {**away, "step": 2, "reward/mean": 0.1}
    assert trackers.best_of([away, scored], "heldout", "reward/mean") == scored
    with pytest.raises(RunError, match=r"save.best='length' is not a metric"):
        trackers.best_of([away, scored], "heldout", "length")


def signalled(monkeypatch, step, number, then=lambda: None):
    """A signal comes in the answers of a step; steps count as long ones."""
    next_groups = loop.GroupSource.next_groups

    def drawing(self, count, now):
        groups = next_groups(self, count, now)  # draws are made and observed: the source is that of the next step
        if now == step:
            os.kill(os.getpid(), number)
            then()
        return groups

    monkeypatch.setattr(session, "_LONG_S", 0.0)
    monkeypatch.setattr(loop.GroupSource, "next_groups", drawing)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_the_completed_steps_are_saved_at_once_and_the_step_in_flight_after(tiny_models, tmp_path, monkeypatch, whole,
                                                                            capfd, number):
    signalled(monkeypatch, 2, number)
    run = start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "steps=4", "save.every=0", "save.keep=9", "save.grace=600")
    assert run.done == 3 and run.folder.last_heartbeat()["state"] == "interrupted"
    assert "saving the 2 completed steps at once (" in capfd.readouterr().err
    known = contents(whole)
    assert contents(run.folder.path) == {name: known[name] for name in ("step-000002", "step-000003")}


@pytest.mark.slow
def test_a_step_that_takes_longer_than_the_grace_is_given_up(tiny_models, tmp_path, monkeypatch, whole, capfd):
    def forever():
        while True:
            time.sleep(0.05)
    before = signal.getsignal(signal.SIGTERM)
    signalled(monkeypatch, 2, signal.SIGTERM, forever)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "steps=4", "save.every=0", "save.grace=0.1")
    assert "given up" in capfd.readouterr().err
    assert contents(tmp_path / "run") == {"step-000002": contents(whole)["step-000002"]}
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "run" / "run.lock").exists()
    monkeypatch.undo()
    again = start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "steps=4", "save.keep=9")
    assert again.start == 2 and contents(again.folder.path)["step-000004"] == contents(whole)["step-000004"]
    assert metrics(again.folder.path) == metrics(whole)


def test_expected_seconds(tmp_path):
    assert estimate(tmp_path, 3_000_000) == "3.0 MB"
    checkpoint.save(tmp_path, 1, lambda path: (path / "model.safetensors").write_bytes(bytes(10_000)), {}, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 0.001}))
    size, speed = checkpoint.write_speed(tmp_path)
    assert size > 10_000 and speed == pytest.approx(1000 * size)
    assert estimate(tmp_path, int(9e9)).startswith("9.00 GB, about 0:1")


@pytest.mark.slow
def test_tensorboard_has_every_step_once(tiny_models, tmp_path, monkeypatch):
    words = ("log.trackers=[tensorboard]", "steps=4", "save.every=2", "eval.every=2", "eval.samples=4",
             "store.media=none")
    update = loop.update
    def killed(policy, optimizer, groups, config, step, algorithm, *more):
        if step == 3:
            raise RuntimeError("killed")
        return update(policy, optimizer, groups, config, step, algorithm, *more)
    monkeypatch.setattr(loop, "update", killed)
    with pytest.raises(RuntimeError, match="killed"):
        start(tmp_path, tiny_models["qwen3_vl"], *words)
    monkeypatch.undo()
    found = EventAccumulator(str(start(tmp_path, tiny_models["qwen3_vl"], *words).folder.path / "vlrl"))
    found.Reload()
    assert [e.step for e in found.Scalars("loss")] == [0, 1, 2, 3]
    assert [e.step for e in found.Scalars("eval/heldout/vowels")] == [0, 2, 4]


def test_a_run_keeps_its_name_at_the_trackers(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    name = trackers.run_id(tmp_path)
    assert trackers.run_id(tmp_path) == name and len(name) == 8
    options = trackers.options(tmp_path, 5)
    assert options["wandb"] == {"id": name, "resume": "allow"} and options["tensorboard"] == {"purge_step": 5}
    assert trackers.options(tmp_path, 0)["tensorboard"] == {}
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert trackers.run_id(tmp_path) == "mine"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert trackers.run_id(tmp_path) == "mine"


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tiny_models, tmp_path, monkeypatch, whole):
    real, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 86400 * (-1) ** next(jumps))
    folder = start(tmp_path, tiny_models["qwen3_vl"], *QUIET, "steps=2", "save.every=1").folder.path
    assert metrics(folder) == metrics(whole)[:2]
    assert 0 < json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["time/total_s"] < 3600
