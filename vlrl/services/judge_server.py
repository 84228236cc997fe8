"""Starts a vLLM server for `services.judge` (`vlrl serve --judge`), with its own model, whose weights never change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from vlrl.config.services import JudgeSettings
from vlrl.engine.vllm import launch as vllm_launch
from vlrl.engine.vllm.launch import ServerGroup, ServerProcess
from vlrl.engine.vllm.process import PARENT
from vlrl.engine.vllm.server import EXTENSION
from vlrl.errors import ConfigError
from vlrl.services.chat import address_of, key_of
from vlrl.store import checkpoint

_SET_BY = {"--model": "services.judge.model", "--served-model-name": "services.judge.model", "--host": "--host",
           "--port": "services.judge.url", "--api-key": "services.judge.key_env"}
_HERE = ("127.0.0.1", "localhost", "::1")
_PORT = 8001  # the default port: the port after that of the first policy server


def prepare(settings: JudgeSettings, folder: Path, *, host: str = _HERE[0], port: int | None = None,
            further: Sequence[str] = (), say: Callable[[str], None] = print) -> ServerGroup:
    """Creates a vLLM server (OpenAI-compatible) with the model services.judge.model, without starting it.

    The server's log is written to `folder`. further: additional vLLM arguments, NAME=VALUE or NAME. Raises ConfigError
    if no model is set, the model is an adapter, the port is in use or differs from the one in services.judge.url, that
    URL names another host, or other hosts could use the server without a key."""
    port = _port(settings, host, port)
    added = vllm_launch.further_arguments(further, (), _SET_BY)
    key = key_of(settings.key_env, "services.judge.key_env")
    if host not in _HERE and not key:
        raise ConfigError(f"--host {host} without a key would let anyone use the judge: set services.judge.key_env to "
                          "the environment variable that contains a key")
    model = _model(settings.model)
    vllm_launch.check_free(host, port)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", vllm_launch.PROGRAM, "--model", model, "--served-model-name", settings.model,
               "--host", host, "--port", str(port), "--disable-uvicorn-access-log",
               "--worker-extension-cls", EXTENSION, *([] if torch.cuda.device_count() else ["--enforce-eager"]),
               *(word for name, value in added.items() for word in (name, value) if word)]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"} | {
        PARENT: str(os.getpid()), "VLLM_NO_USAGE_STATS": "1", **({"VLLM_API_KEY": key} if key else {}),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")}
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else f'[{host}]' if ':' in host else host}:{port}"
    server = ServerProcess(address, address, command, environment, folder / f"judge-{port}.log")
    return ServerGroup([server], say, back="questions that wait for it are asked again")


def _port(settings: JudgeSettings, host: str, port: int | None) -> int:
    if not settings.model:
        raise ConfigError("--judge needs services.judge.model. Set this to the hub name, folder or run of the model "
                          "that judges")
    if not settings.url:
        return port or _PORT
    parts = urlsplit(address_of(settings.url, "services.judge.url"))
    if parts.hostname not in _HERE and host in _HERE:
        raise ConfigError(f"services.judge.url={settings.url} names another host than {host}: run `vlrl serve --judge` "
                          "on that host with --host 0.0.0.0, or set the URL to http://127.0.0.1:PORT/v1")
    if parts.scheme != "http" or parts.path.strip("/") != "v1":
        raise ConfigError(f"services.judge.url={settings.url}: vLLM answers only at http://HOST:PORT/v1: set an "
                          "address of this form")
    if port not in (None, parts.port):
        raise ConfigError(f"--port {port} differs from the port in services.judge.url={settings.url}: leave --port out")
    return parts.port or 80


def _model(name: str) -> str:
    folder = checkpoint.model_folder(name)
    if (Path(folder) / "adapter_config.json").is_file():
        raise ConfigError(f"services.judge.model={name!r} is an adapter, which the server cannot load: merge the "
                          f"adapter into its model first, by a run with model.name={name} model.lora.rank=0 steps=0")
    return folder
