"""An engine that sends its requests to an OpenAI-compatible server: chat completions over HTTP, with images as data
URLs.

    with closing(Endpoint("http://127.0.0.1:8000/v1", "my-model", seed=0)) as engine:
        engine.generate([Request(prompt=ChatEncoder(config)(task, sample), n=4, sampling=Sampling(max_new_tokens=64))])

A request is repeated if the server is busy, disconnects or sends an invalid reply (services/chat.py). If a request
still fails, its completion has an `error` and is not scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from vlrl.engine.base import Done, Request
from vlrl.errors import TrainingError
from vlrl.services.chat import MOST_DETAIL, WAIT_S, ChatClient, ChatError, ChatReply
from vlrl.types import Completion, Turn

_TRIED = 16  # if this many requests fail before the first success, generation is aborted

Keep = Callable[[Request, int, ChatReply], None]  # function of (request, index of the completion, reply of the server)


class Endpoint:
    """An engine that generates completions on a server.

    seed: base of the seeds that are sent with the requests; they also depend on `Request.key` and on the index of the
    completion. key: API key. concurrency: number of concurrent requests. option: the command-line option that gave
    `url`, for error messages. timeout_s, retries, wait_s: as for ChatClient."""

    def __init__(self, url: str, model: str | None, *, seed: int = 0, key: str = "", timeout_s: float = 300.0,
                 retries: int = 4, concurrency: int = 8, wait_s: float = WAIT_S, option: str = "--endpoint"):
        self.seed = seed
        self._client = ChatClient(url, model, key=key, timeout_s=timeout_s, retries=retries, connections=concurrency,
                                  wait_s=wait_s, option=option)
        self.address, self.model = self._client.address, self._client.model
        self._pool = ThreadPoolExecutor(concurrency, "endpoint")
        self.keep: Keep | None = None  # function that is called with each reply when it arrives, in a worker thread
        self._count = threading.Lock()
        self._answered = self._failed = 0

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing, because the server has its own weights."""

    def close(self) -> None:
        """Cancels pending requests and closes all connections."""
        self._client.closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Generates `request.n` completions per request; completions that fail have an `error`. After each request
        except the last, `done` is called with the index of the request and its completions.

        Raises ConfigError if the server refuses API key, path or model; TrainingError if none of the first
        requests succeeds."""
        jobs = [[self._pool.submit(self._completion, request, i) for i in range(request.n)] for request in requests]
        out: list[list[Completion]] = []
        for number, futures in enumerate(jobs):
            out.append([_result(future) for future in futures])
            if done and number < len(jobs) - 1:
                done(number, out[-1])
        return out

    # --- one request ----------------------------------------------------------------------------------------------

    def _completion(self, request: Request, index: int) -> Completion:
        try:
            reply = self._client.complete(self._body(request, index), request.sampling.max_new_tokens)
        except ChatError as error:
            message = self._client.without_key(str(error))[:MOST_DETAIL]
            self._note(False, message)
            none = np.zeros(0, np.int64)
            return Completion(tokens=none, logprobs=none.astype(np.float32), loss_mask=none.astype(bool), text="",
                              finish_reason="stop", error=f"not answered: {message}")
        self._note(True)
        if self.keep:
            self.keep(request, index, reply)
        return completion_of(reply)

    def _body(self, request: Request, index: int) -> dict[str, Any]:
        s = request.sampling
        seed = int(np.random.SeedSequence([self.seed, *request.key, index]).generate_state(1)[0]) >> 1
        return {"model": self.model, "messages": request.prompt.mm["messages"], "temperature": s.temperature,
                "seed": seed, **({"top_p": s.top_p} if s.top_p is not None else {}),
                **({"stop": list(s.stop)} if s.stop else {})}

    def _note(self, answered: bool, detail: str = "") -> None:
        with self._count:
            self._answered, self._failed = self._answered + answered, self._failed + (not answered)
            hopeless = not self._answered and self._failed >= _TRIED
        if hopeless and not self._client.closed.is_set():
            raise TrainingError(f"the server {self.address} answered none of {_TRIED} requests; the last error: "
                                f"{detail}")


def _result(future: Future[Completion]) -> Completion:
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()


def completion_of(reply: ChatReply) -> Completion:
    """Converts a reply of the server to a Completion. All its token ids are 0, because servers only return the number
    of tokens, not the ids."""
    n = reply.tokens_out
    return Completion(tokens=np.zeros(n, np.int64), logprobs=np.zeros(n, np.float32), loss_mask=np.ones(n, bool),
                      text=reply.text, finish_reason="length" if reply.finish_reason == "length" else "stop",
                      turns=(Turn(start=0, end=n),))
