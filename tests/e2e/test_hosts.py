"""Two hosts: network namespaces with one shared run folder, torchrun and accelerate launch, a cable that is cut."""

import re
import subprocess
import sys
import time

import pytest

from tests.e2e.hosts import Hosts, ip, output, works
from tests.e2e.runs import FEW, ROOT, assert_same_run, run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not works(), reason="needs root and network namespaces")]
ENDS_S = 480
"""Seconds in which a command ends on stock settings of the network: TCP alone would need 15 minutes."""


def said(folder):
    return [output(folder, host).read_text()[-3000:] for host in range(2)]


def finished(processes, folder, timeout=600):
    """The exit codes and outputs of both hosts, which have no process any more."""
    codes = [process.wait(timeout) for process in processes]
    return codes, [output(folder, host).read_text() for host in range(2)]


def test_a_run_on_two_hosts_is_that_of_two_processes(pair):
    """By accelerate launch; the next test has torchrun."""
    folder = pair.config.parent / "accelerate"
    with Hosts() as hosts:
        codes, texts = finished(hosts.accelerate(pair.config, folder, *FEW), folder)
    assert codes == [0, 0], texts
    assert_same_run(folder, pair.whole)


@pytest.mark.long
def test_a_cut_cable_ends_both_hosts_with_a_message_and_the_run_goes_on(pair):
    folder = pair.config.parent / "cut"
    with Hosts() as hosts:
        processes = hosts.torchrun(pair.config, folder, *FEW, "limits.collective_s=20")
        wait_for(folder, 3, processes, lambda: said(folder))
        hosts.cut()
        codes, texts = finished(processes, folder, ENDS_S)
        assert all(codes), texts
        for text in texts:
            (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
            assert re.search(r"rank \d waited \d+ s in step \d", line) and "limits.collective_s=20" in line
        assert "no sign of life" in texts[0] and "does not answer either" in texts[1], texts  # the store is on host 0
        assert codes[1] == -9 and ["still waits for its store" in text for text in texts] == [False, True], texts
        assert not (folder / "run.lock").exists()
        end = time.monotonic() + 60
        while hosts.pids():  # the last one is who killed the launcher
            assert time.monotonic() < end
            time.sleep(0.1)
    done = run(pair.config, folder, *FEW, processes=2)  # on whichever hosts: the folder is shared
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr
    assert_same_run(folder, pair.whole)


STORE = """
import time
from torch import distributed
store = distributed.TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("up", flush=True)
time.sleep(1000)
"""
RANK = """
import time
from vlrl.distributed import rank_monitor
from vlrl.distributed import position
rank_monitor.GRACE = 1
here = position.RankPosition()
rank_monitor.RankMonitor(here, 1, 2, 100000)
here.enter("adding up gradients", depth=1)
print("up", flush=True)
time.sleep(1000)
"""


def test_a_rank_says_why_before_its_launcher_ends_it(tmp_path):
    """Where limits.collective_s is above the time after which TCP gives up: here 12 s, and 3 s later there is no route.
    Other reasons: tests/distributed."""
    with Hosts() as hosts:
        ip("netns", "exec", hosts.names[1], "sysctl", "-qw", "net.ipv4.tcp_retries2=5")
        for host, code in enumerate((STORE, RANK)):
            text = tmp_path / f"{host}.txt"
            process = hosts.start(host, [sys.executable, "-c", code], text, MASTER_ADDR=hosts.addresses[0],
                                  MASTER_PORT="29400", PYTHONPATH=str(ROOT))
            end = time.monotonic() + 300
            while "up\n" not in text.read_text():
                assert process.poll() is None and time.monotonic() < end, text.read_text()
                time.sleep(0.1)
        hosts.cut()
        assert process.wait(300) == 1
    said = text.read_text()
    assert re.search("^error: rank 1 waited .*: adding up gradients .*not answer either", said, re.MULTILINE), said


def test_nothing_is_left_behind(tmp_path):
    with Hosts() as hosts:
        sleeper = hosts.start(0, ["sleep", "1000"], tmp_path / "out")
    assert sleeper.returncode is not None
    left = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    assert not any(name in left for name in hosts.names)
