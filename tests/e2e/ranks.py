"""Run under torchrun: rank 0 or 1 does something to the others, which `how` names; no model is needed."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from tests.helpers import settings
from vlrl.distributed import comm
from vlrl.errors import VlrlError
from vlrl.training.build import make_accelerator

LIMIT = 5


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dally() -> None:
    """Long enough for the others to find out where it is."""
    time.sleep(LIMIT + 15)


def fail() -> None:
    raise KeyError("a fault of rank 1 alone")


def leave() -> None:
    sys.exit(0)


def main(how: str) -> None:
    """One step in which rank 1 does `how` before all gather; or rank 0 works alone, longer than the limit."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # torchrun's, when one is dead; a session takes it for Ctrl-C
    make_accelerator(settings("nowhere", limits={"collective_s": LIMIT}))
    comm.gather(0)
    comm.here.at("step 7")
    with comm.transport_errors(), comm.within("train"):
        if how == "patient":
            saved = comm.on_main(lambda: time.sleep(2 * LIMIT) or "saved", "saving")
            os.write(1, f"{saved} {comm.rank()} {comm.here.count}\n".encode())  # whole lines: both write to one pipe
        elif how == "dead while saving":
            comm.on_main(kill, "saving")
        elif how == "impatient":
            comm.on_main(lambda: time.sleep(LIMIT + 15))
        elif how == "transport":  # a collective that is not made in vlrl, as those of FSDP
            if comm.rank() == 1:
                kill()
            torch.distributed.all_reduce(torch.ones(3))
        else:
            if comm.rank() == 1:
                globals()[how]()
            comm.together(lambda: comm.sum_gradients(_parameters()))


def _parameters() -> list[torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return [p]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except VlrlError as error:
        sys.exit(f"error: {error}")
