"""Whole runs of episodes: killed in the middle of one, on sharded processes, in environments from outside: FrozenLake
of gymnasium, and MCP servers, one of which ends in mid-run."""

import os
import signal
import time

import psutil
import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, finished, metrics, weights
from tests.environments.serving import Serving
from vlrl import config as configs
from vlrl.store import RunFolder
from vlrl.training.loop import train

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


SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=0", "limits.environment_errors=1")

ANY = '''
def act(text, space):
    """Any text is an action, so that a model which has learned nothing walks."""
    return sum(map(ord, text)) % int(space.n)
'''

ZOOM = '''
from vlrl.environments.mcp import McpEnvironment, mcp_tools
from vlrl.tasks.zoom import Zoom

SERVERS = %r


class Far(Zoom):
    rewards = {"accuracy": 1.0, "format": 0.1, "tool": 0.0, "tool_success": 0.5}

    def tools(self, sample):
        return mcp_tools(SERVERS)

    def environment(self, sample):
        return McpEnvironment(SERVERS, parts=self.weights, step_s=300, reset_s=300)
'''


def rows_of(run, config):
    rows = run.rollouts().to_pylist()
    assert len(rows) == 4 * config.steps and len(run.metrics()) == config.steps
    return rows


def test_two_steps_over_ice(tmp_path):
    (tmp_path / "act.py").write_text(ANY)
    config = configs.load(ROOT / "configs" / "frozen_lake.yaml", [
        *SMALL, "steps=2", "episode.max_turns=3", f"environment.options.act={tmp_path}/act.py:act",
        "environment.options.actions=[]", "episode.max_pixels=4096", f"run.dir={tmp_path}/run"])
    run = RunFolder(train(config).folder.path)
    for row in rows_of(run, config):
        acted = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        shown = [turn for turn in row["turns"] if turn["role"] == "observation"]
        assert row["error"] is None and row["reward"] == dict(row["parts"])["return"]
        assert 1 <= len(acted) <= 3 and all(turn["state"] for turn in acted)
        assert all(len(turn["media"]) == 1 for turn in shown)
    assert all(line["environment/errors"] == 0 for line in run.metrics())


def test_two_steps_with_an_mcp_server_and_its_death(tmp_path):
    """Two servers; one ends at a call: that episode is not paid, the run goes on with the other."""
    servers = [Serving("mcp_server.py", "zoom", *words) for words in ((), ("2",))]
    try:
        (tmp_path / "far.py").write_text(ZOOM % [f"{server.url}/mcp" for server in servers])
        config = configs.load(ROOT / "configs" / "zoom.yaml", [
            *SMALL, "steps=2", f"task.name={tmp_path}/far.py:Far", f"run.dir={tmp_path}/run", "environment.workers=1"])
        run = RunFolder(train(config).folder.path)
    finally:
        for server in servers:
            server.stop()
    rows = rows_of(run, config)
    failed = [row for row in rows if row["error"]]
    assert failed and all(row["reward"] is None for row in failed)
    assert sum(line["environment/errors"] for line in run.metrics()) == len(failed)
    paid = [row for row in rows if row["reward"] is not None]
    assert len(paid) == len(rows) - len(failed) > 0
    assert any(turn["media"] for row in paid for turn in row["turns"] if turn["role"] == "observation")
    assert any(dict(row["parts"])["tool_success"] > 0 for row in paid)


def test_an_mcp_server_that_is_gone_for_good_leaves_the_run_alive(tmp_path):
    """What cannot be reset is stored without tokens and counted, in training and in evaluations, and is no rejected
    prompt with data.quarantine either."""
    server = Serving("mcp_server.py", "zoom", "2")  # ends at its second call
    try:
        (tmp_path / "far.py").write_text(ZOOM % [f"{server.url}/mcp"])
        config = configs.load(ROOT / "configs" / "zoom.yaml", [
            *SMALL, "steps=2", f"task.name={tmp_path}/far.py:Far", f"run.dir={tmp_path}/run", "environment.workers=1",
            "eval.samples=2", "eval.every=2", "data.quarantine=true", "environment.reset_s=20"])
        run = RunFolder(train(config).folder.path)
    finally:
        server.stop()
    rows = rows_of(run, config)
    lost = [row for row in rows if (row["error"] or "").startswith("reset:")]
    assert lost and all(row["reward"] is None and row["token_ids"] == [] and row["completion"] == "" for row in lost)
    assert all(row["reward"] is None for row in rows if row["error"])
    assert sum(m["environment/errors"] for m in run.metrics()) == sum(row["error"] is not None for row in rows)
    assert all(m["prompts/rejected"] == 0 and m["score_errors"] == 0 for m in run.metrics())
    last = run.evals()[-1]
    assert (last["n"], last["unscorable"], last["rejected"], last["environment/errors"]) == (2, 2, 0, 2)
