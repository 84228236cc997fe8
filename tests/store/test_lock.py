"""The lock on a run folder: who gets it, who loses it, and what is written without it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tables import each
from vlrl.errors import RunError
from vlrl.store import RunFolder, lock

HOLD = "import sys, time\nfrom vlrl.store import RunFolder\nwith RunFolder(sys.argv[1]).lock():\n" \
       "    print('held', flush=True)\n    time.sleep(600)\n"


def holder(path: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_lock_names_its_owner_and_is_taken_over_when_that_is_dead(tmp_path):
    process = holder(tmp_path)
    try:
        with pytest.raises(RunError, match=rf"process {process.pid} .*run\.dir"), RunFolder(tmp_path).lock():
            pass
    finally:
        process.send_signal(signal.SIGKILL)
    # not waited for: a zombie is as dead
    deadline = time.monotonic() + 10
    while "Z" not in Path(f"/proc/{process.pid}/stat").read_text().split(")")[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    with RunFolder(tmp_path).lock():
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run.lock").exists()
    process.wait()
    process.stdout.close()


def test_lock_is_let_go_after_an_error_and_shows_signs_of_life(tmp_path, monkeypatch):
    with pytest.raises(KeyError), RunFolder(tmp_path).lock():
        with pytest.raises(RunError, match="in use"), RunFolder(tmp_path).lock():
            pass
        assert (tmp_path / "run.lock").exists()
        raise KeyError
    assert not (tmp_path / "run.lock").exists()
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    with RunFolder(tmp_path).lock():
        os.utime(tmp_path / "run.lock", (0, 0))
        end = time.monotonic() + 60
        while not (tmp_path / "run.lock").stat().st_mtime and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / "run.lock").stat().st_mtime


@each("change taken", [
    ({}, False), ({"process": "another start of this pid"}, True), ({"pid": 2**22 + 1}, True),
    ({"host": "another-host", "pid": 1}, False), (None, True), ({"system": "an earlier boot"}, True)])
def test_whose_lock_counts(tmp_path, change, taken):
    text = "" if change is None else json.dumps(lock.this_process() | change)
    (tmp_path / "run.lock").write_text(text)
    os.utime(tmp_path / "run.lock", (0, 0))  # silent for long
    if taken:
        with RunFolder(tmp_path).lock():
            pass
    else:
        with pytest.raises(RunError, match=r"delete .*run\.lock"), RunFolder(tmp_path).lock():
            pass
        assert (tmp_path / "run.lock").read_text() == text


ELSEWHERE = ["unshare", "--uts", "sh", "-c", "hostname another-host && exec \"$@\"", "sh"]
"""A command under another host's name, of which a process cannot be looked up."""
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
"""A command in a container of this host's name: ids of its processes are others' here."""
needs_namespaces = pytest.mark.skipif(
    any(subprocess.run([*command, "true"], check=False, capture_output=True).returncode for command in (
        ELSEWHERE, CONTAINER)), reason="needs the right to make a namespace")
BEATING = f"from vlrl.store import lock\nlock.BEAT_S = 0.5\n{HOLD}"


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("elsewhere", [CONTAINER, ELSEWHERE], ids=["container", "host"])
def test_a_lock_of_another_container_or_host_is_taken_when_it_is_silent(tmp_path, monkeypatch, caplog, elsewhere):
    """Its pid is none here. It keeps its folder while it beats twice a second; once killed and silent, it loses it."""
    process = subprocess.Popen([*elsewhere, sys.executable, "-c", BEATING, str(tmp_path)], stdout=subprocess.PIPE,
                               text=True)
    monkeypatch.setattr(lock, "_LOOK_S", 0.05)
    monkeypatch.setattr(lock, "SILENT_S", 60)
    try:
        assert process.stdout.readline() == "held\n"
        words = r"on another-host .*sign of life was \d+ s ago.*steal_lock=true.* or delete"
        if elsewhere is CONTAINER:  # of the same name
            other = json.loads((tmp_path / "run.lock").read_text())
            assert other["pid"] == 1 and other["host"] == lock.this_process()["host"]
            assert lock.owner_lives(other) is None
            words = r"in use by process 1 .*sign of life was \d+ s ago.*if that process is gone, delete"
        with pytest.raises(RunError, match=words), RunFolder(tmp_path).lock():
            pass
        if elsewhere is ELSEWHERE:
            with pytest.raises(RunError, match=r"on another-host"), RunFolder(tmp_path).lock(steal=True):
                pass  # it was seen to live
        assert "more for a sign of life" in caplog.text
    finally:
        process.kill()
        process.communicate()
    monkeypatch.setattr(lock, "SILENT_S", 2)
    with RunFolder(tmp_path).lock(steal=elsewhere is ELSEWHERE):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fate, words", [("vanished", r"has vanished.*Restore the folder"),
                                         ("taken", r"taken over by process 7")])
def test_a_run_whose_folder_is_gone_writes_no_more(tmp_path, fate, words):
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        folder.append_metrics({"step": 0})
        if fate == "vanished":
            shutil.rmtree(folder.path)
        else:
            (folder.path / "run.lock").write_text(json.dumps(lock.this_process() | {"pid": 7}))
        for write in (lambda: folder.append_metrics({"step": 1}), lambda: folder.append_eval({"step": 1}),
                      lambda: folder.write_rollouts(1, 0, [])):
            with pytest.raises(RunError, match=words):
                write()
        folder.heartbeat({"step": 1})
        assert not (folder.path / "heartbeat.json").exists()
    assert folder.path.exists() == (folder.path / "run.lock").exists() == (fate == "taken")
    RunFolder(tmp_path / "run").append_metrics({"step": 0})  # not held: whoever writes knows what he does


def test_a_lock_that_another_has_just_made_is_neither_taken_away_nor_written_over(tmp_path, monkeypatch):
    """What a second taker finds; and one made between the look at the file and the claim, where no flock helps."""
    path, other = tmp_path / "run.lock", json.dumps({"host": "another-host", "pid": 7, "since": "noon"})
    mine = json.dumps(lock.this_process())
    path.write_text(mine)
    lock._remove_stale(path, lock.this_process() | {"pid": 2**22 + 1})
    assert path.read_text() == mine and len(os.listdir(tmp_path)) == 1
    path.write_text(other)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self != path and exists(self))
    with pytest.raises(RunError, match="in use by process 7 on another-host since noon"):
        lock._claim(path, lock.this_process(), False)
    assert path.read_text() == other


def test_of_many_takers_of_a_stale_lock_one_wins(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps(lock.this_process() | {"pid": 2**22 + 1}))
    code = HOLD.replace("time.sleep(600)", "sys.stdin.read()")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    takers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) for _ in range(4)]
    assert sum(taker.stdout.readline() != "held\n" for taker in takers) == 3  # the word of the winner, or a loser's end
    for taker in takers:
        taker.communicate()
    assert sorted(t.returncode for t in takers) == [0, 1, 1, 1]


def test_a_lock_that_cannot_be_removed_hides_no_error(tmp_path, monkeypatch, caplog):
    def unlink(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(RunError, match="the first error"), RunFolder(tmp_path).lock():
        monkeypatch.setattr(Path, "unlink", unlink)
        raise RunError("the first error")
    assert "stays locked" in caplog.text and "Read-only file system" in caplog.text
