"""Servers that `vlrl serve` started: the same policy after every sync, and no answer lost when one is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from tests.vllm.conftest import trainer_logprobs
from vlrl.engine.replicas import Client, Unavailable
from vlrl.engine.vllm_server import ServerEngine, read_key
from vlrl.errors import ConfigError, TrainingError
from vlrl.types import Begun, Request, Sampling

pytestmark = pytest.mark.vllm
PATIENT = 900
"""Seconds; starting two servers takes one minute on a quiet machine."""
LORA = {"rank": 4, "target": "language"}
LEARNS = {"full": {"train": ["language", "merger", "vision"]}, "lora": {"lora": LORA}}


def until(true, what):
    end = time.monotonic() + PATIENT
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


def free_ports() -> int:
    """The first of two free ports."""
    for port in range(21000 + os.getpid() % 9000, 60000, 2):
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


@pytest.fixture(scope="module")
def served(installed, tiny_models, tmp_path_factory):
    """Two servers of a tiny Qwen3-VL; they take adapters and whole weights."""
    root = tmp_path_factory.mktemp("served")
    config = root / "run.json"  # JSON is YAML
    config.write_text(json.dumps({"task": "x", "model": {"name": str(tiny_models["qwen3_vl"]), "lora": LORA},
                                  "engine": {"name": "vllm_server", "max_model_len": 256, "max_seqs": 32},
                                  "rollout": {"max_new_tokens": 64}, "run": {"dir": str(root / "run")}}))
    config = config.rename(root / "run.yaml")
    port, about = free_ports(), root / "run-servers" / "servers.json"
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with (root / "serve.log").open("wb") as log:
        serve = subprocess.Popen([sys.executable, "-m", "vlrl", "serve", str(config), "--replicas", "2", "--port",
                                  str(port)], stdout=log, stderr=subprocess.STDOUT, env=environment)
    said = lambda: (root / "serve.log").read_text()  # noqa: E731
    try:
        until(lambda: about.exists() or serve.poll() is not None, "the servers do not start")
        assert serve.poll() is None, said()
        yield SimpleNamespace(root=root, said=said, **json.loads(about.read_text()))
    finally:
        serve.send_signal(signal.SIGTERM)
        code = serve.wait(120)
    assert code == 130, said()
    assert not about.exists()


@pytest.fixture(scope="module")
def engines(served, tiny_models):
    """A ServerEngine by what learns, made when first asked for."""
    made = {}

    def make(learns):
        if learns not in made:
            config = settings(tiny_models["qwen3_vl"], model={"name": str(tiny_models["qwen3_vl"]), **LEARNS[learns]},
                              engine={"name": "vllm_server", "max_model_len": 256, "max_seqs": 32, "servers":
                                      served.servers, "key_file": served.key_file, "timeout_s": PATIENT})
            policy, encode = load(config)
            folder = served.root / learns
            folder.mkdir()
            prompts = {kind: encode(Vowels(), sample) for kind, sample in SAMPLES.items()}
            made[learns] = SimpleNamespace(policy=policy, config=config, prompts=prompts,
                                           engine=ServerEngine(policy, config, folder))
        return made[learns]

    yield make
    for it in made.values():
        it.engine.close()


@torch.no_grad()
def move(policy, seed):
    """As an optimizer step would, and more."""
    torch.manual_seed(seed)
    for _, weight in policy.trainable():
        weight.add_(0.02 * torch.randn_like(weight))


def gap(policy, requests, answers, temperature=1.0):
    pairs = [(r.prompt, c) for r, group in zip(requests, answers, strict=True) for c in group]
    sampled = np.concatenate([c.logprobs for _, c in pairs])
    return np.abs(trainer_logprobs(policy, pairs, temperature) - sampled).max()


@pytest.mark.parametrize("learns", ["full", "lora"])
def test_servers_sample_from_the_policy_after_every_sync(engines, learns):
    it = engines(learns)
    assert it.engine.way == {"full": "full", "lora": "adapter"}[learns]
    seen = []
    for step in range(3):
        it.engine.sync(it.policy, step)
        requests = [Request(prompt=p, n=3, sampling=Sampling(max_new_tokens=10, temperature=0.7), key=(7, i))
                    for i, p in enumerate(it.prompts.values())]
        answers = it.engine.generate(requests)
        assert [len(group) for group in answers] == [3] * 4
        assert gap(it.policy, requests, answers, 0.7) < 1e-5
        assert not {t for group in answers for c in group for t in c.tokens.tolist()} & {*it.policy.banned.tolist()}
        again = it.engine.generate(requests)
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
    begun = tuple(Begun(index=i, written=c) for i, c in enumerate(first) if c.finish_reason == "length")
    assert begun
    more = [Request(prompt=prompt, n=len(begun), sampling=Sampling(max_new_tokens=9), key=(2,), begun=begun)]
    whole = it.engine.generate(more)
    for b, c in zip(begun, whole[0], strict=True):
        assert c.tokens[:4].tolist() == b.written.tokens.tolist() and len(c.turns) == 2
    assert gap(it.policy, more, whole) < 1e-5
    (free,) = it.engine.generate([Request(prompt=prompt, n=4, sampling=Sampling(max_new_tokens=30), key=(3,))])
    stop = free[0].text[3:5]
    (stopped,) = it.engine.generate([Request(prompt=prompt, n=4, sampling=Sampling(max_new_tokens=30, stop=(stop,)),
                                             key=(3,))])
    assert stop in stopped[0].text and stopped[0].finish_reason == "stop"
    assert len(stopped[0].tokens) < len(free[0].tokens)


def test_a_wrong_weight_is_found(engines, monkeypatch):
    it = engines("full")
    from vlrl.engine import vllm_server

    write, name = vllm_server.write_weights, "model.visual.blocks.0.mlp.linear_fc1.weight"

    def forgetful(policy, *args, **kwargs):
        weight = dict(policy.base.named_parameters())[name]
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1.0)
        try:
            return write(policy, *args, **kwargs)
        finally:
            weight.data.copy_(kept)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_server, "write_weights", forgetful)
        with pytest.raises(TrainingError, match="not the same policy"):
            it.engine.sync(it.policy, 4)
    it.engine.sync(it.policy, 4)


def test_servers_of_other_settings_are_refused(served, engines):
    it = engines("full")
    longer = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"max_model_len": 512})})
    with pytest.raises(ConfigError, match=r"engine\.max_model_len is 256, less than 512.*vlrl serve"):
        ServerEngine(it.policy, longer, served.root / "full")
    elsewhere = served.root.parent / "elsewhere"
    with pytest.raises(ConfigError, match="takes weights from"):
        ServerEngine(it.policy, it.config, elsewhere)
    other = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"key_file": ""})})
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        ServerEngine(it.policy, other, served.root / "full")


def test_a_killed_server_loses_no_answer_and_comes_back_with_the_weights(served, engines):
    it = engines("full")
    it.engine.sync(it.policy, 5)
    address = served.servers[1]
    port = address.rpartition(":")[2]
    (victim,) = [p for p in psutil.Process(served.pid).children() if port in p.cmdline()]
    finished = []

    def kill(number, completions):
        finished.append(number)
        if len(finished) == 1:
            victim.kill()

    requests = [Request(prompt=p, n=2, sampling=Sampling(max_new_tokens=2 if k + i == 0 else 150), key=(9, i, k))
                for k in range(8) for i, p in enumerate(it.prompts.values())]  # the first is done long before the rest
    answers = it.engine.generate(requests, kill)
    dead = it.engine.pool.replicas[1]
    assert dead.asked and not dead.ready and dead.problem
    assert [len(group) for group in answers] == [2] * len(requests)
    assert len(finished) == len({*finished}) == len(requests) - 1
    assert gap(it.policy, requests, answers) < 1e-5
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE

    client = Client(read_key(served.key_file), PATIENT)

    def state():
        try:
            return client.get(address, "/vlrl/state")
        except Unavailable:
            return None

    fresh = until(state, served.said())
    assert fresh["version"] == "" and not dead.ready  # up again, and nothing gets in before a sync
    small = [Request(prompt=it.prompts["image"], n=1, sampling=Sampling(max_new_tokens=2), key=(10,))]

    def back():
        it.engine.generate(small)
        return dead.ready

    until(back, dead.problem)
    assert state()["version"] == it.engine._target.version
    again = it.engine.generate(requests)
    assert gap(it.policy, requests, again) < 1e-5
    client.close()
