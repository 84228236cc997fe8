"""Two hosts: network namespaces with one shared run folder, torchrun and accelerate launch, a cable that is cut."""

import re
import subprocess
import sys

import pytest

from tests.e2e.hosts import TRAIN, Hosts, output, wait_for, works
from tests.e2e.runs import metrics, run, weights, write_config
from vlrl.store import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not works(), reason="needs root and network namespaces")]
WORDS = ("steps=5", "save.every=2", "eval.samples=2", "rollout.prompts_per_step=2", "rollout.group_size=2")


@pytest.fixture(scope="module")
def config(tiny_models, tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("hosts"), tiny_models["qwen3_vl"])


@pytest.fixture(scope="module")
def whole(config):
    """The run folder of two processes on one host."""
    folder = config.parent / "whole"
    done = run(config, folder, *WORDS, launcher=[sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                 "--nproc_per_node", "2", TRAIN], ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    return folder


def finished(processes, folder, timeout=600):
    """The exit codes and outputs of both hosts."""
    codes = [process.wait(timeout) for process in processes]
    return codes, [output(folder, host).read_text() for host in range(2)]


def assert_same_run(found, whole):
    assert weights(found, 5) == weights(whole, 5)
    assert metrics(found) == metrics(whole) and len(metrics(found)) == 5
    assert metrics(found, "eval.jsonl") == metrics(whole, "eval.jsonl")
    assert RunFolder(found).rollouts().equals(RunFolder(whole).rollouts())


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_run_on_two_hosts_is_that_of_two_processes(config, whole, launcher):
    folder = config.parent / launcher
    with Hosts() as hosts:
        codes, texts = finished(getattr(hosts, launcher)(config, folder, *WORDS), folder)
    assert codes == [0, 0], texts
    assert_same_run(folder, whole)


def test_a_cut_cable_ends_both_hosts_with_a_message_and_the_run_goes_on(config, whole):
    folder = config.parent / "cut"
    with Hosts() as hosts:
        processes = hosts.torchrun(config, folder, *WORDS, "limits.collective_s=40")
        wait_for(folder, 3, processes)
        hosts.cut()
        codes, texts = finished(processes, folder)
        assert all(codes), texts
        for text in texts:
            (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
            assert re.search(r"rank \d waited \d+ s in step \d", line) and "limits.collective_s=40" in line
        assert "no sign of life" in texts[0] and "does not answer either" in texts[1], texts  # the store is on host 0
        assert not (folder / "run.lock").exists()
        hosts.mend()
        codes, texts = finished(hosts.torchrun(config, folder, *WORDS), folder)
        assert codes == [0, 0] and any("going on from" in text for text in texts), texts
    assert_same_run(folder, whole)


def test_nothing_is_left_behind(tmp_path):
    with Hosts() as hosts:
        sleeper = hosts.start(0, ["sleep", "1000"], tmp_path / "out")
    assert sleeper.returncode is not None
    left = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    assert not any(name in left for name in hosts.names)
