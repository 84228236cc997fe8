"""A process that is killed after a time limit, by small programs: replies, hangs, deaths, what they have started."""

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from vlrl.rewards.worker import Hung, Killed, Worker

PROGRAM = """
import os, subprocess, time
from multiprocessing.connection import Connection
connection = Connection(0)
while True:
    word = connection.recv_bytes()
    if word == b"die":
        os._exit(1)
    if word == b"child":
        connection.send_bytes(str(subprocess.Popen(["sleep", "1000"]).pid).encode())
    elif word == b"hang":
        time.sleep(1000)
    else:
        connection.send_bytes(word + b"!")
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


def test_one_process_replies_until_it_dies(worker):
    assert worker.process is None and ask(worker, b"a") == b"a!"
    first = worker.process
    assert ask(worker, b"b" * 1_000_000) == b"b" * 1_000_000 + b"!" and worker.process is first
    with pytest.raises(Killed):
        ask(worker, b"die")
    assert worker.process is None and first.returncode == 1
    assert ask(worker, b"a") == b"a!" and worker.process is not first


def test_a_process_that_ended_unasked_is_replaced(worker):
    ask(worker, b"a")
    worker.process.kill()
    worker.process.wait()
    assert ask(worker, b"b") == b"b!"


def test_a_hang_is_killed_with_what_it_has_started(worker):
    child = int(ask(worker, b"child"))
    with pytest.raises(Hung):
        ask(worker, b"hang", 0.2)
    end = time.monotonic() + 60
    while alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child) and ask(worker, b"a") == b"a!"


def alive(pid):
    """Returns whether a process runs; one that is dead and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_progress_is_no_hang(worker):
    begun, places = time.monotonic(), iter(range(1000))
    with pytest.raises(Hung):
        worker.ask(b"hang", lambda: (next(places) if time.monotonic() < begun + 0.5 else None, 0.1))
    assert time.monotonic() > begun + 0.5


def test_a_forked_process_leaves_it_alone(worker):
    ask(worker, b"a")
    child = os.fork()
    if child == 0:
        worker.forget()
        worker.kill()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and ask(worker, b"b") == b"b!"
