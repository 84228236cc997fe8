"""A client of MCP servers. A server's tools become the tools of a task. Images in results become media of the
observation.

    SERVER = "python my_server.py"                   # or "http://127.0.0.1:8000/mcp"

    class Mine(Task):
        def tools(self, sample): return mcp_tools(SERVER)
        def environment(self, sample): return McpEnvironment(SERVER)

Each episode has a separate session. For a command, this is a process that is started without a shell and ends with the
episode. For a URL, it is a session over streamable HTTP. The protocol (https://modelcontextprotocol.io) is implemented
by the package mcp."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from vlrl.environments.episode_reward import PARTS, EpisodeReward, number
from vlrl.environments.episode_reward import SUCCESS as SUCCEEDED
from vlrl.environments.images import image_of_base64
from vlrl.environments.server_pool import Deadline, pool
from vlrl.environments.tools import NAME, CallError, Tool, ToolEnvironment, shorten
from vlrl.environments.validation import ProtocolError, checked_names, checked_server_url, checked_variables
from vlrl.errors import ConfigError
from vlrl.task.environment import SUCCESS
from vlrl.types import Media, Observation, Step

_MOST_BYTES = 2**26  # maximum size of a response in bytes
_MOST_TOOLS, _MOST_SCHEMA, _MOST_CONTENT = 100, 20_000, 64
_CLOSE_S = 5.0  # time limit in seconds for closing a session
_MODELS_FAULT = (-32602, -32601)
"""JSON-RPC error codes for invalid parameters and an unknown method. The model gets the error message, and the episode
continues."""
_LEASH = os.path.join(os.path.dirname(__file__), "leash.py")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII | re.IGNORECASE)
_log = logging.getLogger(__name__)


class McpTool(Tool):
    """A tool of an MCP server, with its schema. call: function that runs the tool; None if only the schema is needed.
    """

    def __init__(self, schema: Mapping[str, Any], call: Callable[[str, Mapping[str, Any]], Observation] | None = None):
        function = schema["function"]
        self.name, self.description = function["name"], function["description"]
        self.schema, self._call = dict(schema), call

    def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs the tool and returns its result. Raises CallError if the server rejects the call, and ProtocolError for
        a malformed result."""
        if self._call is None:
            raise CallError(f"{self.name} cannot be called here, because only its schema was requested")
        return self._call(self.name, arguments)


class McpSession:
    """A session with one server. address: a command or URL; nothing else is contacted. until, in all methods: the
    deadline."""

    def __init__(self, address: str, environment: Collection[str] = (), folder: str | None = None):
        self.address, self._environment, self._folder = address, environment, folder
        self._stack, self._stderr = ExitStack(), _Tail()
        self._refused: list[str] = []
        self._portal: Any = None
        self._client: Any = None

    def open(self, until: Deadline) -> None:
        """Connects to the server. Raises ProtocolError if the server does not respond in time."""
        from anyio.from_thread import start_blocking_portal
        from mcp import Client

        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            # the handshake of versions before 2026, which servers of all versions have, gives each client a session
            client = Client(self._transport(until.left), mode="legacy", cache=None, read_timeout_seconds=until.left)
            try:
                self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(client))
            except Exception as error:
                raise ProtocolError(self._why(error, until)) from error
        except BaseException:
            self.close()
            raise

    def tools(self, allowed: Collection[str], until: Deadline) -> list[dict[str, Any]]:
        """Returns the schemas of the server's tools for chat templates: those of the tools named in `allowed`, or of
        all tools if `allowed` is empty. Raises ProtocolError for an invalid response or a missing tool."""
        offered, cursor = [], None
        for _ in range(_MOST_TOOLS):
            page = self._request(until, self._client.list_tools, cursor=cursor)
            offered += page.tools
            cursor = page.next_cursor
            if not cursor or len(offered) > _MOST_TOOLS:
                break
        if cursor or len(offered) > _MOST_TOOLS:
            raise ProtocolError(f"{self.address} offers more than {_MOST_TOOLS} tools, or an endless list of tools")
        named = {tool.name: tool for tool in offered}
        missing = [name for name in allowed if name not in named]
        if missing:
            raise ProtocolError(f"{self.address} has no tool {missing[0]!r}; it has {', '.join(named)[:300]}")
        return [_schema(tool) for name, tool in named.items() if not allowed or name in allowed]

    def call(self, name: str, arguments: Mapping[str, Any], until: Deadline) -> Any:
        """Runs a tool and returns its result. Raises CallError if the server rejects the arguments, and ProtocolError
        for any other failure."""
        return self._request(until, self._client.call_tool, name, dict(arguments), read_timeout_seconds=until.left)

    def close(self) -> None:
        """Closes the session. A server that was started by a command is ended."""
        stack, self._stack, self._client = self._stack, ExitStack(), None
        try:
            stack.close()
        except Exception as error:  # the connection may be broken already
            _log.debug("%s: closing: %s: %s", self.address, type(error).__name__, error)
        finally:
            self._stderr.close()

    def _transport(self, connect_s: float) -> Any:
        if _is_url(self.address):
            from mcp.client.streamable_http import streamable_http_client

            client = _bounded_client(connect_s, self._refused.append)
            self._stack.enter_context(self._portal.wrap_async_context_manager(client))
            return streamable_http_client(self.address, http_client=client, max_sse_event_size=_MOST_BYTES)
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command = shlex.split(self.address)
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", _LEASH, str(os.getpid()), *command]
        own = {name: os.environ[name] for name in self._environment}
        return stdio_client(StdioServerParameters(command=command[0], args=command[1:], env=own, cwd=self._folder),
                            errlog=self._stderr.file)

    def _request(self, until: Deadline, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        from mcp import MCPError

        try:
            return self._portal.call(functools.partial(_within, until.left, function, *given, **named))
        except Exception as error:  # a malformed message may raise anything
            if isinstance(error, MCPError) and error.code in _MODELS_FAULT:
                raise CallError(str(error)[:500]) from error
            _log.debug("%s: a call failed", self.address, exc_info=True)
            raise ProtocolError(self._why(error, until)) from error

    def _why(self, error: BaseException, until: Deadline) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        why = f"no answer within {until}" if late else f"{type(error).__name__}: {str(error)[:300]}"
        detail = self._stderr.text() or "".join(self._refused[-1:])
        return f"{self.address}: {why}" + (f" ({detail})" if detail else "")


async def _within(seconds: float, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    import anyio

    with anyio.fail_after(seconds):
        return await function(*given, **named)


def _bounded_client(connect_s: float, tell: Callable[[str], None]) -> Any:
    """Creates an HTTP client that uses no proxies and limits the size of responses. If the client rejects a response,
    it calls `tell` with the reason. `connect_s` limits the time for connecting. Callers must limit the time of
    requests; only closing a session is limited here, to _CLOSE_S seconds."""
    import anyio
    import httpx2

    def refuse(why: str) -> None:
        tell(why)
        raise httpx2.ReadError(why)

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, inner: Any):
            self.inner, self.left = inner, _MOST_BYTES

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self.inner:
                self.left -= len(piece)
                if self.left < 0:
                    refuse(f"the response has more than {_MOST_BYTES} bytes")
                yield piece

        async def aclose(self) -> None:
            await self.inner.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"
            if request.method == "DELETE":  # what it answers besides is not read
                with anyio.fail_after(_CLOSE_S):
                    response = await super().handle_async_request(request)
                    await response.aclose()
                return httpx2.Response(response.status_code)
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":  # which may unpack to any size
                refuse("the response is compressed, which was not requested")
            response.stream = Counted(response.stream)
            return response

    return httpx2.AsyncClient(timeout=httpx2.Timeout(connect_s, read=None), trust_env=False,
                              transport=Transport(trust_env=False))


class _Tail:
    def __init__(self):
        reader, writer = os.pipe()
        self.file, self._tail = os.fdopen(writer, "w"), b""
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while piece := pipe.read(4096):
                self._tail = (self._tail + piece)[-300:]

    def text(self) -> str:
        return " ".join(self._tail.decode("utf-8", "replace").split())

    def close(self) -> None:
        self.file.close()


class McpEnvironment(ToolEnvironment):
    """An environment that executes the tool calls in the model's action on an MCP server.

    address: a command with arguments, or the URL of a server over streamable HTTP; several URLs are equivalent servers.
    tools: names of the tools that the model may call; () = all.
    reset: name of a tool, hidden from the model, that is called with {"seed": ...} when an episode begins; its result
        is the first observation.
    environment: names of environment variables passed to the command, in addition to HOME, LOGNAME, PATH, SHELL, TERM
        and USER.
    folder: the working directory of the command.
    step_s, reset_s: time limits in seconds for all calls of an action, and for everything up to the first observation.

    If the structured content of a tool's result has a `reward` (and optionally `done`, `success`, `progress`), the turn
    gets the reward parts of EpisodeReward, with the same `goal` and `parts`. The rewards of several calls in one action
    are added, and the episode is done or successful if any call reports it."""

    def __init__(self, address: str | Sequence[str], *, tools: Collection[str] = (), reset: str = "",
                 environment: Collection[str] = (), folder: str | None = None, goal: float | None = None,
                 parts: Collection[str] = PARTS, step_s: float = 45.0, reset_s: float = 90.0):
        super().__init__((), SUCCESS in parts)
        self.addresses = checked_addresses([address] if isinstance(address, str) else address)
        self._allowed, self._reset = checked_names(tools, "tools"), reset
        self._given = checked_variables(environment, "environment"), folder
        self.rewards, self.step_s, self.reset_s = EpisodeReward(parts, goal), step_s, reset_s
        self._servers = pool(self.addresses, lambda address: True)
        self._session: McpSession | None = None
        self._payment: dict[str, Any] = {}
        self._until = Deadline(reset_s)

    def reset(self, seed: int) -> Observation:
        self._until = Deadline(self.reset_s)
        self._connect()
        assert self._session
        schemas = self._session.tools((*self._allowed, *filter(None, [self._reset])) if self._allowed else (),
                                      self._until)
        self.tools = {tool.name: tool for tool in (McpTool(s, self._called) for s in schemas)}
        if not self._reset:
            return Observation()
        first = self.tools.pop(self._reset, None)
        if first is None:
            raise ProtocolError(f"{self._session.address} has no tool {self._reset!r}, but the option `reset` names "
                                "this tool")
        try:
            shown = first({"seed": seed})
        except CallError as error:
            raise ProtocolError(f"the server's tool {self._reset!r} failed: {error}") from None
        return shown

    def step(self, action: str) -> Step:
        self._payment, self._until = {}, Deadline(self.step_s)
        step = super().step(action)
        payment = self._payment
        if not payment:
            return step
        paid = self.rewards.step(payment["reward"], payment["done"], payment)
        state = payment.get("state")
        return Step(step.observation, {**step.parts, **paid}, done=step.done or payment["done"],
                    state=None if state is None else shorten(str(state), 1000), info=step.info)

    def close(self) -> None:
        if self._session:
            session, self._session = self._session, None
            try:
                session.close()
            finally:
                self._servers.closed(session.address)

    def _connect(self) -> None:
        self.close()
        refused = []
        for address in self._servers.candidates():
            session = McpSession(address, *self._given)
            try:
                session.open(self._until.within(self.reset_s / len(self.addresses)))
            except ProtocolError as error:
                self._servers.failed(address)
                refused.append(str(error))
            else:
                self._session = session
                self._servers.started(address)
                return
        raise ProtocolError("; ".join(refused) or "no server is healthy")

    def _called(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        assert self._session
        try:
            result = self._session.call(name, arguments, self._until)
        except ProtocolError:
            self._servers.failed(self._session.address)
            raise
        shown = content(result.content)
        if result.is_error:
            raise CallError(f"{name}: {shown.text or 'it failed'}"[:500])
        payment = result.structured_content if isinstance(result.structured_content, Mapping) else {}
        if "reward" in payment:
            self._payment = _added(self._payment, payment)
        return shown


def _added(before: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the combined fields of an action's calls: those of the earlier calls (`before`) and of the last call
    (`last`). Rewards are added; `done` and success are true if any call reports them; of other fields the last value
    is used. Raises ProtocolError for an invalid value."""
    done = last.get("done", False)
    if not isinstance(done, bool):
        raise ProtocolError(f"the server's done is {str(done)[:60]!r}, expected true or false")
    both = {**before, **last, "done": bool(before.get("done")) or done,
            "reward": number(before.get("reward"), "reward") + number(last["reward"], "reward")}
    return both | {name: before.get(name) or last.get(name) for name in SUCCEEDED if name in both}


def mcp_tools(address: str | Sequence[str], *, tools: Collection[str] = (), reset: str = "",
              environment: Collection[str] = (), folder: str | None = None, seconds: float = 90.0) -> list[McpTool]:
    """Returns the schemas of a server's tools, for the prompt only. They are requested once per process, within
    `seconds`. The other arguments are those of McpEnvironment. Raises ConfigError if the server does not respond."""
    addresses = checked_addresses([address] if isinstance(address, str) else address)
    return list(_listed(tuple(addresses), checked_names(tools, "tools"), reset,
                        checked_variables(environment, "environment"), folder,
                        seconds))


@functools.cache
def _listed(addresses: Sequence[str], allowed: Sequence[str], reset: str, environment: Sequence[str],
            folder: str | None, seconds: float) -> tuple[McpTool, ...]:
    problems, until = [], Deadline(seconds)
    for address in addresses:
        session, own = McpSession(address, environment, folder), until.within(seconds / len(addresses))
        try:
            session.open(own)
            schemas = session.tools(allowed, own)
            return tuple(McpTool(schema) for schema in schemas if schema["function"]["name"] != reset)
        except (ProtocolError, CallError) as error:
            problems.append(str(error))
        finally:
            session.close()
    raise ConfigError(f"the MCP server does not list its tools: {'; '.join(problems)}")


def _schema(tool: Any) -> dict[str, Any]:
    if not NAME.fullmatch(tool.name):
        raise ProtocolError(f"the server's tool {tool.name[:100]!r} has a name that a tool call cannot contain; list "
                            "only the other tools in environment.options.tools")
    parameters = _untitled(tool.input_schema) if isinstance(tool.input_schema, Mapping) else {}
    schema = {"type": "function", "function": {"name": tool.name, "description": shorten(tool.description or "", 2000),
                                               "parameters": {"type": "object", "properties": {}, **parameters}}}
    if len(str(schema)) > _MOST_SCHEMA:
        raise ProtocolError(f"the server's tool {tool.name!r} has a schema of more than {_MOST_SCHEMA} characters")
    return schema


def _untitled(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return [*map(_untitled, schema)] if isinstance(schema, list) else schema


def content(blocks: Sequence[Any]) -> Observation:
    """Converts the content blocks of a tool's result to an Observation with text and images. Links are shown as text
    and not fetched. Raises ProtocolError for invalid content."""
    texts, media = [], []
    if len(blocks) > _MOST_CONTENT:
        raise ProtocolError(f"the tool's result has {len(blocks)} pieces; at most {_MOST_CONTENT} are shown")
    for block in blocks:
        resource: Any = getattr(block, "resource", None)
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            media.append(Media(source=image_of_base64(block.data, "image")))
        elif block.type == "resource" and getattr(resource, "text", None) is not None:
            texts.append(resource.text)
        elif block.type == "resource" and str(getattr(resource, "mime_type", "")).startswith("image/"):
            media.append(Media(source=image_of_base64(getattr(resource, "blob", None), "image")))
        elif block.type == "resource_link":
            texts.append(f"[{block.name}: {block.uri}]")
        else:
            texts.append(f"[{block.type}: not shown]")
    return Observation(shorten("\n".join(texts)), media)


def checked_addresses(addresses: Sequence[str]) -> list[str]:
    """Checks commands or URLs of MCP servers, and returns them. Raises ConfigError for an invalid address, for several
    addresses that are not all URLs, and for a URL with a user name or password, which the message omits."""
    checked = [checked_server_url(address, "http://127.0.0.1:8000/mcp") if _is_url(address) else address
               for address in addresses]
    for address in checked:
        try:
            if not _is_url(address) and not shlex.split(address):
                raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError(f"the MCP server {address!r} is not a command: {error}") from None
    if len(checked) > 1 and not all(map(_is_url, checked)):
        raise ConfigError(f"the MCP servers {', '.join(checked)}: several servers must all be given as URLs. One "
                          "command is enough, because it is started for each episode")
    return checked


def _is_url(address: str) -> bool:
    return bool(_SCHEME.match(address))
