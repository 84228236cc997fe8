"""A real HTTP server on 127.0.0.1 that answers chat completions as a script says, well or badly."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any], int], Any]
"""(body, number of the request) -> text, a status, or a function of the handler that answers by itself."""


def reply(text: Any, **more: Any) -> dict[str, Any]:
    """A chat completion as OpenAI writes it."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3}, **more}


class StandIn(ThreadingHTTPServer):
    """Notes every request in `asked`: path, headers, body."""

    daemon_threads = True
    request_queue_size = 256
    port = 0

    def __init__(self, script: Script, models: tuple[str, ...] = ("only",)):
        super().__init__(("127.0.0.1", self.port), _Handler)
        self.script, self.models = script, models
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that have gone; anything else is an error of the test."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # its answers are written in two parts

    def do_GET(self) -> None:
        self.send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        given = self.rfile.read(length)
        if len(given) < length:  # of a client that was killed while it asked
            self.close_connection = True
            return
        body = json.loads(given)
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            number = len(self.server.asked) - 1
        found = self.server.script(body, number)
        if callable(found):
            found(self)
        elif isinstance(found, int):
            self.send(found, b'{"error": {"message": "as the script says"}}')
        elif isinstance(found, bytes):
            self.send(200, found)
        else:
            self.send(200, json.dumps(found if isinstance(found, dict) else reply(found)).encode())

    def send(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        """Answers; a `length` above that of the body breaks the answer off."""
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if length:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(script: Script, models: tuple[str, ...] = ("only",)) -> Iterator[StandIn]:
    """A server that answers until the block ends."""
    server = StandIn(script, models)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
