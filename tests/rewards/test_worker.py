"""A process that is killed after a time limit, by small programs: replies, hangs, deaths, what they have started."""

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from vlrl.rewards.worker import Worker, WorkerEnded, WorkerHung

PROGRAM = """
import os, subprocess, time
from multiprocessing.connection import Connection
from vlrl.rewards._wire import serve, numbered_message
connection, asked = Connection(0), 0

def reply(word):
    global asked
    asked += 1
    if word == b"die":
        os._exit(1)
    if word == b"child":
        return str(subprocess.Popen(["sleep", "1000"]).pid).encode()
    if word == b"hang":
        time.sleep(1000)
    if word == b"unasked":
        connection.send_bytes(numbered_message(asked - 1, b"late"))
        connection.send_bytes(numbered_message(asked, b"first"))
    if word in (b"copy", b"raising copy") and not os.fork():
        time.sleep(0.05)
        if word == b"raising copy":
            raise KeyError("a copy")
        return b"of the copy"
    return word + b"!"

serve(connection, reply)
"""


def start():
    mine, other = socket.socketpair()
    with other:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=other.fileno(), start_new_session=True)
    return Connection(mine.detach()), process


@pytest.fixture
def worker():
    one = Worker(start)
    yield one
    one.kill()


def ask(worker, word, seconds=60.0):
    return worker.ask(word, lambda: (None, seconds))


def test_one_process_replies_until_it_ends(worker):
    assert worker.process is None and ask(worker, b"a") == b"a!"
    first = worker.process
    assert ask(worker, b"b" * 1_000_000) == b"b" * 1_000_000 + b"!" and worker.process is first
    with pytest.raises(WorkerEnded):
        ask(worker, b"die")
    assert worker.process is None and first.returncode == 1
    assert ask(worker, b"a") == b"a!" and worker.process is not first
    ask(worker, b"a")
    worker.process.kill()
    worker.process.wait()
    assert ask(worker, b"b") == b"b!"


def test_a_hang_is_killed_and_progress_is_none(worker):
    child = int(ask(worker, b"child"))
    with pytest.raises(WorkerHung):
        ask(worker, b"hang", 0.2)
    end = time.monotonic() + 60
    while alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child) and ask(worker, b"a") == b"a!"
    begun, places = time.monotonic(), iter(range(1000))
    with pytest.raises(WorkerHung):
        worker.ask(b"hang", lambda: (next(places) if time.monotonic() < begun + 0.5 else None, 0.1))
    assert time.monotonic() > begun + 0.5
    ask(worker, b"a")
    child = os.fork()
    if child == 0:
        worker.forget()
        worker.kill()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and ask(worker, b"b") == b"b!"


def alive(pid):
    """Returns whether a process runs; one that is dead and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("word", [b"copy", b"raising copy"])
def test_a_copy_that_a_reply_leaves_behind_replies_to_nothing(worker, word):
    replies = []
    for i in range(5):
        replies += [ask(worker, word), ask(worker, b"%d" % i)]
    time.sleep(0.1)
    assert replies == [r for i in range(5) for r in (word + b"!", b"%d!" % i)] and ask(worker, b"a") == b"a!"
    assert worker.late == 0


def test_replies_that_belong_to_no_request_are_dropped_and_counted(worker):
    assert ask(worker, b"a") == b"a!"
    for i in range(1, 11):
        assert ask(worker, b"unasked") == b"first"  # its number; "late" has that of the request before
        assert ask(worker, b"b") == b"b!"  # and "unasked!" comes twice
        assert worker.late == 2 * i
