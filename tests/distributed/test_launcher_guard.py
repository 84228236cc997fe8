"""A launcher that hangs is killed with what it started, and no other process; on hosts: tests/e2e/test_hosts.py."""

import os
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone")
AGENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0"}
sleeper = subprocess.Popen(["sleep", "1000"])
print(sleeper.pid, flush=True)
subprocess.run(["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", sys.argv[1]])  # by a script, as some are
sys.stdin.read()
"""
RANK = """
import psutil
from vlrl.distributed import launcher_guard
launcher_guard.LAUNCHER_S = 0.2
found = launcher_guard.find()
if found is not None:
    found.end_if_it_hangs()
print(found and found.pid, len(psutil.Process().children()), flush=True)
"""


def agent(*words, **env):
    """Something that hangs after its rank has ended, with a process beside the rank, and what the rank says: the pid
    that it found and how many wait for that to end."""
    process = subprocess.Popen([sys.executable, "-c", AGENT, RANK, *words], stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env})
    assert process.stdout
    return process, psutil.Process(int(process.stdout.readline())), process.stdout.readline().strip()


@pytest.mark.slow
def test_a_launcher_that_hangs_is_killed_with_all_that_it_started():
    process, sleeper, found = agent("torchrun")
    assert found == f"{process.pid} 1"
    assert process.wait(60) == -9
    _, said = process.communicate(timeout=60)
    assert f"Killing the launcher, process {process.pid}" in said
    psutil.wait_procs([sleeper], 60)
    assert not sleeper.is_running()


@pytest.mark.parametrize("words, env, known", [
    (["torchrun"], {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, True),
    (["something-else"], {}, False)])
def test_one_that_may_restart_its_ranks_and_one_of_another_kind_are_left_alone(words, env, known):
    process, sleeper, found = agent(*words, **env)
    sleeper.kill()
    _, said = process.communicate("", timeout=60)
    assert found == f"{process.pid if known else None} 0" and process.returncode == 0 and not said


def test_a_process_without_a_launcher_finds_none():
    done = subprocess.run([sys.executable, "-c", RANK], text=True, capture_output=True, check=True)
    assert done.stdout == "None 0\n"
