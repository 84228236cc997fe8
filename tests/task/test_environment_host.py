"""Environments in processes of their own: calls that wait beside others, and limits of each call."""

import os
import time

import pytest

from vlrl import Environment, Observation, Sample, Step, Task
from vlrl.config.schema import EnvironmentSettings
from vlrl.task.environment_host import Environments, Failed


class Gate(Environment):
    """`open` makes a file, `wait` waits for it."""

    def __init__(self, sample):
        self.file, self.hang = sample["file"], sample["hang"]

    def reset(self, seed):
        while self.hang:
            time.sleep(1)
        return Observation(str(seed))

    def step(self, action):
        if action == "open":
            open(self.file, "w").close()
        while action == "wait" and not os.path.exists(self.file):
            time.sleep(0.01)
        return Step(Observation(action), done=True)


class Gates(Task):
    rewards = {"none": 1.0}

    def environment(self, sample):
        return Gate(sample)


@pytest.fixture
def opened(tmp_path):
    hosts = []

    def open_(hangs, **settings):
        host = Environments(lambda convention: Gates(), EnvironmentSettings(**settings))
        hosts.append(host)
        row = {"file": str(tmp_path / "open")}
        return host, [host.open(Sample(id=str(i), row={**row, "hang": h}), i) for i, h in enumerate(hangs)]

    yield open_
    for host in hosts:
        host.close()


def test_a_call_that_waits_holds_up_its_own_process_alone(opened):
    host, (one, other, behind) = opened([False] * 3, workers=2)
    assert [o.text for o in host.reset([one, other, behind])] == ["0", "1", "2"]
    waiting = host.begin_step(one, "wait")
    late = host.begin_step(behind, "late")  # in the process of `one`
    assert not waiting.done() and not late.done()
    assert host.begin_step(other, "open").result(60).observation.text == "open"
    assert waiting.result(60).observation.text == "wait" and late.result(60).observation.text == "late"
    assert one.seconds > 0 and host.restarts == 0


def test_the_first_call_of_a_process_has_its_own_limit(opened):
    host, (hung, well) = opened([True, False], workers=1, reset_s=0.5)
    begun = time.monotonic()
    first, second = host.reset([hung, well])
    assert isinstance(first, Failed) and first.reason == "reset: no result within 0.5 s" and second.text == "1"
    assert time.monotonic() - begun < 30  # not that of the start of a process, a minute more
    assert host.restarts == 1
