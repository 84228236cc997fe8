"""Chat completions from an OpenAI-compatible server over HTTP, with retries; images are sent as data URLs.

A request is retried if the server is busy, disconnects or returns an invalid response. Only the configured address is
contacted: redirects are not followed, and proxies in environment variables are ignored."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx

from vlrl.engine.vllm.client import CONNECT_S, http_client
from vlrl.errors import ConfigError
from vlrl.types import LoadedMedia

MOST_BYTES = 2**24  # maximum size of a response in bytes
MOST_PNG = 2**22  # maximum size of a PNG in bytes; a larger image is sent as JPEG of quality 95
MOST_DETAIL = 300  # maximum number of characters of a server's response that an error message quotes
WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Seconds to wait before the first retry, and the longest wait. The wait doubles with each retry."""
_FATAL = {HTTPStatus.UNAUTHORIZED: "refuses the key", HTTPStatus.FORBIDDEN: "refuses the key",
          HTTPStatus.PAYMENT_REQUIRED: "requires payment", HTTPStatus.NOT_FOUND: "does not know the path or the model"}
_AGAIN = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


class ChatError(Exception):
    """Raised if a chat request failed. retry: whether a retry may succeed. wait_s: seconds to wait before the retry;
    None = the client's usual time. tries: number of attempts so far."""

    def __init__(self, message: str, retry: bool, wait_s: float | None = None):
        super().__init__(message)
        self.retry, self.wait_s, self.tries = retry, wait_s, 1


@dataclass(frozen=True)
class ChatReply:
    """The text of a model's reply to a chat request, with counts of tokens and attempts."""

    text: str
    finish_reason: str  # "stop", or "length" if the reply was truncated
    tokens_in: int = 0  # number of prompt tokens, counted by the server; 0 if unknown
    tokens_out: int = 0
    tries: int = 1


def address_of(url: str, option: str = "--endpoint") -> str:
    """The base address of a server, e.g. http://127.0.0.1:8000/v1, without /chat/completions. Raises ConfigError for an
    invalid address. `option`: the option or setting to name in the message."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good, parts = False, urlsplit("")
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(f"{option} {shown}: the address must not have a user name, password, query or fragment, "
                          "because it is stored with the answers. Remove them, and name the environment variable with "
                          f"the key in {_further(option, 'key-env')}")
    if not good:
        raise ConfigError(f"{option} {url!r} is not the address of a server: write an address such as "
                          "http://127.0.0.1:8000/v1")
    return url.rstrip("/").removesuffix("/chat/completions")


def key_of(variable: str | None, option: str) -> str:
    """The key in the environment variable named `variable`; "" if `variable` is empty. Raises ConfigError if the
    environment variable has no valid key. `option`: the option or setting to name in the message."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{option} {variable}: this environment variable is empty or not set. Set it to the "
                          "API key of the server")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{option} {variable}: the value of this environment variable is not a key: it must be "
                          "printable ASCII without spaces. Set it to the API key of the server")
    return key


def _further(option: str, name: str) -> str:
    if not option.startswith("--"):
        return f"{option.rpartition('.')[0]}.{name.replace('-', '_')}"
    return f"--{name}" if option == "--endpoint" else f"{option}-{name}"


class ChatClient:
    """A client of one OpenAI-compatible server, for use in several threads. key: bearer token. timeout_s: time limit of
    one attempt in seconds. retries: maximum number of retries per request. connections: number of idle connections that
    are kept open. option: the option or setting with the address, for error messages."""

    def __init__(self, url: str, model: str | None, *, key: str = "", timeout_s: float = 300.0, retries: int = 4,
                 connections: int = 8, wait_s: float = WAIT_S, option: str = "--endpoint"):
        self.address, self._option, self._key = address_of(url, option), option, key
        self._timeout_s, self._retries, self._wait_s = timeout_s, retries, wait_s
        self._http = http_client(key, timeout_s, connections)
        self.closed = threading.Event()  # Set when the client is closed. No further requests are sent.
        self._length = "max_tokens"
        self.model = model or self._only_model()

    def close(self) -> None:
        """Gives up pending requests, and closes all connections."""
        self.closed.set()
        self._http.close()

    def complete(self, body: Mapping[str, Any], most_tokens: int,
                 accept: Callable[[ChatReply], str | None] | None = None,
                 before: Callable[[], None] | None = None) -> ChatReply:
        """Requests a chat completion of at most `most_tokens` tokens, with retries, and returns the reply.

        body: the request as JSON. accept: function that returns None for a usable reply, else a description of the
        problem; the request is then retried with another seed. before: called before each attempt. Raises ChatError if
        all attempts fail, and ConfigError if the server rejects the key, path or model."""
        tries = 0
        while not self.closed.is_set():
            length = self._length
            if before:
                before()
            try:
                reply = _read(self._post({**body, length: most_tokens,
                                          **({"seed": body["seed"] + tries} if accept and "seed" in body else {})}))
                if problem := accept(reply) if accept else None:
                    raise ChatError(problem, retry=True, wait_s=0.0)
                return replace(reply, tries=tries + 1)
            except ChatError as error:
                if length == "max_tokens" and "max_completion_tokens" in str(error):  # newer models of OpenAI
                    self._length = "max_completion_tokens"
                    continue  # not counted as an attempt
                tries = error.tries = tries + 1
                if not error.retry or tries > self._retries:
                    raise
                wait_s = self._wait_s * 2**(tries - 1) if error.wait_s is None else error.wait_s
                self.closed.wait(min(wait_s, MOST_WAIT_S))
        raise ChatError("the client was closed", retry=False)

    def without_key(self, text: str) -> str:
        """Returns a text from the server with the key replaced by ***, because some servers echo the request. Must be
        called before the text is shortened, which could cut the key."""
        return text.replace(self._key, "***") if self._key else text

    def models(self, timeout_s: float = CONNECT_S) -> tuple[list[str], str]:
        """Returns (names of the server's models, ""). If the server lists no models, returns ([], description of the
        problem)."""
        answer: Any = None
        try:
            answer = self._http.get(f"{self.address}/models", timeout=timeout_s)
            names = [str(entry["id"]) for entry in answer.json()["data"]] if answer.status_code == HTTPStatus.OK else []
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return [], f"{type(error).__name__}: {error}" if answer is None else str(error)
        return names, "" if names else str(answer)

    def _post(self, body: dict[str, Any]) -> Any:
        end = time.monotonic() + self._timeout_s
        try:
            with self._http.stream("POST", f"{self.address}/chat/completions", json=body) as answer:
                text = self._limited(answer, end)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise ChatError(f"{type(error).__name__}: {error}".rstrip(": "), retry=True) from None
        status, detail = answer.status_code, text.decode("utf-8", "replace")
        if status == HTTPStatus.OK:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                raise ChatError(f"the response is not JSON: {detail!a}", retry=True) from None
        if status in _FATAL:
            detail = self.without_key(detail)[:MOST_DETAIL]
            raise ConfigError(f"the server {self.address} {_FATAL[HTTPStatus(status)]} ({status}): {detail!a}. "
                              f"Check {self._option}, {_further(self._option, 'model')} ({self.model!r}) and the key "
                              f"that {_further(self._option, 'key-env')} names")
        try:
            wait_s = max(0.0, float(answer.headers.get("Retry-After", "")))
        except ValueError:  # none, or a date
            wait_s = None
        raise ChatError(f"{status} {detail}", status in _AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR, wait_s)

    def _limited(self, answer: httpx.Response, end: float) -> bytes:
        out = bytearray()
        for piece in answer.iter_bytes():
            out += piece
            if len(out) > MOST_BYTES:
                raise ChatError(f"the response has more than {MOST_BYTES:,} bytes", retry=False)
            if time.monotonic() > end or self.closed.is_set():
                raise ChatError(f"no complete response within {self._timeout_s:g} s", retry=True)
        return bytes(out)

    def _only_model(self) -> str:
        names, problem = self.models()
        if len(names) == 1:
            return names[0]
        self.close()
        detail = (f"has several models ({self.without_key(', '.join(names[:20]))})" if names else
                  f"does not list its models ({ascii(problem)[:200]})")
        raise ConfigError(f"{self._option} {self.address}: the server {detail}. Choose a model with "
                          f"{_further(self._option, 'model')}")




def _read(reply: Any) -> ChatReply:
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text = message.get("content") or ""
        if not isinstance(text, str):
            text = "".join(str(part["text"]) for part in text if part.get("type") == "text")
        thought = message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ChatError(f"the response is not a chat completion: {json.dumps(reply)!a}", retry=True) from None
    if reason not in ("stop", "length", None):
        raise ChatError(f"the reply ended with finish_reason={reason!a}", retry=False)
    if isinstance(thought, str) and "</think>" not in text:  # the server separated the thinking from the text
        text = f"<think>{thought}</think>{text}"
    usage = reply.get("usage")
    return ChatReply(text, "length" if reason == "length" else "stop", _count(usage, "prompt_tokens"),
                     _count(usage, "completion_tokens"))


def _count(usage: Any, name: str) -> int:
    used = usage.get(name) if isinstance(usage, Mapping) else None
    return used if isinstance(used, int) and not isinstance(used, bool) and 0 < used <= 10**7 else 0


def data_urls(loaded: LoadedMedia) -> list[str]:
    """The frames of an image or video as data URLs: each a PNG or, if the PNG exceeds MOST_PNG bytes, a JPEG."""
    urls = []
    for frame in loaded.frames:
        file, kind = io.BytesIO(), "png"
        frame.save(file, format=kind)
        if file.tell() > MOST_PNG:
            file, kind = io.BytesIO(), "jpeg"
            frame.save(file, format=kind, quality=95)
        urls.append(f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}")
    return urls
