"""Scoring in a process of its own, and the process that starts it: the same scores, answers that hang, end or stay."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SAMPLES
from tests.e2e.runs import ROOT
from vlrl.errors import TaskError
from vlrl.monitoring.signals import STOPS
from vlrl.task import fork_server
from vlrl.task.base import Task
from vlrl.task.fork_server import ForkServer, ForkServerLost
from vlrl.task.scoring import score_all
from vlrl.task.services import Services
from vlrl.task.subprocess_scorer import SubprocessScorer
from vlrl.types import Answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process is forked on Linux alone")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process is forked on Linux alone")
SAMPLE = SAMPLES["image"]


def answers_overlay(parsed):
    return isinstance(parsed, dict) and parsed["text"] == "overlay"


class Odd(Task):
    """Does what an answer says."""

    prompt = "{q}"
    rewards = {"length": 1.0, "rank": 0.5}

    def __init__(self):
        super().__init__()
        self.asked, self.lambdas = 0, [lambda: 1]

    def score(self, sample, answer):
        self.asked += 1
        text = answer.text
        if text == "loop":
            while True:
                pass
        if text == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")  # holds the lock of the interpreter
        if text == "exit":
            os._exit(3)
        if text == "child":
            Path(sample.row["pid"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            time.sleep(1000)
        if text == "wait":
            (Path(sample.row["folder"]) / "begun").touch()
            wait_for((Path(sample.row["folder"]) / "go").exists)
        if text.endswith("copy") and not os.fork():  # which does not end
            time.sleep(0.02)
            return 1 / 0 if text == "raising copy" else {"length": 99.0}
        if text == "wrong":
            raise TaskError("mend me")
        return {"length": 1 / 0 if text == "divide" else float("nan") if text == "nan" else np.float32(len(text))}

    def score_group(self, sample, answers, services):
        if any(a.text == "group" for a in answers):
            time.sleep(1000)
        return [{"rank": float(i)} for i, _ in enumerate(answers)]

    def parse(self, sample, answer):
        return self.lambdas if answer.text == "lambda" else {"text": answer.text, "asked": self.asked}

    def overlay(self, sample, parsed):
        if answers_overlay(parsed):
            time.sleep(1000)
        return [{"kind": "point", "at": [1, 2], "label": str(parsed)}]


@pytest.fixture
def scorer():
    made = SubprocessScorer(lambda convention: Odd(), 1.0)
    made.set_convention("norm1000")
    yield made
    made.close()


def answers(*texts):
    return [Answer(text=text, final=text, step=3) for text in texts]


def scored(scorer, *texts, sample=SAMPLE, task=None):
    return scorer(task or Odd(), sample, answers(*texts), [], 3, Services())


def both(scorer, *texts, others=()):
    given = (SAMPLE, answers(*texts), answers(*others), 3, Services())
    return scorer(Odd(), *given), score_all(Odd(), *given)


def test_the_same_scores_in_the_same_order(scorer):
    found, expected = both(scorer, "one", "divide", "nan", "three", others=("aside",))
    assert found == expected and [s.error is None for s, _ in found[0]] == [True, False, False, True, True]
    assert found[0][3][0].parsed["asked"] == 4  # the state of its own process
    assert both(scorer)[0] == both(scorer)[1]
    before = os.getpid()
    found, _ = score_all(Odd(), SAMPLE, answers("copy"), [], 3, Services())
    assert os.getpid() == before and found[0][0].parts["length"] == 4  # the copy does not come here


@pytest.mark.slow
@pytest.mark.parametrize("text, why", [
    ("loop", "TimeoutError: no result within limits.score_s=1 s"), ("exit", "ChildProcessError"), *(
        pytest.param(text, "TimeoutError", marks=pytest.mark.slow) for text in ("regex", "overlay"))])
def test_an_answer_that_hangs_or_ends_the_process(scorer, text, why, caplog):
    found, weights = scored(scorer, "one", text, "three")
    assert weights == {"length": 1.0, "rank": 0.5} and "sample 'image'" in caplog.text
    assert [(s.reward, s.parts) for s, _ in (found[0], found[2])] == [
        (3.0, {"length": 3.0, "rank": 0.0}), (6.0, {"length": 5.0, "rank": 2.0})]
    (bad, marks), (good, _) = found[1], found[0]
    if text == "overlay":
        assert bad.reward == 7.5 and marks is None and bad.error is None
    else:
        assert bad.reward is None and why in bad.error and bad.parts == {"length": None, "rank": None}
    assert good.error is None and scored(scorer, "one")[0][0][0].reward == 3  # another process goes on


@pytest.mark.parametrize("text", ["copy", "raising copy"])
def test_a_copy_left_behind_pays_no_other_answer(scorer, text, tmp_path):
    rewards = []
    for _ in range(5):
        for one in (text, "three"):
            (found, _), = scored(scorer, one)[0]
            rewards.append((found.parts["length"], found.error))
    time.sleep(0.05)
    assert rewards == [(float(len(text)), None), (5.0, None)] * 5 and scorer.worker.late == 0


def test_a_killed_fork_server_warns(scorer, caplog):
    os.kill(scorer.fork_server.process, signal.SIGKILL)
    assert scored(scorer, "one")[0][0][0].reward == 3
    assert "scored in the training process" in caplog.text and "was killed from outside" in caplog.text
    assert "cannot be sent" not in caplog.text


def test_what_hangs_or_was_started_ends(scorer, tmp_path):
    scorer.seconds = 0.2  # for each of its answers
    found, _ = scored(scorer, "one", "group")
    assert all(s.reward is None and "TimeoutError" in s.error for s, _ in found)
    sample = replace(SAMPLE, row={"q": "?", "pid": str(tmp_path / "pid")})
    scored(scorer, "child", sample=sample)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
    assert not alive(pid)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_is_asked_of_this_process(scorer, caplog):
    sample = replace(SAMPLE, row={"q": "?", "odd": lambda: 1})
    task = Odd()
    assert scored(scorer, "one", sample=sample, task=task)[0][0][0].reward == 3 and task.asked == 1
    assert scored(scorer, "lambda", task=task)[0][0][0].parsed is task.lambdas and task.asked == 2
    assert len([r for r in caplog.records if "scored in the training process" in r.message]) == 1
    with pytest.raises(TaskError, match="mend me"):
        scored(scorer, "one", "wrong")
    task = Odd()
    scorer(task, SAMPLE, answers("one"), [], 3, Services({}, {"judge": lambda questions: questions}))
    assert task.asked == 1


@pytest.mark.parametrize("number", STOPS)
def test_what_asks_the_run_to_end_ends_no_scoring(scorer, tmp_path, number):
    scorer.seconds = 60
    signalled = threading.Thread(target=lambda: (
        wait_for(lambda: (tmp_path / "begun").exists()),
        [os.kill(pid, number) for pid in (scorer.worker.process, scorer.fork_server.process)],
        (tmp_path / "go").touch()))
    signalled.start()
    found, _ = scored(scorer, "wait", sample=replace(SAMPLE, row={"q": "?", "folder": str(tmp_path)}))
    signalled.join()
    assert [(s.reward, s.error) for s, _ in found] == [(4.0, None)]
    scored(scorer, "exit")  # which asks for another process
    assert alive(scorer.fork_server.process)


def wait_for(there):
    end = time.monotonic() + 60
    while not there() and time.monotonic() < end:
        time.sleep(0.02)


def test_closed(scorer):
    both(scorer, "one")
    fork_server, worker = scorer.fork_server.process, scorer.worker.process
    scorer.close()
    wait_for(lambda: not alive(worker))
    assert not alive(fork_server) and not alive(worker)
    scorer.close()




def sleeper(connection, text):
    """Starts one in a session of its own, whose parent is gone."""
    started = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True)
    connection.send_bytes(started.stdout.strip())
    time.sleep(1000)


def test_what_is_in_a_session_of_its_own_ends_with_it():
    server = ForkServer(sleeper)
    connection, worker = server.start("")
    stray = int(connection.recv_bytes())
    assert alive(worker) and alive(stray)
    wait_for(lambda: os.getsid(stray) != os.getsid(worker))
    server.close()
    assert not alive(worker) and not alive(stray)


ENDING = """
from tests.task.test_subprocess_scorer import Odd, SAMPLE, answers, sleeper
from vlrl.task.fork_server import ForkServer
from vlrl.task.services import Services
from vlrl.task.subprocess_scorer import SubprocessScorer
server, scorer = ForkServer(sleeper), SubprocessScorer(lambda convention: Odd(), 1000)
scorer(Odd(), SAMPLE, answers("one"), [], 3, Services())
stray = int(server.start("")[0].recv_bytes())
print(stray, server.process, scorer.fork_server.process, scorer.worker.process, flush=True)
scorer(Odd(), SAMPLE, answers("loop"), [], 3, Services())
"""


@pytest.mark.slow
def test_all_end_with_a_run_that_is_killed():
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [*map(int, process.stdout.readline().split())]
    assert len(pids) == 4 and all(map(alive, pids))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(alive, pids)))
    assert not any(map(alive, pids))


def test_one_that_was_killed_is_named():
    server = ForkServer(sleeper)
    os.kill(server.process, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ForkServerLost, match=f"pid {server.process}.* was killed from outside"):
            server.start("")
    server.close()


def test_prints_are_bounded(capfd, monkeypatch):
    def chatty(connection, text):
        for _ in range(50):
            print("x" * 99)
        print("y", file=sys.stderr)
        connection.send_bytes(b"done")
    monkeypatch.setattr(fork_server, "MOST_PRINTED", 1000)
    server = ForkServer(chatty)
    assert server.start("")[0].recv_bytes() == b"done"
    server.close()
    out, err = capfd.readouterr()
    assert out.count("x") == 990 and "has printed 1000 characters" in out and err == "y\n"
