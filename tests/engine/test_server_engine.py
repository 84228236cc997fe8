"""The engine over servers, against small HTTP servers that answer as vlrl's do and do what is planted."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SAMPLES, noise
from tests.engine.stubs import KEY_OF_ALL, PATIENT, Stub
from tests.helpers import Vowels, load, settings
from vlrl.engine.base import AnswerPrefix, Request, Sampling
from vlrl.engine.vllm import server as vllm_server
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.server import ServerEngine, read_key
from vlrl.errors import ConfigError, TrainingError
from vlrl.types import Completion, Turn


class Server(Stub):
    """Knows the probe of `engine`; writes one token an answer. `planted(body)` may hold a request up or change it."""

    def __init__(self, root):
        super().__init__(self.reply_to)
        self.root, self.version = root, ""
        self.engine: Any = None
        self.planted, self.expanded = (lambda body: None), {}
        self.asked = []
        """What it wrote answers to, proofs aside."""

    def describe(self, **more):
        self.state = {"protocol": vllm_wire.PROTOCOL, "version": self.version, "logprobs_mode": "processed_logprobs",
                      "extension": vllm_server.EXTENSION, "max_model_len": 256, "lora_rank": 0, "dtype": "float32",
                      "roots": [str(self.root)], **more}

    def reply_to(self, body):
        if "base" in body:
            self.version = body["version"]
            self.describe(vocabulary=self.state["vocabulary"])
            return 200, {"version": self.version, "compared": 1, "differing": []}
        options, ids = body["options"], body["input"]["prompt_token_ids"]
        if "logit_bias" in options:
            self.asked.append(ids)
        self.planted(body)
        proof = self.engine._proof
        known = {tuple(p.raw_ids.tolist()): p.ids.tolist() for p in (*self.expanded.values(), proof.prompt)}
        raw = max((k for k in known if tuple(ids[:len(k)]) == k), key=len)
        written = ids[len(raw):]
        logprob = self.engine._target.probe[len(written)] if raw == tuple(proof.prompt.raw_ids.tolist()) else -1.0
        output = {"tokens": [5], "logprobs": [logprob], "finish": "length"}
        return 200, {"prompt": [*known[raw], *written], "outputs": [output] * options["n"] if "n" in options
                     else [output]}


@pytest.fixture
def two(tiny_models, tmp_path):
    servers = [Server(tmp_path), Server(tmp_path)]
    made = []

    def make(**more):
        (tmp_path / "key").write_text(KEY_OF_ALL)
        config = settings(tiny_models["qwen2_5_vl"], engine={
            "name": "vllm_server", "max_model_len": 256, "max_seqs": 32, "servers": [s.address for s in servers],
            "key_file": str(tmp_path / "key"), **more})
        policy, encode = load(config)
        for server in servers:
            server.describe(vocabulary=policy.base.config.get_text_config().vocab_size)
        engine = ServerEngine(policy, config, tmp_path / "engine")
        prompts = {kind: encode(Vowels(), SAMPLES[kind]) for kind in ("image", "text")}
        for server in servers:
            server.engine, server.expanded = engine, prompts
        made.append(engine)
        return SimpleNamespace(policy=policy, engine=engine, servers=servers, prompts=prompts)

    yield make
    for engine in made:
        engine.close()
    for server in servers:
        server.kill()


def requests(prompt, count):
    return [Request(prompt=prompt, n=2, sampling=Sampling(max_new_tokens=1), key=(0, i)) for i in range(count)]


@pytest.mark.slow
def test_a_server_that_hangs_gets_nothing_more_before_it_answers_again(two):
    """Its web page and its version are as they should be; what writes the answers stands still."""
    it = two(timeout_s=3.0)
    hung, other = it.servers
    it.engine.sync(it.policy, 0)
    free = threading.Event()
    hung.planted = lambda body: free.wait(PATIENT)
    for count in (4, 8):
        assert [len(made) for made in it.engine.generate(requests(it.prompts["text"], count))] == [2] * count
    assert len(hung.asked) == 2 and len(other.asked) == 4 - 2 + 2 + 8
    assert [r.ready for r in it.engine.pool.replicas] == [False, True]
    free.set()
    end = time.monotonic() + PATIENT
    while len(it.engine.pool.admit_all()) < 2:
        assert time.monotonic() < end
    assert len(hung.asked) == 2


@pytest.mark.parametrize("part", ["goes on", "is forced"])
def test_an_answer_that_goes_on_does_so_from_the_prompt_of_the_trainer(two, part):
    it = two()
    it.engine.sync(it.policy, 0)
    written = Completion(tokens=np.array([5, 6]), logprobs=np.zeros(2, np.float32), loss_mask=np.ones(2, bool),
                         text="", finish_reason="length", turns=(Turn(start=0, end=2),))
    sampling = Sampling(max_new_tokens=3 if part == "goes on" else 9, thinking_budget=None if part == "goes on" else 2)
    request = Request(prompt=it.prompts["image"], n=1, sampling=sampling, key=(0, 0),
                      begun=(AnswerPrefix(index=0, written=written),))
    ((answer,),) = it.engine.generate([request])
    assert answer.tokens[:2].tolist() == [5, 6] and len(answer.tokens) > 2
    image = it.prompts["image"]
    changed = SimpleNamespace(raw_ids=image.raw_ids, ids=np.append(image.ids[:-1], image.ids[-1] + 1))
    for server in it.servers:
        server.expanded = {"image": changed}
    with pytest.raises(TrainingError, match=f"^sample '{image.sample_id}': vLLM's processor converts"):
        it.engine.generate([request])


def test_prompts_travel_without_loss_and_keys_come_from_a_file(monkeypatch, tmp_path, caplog):
    image = noise(1, 30, 20)
    frames = np.stack([np.asarray(noise(i, 16, 8)) for i in range(4)])
    sent = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": [image], "video": [(frames, {"fps": 2.5, "at":
            [0, 1]})]}, "bias": {7: float("-inf")}, "floats": np.arange(3, dtype=np.float32), "n": np.int64(3),
            "nothing": None}
    found = vllm_wire.unpack(vllm_wire.pack(sent))
    (got,) = found["multi_modal_data"]["image"]
    assert isinstance(got, Image.Image) and got.mode == "RGB" and np.array_equal(np.asarray(got), np.asarray(image))
    (video, metadata), = found["multi_modal_data"]["video"]
    assert video.dtype == np.uint8 and np.array_equal(video, frames) and metadata == {"fps": 2.5, "at": [0, 1]}
    assert isinstance(found["multi_modal_data"]["video"][0], tuple)
    assert found["bias"] == {7: float("-inf")} and found["n"] == 3 and found["nothing"] is None
    assert found["floats"].dtype == np.float32 and found["floats"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="Lock"):
        vllm_wire.pack({"x": asyncio.Lock()})
    monkeypatch.setenv("VLRL_ENGINE_KEY", "of the environment")
    assert read_key("") == "of the environment"
    (tmp_path / "key").write_text("of the file\n")
    for mode, told in ((0o600, False), (0o640, True)):
        (tmp_path / "key").chmod(mode)
        assert read_key(str(tmp_path / "key")) == "of the file"
        assert ("can be read by users other than its owner (mode 640)" in caplog.text) == told
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        read_key(str(tmp_path / "absent"))
