"""Who is missing, by the records of the ranks; how a process leaves its group."""

import errno
import os
import subprocess
import sys

import pytest
from torch import distributed

from vlrl.distributed import comm
from vlrl.distributed.position import RankPosition
from vlrl.distributed.rank_monitor import RankMonitor, describe_missing


def record(beat=1, count=5, waits=True, place="step 3, train", ended=None):
    return {"beat": beat, "count": count, "waits": waits, "place": place, "for_s": 12.3, "ended": ended, "host": "a"}


def missing(*pairs, rank=0, count=5):
    before, after = zip((record(), record(beat=2)), *pairs, strict=True)
    return describe_missing(rank, count, before, after)


HERE = (record(), record(beat=2))
SILENT = (record(beat=4), record(beat=4))
BEHIND = (record(), record(beat=2, count=4, waits=False, place="step 3, rollout"))


def test_who_is_missing():
    assert missing(HERE, SILENT, BEHIND) == (
        "rank 2 (no sign of life from host a; last heard of in step 3, train); rank 3 (in step 3, rollout for 12 s)")
    own = (record(), record(ended={"why": "KeyError: 'x'", "follows": False}))
    followed = (record(), record(ended={"why": "RankError: ...", "follows": True}))
    assert missing(followed, own) == "rank 2 (ended in step 3, train: KeyError: 'x')"
    assert "rank 1 (ended in step 3, train: RankError: ...)" in missing(followed, HERE)
    assert missing(HERE, HERE).startswith("rank 1; rank 2; these have reached the same point or gone further")
    assert "GLOO_SOCKET_IFNAME" in missing(HERE)
    assert missing((None, None)) == "rank 1 (has not begun)"
    assert missing(*[SILENT] * 20).endswith(" and 12 more")


def test_a_place_is_step_phase_and_collective():
    here = RankPosition()
    here.at("step 12")
    here.phases.append("train")
    assert str(here) == "step 12, train"
    here.enter("adding up gradients", depth=1)
    assert str(here).startswith("step 12, train: adding up gradients (test_rank_monitor.py:")
    here.leave()
    assert str(here) == "step 12, train" and here.count == 1


@pytest.mark.parametrize("code, given_up", [
    (errno.ETIMEDOUT, True), (errno.EHOSTUNREACH, True), (errno.ENETUNREACH, True), (errno.ECONNREFUSED, False)])
def test_what_tcp_says_of_a_host_that_it_has_given_up(monkeypatch, code, given_up):
    """A neighbour on the same network is not found (no route) long before TCP's own time is over."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    call = RankMonitor(RankPosition(), 0, 1, 60)
    class Broken:
        def set(self, key, value):
            raise distributed.DistNetworkError(f"failed to send, remote=[host]:29400: {os.strerror(code)}")
    call.close()
    assert not call._thread.is_alive()
    call._writing = Broken()
    call.publish()
    assert call._cut is given_up


LEAVES = """
import sys
import torch
from torch import distributed
from vlrl.distributed import comm

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
kept = distributed.group.WORLD  # as FSDP's meshes keep it
comm.gather("something")
distributed.all_gather([torch.ones(3)], torch.ones(3))
comm.leave()
print(comm._thread_states("pt_gloo"), distributed.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gloos_threads_are_at_rest_when_a_process_has_left_its_group():
    done = subprocess.run([sys.executable, "-c", LEAVES], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "SS False\n"), done.stderr


def test_two_quiet_looks_are_awaited(monkeypatch):
    """A thread that asks for the interpreter sleeps too, but not at two looks with a pause between."""
    for looks, taken in ((["SS", "SS"], 2), (["SR", "SS", "RS", "SS", "SS", "SS"], 5)):
        left = iter(looks)
        monkeypatch.setattr(comm, "_thread_states", lambda prefix, left=left: next(left))
        comm._await_gloo()
        assert len([*left]) == len(looks) - taken
    monkeypatch.setattr(comm, "_thread_states", lambda prefix: "R")  # busy ones are not awaited for ever
    comm._await_gloo(seconds=0.05)
