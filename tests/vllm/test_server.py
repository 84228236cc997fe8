"""Servers that `vlrl serve` started: the same policy after every sync, and no answer lost when one is killed."""

import json
import os
import re
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from tests.conftest import SAMPLES
from tests.e2e import forked
from tests.e2e.runs import ROOT
from tests.helpers import Vowels, load, settings
from tests.vllm.conftest import trainer_logprobs
from tests.vllm.test_proof import perturb
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.vllm import server as vllm_server
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.server import ServerEngine, read_key
from vlrl.errors import ConfigError, TrainingError

pytestmark = pytest.mark.vllm
PATIENT = 900
"""Seconds; starting two servers takes one minute on a quiet machine."""
LORA = {"rank": 4, "target": "language"}
LEARNS = {"full": {"train": ["language", "merger", "vision"]}, "lora": {"lora": LORA},
          "merged": {"lora": LORA | {"target": "vision_language"}}}
WAYS = {"full": "full", "lora": "adapter", "merged": "merged"}
planted = "tests.vllm.planted.Extension"


def until(true, what):
    end = time.monotonic() + PATIENT
    while not (found := true()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.2)
    return found


def free_ports() -> int:
    """The first of two free ports that no other worker takes while servers start, which take them after a minute."""
    for port in range(21000 + 20 * os.getpid() % 11000, 60000, 2):
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


PLANTED = f"vllm_launch.EXTENSION = {planted!r}\n"
FORKED = "from tests.vllm import forking\nforking.servers()\n"


def serving(root: Path, *settings: str) -> Path:
    """A program in a folder that is the command `vlrl` with something set before.

    A command below nohup is started deaf to a closed terminal; this one heeds it."""
    program = root / "serving.py"
    program.write_text("import signal\nfrom vlrl.cli.main import main\n"
                       "from vlrl.engine.vllm import launch as vllm_launch\n"
                       f"signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{''.join(settings)}raise SystemExit(main())\n")
    return program


def process_of(serve: int, address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    (found,) = [p for p in psutil.Process(serve).children() if any(
        c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in p.net_connections("tcp"))]
    return found


def serving_environment() -> dict[str, str]:
    """That of `vlrl serve`: servers find the tests, and their engines are processes of their own."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return environment | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def served(installed, tiny_models, tmp_path_factory):
    """Two servers of a tiny model, which take adapters and whole weights, and stale ones as told; a hangup ends them
    (SIGTERM: test_processes.py, SIGKILL: test_faults.py)."""
    root = tmp_path_factory.mktemp("served")
    model, config = tiny_models["qwen3_vl"], root / "run.yaml"
    config.write_text(json.dumps({"task": "x", "model": {"name": str(model), "lora": LORA},  # JSON is YAML
                                  "engine": {"name": "vllm_server", "max_model_len": 256, "max_seqs": 32},
                                  "rollout": {"max_new_tokens": 64}, "run": {"dir": str(root / "run")}}))
    about, said = root / "run-servers" / "servers.json", (root / "serve.log").read_text
    with (root / "serve.log").open("w") as log:
        serve = forked.Process([serving(root, PLANTED, FORKED), "serve", config, "--replicas", "2", "--port",
                                free_ports()], serving_environment() | {"VLRL_PLANTED": str(root / "planted")}, ROOT,
                               log, log)
    try:
        until(lambda: about.exists() or serve.poll() is not None, "the servers do not start")
        yield SimpleNamespace(root=root, said=said, model=model, **json.loads(about.read_text()))
    finally:
        assert serve.poll() is None, said()
        family = psutil.Process(serve.pid).children(recursive=True)
        serve.send_signal(signal.SIGHUP)
        code = serve.wait(120)
        gone, left = psutil.wait_procs(family, timeout=120)
        for orphan in left:
            orphan.kill()
    assert not left and len(gone) >= 2, left
    assert code == 130 and not about.exists(), said()


@pytest.fixture(scope="module", autouse=True)
def allowed():
    """Engines that accept servers with the planted extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "EXTENSION", planted)
        yield


@pytest.fixture(scope="module")
def engines(served):
    """A ServerEngine by what learns, made when first asked for; each time with the policy as it was at first."""
    made = {}

    def make(learns):
        if learns not in made:
            config = settings(served.model, model={"name": str(served.model), **LEARNS[learns]},
                              engine={"name": "vllm_server", "max_model_len": 256, "max_seqs": 32, "servers":
                                      served.servers, "key_file": served.key_file, "timeout_s": PATIENT})
            policy, encode = load(config)
            folder = served.root / learns
            folder.mkdir()
            prompts = {kind: encode(Vowels(), sample) for kind, sample in SAMPLES.items()}
            start = {name: t.clone() for name, t in policy.model.state_dict().items()}
            made[learns] = SimpleNamespace(policy=policy, config=config, prompts=prompts, start=start,
                                           engine=ServerEngine(policy, config, folder))
        made[learns].policy.model.load_state_dict(made[learns].start)
        return made[learns]

    yield make
    for it in made.values():
        it.engine.close()


@pytest.fixture
def plant(served):
    """Has the servers keep a stale weight from now on, or none."""
    path = served.root / "planted"
    yield path.write_text
    path.write_text("")


@torch.no_grad()
def move(policy, seed):
    """As an optimizer step would, and more."""
    torch.manual_seed(seed)
    for _, weight in policy.trainable():
        weight.add_(0.02 * torch.randn_like(weight))


def both_there(it, served):
    """Waits until both servers may be used: a sync does not wait for one that was not there before it."""
    small = [Request(prompt=it.prompts["image"], n=1, sampling=Sampling(max_new_tokens=2), key=(10,))]
    until(lambda: it.engine.generate(small) and all(r.ready for r in it.engine.pool.replicas), served.said)
    return small


def gap(policy, requests, answers, temperature=1.0):
    pairs = [(r.prompt, c) for r, group in zip(requests, answers, strict=True) for c in group]
    sampled = np.concatenate([c.logprobs for _, c in pairs])
    return np.abs(trainer_logprobs(policy, pairs, temperature) - sampled).max()


@pytest.mark.parametrize("learns", ["full", "lora"])
def test_servers_sample_from_the_policy_after_every_sync(engines, learns):
    it = engines(learns)
    assert it.engine.way == WAYS[learns]
    seen = []
    for step in range(3):
        it.engine.sync(it.policy, step)
        requests = [Request(prompt=p, n=3, sampling=Sampling(max_new_tokens=10, temperature=0.7), key=(7, i))
                    for i, p in enumerate(it.prompts.values())]
        answers = it.engine.generate(requests)
        assert [len(group) for group in answers] == [3] * 4
        assert gap(it.policy, requests, answers, 0.7) < 1e-5
        assert not {t for group in answers for c in group for t in c.tokens.tolist()} & {*it.policy.banned.tolist()}
        again = it.engine.generate(requests) if not step else answers
        assert sum(a.tokens.tolist() == b.tokens.tolist() for x, y in zip(answers, again, strict=True)
                   for a, b in zip(x, y, strict=True)) >= 11  # seeds; a tie may tip with the batch
        seen.append(np.concatenate([c.logprobs for c in answers[0]])[:3])
        move(it.policy, step)
    assert len({tuple(first.tolist()) for first in seen}) == 3  # the weights did change
    it.engine.sync(it.policy, 3)


def test_stops_budgets_and_answers_that_go_on(engines):
    it = engines("full")
    it.engine.sync(it.policy, 0)
    prompt = it.prompts["image"]
    budget = Sampling(max_new_tokens=14, thinking_budget=4)
    requests = [Request(prompt=prompt, n=3, sampling=budget, key=(1,))]
    answers = it.engine.generate(requests)
    for c in answers[0]:
        ended = len(c.tokens) <= 4
        assert ended or ("</think>" in c.text and not c.loss_mask[4] and c.loss_mask[:4].all())
    assert any(len(c.tokens) > 4 for c in answers[0])
    assert gap(it.policy, requests, answers) < 1e-5  # of forced tokens too
    (first,) = it.engine.generate([Request(prompt=prompt, n=2, sampling=Sampling(max_new_tokens=4), key=(2,))])
    begun = tuple(AnswerPrefix(index=i, written=c) for i, c in enumerate(first) if c.finish_reason == "length")
    assert begun
    more = [Request(prompt=prompt, n=len(begun), sampling=Sampling(max_new_tokens=9), key=(2,), begun=begun)]
    whole = it.engine.generate(more)
    for b, c in zip(begun, whole[0], strict=True):
        assert c.tokens[:4].tolist() == b.written.tokens.tolist() and len(c.turns) == 2
    assert gap(it.policy, more, whole) < 1e-5
    found = []
    for stop in ((), None):
        sampling = Sampling(max_new_tokens=30, stop=(found[0].text[3:5],) if stop is None else stop)
        found.append(it.engine.generate([Request(prompt=prompt, n=4, sampling=sampling, key=(3,))])[0][0])
    free, stopped = found
    assert free.text[3:5] in stopped.text and stopped.finish_reason == "stop" and len(stopped.tokens) < len(free.tokens)


STALE = {"language": ("full", "model.language_model.layers.1.self_attn.k_proj.weight"),
         "vision": ("full", "model.visual.blocks.0.mlp.linear_fc1.weight"),
         "merged": ("merged", "model.visual.blocks.0.mlp.linear_fc1.weight"),
         "adapter": ("lora", "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_B.weight")}


def test_every_weight_is_compared(served, engines):
    """Files against servers: fused layers, what packed copies stand for, a tied head, an adapter."""
    for learns in ("full", "lora"):
        it = engines(learns)
        perturb(it.policy, 1, by=0.1)
        it.engine.sync(it.policy, 0)
        target, tied = it.engine._target, it.policy.base.config.tie_word_embeddings
        found = it.engine._client.post(served.servers[0], "/vlrl/compare", json.dumps(
            {"version": target.version, "base": target.base[1], "adapter": target.adapter}).encode())
        assert found == {"compared": len(list(it.policy.model.named_parameters())) + tied, "differing": []}


@pytest.mark.parametrize("what", STALE)
@pytest.mark.parametrize("step", [0.2, 1e-6], ids=["seen by the probe", "too small for it"])
def test_a_stale_weight_is_named(engines, plant, what, step):
    learns, name = STALE[what]
    it = engines(learns)
    assert it.engine.way == WAYS[learns]
    perturb(it.policy, 2, by=0.1)
    it.engine.sync(it.policy, 0)
    perturb(it.policy, 3, by=step)
    if step < 1e-3:
        it.engine._checks.clear()  # as after a start: every weight is compared
    else:
        it.engine._checks.update(dict.fromkeys(it.engine.config.engine.servers, 9))
    plant(name)
    with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities") as error:
        it.engine.sync(it.policy, 1)
    assert f". {name} differs by" in str(error.value) and str(error.value).count("differs by") == 1
    plant("")
    it.engine.sync(it.policy, 2)
    requests = [Request(prompt=it.prompts["image"], n=2, sampling=Sampling(max_new_tokens=4), key=(1,))]
    assert gap(it.policy, requests, it.engine.generate(requests)) < 1e-5


def test_a_stale_tied_head_is_named(engines, plant):
    """Its packed copy is that of the embedding before, as vLLM's own reload leaves it on CPUs."""
    it = engines("full")
    it.engine.sync(it.policy, 0)
    perturb(it.policy, 4, by=0.2)
    plant("head")
    with pytest.raises(TrainingError, match=r"\. lm_head\.weight \(tied to the embedding\) differs by") as error:
        it.engine.sync(it.policy, 1)
    assert str(error.value).count("differs by") == 1
    plant("")
    it.engine.sync(it.policy, 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_that_did_not_reach_its_file_is_named(engines, monkeypatch, first):
    it, name = engines("full"), "model.visual.blocks.0.mlp.linear_fc1.weight"
    it.engine.sync(it.policy, 3)
    it.engine._syncs = 0 if first else 9
    it.engine._run = secrets.token_hex(4)
    perturb(it.policy, 5, by=0.2)
    write, changed = vllm_server.write_weights, dict(it.policy.base.named_parameters())[name]

    def forgetful(policy, *args, **kwargs):
        now = changed.detach().clone()
        changed.data.add_(1.0)
        try:
            return write(policy, *args, **kwargs)
        finally:
            changed.data.copy_(now)

    monkeypatch.setattr(vllm_server, "write_weights", forgetful)
    with pytest.raises(TrainingError, match=r"files for the servers (already )?differ .*" + re.escape(name)) as error:
        it.engine.sync(it.policy, 4)
    assert str(error.value).count("differs by") == 1
    monkeypatch.undo()
    monkeypatch.setattr(vllm_server, "EXTENSION", planted)
    it.engine.sync(it.policy, 5)


def test_no_server_is_used_before_the_proof(engines, plant, monkeypatch):
    """It has loaded the weights, and the connection breaks before it is asked for the probe."""
    it, prove, cut = engines("full"), ServerEngine._prove, []
    it.engine.sync(it.policy, 0)
    perturb(it.policy, 6, by=0.2)
    plant(STALE["vision"][1])

    def broken(self, address, *args, **kwargs):
        if address not in cut:
            cut.append(address)
            raise Unavailable("the connection broke")
        return prove(self, address, *args, **kwargs)

    monkeypatch.setattr(ServerEngine, "_prove", broken)
    with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities"):
        it.engine.sync(it.policy, 1)
    assert cut
    plant("")
    it.engine.sync(it.policy, 2)


@pytest.mark.parametrize("learns", ["full", "lora"])
def test_proofs_beside_each_other_and_beside_answers(served, engines, learns):
    """Several processes prove at once, and one of them is answered already."""
    it = engines(learns)
    it.engine.sync(it.policy, 0)
    both_there(it, served)
    requests = [Request(prompt=p, n=8, sampling=Sampling(max_new_tokens=100), key=(3, i))
                for i, p in enumerate(it.prompts.values())]
    with ThreadPoolExecutor() as threads:
        answers = threads.submit(it.engine.generate, requests)
        gaps = list(threads.map(lambda i: it.engine._gap(served.servers[i % 2], it.engine._target), range(12)))
        assert max(gaps) < 1e-5
        assert gap(it.policy, requests, answers.result()) < 1e-5


def test_servers_of_other_settings_are_refused(served, engines):
    it = engines("full")
    longer = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"max_model_len": 512})})
    with pytest.raises(ConfigError, match=r"engine\.max_model_len is 256, less than 512.*vlrl serve"):
        ServerEngine(it.policy, longer, served.root / "full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "EXTENSION", "vlrl.engine.vllm.worker.Extension")
        with pytest.raises(ConfigError, match=r"extension is tests\.vllm\.planted"):
            ServerEngine(it.policy, it.config, served.root / "full")
    elsewhere = served.root.parent / "elsewhere"
    with pytest.raises(ConfigError, match="loads weights from"):
        ServerEngine(it.policy, it.config, elsewhere)
    other = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"key_file": ""})})
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        ServerEngine(it.policy, other, served.root / "full")


def test_a_killed_server_loses_no_answer_and_comes_back_with_the_weights(served, engines):
    it = engines("full")
    small = both_there(it, served)
    it.engine.sync(it.policy, 5)  # waits for both, as both were there before
    address = served.servers[1]
    victim = process_of(served.pid, address)
    finished = []

    def kill(number, completions):
        finished.append(number)
        if len(finished) == 1:
            victim.kill()

    requests = [Request(prompt=p, n=2, sampling=Sampling(max_new_tokens=2 if k + i == 0 else 150), key=(9, i, k))
                for k in range(8) for i, p in enumerate(it.prompts.values())]  # the first is done long before the rest
    answers = it.engine.generate(requests, kill)
    dead = it.engine.pool.replicas[1]
    assert dead.requests and not dead.ready and dead.problem
    assert [len(group) for group in answers] == [2] * len(requests)
    assert len(finished) == len({*finished}) == len(requests) - 1
    assert gap(it.policy, requests, answers) < 1e-5
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    client = ServerClient(read_key(served.key_file), PATIENT)

    def state():
        try:
            return client.get(address, "/vlrl/state")
        except Unavailable:
            return None

    fresh = until(state, served.said)
    assert fresh["version"] == "" and not dead.ready  # up again, and nothing gets in before a sync

    def back():
        it.engine.generate(small)
        return dead.ready

    until(back, dead.problem)
    assert state()["version"] == it.engine._target.version
    again = it.engine.generate(requests)
    assert gap(it.policy, requests, again) < 1e-5
    client.close()
