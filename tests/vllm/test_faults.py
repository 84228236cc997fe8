"""Whole runs with real servers that are killed or hang, and a trainer that is killed: no group is lost or counted
twice, and the run is the undisturbed one. The tests go on from each other's servers, in their order."""

import contextlib
import json
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tests.e2e import forked
from tests.e2e.runs import ROOT, metrics, weights
from tests.vllm.serve import FORKED, PATIENT, Serve, free_ports, process_of, until
from vlrl import config as configs
from vlrl.engine.vllm import launch as vllm_launch
from vlrl.engine.vllm import server as vllm_server
from vlrl.errors import TrainingError
from vlrl.store import RunFolder
from vlrl.training.loop import train

pytestmark = pytest.mark.vllm

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SMALL = ("engine=vllm_server", "engine.max_model_len=512", "engine.max_seqs=32")
RUN = (*SMALL, f"engine.timeout_s={PATIENT}", "engine.retries=50", "steps=4", "rollout.prompts_per_step=6",
       "rollout.group_size=3", "eval.samples=4", "eval.every=4", "save.every=1", "save.keep=9", "log.samples_every=0")
ASYNC = ("async.max_staleness=1", "extends=algorithms/decoupled_ppo.yaml", "rollout.minibatches=1")
EVALUATIONS = 1
"""Generations before that of step 0."""
DIES = """
import os, signal, sys
from vlrl import config
from vlrl.engine.vllm.server import ServerEngine
from vlrl.training.loop import train

class Dies(ServerEngine):
    calls = 0

    def generate(self, requests, done=None):
        self.calls += 1
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests, kill if self.calls == 4 else done)

import vlrl.engine.vllm.server as module
module.ServerEngine = Dies
train(config.load(sys.argv[1], sys.argv[2:]))
"""
"""A trainer that is killed when the first answers of step 2 are there, and others are being written."""


HASTY = "vllm_launch._SILENT_S = 15.0\n" + FORKED
"""A quarter of a minute is a long silence."""


class Servers(Serve):
    def __init__(self, root, name, replicas, *more, **settings):
        super().__init__(root, name, QUICKSTART, "--replicas", replicas, "--port", free_ports(),
                         f"run.dir={root / 'run'}", *SMALL[1:], *more, **settings)

    def server(self, i):
        until(lambda: vllm_launch._health(self.servers[i]) == 200, self.said)
        return process_of(self.process.pid, self.servers[i])


@pytest.fixture(scope="module")
def served(installed, tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    serve = Servers(root, "servers", 2)
    try:
        key, servers = serve.ready()
        yield SimpleNamespace(root=root, serve=serve, key=key, servers=servers, both=(key, servers))
    finally:
        serve.close()


@pytest.fixture
def start(served, monkeypatch):
    """Runs the quickstart with servers; `faults[n](engine)` is called before its n-th step is generated."""
    def go(name, *words, faults=None):
        class Faulty(vllm_server.ServerEngine):
            calls = -EVALUATIONS

            def generate(self, requests, done=None):
                fault = (faults or {}).pop(self.calls, None) if requests else None
                type(self).calls += 1
                if fault:
                    fault(self)
                made = super().generate(requests, done)
                assert [len(answers) for answers in made] == [request.n for request in requests]
                return made

        with monkeypatch.context() as patch:
            patch.setattr(vllm_server, "ServerEngine", Faulty)
            return train(configs.load(QUICKSTART, [*RUN, *words, f"run.dir={served.root / name}"])).folder.path

    return go


@pytest.fixture(scope="module")
def undisturbed(served):
    """The folders of runs that nothing happens to: one step after the other, and beside the update."""
    folders = {name: train(configs.load(QUICKSTART, [*RUN, *served.both, *more, f"run.dir={served.root / name}"]))
               .folder.path for name, more in (("plain", ()), ("ahead", ASYNC))}
    for folder in folders.values():
        assert len({weights(folder, step) for step in (1, 2, 3, 4)}) == 4  # there is something to be stale
    return folders


def assert_same(one, other):
    """The same answers, rewards, metrics and weights; what servers report may differ in the last bits, by what they
    write side by side, and with it what the correction makes of it."""
    exact = ("step", "group_id", "index", "sample_id", "token_ids", "completion", "reward", "policy_step", "parts")
    rows, others = (RunFolder(folder).rollouts().to_pylist() for folder in (one, other))
    assert [[r[name] for name in exact] for r in rows] == [[r[name] for name in exact] for r in others]
    assert len({(r["step"], r["group_id"], r["index"]) for r in others}) == len(others) == 4 * 6 * 3
    for r, q in zip(rows, others, strict=True):
        assert np.allclose(r["logprobs"], q["logprobs"], atol=1e-4)
    ahead = any("correction/weight" in line for line in metrics(one))
    loose = ("mismatch/", *(("correction/", "loss", "grad", "policy", "ratio", "kl", "entropy") if ahead else ()))
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        assert {k: v for k, v in a.items() if not k.startswith(loose)} == {
            k: v for k, v in b.items() if not k.startswith(loose)}
        assert all(a[k] == pytest.approx(b[k], rel=1e-2, abs=1e-4) for k in a if k.startswith(loose))
        assert ahead or b["mismatch/gap_max"] < 1e-4  # no answer is of older weights
    if not ahead:
        assert weights(one, 4) == weights(other, 4)
    assert metrics(one, "eval.jsonl") == metrics(other, "eval.jsonl")
    assert json.loads((other / "heartbeat.json").read_text())["state"] == "finished"


def when_busy(engine, i, count, act):
    """Calls `act` in a thread once server `i` has got `count` requests more."""
    replica = engine.pool.replicas[i]
    port, before = int(replica.address.rpartition(":")[2]), replica.requests

    def connected():
        return sum(c.status == psutil.CONN_ESTABLISHED and bool(c.raddr) and c.raddr.port == port
                   for c in psutil.Process().net_connections("tcp"))

    def work():
        until(lambda: replica.requests >= before + count and connected() >= count, "the server is asked nothing")
        act()

    threading.Thread(target=work, daemon=True).start()


def kills(server, i, count=3):
    """A fault: the server is killed while it holds `count` requests that it cannot finish."""
    def fault(engine):
        for core in server.children(recursive=True):
            core.suspend()
        when_busy(engine, i, count, server.kill)

    return fault


@pytest.mark.parametrize("kind", ["plain", "ahead"])
def test_a_killed_trainer_goes_on_with_the_servers_it_left(served, start, undisturbed, kind):
    more, name = {"plain": (), "ahead": ASYNC}[kind], f"killed-{kind}"
    words = [*RUN, *served.both, *more, f"run.dir={served.root / name}"]
    program = served.root / "dies.py"
    program.write_text(DIES)
    died = forked.run([program, QUICKSTART, *words], os.environ, ROOT, PATIENT)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(metrics(served.root / name)) in {"plain": (2,), "ahead": (1, 2)}[kind]
    assert_same(undisturbed[kind], start(name, *served.both, *more))


def test_a_server_that_hangs_comes_back_and_another_takes_its_work_when_it_is_killed(served, start, undisturbed):
    server, noted = served.serve.server(1), {}
    group = [server, *server.children(recursive=True)]

    def hang(engine):
        engine.pool._patience_s = 3.0
        for process in group:
            process.suspend()

    def go_on(engine):
        replica = engine.pool.replicas[1]
        noted["away"], noted["asked"] = not replica.ready, replica.requests
        for process in group:
            process.resume()
        until(lambda: engine.pool.admit_all() and replica.ready, replica.problem)

    def end(engine):
        noted["more"] = engine.pool.replicas[1].requests - noted["asked"]
        kills(server, 1)(engine)

    try:
        folder = start("hangs", *served.both, faults={1: hang, 2: go_on, 3: end})
    finally:
        for process in group:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    assert noted["away"] and noted["asked"] and noted["more"]
    until(lambda: not server.is_running(), "the server was not killed")
    assert_same(undisturbed["plain"], folder)


def test_the_only_server_is_killed_beside_the_update_and_started_again(served, start, undisturbed):
    server = served.serve.server(0)
    faults = {2: kills(server, 0, 6)}
    folder = start("alone", served.key, f"engine.servers={served.serve.servers[0]}", *ASYNC, faults=faults)
    assert not faults
    until(lambda: not server.is_running(), "the server was not killed")
    assert_same(undisturbed["ahead"], folder)


def test_without_a_server_the_run_stops_and_another_one_ends_it(served, start, undisturbed):
    def gone(engine):
        engine.pool._wait_s = 3.0
        when_busy(engine, 0, 6, lambda: served.serve.close(signal.SIGKILL))
        for core in served.serve.server(0).children(recursive=True):
            core.suspend()

    alone = served.serve.servers[0]
    with pytest.raises(TrainingError, match=rf"no server of engine\.servers was .* for 3 s \({alone}: .*vlrl serve"):
        start("gone", served.key, f"engine.servers={alone}", faults={2: gone})
    folder = served.root / "gone"
    assert json.loads((folder / "heartbeat.json").read_text())["state"] == "failed"
    assert [m["step"] for m in metrics(folder)] == [0, 1] and (folder / "checkpoints" / "step-000002").exists()
    other = Servers(served.root, "others", 1, "engine.timeout_s=15", settings=HASTY)
    try:
        assert_same(undisturbed["plain"], start("gone", *other.ready()))
        server, said, what = other.server(0), other.said, "its engine has not responded for 15 s; the server"
        told = said().count(what)  # by a busy machine
        for process in server.children(recursive=True):
            process.suspend()
        assert vllm_launch._health(other.servers[0]) == 200
        until(lambda: said().count(what) > told, said)  # though its health page goes on answering
        assert not server.is_running()
        until(lambda: vllm_launch._health(other.servers[0]) == 200, said)
    finally:
        other.close()
