"""Environments in processes of their own: calls that wait beside others, limits of each call, resets that fail, and
worlds that are lost and begun again."""

import os
import time

import numpy as np
import pytest
from PIL import Image

from vlrl import Environment, Media, Observation, Sample, Step, Task
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.validation import ProtocolError, checked_step


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


class Fleeting(Environment):
    """A world of which one thing is another one in each process, as its sample says; "die" ends the process."""

    def __init__(self, sample):
        self.row, self.own = sample.row, os.getpid()

    def shown(self):
        what, own = self.row["anew"], self.own
        picture = Image.new("RGB", (4, 4), (own % 256, own // 256 % 256, 0) if what == "pixels" else "red")
        media = [Media(source=picture)]
        if what == "file":
            path = self.row["folder"] + "/frame.bin"  # the same name each time
            with open(path, "wb") as file:
                file.write(b"%d" % own)
            media = [Media(source=path)]
        if what == "frames":
            media = [Media(kind="video", fps=1.0, source=[picture] * (1 + own % 50))]
        return Observation(str(own) if what == "text" else "on", media)

    def reset(self, seed):
        return self.shown() if self.row["anew"] != "reset" else Observation(str(self.own))

    def step(self, action):
        if action == "die":
            os._exit(3)
        if action == "copy" and not os.fork():
            time.sleep(0.02)
            return Step(Observation("of a copy"), {"won": 99.0})
        what = self.row["anew"]
        return Step(self.shown(), {"won": float(self.own) if what == "part" else 1.0},
                    done=np.bool_(what == "done" and self.own % 2), state=self.own if what == "state" else "s")


class Flaky(Environment):
    """Fails so many resets, and counts them."""

    def __init__(self, sample):
        self.row = sample.row

    def reset(self, seed):
        with open(self.row["file"], "a") as file:
            file.write("x")
        if os.path.getsize(self.row["file"]) <= self.row["fails"]:
            if self.row["how"] == "exit":
                os._exit(3)
            raise ConnectionError("away")
        return Observation("well")


class Worlds(Task):
    rewards = {"won": 1.0}

    def environment(self, sample):
        return next(kind for name, kind in (("hang", Gate), ("how", Flaky), ("anew", Fleeting)) if name in sample.row)(
            sample)


@pytest.fixture
def hosting():
    hosts = []

    def made(**settings):
        hosts.append(Environments(lambda convention: Worlds(), EnvironmentSettings(**settings)))
        return hosts[-1]

    yield made
    for host in hosts:
        host.close()


@pytest.fixture
def worlds(hosting, tmp_path, monkeypatch):
    monkeypatch.setattr("vlrl.environments.host._PAUSES_S", (0.01, 0.02, 0.04))
    host, numbers = hosting(workers=1, reset_s=20), iter(range(1000))

    def begun(**row):
        episode = host.open(Sample(id=str(next(numbers)), row={"folder": str(tmp_path), **row}), 1)
        return episode, host.reset([episode])[0]

    return host, begun


def test_calls_wait_and_have_limits_of_their_own(hosting, tmp_path):
    def opened(host, hangs):
        return [host.open(Sample(id=str(i), row={"file": str(tmp_path / "open"), "hang": h}), i)
                for i, h in enumerate(hangs)]

    host = hosting(workers=2)
    one, other, behind = opened(host, [False] * 3)
    assert [o.text for o in host.reset([one, other, behind])] == ["0", "1", "2"]
    waiting = host.begin_step(one, "wait")
    late = host.begin_step(behind, "late")  # in the process of `one`
    assert not waiting.done() and not late.done()
    assert host.begin_step(other, "open").result(60).observation.text == "open"
    assert waiting.result(60).observation.text == "wait" and late.result(60).observation.text == "late"
    assert one.seconds > 0 and host.restarts == 0
    host, begun = hosting(workers=1, reset_s=0.5), time.monotonic()
    first, second = host.reset(opened(host, [True, False]))
    assert isinstance(first, EnvironmentFailure) and first.reason == "reset: no result within 0.5 s"
    assert second.text == "1" and host.restarts == 1
    assert time.monotonic() - begun < 30  # not that of the start of a process, a minute more


ANEW = ("text", "pixels", "file", "frames", "part", "done", "state", "reset", "")


def test_a_world_that_is_another_one_after_its_process_was_lost_is_not_gone_on_with(worlds):
    """Some are alike in processes whose numbers differ by a multiple: again then. One that is the same goes on."""
    (host, begun), left = worlds, {*ANEW}
    for _ in range(8):
        episodes, other, (before,) = [begun(anew=anew)[0] for anew in ANEW], begun(anew="")[0], host.processes
        assert all(isinstance(found, Step) for found in host.step(episodes, ["a"] * len(ANEW)))
        assert isinstance(host.step([other], ["die"])[0], EnvironmentFailure)
        for anew, found in zip(ANEW, host.step(episodes, ["b"] * len(ANEW)), strict=True):
            alike = {"done": 2, "frames": 50}.get(anew)
            if not alike or before % alike != host.processes[0] % alike:
                assert isinstance(found, EnvironmentFailure if anew else Step), anew
                assert not anew or found.reason.startswith("replay: its process was lost"), anew
                left -= {anew}
        if not left:
            return
    raise AssertionError(left)


def test_a_copy_that_a_world_leaves_behind_answers_no_other_episode(worlds):
    host, begun = worlds
    (one, _), (other, _) = begun(anew=""), begun(anew="")
    for _ in range(10):
        for episode, action in ((one, "copy"), (other, "a")):
            (step,) = host.step([episode], [action])
            assert isinstance(step, Step) and step.observation.text == "on" and step.parts == {"won": 1.0}
    assert host.restarts == 0


def test_a_reset_that_fails_is_tried_again_and_not_for_ever(worlds, tmp_path):
    _, begun = worlds
    for how in ("raise", "exit"):
        for fails, tries in ((2, 3), (9, 4)):
            file = tmp_path / f"{how}-{fails}"
            begin = time.monotonic()
            _, shown = begun(how=how, fails=fails, file=str(file))
            assert len(file.read_text()) == tries and time.monotonic() - begin < 10, how
            assert shown.text == "well" if fails == 2 else shown.reason.startswith("reset: "), how


def test_resets_while_a_server_is_away_have_one_try_each_until_it_is_back(worlds, tmp_path):
    _, begun = worlds

    def tries(name, fails):
        begun(how="raise", fails=fails, file=str(tmp_path / name))
        return len((tmp_path / name).read_text())

    assert [tries(f"away-{i}", 99) for i in range(5)] == [4, 4, 4, 1, 1]
    assert tries("back", 0) == 1 and tries("again", 2) == 3


def test_resets_have_a_limit_and_done_is_a_truth_value(hosting, tmp_path):
    host = hosting(workers=1, reset_s=0.6)
    host.reset([host.open(Sample(id="a", row={"how": "raise", "fails": 99, "file": str(tmp_path / "log")}), 1)])
    assert len((tmp_path / "log").read_text()) == 2  # a third would begin after 0.75 s
    for done in ("no", "yes", "", 2, None, [], float("nan")):
        with pytest.raises(ProtocolError, match="done is"):
            checked_step(Step(Observation(), {}, done=done))
    assert [checked_step(Step(done=d)).done for d in (True, np.bool_(False), 1, np.array(0))] == [True, False] * 2
