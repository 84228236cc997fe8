"""Chat completions of an OpenAI-compatible server over HTTP: one request, asked again where that may help.

A server is asked again when it is busy, breaks off or answers nonsense. Nothing but the given address is asked,
redirects are not followed, and no proxy of the environment is used.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx

from vlrl.engine.vllm.client import CONNECT_S
from vlrl.errors import ConfigError

MOST_BYTES = 2**24
"""Of one answer of a server."""
MOST_DETAIL = 300
"""Characters of the reply of a server that a message holds."""
WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Seconds before the first retry, doubled for each further one, and the most of it."""
_FATAL = {HTTPStatus.UNAUTHORIZED: "refuses the key", HTTPStatus.FORBIDDEN: "refuses the key",
          HTTPStatus.PAYMENT_REQUIRED: "wants to be paid", HTTPStatus.NOT_FOUND: "does not know the path or the model"}
_AGAIN = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


class ChatError(Exception):
    """A request failed; `again`: a later try may succeed, after `wait_s` where the server says so. `tries`: how often
    it was tried in all.
    """

    def __init__(self, message: str, again: bool, wait_s: float | None = None):
        super().__init__(message)
        self.again, self.wait_s, self.tries = again, wait_s, 1


@dataclass(frozen=True)
class ChatReply:
    """What a server said."""

    text: str
    finish_reason: str
    """stop, or length: it was cut off."""
    tokens_in: int = 0
    """Of the prompt, as the server counts; 0 where it does not say."""
    tokens_out: int = 0
    tries: int = 1


def address_of(url: str, option: str = "--endpoint") -> str:
    """Returns the base address of an endpoint, e.g. http://127.0.0.1:8000/v1. Raises ConfigError, which names the
    option, for anything else.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good, parts = False, urlsplit("")
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(f"{option} {shown}: an address with a user name, password, query or fragment is refused, "
                          "as it is stored with the answers. Leave that out, and name the variable that holds the key "
                          f"with {_further(option, 'key-env')}")
    if not good:
        raise ConfigError(f"{option} {url!r} is no address of a server: e.g. http://127.0.0.1:8000/v1")
    return url.rstrip("/").removesuffix("/chat/completions")


def key_of(variable: str | None, option: str) -> str:
    """Returns the key that an environment variable holds; "" where none is named. Raises ConfigError, which names the
    option, where there is none in it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{option} {variable}: that environment variable is not set, or empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{option} {variable}: that environment variable holds spaces or characters that no key has")
    return key


def _further(option: str, name: str) -> str:
    """Returns the option, or the setting, for key or model that goes with the one for the address."""
    if not option.startswith("--"):
        return f"{option.rpartition('.')[0]}.{name.replace('-', '_')}"
    return f"--{name}" if option == "--endpoint" else f"{option}-{name}"


class ChatClient:
    """One server. Requests may be made from several threads.

    key: sent as a bearer token. timeout_s: most seconds of one try. retries: further tries. connections: how many are
    kept. option: what named the address, for messages.
    """

    def __init__(self, url: str, model: str | None, *, key: str = "", timeout_s: float = 300.0, retries: int = 4,
                 connections: int = 8, wait_s: float = WAIT_S, option: str = "--endpoint"):
        self.address, self._option, self._key = address_of(url, option), option, key
        self._timeout_s, self._retries, self._wait_s = timeout_s, retries, wait_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, trust_env=False, follow_redirects=False,
                                  timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), pool=None),
                                  limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections))
        self.closed = threading.Event()
        """Set once nothing is to be asked any more."""
        self._length = "max_tokens"
        self.model = model or self._only_model()

    def close(self) -> None:
        """Gives up what is still asked, and closes all connections."""
        self.closed.set()
        self._http.close()

    def complete(self, body: Mapping[str, Any], most_tokens: int,
                 accept: Callable[[ChatReply], str | None] | None = None,
                 before: Callable[[], None] | None = None) -> ChatReply:
        """Returns a reply of at most so many tokens, after as many tries as it takes. `accept` says what is wrong with
        a reply, which is then asked for again with another seed; `before` is called before each try.

        Raises Refused where there is none, ConfigError where the server refuses key, path or model.
        """
        tries = 0
        while not self.closed.is_set():
            length = self._length
            if before:
                before()
            try:
                return self._reply({**body, length: most_tokens}, tries, accept)
            except ChatError as error:
                if length == "max_tokens" and "max_completion_tokens" in str(error):  # newer models of OpenAI
                    self._length = "max_completion_tokens"
                    continue  # its first request was no try
                tries = error.tries = tries + 1
                if not error.again or tries > self._retries:
                    raise
                wait_s = self._wait_s * 2**(tries - 1) if error.wait_s is None else error.wait_s
                self.closed.wait(min(wait_s, MOST_WAIT_S))
        raise ChatError("given up", again=False)

    def without_key(self, text: str) -> str:
        """Returns text of a server without the key, before anything is cut off: some repeat what they were sent."""
        return text.replace(self._key, "***") if self._key else text

    def models(self, timeout_s: float = CONNECT_S) -> tuple[list[str], str]:
        """Returns the names of the server's models, and what was wrong where there are none."""
        answer: Any = None
        try:
            answer = self._http.get(f"{self.address}/models", timeout=timeout_s)
            names = [str(entry["id"]) for entry in answer.json()["data"]] if answer.status_code == HTTPStatus.OK else []
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return [], f"{type(error).__name__}: {error}" if answer is None else str(error)
        return names, "" if names else str(answer)

    def _reply(self, body: dict[str, Any], tries: int, accept: Callable[[ChatReply], str | None] | None) -> ChatReply:
        if accept and "seed" in body:
            body["seed"] += tries
        reply = _read(self._post(body))
        problem = accept(reply) if accept else None
        if problem:
            raise ChatError(problem, again=True, wait_s=0.0)
        return replace(reply, tries=tries + 1)

    def _post(self, body: dict[str, Any]) -> Any:
        """Returns the JSON that the server answers."""
        end = time.monotonic() + self._timeout_s
        try:
            with self._http.stream("POST", f"{self.address}/chat/completions", json=body) as answer:
                text = self._limited(answer, end)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise ChatError(f"{type(error).__name__}: {error}".rstrip(": "), again=True) from None
        if answer.status_code == HTTPStatus.OK:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                raise ChatError(f"the answer is no JSON: {text.decode('utf-8', 'replace')!a}", again=True) from None
        self._refuse(answer, text)

    def _limited(self, answer: httpx.Response, end: float) -> bytes:
        """Returns a body of at most MOST_BYTES that has come in time, however slowly it drips."""
        out = bytearray()
        for piece in answer.iter_bytes():
            out += piece
            if len(out) > MOST_BYTES:
                raise ChatError(f"the answer has more than {MOST_BYTES:,} bytes", again=False)
            if time.monotonic() > end or self.closed.is_set():
                raise ChatError(f"no whole answer within {self._timeout_s:g} s", again=True)
        return bytes(out)

    def _refuse(self, answer: httpx.Response, text: bytes) -> None:
        """Raises what a status other than 200 means."""
        status, detail = answer.status_code, text.decode("utf-8", "replace")
        if status in _FATAL:
            detail = self.without_key(detail)[:MOST_DETAIL]
            raise ConfigError(f"the server {self.address} {_FATAL[HTTPStatus(status)]} ({status}): {detail!a}. "
                              f"Check {self._option}, {_further(self._option, 'model')} ({self.model!r}) and the key "
                              f"that {_further(self._option, 'key-env')} names")
        again = status in _AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise ChatError(f"{status} {detail}", again, _retry_after(answer.headers.get("Retry-After")))

    def _only_model(self) -> str:
        """Returns the model that the server has. Raises ConfigError where it has several, or does not say."""
        names, problem = self.models()
        if len(names) == 1:
            return names[0]
        self.close()
        detail = (self.without_key(", ".join(names[:20])) if names else
                  f"it does not say which it has ({ascii(problem)[:200]})")
        raise ConfigError(f"{self._option} {self.address}: name one of its models with "
                          f"{_further(self._option, 'model')}. {detail}")


def _retry_after(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:  # a date
        return None


# --- what a server says -----------------------------------------------------------------------------------------------


def _read(reply: Any) -> ChatReply:
    """Returns the text in a reply. Raises Refused where it has none."""
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, thought = _text(message.get("content")), message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ChatError(f"the answer is no chat completion: {json.dumps(reply)!a}", again=True) from None
    if reason not in ("stop", "length", None):
        raise ChatError(f"the answer ended with finish_reason={reason!a}", again=False)
    if isinstance(thought, str) and "</think>" not in text:  # a server that takes the thinking out of the text
        text = f"<think>{thought}</think>{text}"
    usage = reply.get("usage")
    return ChatReply(text, "length" if reason == "length" else "stop", _count(usage, "prompt_tokens"),
                     _count(usage, "completion_tokens"))


def _count(usage: Any, name: str) -> int:
    used = usage.get(name) if isinstance(usage, Mapping) else None
    return used if isinstance(used, int) and not isinstance(used, bool) and 0 < used <= 10**7 else 0


def _text(content: Any) -> str:
    """Returns a message's text; of a list its text parts, of nothing an empty one."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    return "".join(_parts(content))


def _parts(content: Any) -> Iterator[str]:
    for part in content:
        if part.get("type") == "text":
            yield str(part["text"])
