"""Writing in the background: in order, bounded, and no error lost."""

import threading

import pytest

from tests.e2e.runs import metrics
from tests.training.test_loop import start
from vlrl.errors import RunError, TrainingError
from vlrl.store import RunFolder
from vlrl.store.writer import BackgroundWriter
from vlrl.training import loop


def failing():
    raise RunError("cannot write a.parquet: disk full")


def test_writes_in_order_and_no_error_is_lost():
    done, gate = [], threading.Event()
    with BackgroundWriter(most=2) as writer:
        writer.submit(lambda: gate.wait(10) and done.append(0))
        writer.submit(lambda: done.append(1))
        third = threading.Thread(target=lambda: writer.submit(lambda: done.append(2)))
        third.start()
        third.join(0.05)
        assert third.is_alive() and done == []  # two are not written yet
        gate.set()
        third.join(10)
        writer.flush()
        assert done == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("writer")]
    writer = BackgroundWriter()
    writer.submit(failing)
    with pytest.raises(RunError, match="disk full"):
        writer.submit(lambda: None)
    writer.flush()  # told once
    writer.submit(failing)
    with pytest.raises(RunError, match="disk full"):
        writer.flush()
    writer.submit(failing)
    with pytest.raises(RunError, match="disk full"):
        writer.close()


@pytest.mark.slow
def test_a_run_ends_with_the_error_of_its_last_write(tiny_models, tmp_path, monkeypatch):
    write = RunFolder.write_rollouts
    monkeypatch.setattr(RunFolder, "write_rollouts", lambda self, step, *a, **k: (
        failing() if step == 2 else write(self, step, *a, **k)))
    with pytest.raises(RunError, match="disk full"):
        start(tmp_path, tiny_models["qwen3_vl"], "eval.samples=0", "save.every=0")
    folder = RunFolder(tmp_path / "run")
    assert folder.last_heartbeat()["state"] == "failed" and not list(folder.checkpoints.glob("*"))
    assert not [t for t in threading.enumerate() if t.name.startswith(("writer", "prefetch"))]


def test_what_came_before_an_error_is_on_disk(tiny_models, tmp_path, monkeypatch):
    update, write = loop.update, RunFolder.write_rollouts
    held = threading.Event()

    def broken(policy, optimizer, groups, config, step, algorithm, *more):
        if step == 2:
            threading.Timer(0.3, held.set).start()
            raise TrainingError("step 2: the gradient norm is nan.")
        return update(policy, optimizer, groups, config, step, algorithm, *more)

    def slow(self, step, *args, **more):
        assert step != 1 or held.wait(60)  # still being written when the error leaves the step
        return write(self, step, *args, **more)

    monkeypatch.setattr(loop, "update", broken)
    monkeypatch.setattr(RunFolder, "write_rollouts", slow)
    with pytest.raises(TrainingError, match=r"rollouts are in .*failed"):
        start(tmp_path, tiny_models["qwen3_vl"], "eval.samples=0", "save.every=0")
    folder = tmp_path / "run"
    assert len(list((folder / "rollouts").glob("*.parquet"))) == len(metrics(folder)) == 2
    assert len(list((folder / "failed" / "rollouts").glob("step-000002-*.parquet"))) == 1
