"""How a process leaves its group."""

import subprocess
import sys

import pytest

from vlrl.distributed import comm

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
