"""The client of MCP against real servers of its package: over standard input and HTTP, killed, slow, and lying."""

import contextlib
import http.server
import json
import resource
import signal
import sys
import threading

import psutil
import pytest

from tests.environments.serving import HERE, Serving, http_server
from tests.tables import each
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments import external as named
from vlrl.environments import mcp
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.mcp import McpEnvironment, checked_addresses, mcp_tools
from vlrl.environments.tools import environment_of, schemas
from vlrl.environments.validation import ProtocolError
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.types import Observation, Sample, Step

pytestmark = pytest.mark.slow
COMMAND = f"{sys.executable} {HERE / 'mcp_server.py'}"
PARTS = ("return", "success", "tool_success")
PATIENT = {"step_s": 200, "reset_s": 200}


@pytest.fixture(scope="module")
def server():
    serving = Serving("mcp_server.py")
    yield serving
    serving.stop()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def children():
    return [p for p in psutil.Process().children(recursive=True) if "mcp_server.py" in " ".join(p.cmdline())]


@pytest.mark.parametrize("over", ["stdio", "http"])
def test_its_tools_are_called_and_its_images_seen(server, over):
    address = COMMAND if over == "stdio" else f"{server.url}/mcp"
    before = children()
    environment = McpEnvironment(address, reset="start", parts=PARTS, **PATIENT)
    assert [environment.reset(seed).text for seed in (4, 5)] == ["There are doors, seed 4.", "There are doors, seed 5."]
    door = environment.step(call("open_door", number=2) + call("open_door", number=1))
    assert [m.source.getpixel((0, 0)) for m in door.observation.media] == [(255, 215, 0), (128, 128, 128)]
    assert door.observation.text == "Door 2 is open.\nDoor 1 is open." and door.parts == {"tool_success": 1}
    wrong = environment.step(call("open_door", number="two"))
    assert "valid integer" in wrong.observation.text and wrong.parts == {"tool_success": 0} and not wrong.done
    assert environment.step(call("start", seed=1)).observation.text.startswith("Error: no tool 'start'")
    assert "Error executing tool fault" in environment.step(call("fault", kind="raise")).observation.text
    long = environment.step(call("fault", kind="long")).observation.text
    assert len(long) < 10_100 and long.endswith("[cut: 10000 of 50000 characters are shown]")
    last = environment.step(call("guess", number=2))
    assert last.done and last.parts == {"return": 1, "success": 1, "tool_success": 1}
    assert environment.step("no call").done
    twice = environment.step(call("fault", kind="pay") + call("guess", number=2) + call("fault", kind="pay"))
    assert twice.done and twice.parts == {"return": 2, "success": 0, "tool_success": 1}  # it had succeeded before
    environment.close()
    environment.close()
    assert children() == before  # a command ends with its environment


def test_what_several_calls_of_an_action_pay_in_one_time(server, closing):
    """Their rewards add up; what one of them ended and reached stays so."""
    environment = closing(McpEnvironment(f"{server.url}/mcp", parts=("return", "success", "progress"), **PATIENT))
    environment.reset(1)
    step = environment.step(call("guess", number=2) + call("fault", kind="pay"))
    assert step.done and step.parts == {"return": 1.5, "success": 1, "progress": 0.25} and step.state == "paid"
    environment = closing(McpEnvironment(f"{server.url}/mcp", parts=PARTS, step_s=3, reset_s=200))
    environment.reset(1)
    with pytest.raises(ProtocolError, match="no answer within 3 s"):
        environment.step(call("fault", kind="nap") * 2)


def test_what_the_model_is_shown(server):
    shown = [tool.schema["function"] for tool in mcp_tools(COMMAND, reset="start")]
    assert [s["name"] for s in shown] == ["open_door", "guess", "fault"]
    assert shown[0]["description"] == "Opens a door and shows what is behind it."
    assert shown[0]["parameters"]["properties"]["number"]["type"] == "integer"
    assert [tool.name for tool in mcp_tools(f"{server.url}/mcp", tools=["guess"])] == ["guess"]
    with pytest.raises(ConfigError, match="has no tool 'gues'; it has open_door"):
        mcp_tools(f"{server.url}/mcp", tools=["gues"])
    with pytest.raises(ConfigError, match="cannot be started: No such file"):
        mcp_tools("no_such_program_of_anyone --flag")


@each("kind why", [
    ("nan", "environment's reward is 'much', not a finite"), ("done", "server's done is 'yes'"), ("broken", "'s image"),
    ("text", "the environment's image is not base64"), ("many", "100 pieces"), ("die", "Connection closed")])
def test_what_a_server_does_wrongly_ends_the_episode(server, kind, why):
    address = COMMAND if kind == "die" else f"{server.url}/mcp"
    with contextlib.closing(McpEnvironment(address, parts=PARTS, **PATIENT)) as environment:
        environment.reset(1)
        with pytest.raises(ProtocolError, match=why):
            environment.step(call("fault", kind=kind))


LIAR = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked.get("method"), asked.get("id")
    if method == "initialize":
        said = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "liar", "version": "1"}}
    elif method == "tools/list":
        said = LISTED
    elif method == "tools/call":
        said = CALLED
    else:
        continue
    text = said if isinstance(said, str) else json.dumps({"jsonrpc": "2.0", "id": number, "result": said})
    print(text, flush=True)
"""
TOOL = {"name": "look", "inputSchema": {"type": "object"}}
OUTPUT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("listed, called", [
    ([{"name": 5, "inputSchema": {}}], None), ("tools", None), ([{**TOOL, "name": "look at"}], None),
    ([{**TOOL, "inputSchema": {"x": "y" * 30_000}}], None), ([{**TOOL, "name": f"t{i}"} for i in range(200)], None),
    ([TOOL], {"content": "text"}), ([TOOL], {"content": [{"type": "text", "text": 5}]}), ([TOOL], [1]),
    ([TOOL], {"content": [{"type": "image", "data": 7, "mimeType": "image/png"}]}), ([TOOL], "no JSON"),
    ([TOOL], {"content": [], "structuredContent": {"reward": 1e999}}),
    ([{**TOOL, "outputSchema": OUTPUT}], {"content": [], "structuredContent": {"n": "three"}})],
    ids=lambda v: str(v)[:50])
def test_lies_about_types(tmp_path, listed, called, closing):
    file = tmp_path / "liar.py"
    file.write_text(LIAR.replace("LISTED", repr({"tools": listed})).replace("CALLED", repr(called))
                    .replace("inf", "float('inf')"))
    # what is no message of the protocol is no answer either, so some of these take step_s
    environment = closing(McpEnvironment(f"{sys.executable} {file}", parts=PARTS, step_s=3, reset_s=200))
    with pytest.raises(ProtocolError):
        environment.reset(1)
        environment.step(call("look") if called is not None else "")


def test_opening_has_its_own_time_and_tools_end(tmp_path, closing):
    file = tmp_path / "silent.py"
    file.write_text("import time; time.sleep(600)")
    environment = closing(McpEnvironment(f"{sys.executable} {file}", parts=PARTS, step_s=500, reset_s=2))
    with pytest.raises(ProtocolError, match=r"no answer within (2|1\.\d+) s"):
        environment.reset(1)
    file = tmp_path / "liar.py"
    file.write_text(LIAR.replace("LISTED", repr({"tools": [], "nextCursor": "more"})).replace("CALLED", "None"))
    environment = closing(McpEnvironment(f"{sys.executable} {file}", parts=PARTS, **PATIENT))
    with pytest.raises(ProtocolError, match="more than 100 tools, or an endless list of tools"):
        environment.reset(1)


class Endless(http.server.BaseHTTPRequestHandler):
    """Speaks MCP up to a call of its tool, which it answers without an end, or packed."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"initialize": {"protocolVersion": asked.get("params", {}).get("protocolVersion"), "capabilities": {},
                               "serverInfo": {"name": "endless", "version": "1"}},
                "tools/list": {"tools": [TOOL]}}.get(asked["method"])
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": said}).encode() if said else b""
        ends = said or "id" not in asked
        self.send_response(200 if "id" in asked else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Mcp-Session-Id", "one")
        self.send_header("Content-Length", str(len(body) if ends else 2**40))
        if not ends and asked["params"]["arguments"]:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)
        with contextlib.suppress(OSError):
            while not ends:
                self.wfile.write(b" " * 2**20)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *given):
        pass


class Clinging(Endless):
    """Does not let a session end."""

    asked, over = threading.Event(), threading.Event()

    def do_DELETE(self):
        self.asked.set()
        self.over.wait(600)
        self.send_error(405)


def test_a_server_that_does_not_let_go_is_left(monkeypatch):
    monkeypatch.setattr(mcp, "_CLOSE_S", 0.5)
    with http_server(Clinging) as (url, _):
        environment = McpEnvironment(f"{url}/mcp", parts=PARTS, **PATIENT)
        environment.reset(1)
        environment.close()
        assert Clinging.asked.is_set() and not Clinging.over.is_set()
        Clinging.over.set()


def test_an_answer_without_an_end_is_not_read():
    for arguments, why in (
            ({}, "the response has more than 67108864 bytes"), ({"packed": True}, "the response is compressed")):
        with http_server(Endless) as (url, _):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with contextlib.closing(McpEnvironment(f"{url}/mcp", parts=PARTS, **PATIENT)) as environment:
                environment.reset(1)
                with pytest.raises(ProtocolError, match=why):
                    environment.step(call("look", **arguments))
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


class Doors(Task):
    rewards = {"return": 1.0, "tool_success": 0.0}


def hosted(name, **settings):
    task, chosen = Doors(), EnvironmentSettings(name=name, workers=1, **settings)
    named.attach(task, chosen)
    return task, Environments(lambda _: task, chosen)


def test_slow_and_killed_in_a_host(server):
    """Over HTTP with another server beside it, which takes its episodes."""
    other = Serving("mcp_server.py")
    task, host = hosted([f"mcp:{server.url}/mcp", f"mcp:{other.url}/mcp"], step_s=24, reset_s=400)
    try:
        assert "open_door" in [s["function"]["name"] for s in schemas(task, Sample(id="a"))]
        one, two = (host.open(Sample(id=str(i)), 3) for i in range(2))
        assert all(isinstance(found, Observation) for found in host.reset([one, two]))
        slow, well = host.step([one, two], [call("fault", kind="sleep"), call("open_door", number=1)])
        assert isinstance(slow, EnvironmentFailure) and "no answer within 18 s" in slow.reason
        assert isinstance(well, Step) and well.parts == {"tool_success": 1} and host.restarts == 0
        other.kill()
        server.kill()
        assert all(isinstance(found, EnvironmentFailure)
                   for found in host.step([one, two], [call("open_door", number=1)] * 2))
        server.start()
        three = host.open(Sample(id="3"), 3)
        (found,) = host.reset([three])
        if isinstance(found, EnvironmentFailure):  # it was asked first while it began
            (found,) = host.reset([three])
        assert isinstance(found, Observation)
        host.close_episodes([one, two, three])
    finally:
        host.close()
        other.stop()


def test_a_command_ends_with_the_process_of_its_environment():
    """Which is ended with kill -9, and cannot end it itself; what the server has started ends too."""
    _, host = hosted(f"mcp:{COMMAND}", step_s=300, reset_s=300)
    try:
        episode = host.open(Sample(id="a"), 1)
        assert isinstance(host.reset([episode])[0], Observation)
        assert isinstance(host.step([episode], [call("fault", kind="child")])[0], Step)
        (worker,) = host.processes
        started = psutil.Process(worker).children(recursive=True)
        assert {"sleep"} <= {p.name() for p in started} and len(started) >= 3
        psutil.Process(worker).send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(started, timeout=60)[1]
    finally:
        host.close()


def test_a_command_sees_few_variables_and_no_shell(monkeypatch, tmp_path):
    monkeypatch.setenv("VLRL_SECRET", "x")
    monkeypatch.setenv("VLRL_WANTED", "y")
    environment = McpEnvironment(COMMAND, environment=["VLRL_WANTED"], parts=PARTS, **PATIENT)
    environment.reset(1)
    names = environment.step(call("fault", kind="environment")).observation.text.split()
    environment.close()
    assert "VLRL_WANTED" in names and "VLRL_SECRET" not in names
    assert {*names} <= {"VLRL_WANTED", "HOME", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    mark = tmp_path / "mark"
    environment = McpEnvironment(f"{COMMAND} ; touch {mark}", parts=PARTS, **PATIENT)
    with pytest.raises(ProtocolError):  # the server takes ; for a port
        environment.reset(1)
    environment.close()
    assert not mark.exists()


def test_addresses_and_variables():
    """What tests of environment.name see too is told by these classes and functions themselves."""
    for address, why in (("ws://a", "must look like"), ("HTTP://me:x@a", "has a user name or password")):
        with pytest.raises(ConfigError, match=why):
            checked_addresses([address])
    assert checked_addresses(["HTTP://a/MCP?x=1"]) == ["http://a/MCP?x=1"]
    for make in (McpEnvironment, mcp_tools):
        for wrong, why in (({"environment": ["VLRL_NEVER_SET"]}, "names 'VLRL_NEVER_SET', which is not set"),
                           ({"environment": "HOME"}, "must be a list"), ({"tools": "look"}, "must be a list")):
            with pytest.raises(ConfigError, match=why):
                make(COMMAND, **wrong)


def test_a_tasks_own_two_lines(server):
    class Mine(Task):
        rewards = {"return": 1.0, "success": 0.0}

        def tools(self, sample):
            return mcp_tools(f"{server.url}/mcp")

        def environment(self, sample):
            return McpEnvironment(f"{server.url}/mcp", **PATIENT)

    assert len(schemas(Mine(), Sample(id="a"))) == 4
    with contextlib.closing(environment_of(Mine(), Sample(id="a"))) as environment:
        environment.reset(1)
        assert environment.step(call("guess", number=2)).parts == {"return": 1, "success": 1}
