# pyright: reportMissingImports=false
"""The HTTP routes that vlrl adds to a vLLM server: `--middleware vlrl.engine.vllm.routes.Routes`.

    GET  /vlrl/state      the server's settings, and the version of the loaded weights
    GET  /vlrl/alive      for how many seconds the engine has not responded
    POST /vlrl/generate   samples n completions of one prompt, with the weights of the version named in the request
                          (with `prompt_logprobs` also returns the log-probabilities of the prompt's tokens)
    POST /vlrl/load       loads weights or an adapter from a folder, and empties all caches of older weights
    POST /vlrl/compare    lists the weights that differ from those in a folder

Every path except /health requires the key in VLLM_API_KEY; vLLM itself protects only some paths. Weights are read only
from folders listed in VLRL_WEIGHTS, and only as safetensors. A newly started server has no version, so it generates
nothing before its first sync. Runs that share a server take turns: no weights are loaded for one run while completions
are generated for another. vLLM's development mode is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vlrl.engine.vllm import wire as vllm_wire

_LOOK_S = 2.0  # while the engine loads weights, its health is checked every this number of seconds
KEY, WEIGHTS = "VLLM_API_KEY", "VLRL_WEIGHTS"
"""Environment variables of a server: its key, and the folders (joined by os.pathsep) from which it may load weights."""
ADAPTER = "adapter_model.safetensors"
"""This file must exist in an adapter's folder. Without it vLLM would load a pickle file."""
ALIVE = "/vlrl/alive"
MOST_BYTES = 2**30  # maximum size of a request in bytes, enough for a thousand large video frames
Choices = tuple[float, tuple[int, ...]]  # the temperature and the banned ids with which log-probabilities are computed
_ALL: Choices = (1.0, ())
_NO_CACHE = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]


class RequestError(Exception):
    """A request was rejected. `status` is the HTTP status of the response."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class Routes:
    """An ASGI middleware around vLLM's server application."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        key = os.environ.get(KEY)
        if not key:
            raise ValueError(f"set {KEY}: a server without a key would load weights for anyone who reaches it")
        self._key = hashlib.sha256(key.encode()).digest()
        self._roots = [Path(p).resolve() for p in os.environ.get(WEIGHTS, "").split(os.pathsep) if p]
        self.version = ""
        self._lora: Any = None
        self._base = ""
        self._choices = _ALL
        self._loads = 0
        self._loading = asyncio.Lock()
        self._running: dict[asyncio.Task[Any], str] = {}
        """The running generations, with the weights version that each one requested."""
        self._owed: asyncio.Future[Any] | None = None
        """The pending check of whether the engine responds. There is at most one; `_owed_since` is its start time."""
        self._owed_since = 0.0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if not self._known(scope) or scope["type"] == "websocket":
            return await _reply(send, HTTPStatus.UNAUTHORIZED, {"error": "the key is wrong or missing"})
        own = {("GET", "/vlrl/state"): self._state, ("GET", ALIVE): self._alive,
               ("POST", "/vlrl/generate"): self._generate, ("POST", "/vlrl/load"): self._load,
               ("POST", "/vlrl/compare"): self._compare}
        handler = own.get((scope["method"], scope["path"]))
        if handler is None:
            return await self.app(scope, receive, send)
        try:
            body = await _body(scope["headers"], receive)
        except RequestError as refused:
            return await _reply(send, refused.status, {"error": str(refused)})
        if body is not None:
            await self._answer(handler, scope["app"].state, body, receive, send)

    def _known(self, scope: dict[str, Any]) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return secrets.compare_digest(hashlib.sha256(given.removeprefix(b"Bearer ")).digest(), self._key)

    async def _answer(self, handler: Callable[..., Awaitable[Any]], state: Any, body: bytes, receive: Any,
                      send: Any) -> None:
        work = asyncio.ensure_future(handler(state, body))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            try:
                status, value = HTTPStatus.OK, work.result()
            except asyncio.CancelledError:
                status, value = HTTPStatus.CONFLICT, {"error": "the request was stopped because newer weights arrived"}
            except RequestError as refused:
                status, value = refused.status, {"error": str(refused)}
            except Exception as error:
                status = _status(error)
                value = {"error": f"{type(error).__name__}: {error}"}
            await _reply(send, status, value)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    # --- what is served ----------------------------------------------------------------------------------------------

    async def _state(self, state: Any, body: bytes) -> dict[str, Any]:
        await state.engine_client.check_health()
        config = state.vllm_config
        model, lora = config.model_config, config.lora_config
        return {"protocol": vllm_wire.PROTOCOL, "version": self.version, "model": model.model,
                "dtype": str(model.dtype).removeprefix("torch."), "max_model_len": model.max_model_len,
                "logprobs_mode": str(model.logprobs_mode), "vocabulary": model.get_vocab_size(),
                "lora_rank": lora.max_lora_rank if lora else 0, "max_seqs": config.scheduler_config.max_num_seqs,
                "extension": config.parallel_config.worker_extension_cls,
                "roots": [str(root) for root in self._roots]}

    async def _alive(self, state: Any, body: bytes) -> dict[str, Any]:
        """Returns {"silent_s": number of seconds for which the engine has not responded}. vLLM's own health page
        reports whether the engine process exists, not whether it makes progress. The engine responds between two
        decoding steps, so a long step appears as a short silence."""
        owed = self._owed
        if owed is None or owed.done():
            owed = self._owed = asyncio.ensure_future(state.engine_client.is_sleeping())
            self._owed_since = time.monotonic()
        since = self._owed_since
        await asyncio.wait((owed,), timeout=1.0)
        if not owed.done():
            return {"silent_s": time.monotonic() - since}
        owed.result()  # raises where the engine is dead
        return {"silent_s": 0.0}

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _generate(self, state: Any, body: bytes) -> dict[str, Any]:
        """Generates completions of one prompt. The request body is {"version": the weights version that must be loaded,
        "input": a prompt for vLLM, "options": arguments of SamplingParams}. Returns the result of wire.response_of."""
        sent = _object(await asyncio.to_thread(vllm_wire.parse, body))
        self._check(sent["version"])
        request = await asyncio.to_thread(vllm_wire.restore_arrays, sent)
        task = asyncio.current_task()
        assert task is not None
        # weights may have arrived while the images were decoded: the request would be computed with two versions, and
        # the engine would lack the images that it has just read
        self._check(request["version"])
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._running[task] = request["version"]
        try:
            options = SamplingParams(**request["options"], output_kind=RequestOutputKind.FINAL_ONLY)
            name = f"vlrl-{secrets.token_hex(8)}"
            outputs = [output async for output in state.engine_client.generate(request["input"], options, name,
                                                                               lora_request=self._lora)]
        finally:
            del self._running[task]
        self._check(request["version"])
        if ends := {o.finish_reason for o in outputs[-1].outputs} - {"stop", "length"}:
            raise RequestError(HTTPStatus.CONFLICT, f"a completion ended with finish_reason={ends.pop()}")
        return vllm_wire.response_of(outputs[-1], request["options"])

    def _check(self, version: str) -> None:
        if not version or version != self.version:
            other = self.version and _run_of(self.version) != _run_of(str(version))
            raise RequestError(HTTPStatus.CONFLICT, f"the server has weights of version {self.version!r}, not "
                               f"{version!r}" + (", because another run uses this server: give each run its own servers"
                                               if other else ""))

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _load(self, state: Any, body: bytes) -> dict[str, Any]:
        """Loads weights. The request body is {"version": name of the new weights version, "base": [version of the full
        weights, folder], "adapter": folder or None}. Nothing happens if the server already holds the weights of
        "version".

        The full weights are loaded from the folder of "base" unless the server already holds that version of the full
        weights. Then the adapter is loaded. With "choices" ([temperature, banned ids]), log-probabilities are computed
        at this temperature and without these ids."""
        request = _object(json.loads(body))
        version, (name, folder), adapter = _text(request["version"]), request["base"], request["adapter"]
        base, adapter = self._own(folder), self._own(adapter, ADAPTER) if adapter else None
        temperature, banned = request.get("choices") or _ALL
        choices = float(temperature), tuple(map(int, banned))
        async with self._loading:
            if version != self.version:
                if any(_run_of(other) != _run_of(version) for other in self._running.values()):
                    raise RequestError(HTTPStatus.CONFLICT, "the server is generating for another run, and loads this "
                                       "run's weights afterwards: give each run its own servers")
                self.version = ""  # no answer from here on, should anything below fail
                await self._stop_answers()
                await _to_the_end(self._take(state.engine_client, version, _text(name), base, adapter, choices),
                                  state.engine_client.check_health)
        return {"version": self.version}

    async def _compare(self, state: Any, body: bytes) -> dict[str, Any]:
        """Compares the loaded weights with files. The request body is {"version": the version that must be loaded,
        "base": folder, "adapter": folder or None}. Returns {"compared": number of compared tensors, "differing": for
        each tensor that differs, worst first, [name, largest absolute difference, largest absolute value]}."""
        request = _object(json.loads(body))
        base, adapter = self._own(request["base"]), self._own(request["adapter"], ADAPTER) if request["adapter"] else ""
        async with self._loading:
            self._check(request["version"])
            pairs = await state.engine_client.collective_rpc("vlrl_differing", args=(str(base), str(adapter)))
        return {"compared": sum(count for count, _ in pairs), "differing": [entry for _, own in pairs for entry in own]}

    async def _stop_answers(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _take(self, engine: Any, version: str, name: str, base: Path, adapter: Path | None,
                    choices: Choices = _ALL) -> None:
        old, self._lora = self._lora, None
        if name != self._base:
            self._base = ""
            await engine.collective_rpc("vlrl_reload", args=(str(base),))
            self._base = name
        if choices != self._choices:
            await engine.collective_rpc("vlrl_choices", args=choices)
            self._choices = choices
        if old is not None:
            await engine.remove_lora(old.lora_int_id)
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self._loads += 1
            self._lora = LoRARequest(f"vlrl-{self._loads}", self._loads, str(adapter))
            if not await engine.add_lora(self._lora):
                raise RuntimeError(f"vLLM did not load the adapter in {adapter}")
        for _ in range(600):  # what was stopped before may still hold blocks for a moment
            if await engine.reset_prefix_cache():
                break
            await asyncio.sleep(0.05)
        else:
            raise RuntimeError("the prefix cache could not be reset: requests of another client are running")
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        self.version = version

    def _own(self, given: str, needed: str = "*.safetensors") -> Path:
        path = Path(_text(given)).resolve()
        self._check_inside(path)
        if not path.is_dir():
            raise RequestError(HTTPStatus.NOT_FOUND,
                               f"{path} does not exist on the server's host: trainer and server must share the folder")
        for file in path.iterdir():
            self._check_inside(file.resolve())
        if not any(path.glob(needed)):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{path} contains no {needed}, and weights are not loaded from "
                               "other files")
        return path

    def _check_inside(self, path: Path) -> None:
        if not any(path.is_relative_to(root) for root in self._roots):
            raise RequestError(HTTPStatus.FORBIDDEN, f"{path} is outside the folders in {WEIGHTS} ("
                               f"{', '.join(map(str, self._roots)) or 'none is set'})")


def _run_of(version: str) -> str:
    return version.rpartition("-")[0]


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the request must be a JSON object, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a non-empty string, got {value!r:.40}")
    return value


async def _to_the_end(work: Coroutine[Any, Any, None], healthy: Callable[[], Awaitable[None]]) -> None:
    """Awaits work that must not be interrupted; a cancellation takes effect after the work. Meanwhile calls `healthy`
    regularly, and raises its error: a dead engine never responds, and the server would wait forever."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,), timeout=_LOOK_S)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        if not task.done():
            try:
                await healthy()
            except Exception:
                task.cancel()
                raise
    if cancelled:
        with contextlib.suppress(Exception):
            task.result()
        raise cancelled
    task.result()


def _status(error: Exception) -> HTTPStatus:
    if type(error).__name__ == "EngineDeadError":
        return HTTPStatus.SERVICE_UNAVAILABLE
    malformed = (ValueError, TypeError, KeyError, RecursionError)
    return HTTPStatus.BAD_REQUEST if isinstance(error, malformed) else HTTPStatus.INTERNAL_SERVER_ERROR


async def _body(headers: Iterable[tuple[bytes, bytes]], receive: Any) -> bytes | None:
    length = dict(headers).get(b"content-length", b"")
    parts, left = [], MOST_BYTES
    while left >= 0 and (not length.isdigit() or int(length[:20]) <= MOST_BYTES):  # int refuses thousands of digits
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left >= 0 and not message.get("more_body"):
            return b"".join(parts)
    raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request has more than {MOST_BYTES:,} bytes")


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Any, status: HTTPStatus, value: Any) -> None:
    body = json.dumps(value).encode()
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": int(status),
                    "headers": [*_NO_CACHE, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})
