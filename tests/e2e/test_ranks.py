"""A rank that dies, hangs, fails or takes long: what the others say (torchrun, gloo)."""

import re
import subprocess
import sys

import pytest

from tests.e2e.runs import ENV, ROOT

pytestmark = pytest.mark.slow


def outcome(how):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
                           "tests.e2e.ranks", how], cwd=ROOT, env={**ENV, "ACCELERATE_USE_CPU": "true"}, timeout=300,
                          text=True, capture_output=True)
    return done, re.findall(r"^error: .*$", done.stderr, re.MULTILINE)


MISSING = {
    "kill": (0, r"for rank 1 \(no sign of life from host .*; last heard of in .*\)"),
    "stop": (0, r"rank 0 waited \d+ s in .* for rank 1 \(no sign of life from host .*\)"),
    "dally": (0, r"rank 0 waited \d+ s in .* for rank 1 \(in step 7, train for \d+ s\)"),
    "fail": (0, r"for rank 1 \(ended in step 7, train: KeyError: 'a fault of rank 1 alone'\)"),
    "leave": (0, r"for rank 1 \(ended in step 7, train: it came to its end\)"),
    "impatient": (1, r"waited \d+ s in step 7, train: taking what rank 0 has \(ranks.py:\d+\) for rank 0 \(in"),
    "dead while saving": (1, r"in step 7, train: waiting for rank 0: saving \(ranks.py:\d+\) for rank 0 \(no sign of"),
    "transport": (0, r"rank 0 waited \d+ s in step 7, train for rank 1 \(no sign of life from host .*gloo"),
}
"""What is done -> who waits, and its message."""


@pytest.mark.parametrize("how", MISSING)
def test_the_others_say_who_is_missing_where(how):
    done, errors = outcome(how)
    rank, message = MISSING[how]
    assert done.returncode != 0
    (own,) = [e for e in errors if e.startswith(f"error: rank {rank} waited ")]
    assert re.search(message, own), own
    assert "start the same command again on every host" in own and "limits.collective_s=10" in own


def test_what_rank_0_does_alone_may_take_longer_than_the_limit():
    done, errors = outcome("patient")
    assert done.returncode == 0 and not errors, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("saved")) == ["saved 0", "saved 1"]
