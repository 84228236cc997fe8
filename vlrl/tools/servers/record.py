"""`vlrl serve --record`: an OpenAI-compatible server for chat completions that records episodes.

    POST /v1/chat/completions           the episode's id is in the header X-Episode-Id, metadata.episode_id, or user
    POST /v1/episodes/{id}/reward       {"reward": number or null, "parts": {name: number}} closes the episode
    GET  /v1/episodes/{id}              token ids, log-probabilities, loss mask, turns
    GET  /health

Every path but /health needs the API key, as `Authorization: Bearer KEY`. Requests that name another host, or that come
from a web page, are refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import transformers

from vlrl import config as configs
from vlrl.config.schema import Config
from vlrl.errors import ConfigError, VlrlError
from vlrl.models import policy
from vlrl.models.processing import Encoder
from vlrl.store import RunFolder
from vlrl.tools.servers.chat import Chat
from vlrl.tools.servers.chat_messages import RequestError
from vlrl.tools.servers.recording import Recorder
from vlrl.training.build import make_accelerator, seed_everything
from vlrl.training.build_engine import check_engine, make_engine
from vlrl.training.build_task import make_task

MOST_BYTES = 2**26  # largest size of a request in bytes; a conversation contains its images in base64
_SILENT_S = 60.0  # seconds after which receiving a request times out
_EPISODE = re.compile(r"/v1/episodes/([^/]+?)(/reward)?")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_LOCAL = ("127.0.0.1", "localhost")
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def recorder(config: Config, folder: Path, most_open: int, idle_s: float) -> Iterator[Recorder]:
    """Context manager that yields a Recorder, which generates with the model of a config and writes episodes to the run
    folder `folder`. Open episodes are closed at the end. `most_open` and `idle_s` are explained in Recorder."""
    if config.engine.name == "vllm_server":
        raise ConfigError("--record with engine.name=vllm_server: the model must run in this process. Set engine=hf or "
                          "engine=vllm")
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(f"--folder {folder} is the folder of a training run, whose config.yaml would be overwritten: "
                          "choose another folder")
    check_engine(config)
    transformers.logging.disable_progress_bar()
    seed_everything(config.seed)
    run, task = RunFolder(folder, config.store.media), make_task(config)
    with run.lock(), TemporaryDirectory(prefix="vlrl-engine-") as scratch:
        run.create(configs.dump(config), config.seed)
        model = policy.load(config, make_accelerator(config))
        encode = Encoder(model.processor, model.family, model.positions, config)
        with contextlib.closing(make_engine(config, model, Path(scratch) / "files", episodes=True)) as engine:
            engine.sync(model, 0)
            with contextlib.closing(Recorder(engine, encode, config, task, run, most_open, idle_s)) as episode_recorder:
                yield episode_recorder


class Server(ThreadingHTTPServer):
    """An HTTP server for a Recorder or Chat, on 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 256  # with Python's 5, the kernel drops simultaneous connections, which then wait for seconds

    def __init__(self, port: int, key: str, backend: Recorder | Chat):
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on 127.0.0.1:{port}: {error}. Choose another --port, or end the program "
                              "that listens there.") from None
        self.key, self.backend = hashlib.sha256(key.encode()).digest(), backend

    def service_actions(self) -> None:
        if isinstance(self.backend, Recorder):
            self.backend.expire()

    def stop(self) -> None:
        """Makes `serve_forever` return; may be called from a signal handler."""
        threading.Thread(target=self.shutdown, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = _SILENT_S  # pyright: ignore[reportIncompatibleVariableOverride]
    disable_nagle_algorithm = True  # otherwise the kernel delays the second part of a reply by 40 ms

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _get(self) -> dict[str, Any]:
        if self.path == "/health":
            return {"status": "ok"}
        self._check()
        backend = self.server.backend
        if isinstance(backend, Chat):
            if self.path == "/v1/models":
                return backend.models()
        elif (match := _EPISODE.fullmatch(self.path)) and not match[2]:
            return backend.get(_name(match[1]))
        raise RequestError(404, "no such path")

    def _post(self) -> dict[str, Any]:
        self._check()
        backend, match = self.server.backend, _EPISODE.fullmatch(self.path)
        if isinstance(backend, Chat):
            if self.path != "/v1/chat/completions":
                raise RequestError(404, "no such path")
            return backend.chat(self._body())
        if self.path != "/v1/chat/completions" and not (match and match[2]):
            raise RequestError(404, "no such path")
        body = self._body()
        if match:
            return backend.reward(_name(match[1]), body)
        metadata = body.get("metadata")
        named = (self.headers.get("X-Episode-Id"),
                 metadata.get("episode_id") if isinstance(metadata, dict) else None, body.get("user"))
        return backend.chat(_name(next((n for n in named if n is not None), None)), body)

    def _check(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(hashlib.sha256(given.encode()).digest(), self.server.key):
            raise RequestError(401, "the key is wrong or missing: send the header Authorization: Bearer KEY")
        if self.headers.get("Host", "").rpartition(":")[0] not in _LOCAL or self.headers.get("Origin"):
            raise RequestError(403, "requests are accepted only from programs on this host, at 127.0.0.1")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,12}", length, re.ASCII):
            raise RequestError(411, "the request has no valid Content-Length header")
        if int(length) > MOST_BYTES:
            raise RequestError(413, f"the request has more than {MOST_BYTES:,} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise RequestError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise RequestError(400, "the body is not a JSON object")
        return body

    def _reply(self, work: Any) -> None:
        try:
            status, value = 200, work()
        except RequestError as refused:
            status, value = refused.status, {"error": {"message": str(refused), "type": "invalid_request_error"}}
        except OSError:  # the client has disconnected, or timed out
            self.close_connection = True
            return
        except Exception as error:
            if not isinstance(error, VlrlError):
                _log.exception("a request failed")
            status, value = 500, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}}
        body = json.dumps(value).encode()
        self.close_connection = self.close_connection or status != 200  # the request may not be read completely
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing, so that requests are not logged."""


def _name(given: Any) -> str:
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise RequestError(400, f"{str(given)[:60]!r} is not a valid episode id. Set the header X-Episode-Id, "
                      "metadata.episode_id or user to at most 128 letters, digits and .:_-")
    return given
