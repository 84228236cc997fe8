"""A run that ends while a checkpoint is being written says how it is ended at once, and that ends it."""

import signal
import time

import pytest

from tests.e2e import forked
from tests.e2e.faulty import write
from tests.e2e.runs import ENV

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from vlrl.store import checkpoint

def save(*given, **named):
    Path(sys.argv[1]).touch()
    time.sleep(600)

checkpoint.save = save  # a disk that hangs
if os.environ["DEAF"]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script starts what is to run in its background
from vlrl.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("fault, struck, told, more, code", [
    ("sleeps", [signal.SIGTERM], "once more ends at once", 1, -signal.SIGTERM),
    ("sleeps", [signal.SIGINT, signal.SIGINT], "once more ends at once", 1, 130),
    ("raises", [], "Ctrl-C twice ends at once", 2, 130),
], ids=["SIGTERM", "Ctrl-C", "an error"])
def test_a_save_that_hangs_is_ended_as_the_message_says(tiny_models, tmp_path, fault, struck, told, more, code):
    config, said, saving = write(tmp_path / "scene", tiny_models["qwen3_vl"]), tmp_path / "said", tmp_path / "saving"
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["train", str(config), f"run.dir={tmp_path}/run", "save.every=2", "save.grace=1", "limits.score_s=0"]
    with said.open("w") as out:
        run = forked.Process([str(tmp_path / "program.py"), str(saving), *words],
                             {**ENV, "FAULT": fault, "DEAF": "1" if struck[1:] else ""}, tmp_path, out, out)
    try:
        until(saving.exists, run, said)
        strike(run, struck)
        until(lambda: told in said.read_text(), run, said)
        strike(run, [struck[-1] if struck else signal.SIGINT] * more)
        assert run.wait(60) == code, said.read_text()
        assert "Traceback" not in said.read_text()
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)


def until(true, run, said):
    while not true():
        assert run.poll() is None, said.read_text()
        time.sleep(0.02)


def strike(run, signals):
    """Sends them, no two so soon that they count as one."""
    for number in signals:
        run.send_signal(number)
        time.sleep(1.2)
