"""A terminal that is closed, nohup, and what has other processes run."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from tests.tables import each
from vlrl.monitoring.signals import StopSignals, as_interrupt

PROGRAM = """
import sys, time
from vlrl.monitoring.signals import StopSignals, write_to_terminal
with StopSignals(lambda number: write_to_terminal("saving") or came.append(number), 60, write_to_terminal) as signals:
    came = []
    open(sys.argv[1], "w").write("ready")
    while not came:
        time.sleep(0.01)
    print("finishing", flush=True)  # once the terminal is gone this would end a run before it is saved
    open(sys.argv[1], "w").write(f"saved after {came}")
"""


@pytest.fixture(autouse=True)
def heeded():
    """What was started by nohup does not heed SIGHUP, nor what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def started(path, before=None):
    """The program in a terminal of its own, and our end of it."""
    ours, theirs = pty.openpty()

    def own_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        if before:
            before()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True, preexec_fn=own_terminal, close_fds=True, pass_fds=(theirs,))
    os.close(theirs)
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
    return process, ours


def test_a_closed_terminal_is_a_signal_and_no_error(tmp_path):
    process, terminal = started(tmp_path / "said")
    os.close(terminal)
    assert process.wait(20) == 0
    assert (tmp_path / "said").read_text() == f"saved after [{int(signal.SIGHUP)}]"


def test_under_nohup_a_closed_terminal_is_none():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(pytest.fail, 60, str):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@each("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_what_runs_others_is_interrupted_once(number):
    """Its `finally` has the runs save, which a second signal, as shell and kernel send it, does not end."""
    saved = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            saved.append(1)
    assert saved and signal.getsignal(number) == before
