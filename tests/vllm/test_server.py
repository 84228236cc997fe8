"""Servers that `vlrl serve` started: the same policy after every sync, and a stale weight is named."""

import json
import re
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from tests.vllm.conftest import trainer_logprobs
from tests.vllm.serve import FORKED, PATIENT, Serve, free_ports, until
from tests.vllm.test_proof import perturb
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.engine.vllm import server as vllm_server
from vlrl.engine.vllm.client import Unavailable
from vlrl.engine.vllm.server import ServerEngine
from vlrl.errors import ConfigError, TrainingError

pytestmark = pytest.mark.vllm
LORA = {"rank": 4, "target": "language"}
LEARNS = {"full": {"train": ["language", "merger", "vision"]}, "lora": {"lora": LORA},
          "merged": {"lora": LORA | {"target": "vision_language"}}}
WAYS = {"full": "full", "lora": "adapter", "merged": "merged"}
planted = "tests.vllm.planted.Extension"

PLANTED = f"vllm_launch.EXTENSION = {planted!r}\n"


@pytest.fixture(scope="module")
def served(installed, tiny_models, tmp_path_factory):
    """Two servers of a tiny model, which take adapters and whole weights, and stale ones as told; a hangup ends them
    (SIGTERM: test_processes.py, SIGKILL: test_episodes.py)."""
    root = tmp_path_factory.mktemp("served")
    model, config = tiny_models["qwen3_vl"], root / "run.yaml"
    config.write_text(json.dumps({"task": "x", "model": {"name": str(model), "lora": LORA},  # JSON is YAML
                                  "engine": {"name": "vllm_server", "max_model_len": 256, "max_seqs": 32},
                                  "rollout": {"max_new_tokens": 64}, "run": {"dir": str(root / "run")}}))
    serve = Serve(root, "servers", config, "--replicas", "2", "--port", free_ports(), settings=PLANTED + FORKED,
                  VLRL_PLANTED=str(root / "planted"))
    try:
        serve.ready()
        yield SimpleNamespace(root=root, said=serve.said, model=model, servers=serve.servers, key_file=serve.key_file)
    finally:
        assert serve.process.poll() is None, serve.said()
        assert serve.close(signal.SIGHUP) == (130, 0) and not serve.there(), serve.said()


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


def gap(policy, requests, answers, temperature=1.0):
    pairs = [(r.prompt, c) for r, group in zip(requests, answers, strict=True) for c in group]
    return np.abs(trainer_logprobs(policy, pairs, temperature) - np.concatenate([c.logprobs for _, c in pairs])).max()


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
        assert [len(group) for group in answers] == [3] * 4 and gap(it.policy, requests, answers, 0.7) < 1e-5
        assert not {t for group in answers for c in group for t in c.tokens.tolist()} & {*it.policy.banned.tolist()}
        again = it.engine.generate(requests) if not step else answers
        assert sum(a.tokens.tolist() == b.tokens.tolist() for x, y in zip(answers, again, strict=True)
                   for a, b in zip(x, y, strict=True)) >= 11  # seeds; a tie may tip with the batch
        seen.append(np.concatenate([c.logprobs for c in answers[0]])[:3])
        move(it.policy, step)
    assert len({tuple(first.tolist()) for first in seen}) == 3  # the weights did change
    it.engine.sync(it.policy, 3)


def test_stops_budgets_and_answers_that_go_on(engines):
    """As the HF engine's, whose tests say what they are; log-probabilities of forced tokens are the trainer's too."""
    it = engines("full")
    it.engine.sync(it.policy, 0)
    hf, prompt = HFEngine(it.policy, 0), it.prompts["image"]

    def ask(**more):
        begun = more.pop("begun", ())
        asked = [Request(prompt=prompt, n=1, sampling=Sampling(temperature=0, **more), key=(1,), begun=begun)]
        ((ours,),), ((theirs,),) = it.engine.generate(asked), hf.generate(asked)
        for name in ("tokens", "loss_mask", "text", "finish_reason", "turns"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, (name, more)
        assert gap(it.policy, asked, [[ours]]) < 1e-5, more
        return ours

    free = ask(max_new_tokens=30)
    stopped = ask(max_new_tokens=30, stop=(free.text[3:5],))
    assert stopped.finish_reason == "stop" and len(stopped.tokens) < len(free.tokens)
    assert not ask(max_new_tokens=14, thinking_budget=4).loss_mask.all()
    first = ask(max_new_tokens=4)
    assert first.truncated and len(ask(max_new_tokens=9, begun=(AnswerPrefix(index=0, written=first),)).turns) == 2


STALE = {"language": ("full", "model.language_model.layers.1.self_attn.k_proj.weight"),
         "vision": ("full", "model.visual.blocks.0.mlp.linear_fc1.weight"),
         "merged": ("merged", "model.visual.blocks.0.mlp.linear_fc1.weight"),
         "adapter": ("lora", "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_B.weight"),
         "head": ("full", "lm_head.weight (tied to the embedding)")}
"""What learns, and the weight; of a head the packed copy is the embedding before, as vLLM's own reload leaves it
on CPUs."""


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


@pytest.mark.parametrize("what, step", [*((what, 0.2) for what in STALE), *(
    (what, 1e-6) for what in ("vision", "merged", "adapter"))])  # seen by the probe, and too small for it
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
    plant(what if what == "head" else name)
    with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities") as error:
        it.engine.sync(it.policy, 1)
    assert f". {name} differs by" in str(error.value) and str(error.value).count("differs by") == 1
    plant("")
    it.engine.sync(it.policy, 2)
    requests = [Request(prompt=it.prompts["image"], n=2, sampling=Sampling(max_new_tokens=4), key=(1,))]
    assert gap(it.policy, requests, it.engine.generate(requests)) < 1e-5


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
    small = [Request(prompt=it.prompts["image"], n=1, sampling=Sampling(max_new_tokens=2), key=(10,))]
    until(lambda: it.engine.generate(small) and all(r.ready for r in it.engine.pool.replicas), served.said)
    requests = [Request(prompt=p, n=8, sampling=Sampling(max_new_tokens=100), key=(3, i))
                for i, p in enumerate(it.prompts.values())]
    with ThreadPoolExecutor() as threads:
        answers = threads.submit(it.engine.generate, requests)
        gaps = list(threads.map(lambda i: it.engine._gap(served.servers[i % 2], it.engine._target), range(12)))
        assert max(gaps) < 1e-5 and gap(it.policy, requests, answers.result()) < 1e-5


def test_servers_of_other_settings_are_refused(served, engines):
    it = engines("full")
    longer = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"max_model_len": 512})})
    with pytest.raises(ConfigError, match=r"engine\.max_model_len is 256, less than 512.*vlrl serve"):
        ServerEngine(it.policy, longer, served.root / "full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "EXTENSION", "vlrl.engine.vllm.worker.Extension")
        with pytest.raises(ConfigError, match=r"extension is tests\.vllm\.planted"):
            ServerEngine(it.policy, it.config, served.root / "full")
    with pytest.raises(ConfigError, match="loads weights from"):
        ServerEngine(it.policy, it.config, served.root.parent / "elsewhere")
    other = it.config.model_copy(update={"engine": it.config.engine.model_copy(update={"key_file": ""})})
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        ServerEngine(it.policy, other, served.root / "full")
