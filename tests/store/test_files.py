"""Files that are whole or absent, also after a power cut; and writing in the background: in order, no error lost."""

import io
import os
import threading

import numpy as np
import pytest

from tests.e2e.runs import metrics
from tests.training.test_loop import start
from vlrl import load_run
from vlrl.curriculum.visited import _written
from vlrl.errors import RunError, TrainingError, VlrlError
from vlrl.store import RunFolder, checkpoint, files
from vlrl.store.files import append_line, move_to_backup, replacing, write_text
from vlrl.store.writer import BackgroundWriter
from vlrl.tools.experiments import status
from vlrl.tools.experiments.report import summary_table
from vlrl.training import loop


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, disk):
    path = tmp_path / "config.yaml"
    write_text(path, "steps: 1")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert disk == [("sync", file), ("rename", file), ("sync", folder)]
    disk.clear()
    write_text(path, "steps: 2", sync=False)
    assert disk == [("rename", path.stat().st_ino)] and path.read_text() == "steps: 2"


def test_a_line_is_on_the_disk_when_it_is_added(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 0}')
    append_line(path, '{"step": 1}')
    assert disk == [("sync", path.stat().st_ino)] * 2 and path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_disk_that_fills_up_gets_no_part_of_a_line(tmp_path, monkeypatch):
    class Full(io.FileIO):
        """Has room for seven bytes more."""

        def write(self, data):
            return super().write(data[:7])

    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 0}')
    monkeypatch.setattr(files, "open", lambda path, mode, buffering: Full(path, "a+"), raising=False)
    with pytest.raises(RunError, match="only 7 of 12 bytes fit"):
        append_line(path, '{"step": 1}')
    assert path.read_bytes() == b'{"step": 0}\n'


def test_two_threads_that_replace_a_file_write_two(tmp_path):
    path, others = tmp_path / "reward.png", []

    def write():
        with replacing(path) as temporary:
            others.append(temporary)
            temporary.write_text("other")

    with replacing(path) as temporary:
        temporary.write_text("own")
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(10)
        assert others != [temporary] and path.read_text() == "other" and temporary.read_text() == "own"
    assert path.read_text() == "own" and [p.name for p in tmp_path.iterdir()] == ["reward.png"]


def test_what_is_set_aside_lies_beside_and_the_lock_stays(tmp_path):
    folder = tmp_path / "run"
    for name in ("run.lock", "config.yaml"):
        write_text(folder / name, name)
    (tmp_path / "run.before-1").mkdir()  # of an earlier start
    move_to_backup(folder)
    assert [p.name for p in folder.iterdir()] == ["run.lock"]
    assert [p.name for p in (tmp_path / "run.before-2").iterdir()] == ["config.yaml"]
    move_to_backup(folder)
    assert not (tmp_path / "run.before-3").exists()


ENDLESS = {"fifo": os.mkfifo, "zero": lambda path: path.symlink_to("/dev/zero")}
NAMES = ("heartbeat.json", "metrics.jsonl", "eval.jsonl", "config.yaml", "run.lock", "stages.json", "prompts.parquet",
         "rollouts/step-000001-rank-00000.parquet", "checkpoints/best.json", "checkpoints/step-000004/manifest.json")


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_file_without_an_end_holds_up_no_reader(tmp_path, kind):
    """Each of them once was read with open(): a pipe hangs there, /dev/zero takes all memory."""
    for n, name in enumerate(NAMES):
        root = tmp_path / str(n)
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (root / "env.json").write_text("{}")
        ENDLESS[kind](place)
        folder = RunFolder(root)
        assert folder.metrics() == folder.evals() == [] and folder.last_heartbeat() == {}
        assert not len(folder.rollouts())
        status.read_status(root)
        summary_table(folder)
        assert checkpoint.latest(folder.checkpoints, full=True).path is None
        assert _written(place, np.zeros(0)) is not None
        with pytest.raises(VlrlError):
            load_run(root).config  # noqa: B018 - it is read here
        if name.endswith(".jsonl"):
            with pytest.raises(RunError, match="cannot write"):
                files.append_line(place, "{}")
            assert any(name in note for note in folder.notes)


def test_a_file_of_settings_has_a_size_and_lines_are_read_in_pieces(tmp_path, monkeypatch):
    with open(tmp_path / "heartbeat.json", "wb") as file:
        file.truncate(1 << 40)
    assert files.read_json(tmp_path / "heartbeat.json") is None
    with pytest.raises(OSError, match="more than 10 bytes"):
        files.read_small(tmp_path / "heartbeat.json", 10)
    monkeypatch.setattr(files, "MOST_LINE", 8)
    (tmp_path / "a").write_bytes(b"1\n" + b"x" * 20 + b"\n2\nhalf")
    last = [(b"2\n", 2), (b"half", 4)]
    assert [*files.read_lines(tmp_path / "a")] == [(b"1\n", 2), (b"#xxxxx\n", 21), *last]
    assert [*files.read_lines(tmp_path / "a", 23)] == last


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
