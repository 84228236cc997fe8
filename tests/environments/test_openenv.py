"""The client of OpenEnv against real servers of its package: played, killed, stopped, and told lies by."""

import contextlib
import http.server
import json
import signal
import threading
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.sync.server import serve

from tests.environments.serving import Serving, http_server
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments import openenv
from vlrl.environments.actions import action_of_text
from vlrl.environments.external import resolved
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.images import observation_of
from vlrl.environments.openenv import OpenEnv, checked_url, healthy
from vlrl.environments.server_pool import ServerPool
from vlrl.environments.validation import ProtocolError
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.types import Observation, Sample, Step

PARTS = ("return", "success", "progress", "illegal")


@pytest.fixture(scope="module")
def server():
    serving = Serving("openenv_server.py", path="/health")
    yield serving
    serving.stop()


def opened(url, **options):
    return OpenEnv(url, parts=PARTS, step_s=120, reset_s=120, **options)


@pytest.mark.slow
def test_an_episode_of_a_real_server(server, closing):
    environment = opened(server.url)
    first = environment.reset(7)
    assert first.text == "level 0" and environment.step("nan").parts["return"] == 0  # its JSON has null for it
    assert first.media[0].source.size == (48, 32) and first.media[0].source.getpixel((0, 0)) == (0, 7, 0)
    steps = [environment.step(word) for word in ("up", "<think>now</think>down", "up", "up")]
    environment.close()
    assert [step.done for step in steps] == [False, False, False, True]
    totals = {name: sum(step.parts[name] for step in steps) for name in PARTS}
    assert totals == pytest.approx({"return": 3, "success": 1, "progress": 1, "illegal": 0})
    assert steps[0].state == steps[1].state != steps[2].state
    assert steps[0].observation.media[0].source.getpixel((0, 0)) == (60, 7, 0)
    other = closing(opened(server.url, reset={"start": 2}))
    assert other.reset(7).text == "level 2" and other.step("up").done


@pytest.mark.slow
@pytest.mark.parametrize("word, why", [
    ("raise", "the server reports: .lost. .EXECUTION_ERROR."), ("broken", "the environment.s picture"),
    ("pixels", "the environment.s pixels is not an image"), ("huge", "ConnectionClosed|too big|exceeds")])
def test_what_a_server_does_wrongly_ends_the_episode(server, word, why, closing):
    environment = opened(server.url)
    environment.reset(1)
    with pytest.raises(ProtocolError, match=why):
        environment.step(word)
    environment.close()
    other = closing(opened(server.url))  # others go on
    other.reset(1)
    assert other.step("frame").observation.media[0].source.size == (9, 8)


class Climbing(Task):
    rewards = {"return": 1.0}

    def samples(self, split):
        return [Sample(id=str(i)) for i in range(4)]


@pytest.mark.slow
def test_a_server_that_is_full_says_so(server):
    serving = Serving("openenv_server.py", "1", path="/health")
    try:
        one, two = opened(serving.url), opened(serving.url)
        one.reset(1)
        with pytest.raises(ProtocolError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
            two.reset(1)
        assert one.step("up").parts["return"] == 1
        others = [opened([serving.url, server.url]) for _ in range(3)]
        for other in others:  # go to the one that has a place
            other.reset(1)
            assert other.step("up").info["server"] == server.url
            other.close()
        one.close()
        two.close()
    finally:
        serving.stop()


@pytest.mark.slow
def test_killed_slow_and_back_again(server):
    """Two servers: one is stopped and then killed while episodes live on both; new ones go to the other. No later test
    asks the server that all share: it is killed too."""
    servers = [server, Serving("openenv_server.py", path="/health")]
    names = [f"openenv:{server.url}" for server in servers]
    chosen = EnvironmentSettings(name=names, workers=1, step_s=16, reset_s=400)
    task = Climbing()
    task.outside = resolved(chosen)
    host = Environments(lambda _: task, chosen)
    try:
        episodes = [host.open(sample, 3) for sample in task.samples("train")]
        assert all(isinstance(found, Observation) for found in host.reset(episodes))
        steps = host.step(episodes, ["up"] * 4)
        urls = [step.info["server"] for step in steps]
        assert sorted(urls) == sorted([s.url for s in servers] * 2)  # spread
        stopped = next(s for s in servers if s.url == urls[0])
        stopped.send(signal.SIGSTOP)
        found = host.step(episodes, ["up"] * 4)
        slow = [f for f, url in zip(found, urls, strict=True) if url == stopped.url]
        assert all(isinstance(f, EnvironmentFailure) and "no answer within 12 s" in f.reason for f in slow)
        assert all(isinstance(f, Step) for f, url in zip(found, urls, strict=True) if url != stopped.url)
        assert host.restarts == 0  # given up before the process is ended
        stopped.stop()
        fresh = [host.open(sample, 4) for sample in task.samples("train")]
        assert all(isinstance(f, Observation) for f in host.reset(fresh))
        steps = host.step(fresh, ["up"] * 4)
        assert {step.info["server"] for step in steps} == {s.url for s in servers} - {stopped.url}
        stopped.start()
        next(s for s in servers if s is not stopped).kill()
        assert all(isinstance(f, EnvironmentFailure) for f in host.step(fresh, ["up"] * 4))
        again = [host.open(sample, 5) for sample in task.samples("train")]
        assert all(isinstance(f, Observation) for f in host.reset(again))  # taken back
        assert {step.info["server"] for step in host.step(again, ["up"] * 4)} == {stopped.url}
    finally:
        host.close()
        servers[1].stop()


GOOD = {"observation": {"text": "on"}, "reward": 1.0, "done": False}
LIES = ["no JSON", "[1]", "null", '"observation"', "[" * 50_000, b"\xff\xfe", {"type": "observation"},
        {"type": "observation", "data": [1]}, {"type": "state", "data": GOOD}, {"type": "error", "data": "x"},
        {"type": "error", "data": {"message": {"a": 1}, "code": 7}},
        '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}',
        '{"type": "observation", "data": {"observation": {}, "reward": 1e999, "done": false}}',
        *({"type": "observation", "data": {**GOOD, **lie}} for lie in (
            {"observation": "text"}, {"reward": "5"}, {"reward": [5]}, {"reward": {"a": 1}}, {"done": "yes"},
            {"done": 1}, {"metadata": {"progress": "half"}}, {"observation": {"s": "data:image/png;base64,AAAA"}},
            {"observation": {"s": [[[0, 0, 300]] * 8] * 8}}, {"observation": {"s": [1, 2, 3], "s_shape": [9, 9, 3]}}))]


@pytest.fixture(scope="module")
def liar():
    """A server that answers whatever it is told to."""
    said = {}

    def answer(socket):
        for message in socket:
            socket.send(json.dumps({"type": "observation", "data": GOOD}) if "reset" in message else said["next"])

    with serve(answer, "127.0.0.1", 0, max_size=None) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.socket.getsockname()[1]}", said
        serving.shutdown()
        thread.join()


def test_lies_end_the_episode_and_a_true_answer_goes_on(liar, monkeypatch, closing):
    url, said = liar
    monkeypatch.setattr(openenv, "action_schema", lambda *_: {"properties": {"word": {"type": "string"}}})
    for lie in LIES:
        said["next"] = lie if isinstance(lie, (str, bytes)) else json.dumps(lie)
        environment = closing(OpenEnv(url, parts=PARTS))
        assert environment.reset(1).text == "on", lie
        with pytest.raises(ProtocolError):
            environment.step("go")
    said["next"] = json.dumps({"type": "error", "data": {"message": "no", "code": "VALIDATION_ERROR"}})
    environment = closing(OpenEnv(url, parts=PARTS))
    environment.reset(1)
    refused = environment.step("go")
    assert refused.parts["illegal"] == 1 and refused.observation.text.startswith("Error: no (VALIDATION_ERROR)")
    said["next"] = json.dumps({"type": "observation", "data": GOOD})
    assert environment.step("go").parts == {"return": 1.0, "success": 0.0, "progress": 0.0, "illegal": 0.0}
    said["next"] = json.dumps({"type": "observation", "data": {**GOOD, "error": None}})  # which says of no error
    assert environment.step("go").parts["illegal"] == 0
    assert environment.step("[" * 9000).parts["illegal"] == 0  # a text is any text
    environment = closing(OpenEnv(url, parts=PARTS))
    environment.reset(1)
    environment._socket.send("once more")  # whose answer is not taken
    end = time.monotonic() + 60
    with pytest.raises(ProtocolError, match="a message that was not requested"):
        while time.monotonic() < end:
            environment.step("go")


def test_a_server_that_is_not_there_and_a_reset_in_time(liar, monkeypatch, closing):
    environment = OpenEnv("http://127.0.0.1:9", parts=PARTS)
    with pytest.raises(ProtocolError, match=r"no server accepts an episode: .*none is healthy"):
        for _ in range(2):  # tried without a look at its health at first
            try:
                environment.reset(1)
            except ProtocolError as error:
                assert "127.0.0.1:9" in str(error) or "none is healthy" in str(error)
                last = error
        raise last
    environment.close()
    assert not healthy("http://127.0.0.1:9")
    def slow(url, seconds):
        time.sleep(0.6)
        return {"properties": {}}

    monkeypatch.setattr(openenv, "action_schema", slow)
    environment = closing(OpenEnv(liar[0], parts=PARTS, reset_s=0.5))
    with pytest.raises(ProtocolError, match="no server accepts an episode"):
        environment.reset(1)


def test_what_is_no_address():
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a?x=1", "file:///x", "http://a#x", "http://a:99999",
            "http://[a"):
        with pytest.raises(ConfigError, match="must look like"):
            checked_url(url)
    for url in (
            "http://me:secret@host", "HTTP://me:secret@host/x", "https://secret@host", "http://:secret@host:80",
            "http://me:secret@host:99999", "ftp://secret@host"):
        with pytest.raises(ConfigError, match="has a user name or password") as error:
            checked_url(url)
        assert "secret" not in str(error.value), url
    assert checked_url("HTTP://127.0.0.1:8000/a/") == "http://127.0.0.1:8000/a"


class Web(http.server.BaseHTTPRequestHandler):
    """Is well, leads on from /away/ and from /ws, answers /huge/ without an end, and /slow/ a letter at a time."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path.startswith(("/away/", "/ws")):
            self.send_response(302)
            self.send_header("Location", getattr(self.server, "elsewhere", "/health"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100 if self.path.startswith("/huge/") else 0):
                self.wfile.write(b" " * 2**16)
            for _ in range(60 if self.path.startswith("/slow/") else 0):
                time.sleep(0.1)
                self.wfile.write(b" ")
            self.wfile.write(b'{"status": "healthy", "action": {"properties": {}}}')

    def log_message(self, *given):
        pass


@pytest.fixture
def web():
    with http_server(Web) as (url, Web.serving):
        yield url


def test_no_redirect_no_proxy_and_no_endless_body(web, monkeypatch, liar, closing):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert healthy(web) and openenv.action_schema(web) == {"properties": {}} and not healthy(f"{web}/away")
    with pytest.raises(httpx.HTTPStatusError, match="302"):
        openenv.action_schema(f"{web}/away")
    assert not healthy(f"{web}/huge")
    with pytest.raises(ProtocolError, match="more than 1048576 bytes"):
        openenv.action_schema(f"{web}/huge")
    monkeypatch.setattr(openenv, "_CONNECT_S", 0.4)
    with pytest.raises(ProtocolError, match=r"slow/schema: no answer within 0\.4 s"):
        openenv.action_schema(f"{web}/slow", 0.4)
    assert not healthy(f"{web}/slow")
    Web.serving.elsewhere = f"ws{liar[0].removeprefix('http')}/ws"
    environment = closing(OpenEnv(web, parts=PARTS))
    with pytest.raises(ProtocolError, match=f"no server accepts an episode: {web}: .*redirect"):
        environment.reset(1)


def test_a_dead_server_is_left_out_and_taken_back(monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 0)
    now, well = [0.0], {"a": True, "b": True}
    servers = ServerPool(("a", "b"), lambda address: well[address], lambda: now[0])
    assert [*servers.candidates()] == ["a", "b"]
    servers.started("a")
    assert [*servers.candidates()] == ["b", "a"]
    servers.failed("b")
    well["b"] = False
    assert [*servers.candidates()] == ["a"]
    now[0] = 2.5
    assert [*servers.candidates()] == ["a"]  # asked, and not well: the pause doubles
    now[0], well["b"] = 5.0, True
    assert [*servers.candidates()] == ["a"]
    now[0] = 7.0
    assert [*servers.candidates()] == ["a", "b"]
    servers.started("b")
    servers.closed("a")
    assert [*servers.candidates()] == ["a", "b"]
    servers.failed("a")
    servers.failed("b")
    assert [*servers.candidates()] == ["a", "b"]  # at once, where none is left


def test_a_text_becomes_an_action():
    for text, schema, field, action in (
            ("up", {"properties": {"word": {"type": "string"}, "metadata": {}}}, "", {"word": "up"}),
            (" 3 ", {"properties": {"n": {"type": "integer"}}}, "", {"n": 3}),
            ("0.5", {"properties": {"x": {"type": "number"}}}, "", {"x": 0.5}), ("go",
            {"properties": {"word": {}, "speed": {"default": 1}}, "required": ["word"]}, "", {"word": "go"}),
            ("go", {"properties": {"a": {}, "b": {}}}, "b", {"b": "go"}),
            ('{"a": 1}', {"properties": {"a": {}, "b": {}}}, "", {"a": 1}),
            ("[1, 2]", {"properties": {"at": {"type": "array"}}}, "", {"at": [1, 2]}),
            ("2", {"properties": {"n": {"enum": [1, 2]}}}, "", {"n": 2}),
            ("3", {"properties": {"n": {"type": ["string", "integer", "null"]}}}, "", {"n": 3}),
            ("go", {"properties": {"n": {"type": ["string", "integer", "null"]}}}, "", {"n": "go"}),
            ("null", {"properties": {"n": {"type": ["number", "null"]}}}, "", {"n": None}),
            ("[3]", {"properties": {"n": {"type": ["boolean", "array"]}}}, "", {"n": [3]}),
            ("true", {"properties": {"n": {"type": ["boolean", "string"]}}}, "", {"n": True}),
            ("go", {"properties": {"n": {"type": []}}}, "", {"n": "go"})):
        assert action_of_text(text, schema, field) == action, (text, schema, field, action)
    for text, schema in (
            ("x", {"properties": {"n": {"type": "integer"}}}), ("nan", {"properties": {"n": {"type": "number"}}}),
            ("9" * 5000, {"properties": {"n": {"type": "integer"}}}), ("up", {"properties": {"a": {}, "b": {}}}),
            ("[1]", {"properties": {"a": {}, "b": {}}}), ("3", {"properties": {"n": {"enum": [1, 2]}}}),
            ("[" * 9000, {"properties": {"at": {"type": "array"}}}),
            ("go", {"properties": {"n": {"type": ["integer", "null"]}}}),
            ("5", {"properties": {"n": {"type": "boolean"}}}), ("[1e999]", {"properties": {"n": {"type": "array"}}}),
            ("x" * 30_000, {"properties": {"a": {}}})):
        with pytest.raises(ValueError) as error:
            action_of_text(text, schema)
        assert len(str(error.value)) < 600, (text, schema)


KIND = st.sampled_from(["string", "integer", "number", "array", "object", "null", 7])
KINDS = KIND | st.lists(KIND, max_size=3)


@given(st.text(), st.dictionaries(st.text(max_size=3), st.fixed_dictionaries({"type": KINDS}), max_size=3))
def test_any_text_is_an_action_or_a_value_error(text, properties):
    with contextlib.suppress(ValueError):
        assert isinstance(action_of_text(text, {"properties": properties}), dict)


WORD = st.text(max_size=4)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORD,
                    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(WORD, inner, max_size=2), max_leaves=8)


@settings(max_examples=40)
@given(st.dictionaries(WORD, JSON, max_size=3))
def test_any_observation_is_shown_or_wrong(fields):
    try:
        found = observation_of(fields)
    except ProtocolError:
        return
    assert isinstance(found.text, str) and len(found.text) < 11_000
