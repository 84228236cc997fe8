"""A teacher behind a server: gradients beside those of the same teacher from a folder, and a server that is away,
restarted or another. The server is a real one over HTTP that answers as vlrl's do, with the teacher's own numbers."""

import re
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.stubs import KEY_OF_ALL, Stub
from tests.training.test_distillation import TEMPERATURE, of, scene, stepped  # noqa: F401 - a fixture
from tests.training.test_update import assert_close
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import resumable
from vlrl.engine.vllm import server as vllm_server
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.errors import ConfigError, TrainingError
from vlrl.methods.distillation import teacher
from vlrl.models.packing import make_batch, pieces_of
from vlrl.training import inert


class Server(Stub):
    """Scores as a server does with the weights of `folder`; `planted(body)` may answer in its place."""

    def __init__(self, policy, prompts, config, folder):
        super().__init__(self.reply_to)
        self.policy, self.prompts, self.model = policy, prompts, teacher.load(config, policy)
        self.version, self.loads, self.scored = "", [], 0
        self.planted, self.lock = (lambda body: None), threading.Lock()
        self.state = {"protocol": vllm_wire.PROTOCOL, "vocabulary": policy.vocabulary, "lora_rank": 0,
                      "logprobs_mode": "processed_logprobs", "extension": vllm_server.EXTENSION,
                      "roots": [str(folder.parent)]}

    def reply_to(self, body):
        with self.lock:
            return self.planted(body) or (self.load(body) if "base" in body else self.score(body))

    def load(self, body):
        self.version = body["version"]
        self.loads.append(body)
        return 200, {"version": self.version}

    def score(self, body):
        if body["version"] != self.version:
            return 409, {"error": f"the weights here are of version {self.version!r}"}
        self.scored += 1
        temperature, banned = self.loads[-1]["choices"]
        assert banned == self.policy.banned.tolist()
        ids, options = body["input"]["prompt_token_ids"], body["options"]
        assert ("multi_modal_data" in body["input"]) == any(p.media for p in self.prompts if fits(p, ids))
        prompt = max((p for p in self.prompts if fits(p, ids)), key=lambda p: len(p.raw_ids))
        written = ids[len(prompt.raw_ids):]
        batch = make_batch(pieces_of([prompt], [np.array([*written, *options["logprob_token_ids"]])], 10**6))
        with torch.no_grad(), self.policy.evaluating():
            *before, last = self.policy.logprobs(batch, temperature, self.model).logprobs.tolist()
        whole = [*prompt.ids.tolist(), *written]
        given = [None, *[-9.0] * (len(prompt) - 1), *before]
        shown = {"prompt_logprobs": given} if "prompt_logprobs" in options else {}
        return 200, {"prompt": whole, **shown, "outputs": [{"tokens": [1], "logprobs": [last], "finish": "length"}]}


def fits(prompt, ids):
    return ids[:len(prompt.raw_ids)] == prompt.raw_ids.tolist()


@pytest.fixture
def served(scene, tmp_path):  # noqa: F811
    """The scene, a server of its teacher, and the settings that name it."""
    policy, _, groups, folder, other = scene
    server = Server(policy, [g.prompt for g in groups], of(folder, other), other)
    (tmp_path / "key").write_text(KEY_OF_ALL)
    (tmp_path / "key").chmod(0o600)

    def settings(**more):
        return of(folder, other, **{"loss": "sampled_kl", "server": server.address, "timeout_s": 60.0, "retries": 2,
                                    "key_file": str(tmp_path / "key"), **more})
    yield server, settings
    server.planted = lambda body: (503, {})
    with server.lock:  # what a test left behind is computed to its end
        server.kill()


def test_the_gradient_is_that_of_the_same_teacher_from_a_folder(scene, served):  # noqa: F811
    (_, _, groups, folder, other), (server, settings) = scene, served
    more = {"rollout": {"minibatches": 2, "updates": 2}, "coef": 2.0, "objective": 0.5}
    wanted, expected = stepped(scene, of(folder, other, loss="sampled_kl", **more))
    steps, stats = stepped(scene, settings(**more))
    assert len(steps) == len(wanted) == 4
    for found, one in zip(steps, wanted, strict=True):
        assert_close(found, one, 1e-4)
    assert stats["distillation/kl"] == pytest.approx(expected["distillation/kl"], abs=1e-5)
    assert abs(stats["distillation/kl"]) > 1e-3
    # each answer that is trained once, in spite of two passes over it; the weights once, at the sampled temperature
    assert server.scored == sum(r.trained for g in groups for r in g.rollouts)
    assert len({load["version"] for load in server.loads}) == 1  # at the start and in the step, where it is no work
    assert all(load["base"][1] == str(other) and load["choices"][0] == TEMPERATURE for load in server.loads)


@pytest.mark.slow
def test_a_server_that_was_started_again_gets_the_weights_again(scene, served):  # noqa: F811
    server, settings = served
    _, whole = stepped(scene, settings())
    failing = iter([(503, {"error": "loading"}), None, (500, {"error": "engine"})])

    def dies(body):
        if "base" in body:
            return None
        if server.scored == 22:  # of the second run
            server.version, server.scored = "", 100
        return next(failing, None)
    server.planted = dies
    _, stats = stepped(scene, settings())
    assert stats["distillation/kl"] == pytest.approx(whole["distillation/kl"], abs=1e-6)
    assert len(server.loads) >= 4 and len({load["version"] for load in server.loads}) == 1
    for temperature in (0.8, 0.9, 0.8):
        stepped(scene, settings(rollout={"temperature": temperature}))
    versions = {(load["choices"][0], load["version"].rpartition("-")[0]) for load in server.loads}  # as routes do
    assert len(versions) == len({version for _, version in versions}) == 2
    assert len({tuple(load["base"]) for load in server.loads}) == 1


@pytest.mark.slow
def test_a_server_that_is_away(scene, served):  # noqa: F811
    server, settings = served
    config = settings(timeout_s=0.5)
    server.planted = lambda body: None if "base" in body else server.kill() or (500, {})
    away = rf"algo\.distillation\.server={server.address}.*no server of algo\.distillation\.server was .* for 0\.5 s"
    with pytest.raises(TrainingError, match=rf"(?s){away}.*`vlrl serve` again.*same command.*distillation\.timeout_s"):
        stepped(scene, config)
    with pytest.raises(TrainingError, match=r"no server of algo\.distillation\.server was .*Start `vlrl serve`"):
        stepped(scene, config)


@pytest.mark.parametrize("plant, error, message", [
    (lambda s: s.state.update(protocol=1), ConfigError, f"protocol is 1 instead of {vllm_wire.PROTOCOL}"),
    (lambda s: s.state.update(vocabulary=7), ConfigError, r"vocabulary is 7 instead of \d+.*Start it by `vlrl serve"),
    (lambda s: s.state.update(lora_rank=8), ConfigError, r"lora_rank is 8 .*model\.lora\.rank=0"),
    (lambda s: s.state.update(roots=["/elsewhere"]), ConfigError, "loads weights from /elsewhere, .*--weights /"),
    (lambda s: s.state.clear(), ConfigError, "is a server that `vlrl serve` did not start"),
    (lambda s: setattr(s, "planted", lambda body: (500, {"error": "size mismatch"})), TrainingError,
     r"the teacher \(/.*the server cannot load the weights: .*size mismatch.*this teacher's model"),
    (lambda s: setattr(s, "planted", lambda body: (401, {})), ConfigError,
     r"refuses the key: set algo\.distillation\.key_file")])
def test_a_server_that_is_another(scene, served, plant, error, message):  # noqa: F811
    server, settings = served
    plant(server)
    with pytest.raises(error, match=message) as raised:
        stepped(scene, settings())
    assert server.address in str(raised.value) and server.scored == 0


def test_what_a_server_must_not_say_and_cannot_read(scene, served):  # noqa: F811
    (_, _, groups, *_), (server, settings) = scene, served
    last = sum(r.trained for g in groups for r in g.rollouts) - 1  # no other is under way then

    def changed(**more):
        server.scored = 0
        return lambda body: None if "base" in body or server.scored < last else (200, {**server.score(body)[1], **more})
    server.planted = changed(outputs=[{"tokens": [1], "logprobs": [-float("inf")], "finish": "length"}])
    with pytest.raises(TrainingError, match=r"group .*: a log-probability is not finite.*engine\.dtype"):
        stepped(scene, settings())
    server.planted = changed(prompt=[1, 2, 3])
    with pytest.raises(TrainingError, match="vLLM's processor converts"):
        stepped(scene, settings())
    (policy, _, groups, *_), (_, settings) = scene, served
    seen = next(g for g in groups if g.prompt.media)
    first = seen.rollouts[0]
    done = replace(first.completion, shown=seen.prompt)
    (method,) = Algorithm(settings()).methods
    row = SimpleNamespace(row=done, rollout=first, group=seen, name="group 1", mask=np.ones(len(done.tokens), bool))
    method.start(SimpleNamespace(policy=policy))
    with pytest.raises(ConfigError, match=r"an observation has images.*server=null"):
        method.teacher([row], TEMPERATURE)


def test_a_teacher_that_a_server_cannot_read(scene, tmp_path):  # noqa: F811
    *_, folder, other = scene
    more = {"loss": "sampled_kl", "server": "http://127.0.0.1:1"}
    teacher.check(of(folder, other, **more))
    adapter = shutil.copytree(other, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{folder}"}}')
    with pytest.raises(ConfigError, match=r"teacher='.*/adapter' is an adapter.*`vlrl export`.*server=null"):
        teacher.check(of(folder, adapter, **more))


def validated(**distillation):
    return configs.validate({"task": "digits", "model": {"name": "m"}, "algo": {"distillation": distillation}})


def test_settings_of_a_server():
    address = "http://127.0.0.1:8100"
    with pytest.raises(ConfigError, match=rf"loss=reverse_kl needs .*algo\.distillation\.server={re.escape(address)} "
                                          r"returns.*set algo\.distillation\.loss=sampled_"):
        validated(server=address)
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1' is not the address of a server"):
        validated(server="127.0.0.1", loss="sampled_kl")
    with pytest.raises(ConfigError, match=r"8000 is one of engine\.servers.*another --port and"):
        configs.validate({"task": "digits", "model": {"name": "m"}, "engine": "vllm_server", "algo": {"distillation": {
            "server": "http://127.0.0.1:8000", "loss": "sampled_kl"}}})
    assert validated(server=f"{address}/", loss="sampled_kl").algo.distillation.server == address
    found = {one.setting for one in inert.find(validated(retries=1, key_file="key"))}
    chosen = {"algo.distillation.retries", "algo.distillation.key_file"}
    assert chosen <= found
    served = validated(retries=1, key_file="key", server=address, loss="sampled_kl")
    assert not chosen & {one.setting for one in inert.find(served)}
    assert resumable("algo.distillation.server") and not resumable("algo.distillation.loss")
