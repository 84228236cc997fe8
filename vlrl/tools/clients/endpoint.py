"""Answers of an OpenAI-compatible server, as an engine: chat completions over HTTP, images as data URLs.

    with closing(Endpoint("http://127.0.0.1:8000/v1", "my-model", seed=0)) as engine:
        engine.generate([Request(prompt=ChatEncoder(config)(task, sample), n=4, sampling=Sampling(max_new_tokens=64))])

A server is asked again when it is busy, breaks off or answers nonsense; what it then has not answered is a Completion
with an `error`, which nobody scores. See services/chat.py for what is asked, and what not.
"""

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

_TRIED = 16
"""Requests after which an evaluation of which none was answered ends."""

Keep = Callable[[Request, int, ChatReply], None]
"""(request, which answer to it, the reply)"""


class Endpoint:
    """An engine over a server. `seed`, a request's key and the place of an answer make the seed that is sent.

    concurrency: requests at a time. key, timeout_s, retries, option: as of a ChatClient.
    """

    def __init__(self, url: str, model: str | None, *, seed: int = 0, key: str = "", timeout_s: float = 300.0,
                 retries: int = 4, concurrency: int = 8, wait_s: float = WAIT_S, option: str = "--endpoint"):
        self.seed = seed
        self._client = ChatClient(url, model, key=key, timeout_s=timeout_s, retries=retries, connections=concurrency,
                                  wait_s=wait_s, option=option)
        self.address, self.model = self._client.address, self._client.model
        self._pool = ThreadPoolExecutor(concurrency, "endpoint")
        self.keep: Keep | None = None
        """Called with each reply as it comes, in the thread that asked."""
        self._count = threading.Lock()
        self._answered = self._failed = 0

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing: the weights are the server's."""

    def close(self) -> None:
        """Gives up what is still asked, and closes all connections."""
        self._client.closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

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
            reply = self._client.complete(self._body(request, index), request.sampling.max_new_tokens)
        except ChatError as error:
            message = self._client.without_key(str(error))[:MOST_DETAIL]
            self._note(False, message)
            return _unanswered(message)
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
        """Counts answers; a server that has answered nothing of so many requests ends the evaluation."""
        with self._count:
            self._answered, self._failed = self._answered + answered, self._failed + (not answered)
            hopeless = not self._answered and self._failed >= _TRIED
        if hopeless and not self._client.closed.is_set():
            raise TrainingError(f"the server {self.address} answered none of {_TRIED} requests; the last one: {detail}")


def _result(future: Future[Completion]) -> Completion:
    """Returns a future's result, looking up now and then so that Ctrl-C is heard."""
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()


def completion_of(reply: ChatReply) -> Completion:
    """Returns a reply as an answer; as many tokens as the server counts, whose ids are not known."""
    n = reply.tokens_out
    return Completion(tokens=np.zeros(n, np.int64), logprobs=np.zeros(n, np.float32), loss_mask=np.ones(n, bool),
                      text=reply.text, finish_reason="length" if reply.finish_reason == "length" else "stop",
                      turns=(Turn(start=0, end=n),))


def _unanswered(error: str) -> Completion:
    none = np.zeros(0, np.int64)
    return Completion(tokens=none, logprobs=none.astype(np.float32), loss_mask=none.astype(bool), text="",
                      finish_reason="stop", error=f"not answered: {error}")
