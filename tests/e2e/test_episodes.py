"""Whole runs of episodes: killed in the middle of one, and on sharded processes."""

import os
import signal
import time

import psutil
import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, finished, metrics, weights
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow

CONFIG = """
steps: 3
task: {name: %s/tests/environments/acting.py:Acting, mark: %s}
seed: 3
model: {name: %s, train: [language, merger, vision]}
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 6}
train: {lr: 1.0e-3, tokens_per_batch: 2000}
eval: {samples: 0}
save: {every: 1}
"""


@pytest.mark.parametrize("words", [
    ("episode.history=last:1",), ("async.max_staleness=1", "algo.correction=token_truncate")], ids=str)
def test_killed_in_the_middle_of_an_episode(tiny_models, tmp_path, words):
    """With kill -9: the run goes on as if nothing had happened, bit for bit."""
    config, mark, killed, whole = (tmp_path / name for name in ("run.yaml", "mark", "killed", "whole"))
    config.write_text(CONFIG % (ROOT, mark, tiny_models["qwen3_vl"]))
    with open(os.devnull, "w") as nowhere:
        process = forked.Process([str(ROOT / "train.py"), str(config), f"run.dir={killed}", *words], ENV, tmp_path,
                                 nowhere, nowhere)
    until(lambda: len(metrics(killed)) == 1, process)
    mark.unlink(missing_ok=True)
    until(mark.exists, process)  # an environment has answered an action, and expects the next one
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL and len(metrics(killed)) < 3
    assert started and not psutil.wait_procs(started, 60)[1]  # the processes of environments have ended too
    for folder in (killed, whole):
        finished(config, folder, *words)
    assert weights(killed, 3) == weights(whole, 3)
    assert metrics(killed) == metrics(whole) and len(metrics(whole)) == 3
    tables = [RunFolder(folder).rollouts() for folder in (killed, whole)]
    for name in set(tables[0].column_names) - {"turns"}:  # which hold seconds
        assert tables[0][name].equals(tables[1][name]), name


def test_sharded_processes_play_as_one(tiny_models, tmp_path):
    config, found = tmp_path / "run.yaml", []
    config.write_text(CONFIG % (ROOT, "''", tiny_models["qwen3_vl"]))
    for name, processes, words in (("one", 1, ()), ("two", 2, ("train.sharding=fsdp2",))):
        finished(config, tmp_path / name, "steps=2", *words, processes=processes)
        rows = RunFolder(tmp_path / name).rollouts(0).sort_by([("group_id", "ascending"), ("index", "ascending")])
        found.append((rows["token_ids"].to_pylist(), metrics(tmp_path / name)))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 4
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert [two[k] for k in ("loss", "grad_norm", "entropy")] == pytest.approx(
            [one[k] for k in ("loss", "grad_norm", "entropy")], rel=1e-4, abs=1e-6)


def until(true, process, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
