"""Runs of several processes that end by a signal, an error or a kill: what is saved, and that the same command goes on
to what the undisturbed run leaves (gloo)."""

import os
import re
import signal
import time

import pytest

from tests.e2e import forked
from tests.e2e.conftest import TWO
from tests.e2e.faulty import STEPS, assert_same, write
from tests.e2e.runs import ENV, ROOT, run, weights
from tests.e2e.test_sharding import ZERO
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
ALONE = ("limits.score_s=0", "rollout.score_ahead=false")


def start(config, folder, *words, **env):
    return run(config, folder, *words, processes=2, **env)


@pytest.fixture(scope="module")
def config(tiny_models, tmp_path_factory):
    return write(tmp_path_factory.mktemp("processes") / "scene", tiny_models["qwen3_vl"])


def undisturbed(config, *words, steps=STEPS):
    """The folder of a run of two processes that nothing disturbs."""
    folder = config.parent / f"whole {words[-1]}"
    done = start(config, folder, *words, "save.every=1", f"steps={steps}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(config):
    return undisturbed(config, *ALONE)


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero3", marks=ZERO)])
def sharded(config, request):
    """The settings of a run whose processes hold shards, and its folder."""
    words = (*ALONE, f"train.sharding={request.param}")
    return words, undisturbed(config, *words, steps=STEPS if request.param == "fsdp2" else 2)


def goes_on(config, folder, whole, *words):
    again = start(config, folder, *words)
    assert again.returncode == 0 and "resuming from" in again.stdout, again.stderr
    assert_same(folder, whole)


def steps(folder):
    return sorted(path.name for path in folder.glob("checkpoints/step-*"))


def errors(done):
    return re.findall(r"^error: .*$", done.stderr, re.MULTILINE)


def test_an_error_of_all(config, whole, tmp_path):
    done = start(config, tmp_path / "run", *ALONE, FAULT="part")
    assert done.returncode == 1 and steps(tmp_path / "run") == ["step-000002"], done.stderr
    said = errors(done)
    assert len(said) == 2 and all("returned the part" in line for line in said)
    assert sum("The 2 completed steps are saved in" in line for line in said) == 1
    assert weights(tmp_path / "run", 2) == weights(whole, 2)


def test_an_error_of_all_that_hold_shards(config, sharded, tmp_path):
    """They gather the weights once more; how one of zero3 goes on: test_zero.py."""
    words, whole = sharded
    done = start(config, tmp_path / "run", *words, FAULT="raises")
    assert done.returncode == 1 and steps(tmp_path / "run") == ["step-000002"], done.stderr
    assert sum("The 2 completed steps are saved in" in line for line in errors(done)) == 1
    assert weights(tmp_path / "run", 2) == weights(whole, 2)
    if "fsdp2" in words[-1]:
        goes_on(config, tmp_path / "run", whole, *words)


def test_one_of_those_that_hold_shards_is_killed(config, tmp_path):
    done = start(config, tmp_path / "run", *ALONE, "train.sharding=fsdp2", FAULT=f"kill:{tmp_path}/run")
    (said,) = errors(done)
    assert done.returncode == 1 and "for rank 1 (no sign of life" in said, done.stderr
    assert "2 of the 2 completed steps are lost, since the weights are sharded" in said
    assert not steps(tmp_path / "run")


def test_a_process_is_killed(config, whole, tmp_path):
    """Under torchrun, which ends the other."""
    words = [*TWO, str(config), f"run.dir={tmp_path}/run", *ALONE]
    env = {**ENV, "ACCELERATE_USE_CPU": "true", "FAULT": f"kill:{tmp_path}/run"}
    done = forked.run(words, env, tmp_path, 300)
    (said,) = errors(done)
    assert done.returncode == 1 and "for rank 1 (no sign of life" in said, done.stderr
    assert "The 2 completed steps are saved in" in said and steps(tmp_path / "run") == ["step-000002"]
    goes_on(config, tmp_path / "run", whole, *ALONE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_are_told_to_stop(config, whole, tmp_path, number):
    """torchrun hands SIGTERM on to every process; a terminal sends SIGINT to all of them."""
    folder, said = tmp_path / "run", tmp_path / "said.txt"
    words = [str(ROOT / "train.py"), str(config), f"run.dir={folder}", *ALONE, "save.grace=600"]
    with open(said, "w") as text:
        processes = [forked.Process(words, {**ENV, **more, "FAULT": f"wait:{tmp_path}"}, tmp_path, text, text)
                     for more in forked.ranks(2)]
    waiting, end = tmp_path / "waiting", time.monotonic() + 300
    while not waiting.exists() and all(p.poll() is None for p in processes) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        process.send_signal(number)
    (tmp_path / "go").touch()
    assert all(process.wait(300) for process in processes), said.read_text()
    assert steps(folder) == ["step-000003"], said.read_text()
    assert RunFolder(folder).last_heartbeat()["state"] == "interrupted" and not os.path.exists(folder / "run.lock")
    assert weights(folder, 3) == weights(whole, 3)
    if number == signal.SIGTERM:
        goes_on(config, folder, whole, *ALONE)
