"""The watchdog: what is stuck ends, with the stacks on disk; what moves or was stopped does not."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as distributed

from vlrl.distributed import comm, rank_monitor
from vlrl.distributed import position as place
from vlrl.monitoring import metrics
from vlrl.monitoring.watchdog import Stuck, Watchdog

SCRIPT = """
import sys, time
from pathlib import Path
from vlrl.monitoring import metrics, watchdog
watchdog.GRACE_S = watchdog._FAREWELL_S = 0.5
def holds_on_to_everything():
    while True:
        try:
            time.sleep(100)
        except BaseException:
            pass
def fills_a_pipe():
    while True:
        try:
            sys.stdout.write("x" * 10**7)
        except BaseException:
            pass
def moves():
    print("moving", flush=True)
    end = time.monotonic() + 60
    while not (Path(sys.argv[1]) / "go").exists() and time.monotonic() < end:
        metrics.phase("decode")
        time.sleep(0.05)
with watchdog.Watchdog(float(sys.argv[3]), Path(sys.argv[1])):
    metrics.phase("generate")
    globals()[sys.argv[2]]()
print("ended well")
"""


def test_a_main_thread_that_waits_is_made_to_raise(tmp_path):
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(Stuck, match=r"limits\.stuck_s=0\.2.*'generate' began.*stuck-rank-00000\.txt.*checkpoint"), \
            Watchdog(0.2, tmp_path):
        metrics.phase("generate")
        time.sleep(60)
    stacks = (tmp_path / "stuck-rank-00000.txt").read_text()
    assert "test_a_main_thread_that_waits" in stacks and "'generate'" in stacks
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_off_and_at_rest(tmp_path):
    for seconds in (0, 1000):
        with Watchdog(seconds, tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def start(tmp_path, what, seconds):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), what, str(seconds)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_process_that_cannot_end_is_ended(tmp_path):
    (tmp_path / "run.lock").write_text("{}")
    process = start(tmp_path, "holds_on_to_everything", 0.2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "limits.stuck_s" in err and not out
    assert "holds_on_to_everything" in (tmp_path / "stuck-rank-00000.txt").read_text()
    assert not (tmp_path / "run.lock").exists()
    (tmp_path / "run").touch()
    process = start(tmp_path / "run", "holds_on_to_everything", 0.2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "could not be written" in err


@pytest.mark.slow
def test_no_full_pipe_keeps_it(tmp_path):
    process = start(tmp_path, "fills_a_pipe", 0.2)
    assert process.wait(120) == 1  # nobody reads what it prints
    process.communicate()


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on(tmp_path):
    process = start(tmp_path, "moves", 4)
    assert process.stdout.readline() == "moving\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)  # longer than stuck_s: what is tested is that the time counts for nothing
    process.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "ended well\n"), err


def test_a_rank_that_waits_for_others_says_for_whom(tmp_path, monkeypatch):
    """Also where limits.stuck_s is below limits.collective_s."""
    monkeypatch.setattr(rank_monitor, "BEAT", 0.02)
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    here, there = place.RankPosition(), place.RankPosition()
    there.at("step 3")
    calls = [rank_monitor.RankMonitor(one, rank, 2, 1800) for rank, one in enumerate((here, there))]
    monkeypatch.setattr(comm, "here", here)
    monkeypatch.setattr(comm, "_monitor", calls[0])
    here.at("step 3")
    here.enter("gathering values")
    with pytest.raises(Stuck, match=r"'train' began: rank 0 waited \d+ s in step 3: gathering values .* for rank 1 "
                                    r"\(in step 3 for \d+ s\)\. The stacks"), Watchdog(0.1, tmp_path):
        metrics.phase("train")
        time.sleep(60)
    here.leave()
    for call in calls:
        call.close()
