"""What a server lets in and how it changes weights, with a stand-in for vLLM."""

import asyncio
import contextlib
import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlrl.engine.vllm import routes as vllm_routes
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.routes import KEY, WEIGHTS, Routes
from vlrl.engine.vllm.worker import Extension

pytestmark = pytest.mark.anyio
PATIENT = 60
FOREIGN = b'{"version": "b-1", "input": {}, "options": {}}'


class Engine:
    """As much of vLLM's engine as routes ask for; `held` weights come when they are let in."""

    def __init__(self):
        self.calls, self.held, self.inside, self.most = [], {}, 0, 0
        self.questions, self.stands_still = 0, None

    async def collective_rpc(self, name, args):
        self.calls.append((name, *args))
        self.inside += 1
        self.most = max(self.most, self.inside)
        with contextlib.suppress(KeyError):
            await self.held[os.path.basename(str(args[0]))].wait()
        self.inside -= 1
        return [(3, [("w", 1.0, 2.0)])]

    async def is_sleeping(self):
        self.questions += 1
        await self.stands_still.wait() if self.stands_still else None
        return False

    async def reset_prefix_cache(self):
        return True

    async def reset_mm_cache(self):
        pass

    reset_encoder_cache = check_health = reset_mm_cache


async def vllm(scope, receive, send):
    await send({"status": 200})
    await send({"body": b'"vllm"'})


class Server:
    def __init__(self, root):
        self.root, self.engine = root, Engine()
        self.routes = Routes(vllm)

    def folder(self, name, *files):
        (self.root / name).mkdir(exist_ok=True)
        for file in files or ("model.safetensors",):
            (self.root / name / file).touch()
        return str(self.root / name)

    def load(self, version, **more):
        return {"version": version, "base": [version, self.folder(version)], "adapter": None} | more

    async def ask(self, path, value, gone=None, headers=(), key=b"secret", method="POST"):
        """(status, value) of a request whose client leaves when `gone` is set; None where nobody was left to answer."""
        sent, chunks = [], [value] if isinstance(value, bytes) else [json.dumps(value).encode()]
        state = SimpleNamespace(engine_client=self.engine, vllm_config=None)
        scope = {"type": "http", "method": method, "path": path, "app": SimpleNamespace(state=state),
                 "headers": [(b"authorization", b"Bearer " + key), *headers]}
        async def receive():
            if chunks:
                return {"type": "http.request", "body": chunks.pop(), "more_body": False}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await self.routes(scope, receive, send)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setenv(WEIGHTS, str(tmp_path / "ours"))
    (tmp_path / "ours").mkdir()
    return Server(tmp_path / "ours")


async def until(true):
    async with asyncio.timeout(PATIENT):
        while not true():
            await asyncio.sleep(0.001)


@contextlib.contextmanager
def writing(routes, version):
    """Answers are being written, as a task that may be cancelled."""
    async def write():
        await asyncio.Event().wait()
    task = asyncio.ensure_future(write())
    routes._running[task] = version
    try:
        yield task
    finally:
        del routes._running[task]
        task.cancel()


@pytest.mark.parametrize("killed", ["loads", "waits"])
async def test_a_load_whose_trainer_was_killed_ends_before_the_next_begins(server, killed):
    """Or one that only waits for another."""
    gone, held = asyncio.Event(), asyncio.Event()
    server.engine.held["a-1"] = held
    first = asyncio.ensure_future(server.ask("/vlrl/load", server.load("a-1"), gone if killed == "loads" else None))
    await until(lambda: server.engine.inside)
    if killed == "loads":  # its connection breaks in the middle of the load
        gone.set()
    second = asyncio.ensure_future(server.ask("/vlrl/load", server.load("b-1"), gone if killed == "waits" else None))
    for _ in range(20):
        await asyncio.sleep(0)
    if killed == "waits":
        gone.set()
        assert await second is None
    assert len(server.engine.calls) == 1 and server.routes.version == ""
    assert (await server.ask("/vlrl/generate", FOREIGN))[0] == 409
    held.set()
    if killed == "waits":
        assert await first == (200, {"version": "a-1"}) and len(server.engine.calls) == 1
    else:
        assert await first is None and await second == (200, {"version": "b-1"}) and server.engine.most == 1
        assert [os.path.basename(call[1]) for call in server.engine.calls] == ["a-1", "b-1"]
        assert server.routes._base == server.routes.version == "b-1"


async def test_weights_that_could_not_be_taken_leave_no_version(server):
    assert (await server.ask("/vlrl/load", server.load("a-1")))[0] == 200
    async def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    working, server.engine.collective_rpc = server.engine.collective_rpc, fail
    assert await server.ask("/vlrl/load", server.load("a-2")) == (500, {"error": "RuntimeError: no memory"})
    assert server.routes.version == server.routes._base == ""
    server.engine.collective_rpc = working
    assert (await server.ask("/vlrl/load", server.load("a-1", base=["a-1", server.folder("a-1")])))[0] == 200
    assert len(server.engine.calls) == 2  # whole weights are taken anew
    asked = {"version": "a-1", "base": server.folder("a-1"), "adapter": None}
    assert await server.ask("/vlrl/compare", asked) == (200, {"compared": 3, "differing": [["w", 1.0, 2.0]]})
    assert (await server.ask("/vlrl/compare", asked | {"version": "a-2"}))[0] == 409


async def test_what_a_version_chooses_from_comes_with_it(server):
    for version, choices in (("a-1", [0.8, [3, 4]]), ("b-1", [0.8, [3, 4]]), ("b-2", None), ("b-3", [1.0, []])):
        base = server.load("a-1")["base"]
        assert (await server.ask("/vlrl/load", server.load(version, base=base, choices=choices)))[0] == 200
    assert [call[0] for call in server.engine.calls] == ["vlrl_reload", "vlrl_choices", "vlrl_choices"]
    assert [call[1:] for call in server.engine.calls[1:]] == [(0.8, (3, 4)), (1.0, ())]
    for wrong in ([0.8], ["hot", []], [1.0, 5]):
        assert (await server.ask("/vlrl/load", server.load("c-1", choices=wrong)))[0] == 400
    assert server.routes.version == "b-3"


def test_a_worker_computes_with_what_is_chosen_from():
    class Model(torch.nn.Module):
        def compute_logits(self, hidden):
            return hidden and torch.tensor(hidden, dtype=torch.bfloat16)

    model, worker = Model(), Extension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    for temperature in (0.5, 0.25):  # never one upon the other
        worker.vlrl_choices(temperature, [1])
        assert model.compute_logits([[1.0, 2.0, 3.0]]).tolist() == [[1 / temperature, -np.inf, 3 / temperature]]
    assert model.compute_logits(None) is None  # a process that holds no logits
    worker.vlrl_choices(1.0, [])
    assert model.compute_logits([[1.0, 2.0, 3.0]]).dtype == torch.bfloat16


async def test_two_runs_take_turns_and_newer_weights_end_what_was_written_before(server):
    assert (await server.ask("/vlrl/load", server.load("a-1")))[0] == 200
    with writing(server.routes, "a-1") as task:
        status, said = await server.ask("/vlrl/load", server.load("b-1"))
        assert status == 409 and "another run" in said["error"] and not task.cancelled()
        assert server.routes.version == "a-1"
    assert (await server.ask("/vlrl/load", server.load("b-1")))[0] == 200
    body = {"version": "a-1", "input": {}, "options": {}}
    status, said = await server.ask("/vlrl/generate", body)
    assert status == 409 and "another run uses this server" in said["error"]
    with writing(server.routes, "b-1") as task:
        assert (await server.ask("/vlrl/load", server.load("b-2")))[0] == 200 and task.cancelled()


async def test_pictures_for_other_weights_are_not_decoded(server, monkeypatch):
    assert (await server.ask("/vlrl/load", server.load("a-1")))[0] == 200
    picture = vllm_wire.Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    monkeypatch.setattr(vllm_wire, "_image", lambda data: pytest.fail("it is decoded"))
    body = json.loads(vllm_wire.pack({"version": "a-2", "input": {"image": picture}, "options": {}}))
    status, said = await server.ask("/vlrl/generate", body)
    assert status == 409 and "not 'a-2'" in said["error"]


async def test_a_request_whose_pictures_are_decoded_while_weights_come_is_refused(server, monkeypatch):
    """It would be computed among two weights, and an engine whose pictures were forgotten then dies."""
    assert (await server.ask("/vlrl/load", server.load("a-1")))[0] == 200
    decoding, loaded, restored = threading.Event(), threading.Event(), vllm_wire.restore_arrays

    def slow(sent):
        decoding.set()
        loaded.wait(30)
        return restored(sent)

    monkeypatch.setattr(vllm_wire, "restore_arrays", slow)
    server.engine.generate = lambda *given, **named: pytest.fail("it is begun")
    body = json.loads(vllm_wire.pack({"version": "a-1", "input": {"prompt_token_ids": [1]}, "options": {}}))
    asked = asyncio.ensure_future(server.ask("/vlrl/generate", body))
    await until(decoding.is_set)
    assert (await server.ask("/vlrl/load", server.load("a-2")))[0] == 200
    loaded.set()
    status, said = await asked
    assert status == 409 and "not 'a-1'" in said["error"]


async def test_an_engine_that_dies_over_weights_is_said_to(server, monkeypatch):
    class EngineDeadError(Exception):
        pass

    async def dead():
        raise EngineDeadError("gone")

    monkeypatch.setattr(vllm_routes, "_LOOK_S", 0.05)
    server.engine.held["a-1"] = asyncio.Event()
    server.engine.check_health = dead
    status, said = await asyncio.wait_for(server.ask("/vlrl/load", server.load("a-1")), 30)
    assert status == 503 and "EngineDeadError" in said["error"] and not server.routes.version


async def test_weights_come_from_given_folders_alone_and_no_pickle(server, tmp_path):
    (tmp_path / "secret.safetensors").touch()
    (server.root / "linked").mkdir()
    (server.root / "linked" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    for path, value in (("/vlrl/load", server.load("a-1", base=["a-1", str(server.root / "linked")])),
                        ("/vlrl/load", server.load("a-1", adapter=str(server.root / "linked"))),
                        ("/vlrl/compare", {"version": "", "base": str(server.root / "linked"), "adapter": None})):
        status, said = await server.ask(path, value)
        assert status == 403 and "outside the folders in" in said["error"]
    pickled = server.folder("pickled", "adapter_model.bin", "other.safetensors")
    status, said = await server.ask("/vlrl/load", server.load("a-1", adapter=pickled))
    assert status == 400 and "adapter_model.safetensors" in said["error"]
    bare = server.folder("bare", "model.bin")
    assert (await server.ask("/vlrl/load", server.load("a-1", base=["a-1", bare])))[0] == 400
    assert not server.engine.calls and server.routes.version == ""
    (tmp_path / "theirs").mkdir()
    (server.root / "link").symlink_to(tmp_path / "theirs")
    for where, code, why in (("/etc", 403, "outside the folders in"), ("../theirs", 403, "outside the folders in"),
                             ("link", 403, "outside the folders in"), ("missing", 404, "must share the folder")):
        status, said = await server.ask("/vlrl/load", server.load("a-1", base=["a-1", str(server.root / where)]))
        assert status == code and why in said["error"], where


async def test_a_server_wants_its_key_on_every_path_and_a_fresh_one_answers_nothing(server):
    for path in ("/collective_rpc", "/v1/models", "/vlrl/load", "/vlrl/state", "/"):
        for wrong in (b"", b"secret2", b"Secret"):
            assert (await server.ask(path, b"{}", key=wrong))[0] == 401, path
    assert await server.ask("/health", b"{}", method="GET", key=b"") == (200, "vllm")
    assert await server.ask("/v1/models", b"{}", method="GET") == (200, "vllm")
    for version in ("", "run-1"):
        status, said = await server.ask("/vlrl/generate", {"version": version, "input": {}, "options": {}})
        assert status == 409 and "version" in said["error"]


MALFORMED = [b"", b"\xff", b"[]", b"null", b"7", b"{}", b"[" * 100_000, b'{"version": 1}']


async def test_malformed_requests_and_loads_are_refused(server):
    for path in ("/vlrl/generate", "/vlrl/load", "/vlrl/compare"):
        for body in MALFORMED:
            status, said = await server.ask(path, body)
            assert status == 400 or (path, body) == ("/vlrl/generate", MALFORMED[-1]), (body[:20], status, said)
    for more in ({"base": []}, {"base": "/etc"}, {"base": [1, 2]}, {"base": ["a", "\0"]}, {"version": ""},
                 {"version": ["a-1"]}, {"adapter": {"a": 1}}):
        status, _ = await server.ask("/vlrl/load", server.load("a-1") | more)
        assert status == 400 and not server.engine.calls, more


async def test_too_large_a_request_is_not_read(server, monkeypatch):
    length = (b"content-length", str(vllm_routes.MOST_BYTES + 1).encode())
    for told in (length, (b"content-length", b"9" * 5000)):
        status, said = await server.ask("/vlrl/generate", b"{", headers=[told])
        assert status == 413 and "bytes" in said["error"]
    monkeypatch.setattr(vllm_routes, "MOST_BYTES", 10)
    assert (await server.ask("/vlrl/generate", b" " * 11))[0] == 413  # without saying how long it is
    assert (await server.ask("/vlrl/generate", b"[]" + b" " * 8))[0] == 400
    assert (await server.ask("/vlrl/load", b"{", headers=[length], key=b"other"))[0] == 401


def test_damaged_prompts_are_value_errors(monkeypatch):
    for sent in (
            b'{"$image": "AAAA"}', b'{"$image": 5}', b'{"$frames": []}', b'{"$frames": ["AAAA"]}', b"[" * 100_000,
            b'{"$array": "AAAA", "dtype": "O", "shape": [1]}', b'{"$array": "AAAA", "dtype": "float32"}',
            b'{"$array": "AAAA", "dtype": "float32", "shape": [7]}', b'{"$array": "!", "dtype": "V1", "shape": [1]}',
            b'{"$pairs": [[[1], 2]]}', b'{"$pairs": [1]}', b'{"$tuple": 3}'):
        with pytest.raises(ValueError):
            vllm_wire.unpack(sent)
    sent = vllm_wire.pack({"i": vllm_wire.Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8))})
    monkeypatch.setattr(vllm_wire.Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="damaged"):
        vllm_wire.unpack(sent)


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_said_to(server):
    alive = lambda: server.ask(vllm_routes.ALIVE, b"", method="GET")  # noqa: E731
    assert await alive() == (200, {"silent_s": 0.0})
    server.engine.stands_still = asyncio.Event()
    found = [(await alive())[1]["silent_s"] for _ in range(3)]
    assert 0 < found[0] < found[1] < found[2] and server.engine.questions == 2  # one is owed, no second is asked
    server.engine.stands_still.set()
    assert await alive() == await alive() == (200, {"silent_s": 0.0})
    assert (await server.ask(vllm_routes.ALIVE, b"", method="GET", key=b"other"))[0] == 401

    class EngineDeadError(Exception):
        pass

    async def dead():
        raise EngineDeadError("gone")

    server.engine.is_sleeping = dead
    assert (await alive())[0] == 503
