"""Answers of an OpenAI-compatible server, as an engine: chat completions over HTTP, images as data URLs.

    with closing(Endpoint("http://127.0.0.1:8000/v1", "my-model", seed=0)) as engine:
        engine.generate([Request(prompt=ChatEncoder(config)(task, sample), n=4, sampling=Sampling(max_new_tokens=64))])

A server is asked again when it is busy, breaks off or answers nonsense; what it then has not answered is a Completion
with an `error`, which nobody scores. Nothing but the given address is asked; redirects are not followed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from vlrl.engine.base import Done
from vlrl.engine.client import CONNECT_S
from vlrl.errors import ConfigError, TrainingError
from vlrl.types import Completion, Request, Turn

MOST_BYTES = 2**24
"""Of one answer of a server."""
_MOST_DETAIL = 300
"""Characters of the reply of a server that a message holds."""
_TRIED = 16
"""Requests after which an evaluation of which none was answered ends."""
_WAIT_S, _MOST_WAIT_S = 1.0, 60.0
"""Seconds before the first retry, doubled for each further one, and the most of it."""
_FATAL = {HTTPStatus.UNAUTHORIZED: "refuses the key", HTTPStatus.FORBIDDEN: "refuses the key",
          HTTPStatus.PAYMENT_REQUIRED: "wants to be paid", HTTPStatus.NOT_FOUND: "does not know the path or the model"}
_AGAIN = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


class _Refused(Exception):
    """A request failed; `again`: a later try may succeed, after `wait_s` where the server says so."""

    def __init__(self, message: str, again: bool, wait_s: float | None = None):
        super().__init__(message)
        self.again, self.wait_s = again, wait_s


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


def _further(option: str, name: str) -> str:
    """Returns the option for key or model that goes with the one for the address."""
    return f"--{name}" if option == "--endpoint" else f"{option}-{name}"


class Endpoint:
    """An engine over a server. `seed`, a request's key and the place of an answer make the seed that is sent.

    key: sent as a bearer token. timeout_s: most seconds of one try. retries: further tries. concurrency: requests at a
    time. option: what named the address, for messages.
    """

    def __init__(self, url: str, model: str | None, *, seed: int = 0, key: str = "", timeout_s: float = 300.0,
                 retries: int = 4, concurrency: int = 8, wait_s: float = _WAIT_S, option: str = "--endpoint"):
        self.address, self.seed, self._option = address_of(url, option), seed, option
        self._timeout_s, self._retries, self._wait_s = timeout_s, retries, wait_s
        self._key = key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, trust_env=False, follow_redirects=False,
                                  timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), pool=None),
                                  limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency))
        self._pool = ThreadPoolExecutor(concurrency, "endpoint")
        self._closed, self._count = threading.Event(), threading.Lock()
        self._answered = self._failed = 0
        self._length = "max_tokens"
        self.model = model or self._only_model()

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing: the weights are the server's."""

    def close(self) -> None:
        """Gives up what is still asked, and closes all connections."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions per request; those that the server did not give have an `error`.

        Raises ConfigError where it refuses key, path or model, TrainingError where it answers nothing at all.
        """
        jobs = [[self._pool.submit(self._completion, request, i) for i in range(request.n)] for request in requests]
        out: list[list[Completion]] = []
        for number, futures in enumerate(jobs):
            out.append([_result(future) for future in futures])
            if done and number < len(jobs) - 1:
                done(number, out[-1])
        return out

    # --- one request ----------------------------------------------------------------------------------------------

    def _completion(self, request: Request, index: int) -> Completion:
        """Returns one answer, or one with an error."""
        try:
            made = self._asked(self._body(request, index))
        except _Refused as error:
            message = self._without_key(str(error))[:_MOST_DETAIL]
            self._note(False, message)
            return _unanswered(message)
        self._note(True)
        return made

    def _body(self, request: Request, index: int) -> dict[str, Any]:
        s = request.sampling
        seed = int(np.random.SeedSequence([self.seed, *request.key, index]).generate_state(1)[0]) >> 1
        return {"model": self.model, "messages": request.prompt.mm["messages"], "temperature": s.temperature,
                "seed": seed, self._length: s.max_new_tokens, **({"top_p": s.top_p} if s.top_p is not None else {}),
                **({"stop": list(s.stop)} if s.stop else {})}

    def _asked(self, body: dict[str, Any]) -> Completion:
        """Returns an answer, after as many tries as it takes."""
        for attempt in range(self._retries + 1):
            if self._closed.is_set():
                raise _Refused("given up", again=False)
            try:
                return _read(self._post(body))
            except _Refused as error:
                if "max_completion_tokens" in str(error) and "max_tokens" in body:  # newer models of OpenAI
                    self._length = "max_completion_tokens"
                    body["max_completion_tokens"] = body.pop("max_tokens")
                    return self._asked(body)  # its first request was no try
                if not error.again or attempt == self._retries:
                    raise
                wait_s = self._wait_s * 2**attempt if error.wait_s is None else error.wait_s
                self._closed.wait(min(wait_s, _MOST_WAIT_S))
        raise _Refused("not answered", again=False)

    def _post(self, body: dict[str, Any]) -> Any:
        """Returns the JSON that the server answers."""
        end = time.monotonic() + self._timeout_s
        try:
            with self._http.stream("POST", f"{self.address}/chat/completions", json=body) as answer:
                text = self._limited(answer, end)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _Refused(f"{type(error).__name__}: {error}".rstrip(": "), again=True) from None
        if answer.status_code == HTTPStatus.OK:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                raise _Refused(f"the answer is no JSON: {text.decode('utf-8', 'replace')!a}", again=True) from None
        self._refuse(answer, text)

    def _limited(self, answer: httpx.Response, end: float) -> bytes:
        """Returns a body of at most MOST_BYTES that has come in time, however slowly it drips."""
        out = bytearray()
        for piece in answer.iter_bytes():
            out += piece
            if len(out) > MOST_BYTES:
                raise _Refused(f"the answer has more than {MOST_BYTES:,} bytes", again=False)
            if time.monotonic() > end or self._closed.is_set():
                raise _Refused(f"no whole answer within {self._timeout_s:g} s", again=True)
        return bytes(out)

    def _refuse(self, answer: httpx.Response, text: bytes) -> None:
        """Raises what a status other than 200 means."""
        status, detail = answer.status_code, text.decode("utf-8", "replace")
        if status in _FATAL:
            detail = self._without_key(detail)[:_MOST_DETAIL]
            raise ConfigError(f"the server {self.address} {_FATAL[HTTPStatus(status)]} ({status}): {detail!a}. "
                              f"Check {self._option}, {_further(self._option, 'model')} ({self.model!r}) and the key "
                              f"that {_further(self._option, 'key-env')} names")
        again = status in _AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise _Refused(f"{status} {detail}", again, _retry_after(answer.headers.get("Retry-After")))

    def _without_key(self, text: str) -> str:
        """Returns text of a server without the key, before anything is cut off: some repeat what they were sent."""
        return text.replace(self._key, "***") if self._key else text

    def _note(self, answered: bool, detail: str = "") -> None:
        """Counts answers; a server that has answered nothing of so many requests ends the evaluation."""
        with self._count:
            self._answered, self._failed = self._answered + answered, self._failed + (not answered)
            hopeless = not self._answered and self._failed >= _TRIED
        if hopeless and not self._closed.is_set():
            raise TrainingError(f"the server {self.address} answered none of {_TRIED} requests; the last one: {detail}")

    def _only_model(self) -> str:
        """Returns the model that the server has. Raises ConfigError where it has several, or does not say."""
        try:
            answer = self._http.get(f"{self.address}/models", timeout=CONNECT_S)
            names = [str(entry["id"]) for entry in answer.json()["data"]] if answer.status_code == HTTPStatus.OK else []
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            names, answer = [], error
        if len(names) == 1:
            return names[0]
        self.close()
        detail = (self._without_key(", ".join(names[:20])) if names else
                f"it does not say which it has ({ascii(str(answer))[:200]})")
        raise ConfigError(f"{self._option} {self.address}: name one of its models with "
                          f"{_further(self._option, 'model')}. {detail}")


def _retry_after(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:  # a date
        return None


def _result(future: Future[Completion]) -> Completion:
    """Returns a future's result, looking up now and then so that Ctrl-C is heard."""
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()


# --- what a server says -----------------------------------------------------------------------------------------------


def _read(reply: Any) -> Completion:
    """Returns the completion in a reply. Raises _Refused where it has none."""
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, thought = _text(message.get("content")), message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _Refused(f"the answer is no chat completion: {json.dumps(reply)!a}", again=True) from None
    if reason not in ("stop", "length", None):
        raise _Refused(f"the answer ended with finish_reason={reason!a}", again=False)
    if isinstance(thought, str) and "</think>" not in text:  # a server that takes the thinking out of the text
        text = f"<think>{thought}</think>{text}"
    usage = reply.get("usage")
    used = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    n = used if isinstance(used, int) and not isinstance(used, bool) and 0 < used <= 10**7 else 0
    return Completion(tokens=np.zeros(n, np.int64), logprobs=np.zeros(n, np.float32), loss_mask=np.ones(n, bool),
                      text=text, finish_reason="length" if reason == "length" else "stop",
                      turns=(Turn(start=0, end=n),))


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


def _unanswered(error: str) -> Completion:
    none = np.zeros(0, np.int64)
    return Completion(tokens=none, logprobs=none.astype(np.float32), loss_mask=none.astype(bool), text="",
                      finish_reason="stop", error=f"not answered: {error}")
