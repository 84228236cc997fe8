"""What a server lets in and how it changes weights, with a stand-in for vLLM; how `vlrl serve` keeps its processes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import settings
from vlrl.engine.vllm import launch as vllm_launch
from vlrl.engine.vllm import routes as vllm_routes
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.routes import KEY, WEIGHTS, Routes
from vlrl.engine.vllm.worker import Extension
from vlrl.errors import ConfigError

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


async def test_a_load_whose_trainer_was_killed_ends_before_the_next_begins(server):
    gone, held = asyncio.Event(), asyncio.Event()
    server.engine.held["a-1"] = held
    first = asyncio.ensure_future(server.ask("/vlrl/load", server.load("a-1"), gone))
    await until(lambda: server.engine.inside)
    gone.set()  # its connection breaks in the middle of the load
    second = asyncio.ensure_future(server.ask("/vlrl/load", server.load("b-1")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(server.engine.calls) == 1 and server.routes.version == ""
    assert (await server.ask("/vlrl/generate", FOREIGN))[0] == 409
    held.set()
    assert await first is None and await second == (200, {"version": "b-1"})
    assert server.engine.most == 1
    assert [os.path.basename(call[1]) for call in server.engine.calls] == ["a-1", "b-1"]
    assert server.routes._base == server.routes.version == "b-1"


async def test_a_load_that_only_waits_ends_with_its_trainer(server):
    gone, held = asyncio.Event(), asyncio.Event()
    server.engine.held["a-1"] = held
    first = asyncio.ensure_future(server.ask("/vlrl/load", server.load("a-1")))
    await until(lambda: server.engine.inside)
    second = asyncio.ensure_future(server.ask("/vlrl/load", server.load("b-1"), gone))
    for _ in range(20):
        await asyncio.sleep(0)
    gone.set()
    assert await second is None
    held.set()
    assert await first == (200, {"version": "a-1"}) and len(server.engine.calls) == 1


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
        assert (await server.ask("/vlrl/load", server.load("b-2")))[0] == 200
        assert task.cancelled()


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


def test_the_key_outlives_the_servers(tmp_path, monkeypatch):
    path = vllm_launch.write_key(tmp_path / "key")
    key = path.read_text()
    assert len(key) > 30 and path.stat().st_mode & 0o777 == 0o600
    assert vllm_launch.write_key(tmp_path / "key").read_text() == key  # a run goes on with servers that start again
    path.chmod(0o644)
    assert vllm_launch.write_key(tmp_path / "key").read_text() != key and path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "own").write_text("mine\n")
    assert vllm_launch.write_key(tmp_path / "key", str(tmp_path / "own")) == tmp_path / "own"
    assert (tmp_path / "own").read_text() == "mine\n"
    made = vllm_launch.write_key(tmp_path / "key", str(tmp_path / "deep" / "made"))
    assert made.stat().st_mode & 0o777 == 0o600
    (tmp_path / "own").write_text("\n")
    with pytest.raises(ConfigError, match=r"engine\.key_file.*is empty"):
        vllm_launch._key_of(tmp_path / "own")
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=KEY):
        Routes(None)


def test_a_folder_belongs_to_one_serve(tmp_path):
    (tmp_path / "servers.json").write_text("{}")  # of one that was killed
    code = ("import sys; from pathlib import Path; from vlrl.store import lock\n"
            "with lock.lock(Path(sys.argv[1]) / 'serve.lock'): print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"process {other.pid} on .*--folder"), vllm_launch.serve_lock(tmp_path):
            pass
        assert (tmp_path / "servers.json").exists()
        other.kill()
    with vllm_launch.serve_lock(tmp_path):
        assert not (tmp_path / "servers.json").exists()
    assert not (tmp_path / "serve.lock").exists()


def test_what_cannot_be_served_is_said_before_a_model_is_read(tmp_path, monkeypatch):
    config = settings("no such model", engine={"name": "vllm_server"})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            vllm_launch.prepare(config, tmp_path / "a", replicas=2, port=port - 1)
    with pytest.raises(ConfigError, match="--port"):
        vllm_launch.prepare(config, tmp_path / "a", replicas=2, port=65535)
    with pytest.raises(ConfigError, match="--port"):
        vllm_launch.prepare(config, tmp_path / "a", host="no.such.host.invalid", port=port)
    assert not (tmp_path / "a").exists()
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    cpu = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert len(vllm_launch._devices(cpu, config.engine, 3, {})) == 3
    with pytest.raises(ConfigError, match=r"--replicas 4 with engine\.memory=0\.3.*VLLM_CPU_KVCACHE_SPACE"):
        vllm_launch._devices(cpu, config.engine, 4, {})
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert len(vllm_launch._devices(cpu, config.engine, 4, {})) == 4
    monkeypatch.setattr(socket, "gethostname", lambda: "a-name-that-only-others-know")
    assert vllm_launch._reached("0.0.0.0") == "a-name-that-only-others-know"
    assert vllm_launch._reached("0.0.0.0", here=True) == "127.0.0.1"
    assert vllm_launch._reached("::", here=True) == "[::1]"
    assert vllm_launch._reached("10.0.0.2", here=True) == "10.0.0.2"


PAGE = ("import http.server, os, sys, time\n"
        "begun, again = time.monotonic(), sys.argv[2] + ' at the start'\n"
        "if os.path.exists(again): os.unlink(again); time.sleep(1000)\n"
        "class Page(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "        known = self.headers.get('Authorization') == 'Bearer secret'\n"
        "        if self.path == '/vlrl/alive' and known and os.path.exists(sys.argv[2]):\n"
        "            self.wfile.write(b'{\"silent_s\": %f}' % (time.monotonic() - begun))\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Page).serve_forever()")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["server", "engine", "start"])
def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch, what):
    monkeypatch.setattr(vllm_launch, "_HEALTH_S", 0.2)
    monkeypatch.setattr(vllm_launch, "_POLL_S", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at, said, stands_still = f"http://127.0.0.1:{port}", [], tmp_path / "stands still"
    one = vllm_launch.ServerProcess(at, at, [sys.executable, "-c", PAGE, str(port), str(stands_still)],
                                    {**os.environ, KEY: "secret"}, tmp_path / "log")

    def say(line):
        stands_still.unlink(missing_ok=True)
        servers._start_s = PATIENT if "has not responded" in line else servers._start_s
        said.append(line)

    servers = vllm_launch.ServerGroup([one], say, silent_s=1.0)
    assert servers.start(PATIENT)
    hung = one.process
    if what == "server":
        os.kill(hung.pid, signal.SIGSTOP)
    elif what == "engine":
        stands_still.touch()
    else:
        servers._start_s = 1.0
        (tmp_path / "stands still at the start").touch()
        os.kill(hung.pid, signal.SIGKILL)
    watching = threading.Thread(target=servers.watch, daemon=True)
    watching.start()
    try:
        end = time.monotonic() + PATIENT
        while not any("responds again" in line for line in said):
            assert time.monotonic() < end, said
            time.sleep(0.02)
        assert "has not responded for 1 s" in said[what == "start"] and hung.returncode == -signal.SIGKILL
        assert ("its engine" in said[0]) == (what == "engine")
        assert one.process.pid != hung.pid
    finally:
        servers.stop()
        watching.join(PATIENT)
        servers.close()
    assert one.process.returncode == -signal.SIGTERM
