"""A client of OpenEnv servers: one WebSocket per session, with the messages `reset` and `step` as JSON.

    class Mine(Task):
        rewards = {"return": 1.0, "success": 0.0}
        def environment(self, sample):
            return OpenEnv(["http://127.0.0.1:8000", "http://10.0.0.2:8000"])

The client in the openenv package is not used, because it trusts the types, sizes and response times of servers.
Protocol: https://github.com/huggingface/OpenEnv, src/openenv/core/env_server (versions 0.3 to 0.10)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx

from vlrl.environments.actions import action_of_text
from vlrl.environments.episode_reward import PARTS, EpisodeReward
from vlrl.environments.images import observation_of
from vlrl.environments.server_pool import Deadline, ServerPool, pool
from vlrl.environments.tools import shorten
from vlrl.environments.validation import ProtocolError, checked_names, checked_server_url
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task.environment import Environment
from vlrl.task.tool_calls import from_json
from vlrl.types import Media, Observation, Step

MOST_BYTES = 2**26  # maximum size of a message in bytes
_MOST_SCHEMA = 2**20
_CONNECT_S = 10.0
_CLOSE_S = 1.0
_MODELS_FAULT = ("VALIDATION_ERROR",)
"""Error codes for an invalid action. The model gets the error message, and the episode continues."""
_log = logging.getLogger(__name__)


class ServerFull(ProtocolError):
    """Raised when a server has reached its maximum number of sessions."""


class OpenEnv(Environment):
    """An environment on an OpenEnv server. Of several servers, the responding one with the fewest sessions is used.

    field: the field of the action that gets the model's text; "" = the only field in the server's schema. If the schema
        has several fields, the model must write the action as JSON.
    images: fields that contain images, in addition to those recognized by their format (images.observation_of).
    reset: further arguments of the `reset` message. goal, parts: see EpisodeReward.
    step_s, reset_s: time limits in seconds."""

    def __init__(self, urls: str | Sequence[str], *, field: str = "", images: Collection[str] = (),
                 reset: Mapping[str, Any] | None = None, goal: float | None = None, parts: Collection[str] = PARTS,
                 step_s: float = 45.0, reset_s: float = 90.0):
        self.urls = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        self.field, self.images, self.arguments = field, checked_names(images, "images"), dict(reset or {})
        self.rewards, self.step_s, self.reset_s = EpisodeReward(parts, goal), step_s, reset_s
        self.servers: ServerPool = pool(self.urls, healthy)
        self.url = ""
        self.state = None
        self._stack = ExitStack()
        self._socket: Any = None
        self._schema: Mapping[str, Any] = {}
        self._media: Sequence[Media] = ()

    def reset(self, seed: int) -> Observation:
        full, until = dict[str, ServerFull](), Deadline(self.reset_s)
        message = json.dumps({"type": "reset", "data": {"seed": seed, **self.arguments}})
        while True:
            self._connect(full, until)
            try:
                reply = self._request(message, until)
                break
            except ServerFull as error:
                full[self.url] = error
        if "observation" not in reply:
            raise ProtocolError(f"{self.url} refused the reset: {reply['error']}")
        return self._shown(reply)

    def step(self, action: str) -> Step:
        try:
            own = action_of_text(parse_answer(action).final, self._schema, self.field)
            message = json.dumps({"type": "step", "data": own})
        except (ValueError, RecursionError) as error:
            return self._illegal(str(error))
        reply = self._request(message, Deadline(self.step_s))
        if "observation" not in reply:
            return self._illegal(reply["error"])
        done = reply.get("done", False)
        if not isinstance(done, bool):
            raise ProtocolError(f"{self.url} sent done={str(done)[:60]!r}, expected true or false")
        info: dict[str, Any] = {}
        for metadata in (reply["observation"].get("metadata"), reply.get("metadata")):
            info |= metadata if isinstance(metadata, Mapping) else {}
        parts = self.rewards.step(reply.get("reward"), done, info)
        return Step(self._shown(reply), parts, done=done, state=self.state, info={"server": self.url})

    def close(self) -> None:
        from websockets.exceptions import WebSocketException

        if self._socket is None:
            return
        ended, self._socket = self._socket, None
        try:
            with contextlib.suppress(OSError, WebSocketException):  # a server that has gone
                ended.send('{"type": "close"}')
            self._stack.close()
        except (OSError, WebSocketException) as error:
            _log.debug("%s: closing: %s: %s", self.url, type(error).__name__, error)
        finally:
            self.servers.closed(self.url)

    def _illegal(self, why: str) -> Step:
        return Step(Observation(shorten(f"Error: {why}"), self._media), self.rewards.illegal(), state=self.state,
                    info={"error": shorten(why, 1000)})

    def _shown(self, reply: Mapping[str, Any]) -> Observation:
        given = {name: value for name, value in reply["observation"].items() if name != "metadata"}
        self.state = hashlib.sha256(json.dumps(given, sort_keys=True).encode("utf-8", "replace")).hexdigest()[:16]
        shown = observation_of(given, self.images)
        self._media = shown.media
        return shown

    def _connect(self, full: Mapping[str, ServerFull], until: Deadline) -> None:
        """Opens a session on the first server that accepts one. Raises ProtocolError if no server accepts a session
        before the deadline `until`. full: the servers to skip because they have no free session, with the error that
        each has reported."""
        from websockets.exceptions import WebSocketException

        self.close()
        refused = [*map(str, full.values())]
        for url in self.servers.candidates():
            if url in full:
                continue
            if not until.left:
                refused.append(f"no answer within {until}")
                break
            try:
                self._schema = action_schema(url, min(_CONNECT_S, until.left))
                self._socket = self._stack.enter_context(_session(url, until.within(_CONNECT_S)))
            except (OSError, ValueError, httpx.HTTPError, WebSocketException, ProtocolError) as error:
                _log.debug("%s: no session", url, exc_info=True)
                self.servers.failed(url)
                refused.append(f"{url}: {type(error).__name__}: {str(error)[:200]}")
            else:
                self.url = url
                self.servers.started(url)
                return
        raise ProtocolError(f"no server accepts an episode: {'; '.join(refused) or 'none is healthy'}")

    def _request(self, message: str, until: Deadline) -> dict[str, Any]:
        """Sends a message. Returns the data of the observation in the response, or {"error": reason} for an invalid
        action. Raises ProtocolError for any other failure, after which the session cannot be used."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            if self._socket is None:
                raise ProtocolError("the session with the server has ended")
            _refuse_more(self._socket)
            with contextlib.suppress(ConnectionClosed):  # by a server that has said why
                self._socket.send(message)
            return _observation(self._socket.recv(until.left))
        except ProtocolError as error:
            raise type(error)(f"{self.url}: {error}") from None
        except TimeoutError:
            self.servers.failed(self.url)
            raise ProtocolError(f"{self.url}: no answer within {until}") from None
        except (OSError, ValueError, WebSocketException) as error:  # the connection broke
            _log.debug("%s: the connection broke", self.url, exc_info=True)
            self.servers.failed(self.url)
            raise ProtocolError(f"{self.url}: {type(error).__name__}: {str(error)[:300]}") from error


def _session(url: str, until: Deadline) -> Any:
    """Opens a WebSocket to the server at `url`, before the deadline `until`, and returns the WebSocket. It uses no
    proxy and cannot follow redirects, because a redirect would need another socket."""
    from websockets.sync.client import connect

    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    own = socket.create_connection((str(parts.hostname), port), max(until.left, 0.001))
    try:
        own.settimeout(None)
        return connect(f"ws{url.removeprefix('http')}/ws", sock=own, proxy=None, open_timeout=until.left,
                       close_timeout=_CLOSE_S, max_size=MOST_BYTES, ping_interval=None)
    except BaseException:
        own.close()
        raise


def _refuse_more(socket: Any) -> None:
    """Raises ProtocolError if the server has sent an unrequested message, because it would be mistaken for the next
    response. Raises ServerFull if the message says that the server has no free session."""
    try:
        more = socket.recv(0)
    except TimeoutError:
        return
    _observation(more)  # raises if it is an error message
    raise ProtocolError("the server sent a message that was not requested")


def _observation(text: Any) -> dict[str, Any]:
    try:
        message = from_json(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ProtocolError(f"the server's answer is not JSON: {str(error)[:200]}") from None
    kind, data = (message.get("type"), message.get("data")) if isinstance(message, dict) else (None, None)
    if kind == "error":
        details = data if isinstance(data, dict) else {}
        why = f"{details.get('message')} ({details.get('code')})"[:500]
        if details.get("code") in _MODELS_FAULT:
            return {"error": f"{why} {json.dumps(details.get('errors', ''))[:500]}"}
        if details.get("code") == "CAPACITY_REACHED":
            raise ServerFull(f"the server reports: {why}: start it with a larger max_concurrent_envs")
        raise ProtocolError(f"the server reports: {why}")
    if kind != "observation" or not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
        raise ProtocolError(f"the server's answer is not an observation: {str(text)[:200]!r}")
    return data


def checked_url(url: str) -> str:
    """Returns a URL without a trailing slash. Raises ConfigError for an invalid URL, and for one with a user name or
    password, query or fragment."""
    address = checked_server_url(url, like := "http://127.0.0.1:8000")
    try:
        parts = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the environment's address {url!r} must look like {like}: {error}") from None
    if parts.query or parts.fragment:
        raise ConfigError(f"the environment's address {url!r} must look like {like}, without query or fragment")
    return address.rstrip("/")


def healthy(url: str) -> bool:
    """Whether the server's health page reports that it is healthy."""
    try:
        return _fetched(f"{url}/health", _CONNECT_S).get("status") == "healthy"
    except (httpx.HTTPError, ProtocolError):
        return False


def action_schema(url: str, seconds: float = _CONNECT_S) -> Mapping[str, Any]:
    """Requests and returns the JSON schema of the server's actions. Raises ProtocolError for an invalid response, and
    httpx.HTTPError if the request fails."""
    schema = _fetched(f"{url}/schema", seconds).get("action")
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        raise ProtocolError("the server's /schema has no action schema")
    return schema


def _fetched(url: str, seconds: float) -> dict[str, Any]:
    from anyio.from_thread import start_blocking_portal

    try:
        with start_blocking_portal() as portal:
            body = from_json(portal.call(_body, url, seconds))
    except TimeoutError:
        raise ProtocolError(f"{url}: no answer within {seconds:.3g} s") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{url} does not answer with JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"{url} answers with a {type(body).__name__}, expected a JSON object")
    return body


async def _body(url: str, seconds: float) -> bytes:
    """Returns the body of the response to a GET request, within a total time limit (httpx limits only each wait)."""
    import anyio

    body = b""
    with anyio.fail_after(seconds):
        async with (httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None) as client,
                    client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response):
            response.raise_for_status()
            async for piece in response.aiter_raw():  # never unpacked
                body += piece
                if len(body) > _MOST_SCHEMA:
                    raise ProtocolError(f"{url} answers with more than {_MOST_SCHEMA} bytes")
    return body
