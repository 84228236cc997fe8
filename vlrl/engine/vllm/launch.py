"""Starts vLLM servers for a config and keeps them running (`vlrl serve`).

A server starts with weights of zeros and without a weights version. The trainer transfers the real weights later,
including those of the base model if an adapter is trained. So only config and processor are loaded or copied here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from vlrl.config.engine import EngineSettings
from vlrl.config.schema import Config
from vlrl.engine.vllm.policy_weights import write_config
from vlrl.engine.vllm.process import PARENT
from vlrl.engine.vllm.routes import ALIVE, KEY, WEIGHTS
from vlrl.engine.vllm.server import EXTENSION, read_key
from vlrl.engine.vllm.worker import EMPTY
from vlrl.errors import ConfigError, RunError, TrainingError
from vlrl.models.loading import compute_dtype, load_processor, skeleton
from vlrl.store import files, lock

MIDDLEWARE = "vlrl.engine.vllm.routes.Routes"
PROGRAM = "vlrl.engine.vllm.process"
_POLL_S = 0.5
_HEALTH_S = 5.0
_GRACE_S = 30.0  # servers that have not shut down after this number of seconds are killed
_MOST_DEATHS = 5  # A server that has died this many times without a response in between is not restarted
_SILENT_S = 600.0
"""A server is restarted if it does not respond for this number of seconds, or engine.timeout_s if longer."""
_LAST_LINES = 15
_SET_BY = {"--tensor-parallel-size": "engine.tensor_parallel", "--max-model-len": "engine.max_model_len",
           "--gpu-memory-utilization": "engine.memory", "--max-num-seqs": "engine.max_seqs", "--dtype": "engine.dtype",
           "--enforce-eager": "engine.eager", "--seed": "seed", "--host": "--host", "--port": "--port"}
"""Arguments that vlrl passes to vLLM -> the setting or option of vlrl that determines the value."""


@dataclass(eq=False)
class ServerProcess:
    """A vLLM server: its addresses, command and log, its process if it runs, and the state that ServerGroup records."""

    address: str  # the URL that trainers use, also on other hosts
    local: str  # the URL on this host
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    healthy: bool = False
    deaths: int = 0  # how often the process has died since the server's last response
    start_at: float = 0.0
    checked: float = 0.0
    heard: float = 0.0


@dataclass(eq=False)
class ServerGroup:
    """The servers of a config. `say` prints messages about restarts."""

    servers: list[ServerProcess]
    say: Callable[[str], None]
    key_file: Path | None = None  # the file with the servers' key; None if the key is not in a file
    silent_s: float = _SILENT_S
    back: str = "the trainer brings it the current weights"
    """What happens to a restarted server that responds again; the end of the message about it."""
    _stopped: bool = False  # no threading.Event: a signal handler that sets it may wait forever for its lock
    _signal: int = signal.SIGTERM
    _start_s: float = math.inf  # number of seconds within which a server must respond after a start or restart

    @property
    def addresses(self) -> list[str]:
        return [s.address for s in self.servers]

    def start(self, timeout_s: float) -> bool:
        """Starts all servers and waits until they respond. Returns False if `stop` was called meanwhile. Raises
        TrainingError if a server dies or does not respond in time."""
        for server in self.servers:
            _launch(server)
        self._start_s, deadline = timeout_s, time.monotonic() + timeout_s
        while not self._stopped:
            for server in self.servers:
                server.healthy = server.healthy or _health(server.local) == 200
                if _dead(server):
                    raise TrainingError(f"the server {server.address} ended while it started:\n{_tail(server.log)}")
            if all(s.healthy for s in self.servers):
                return True
            if time.monotonic() > deadline:
                slow = ", ".join(s.address for s in self.servers if not s.healthy)
                raise TrainingError(f"{slow} did not respond within {timeout_s:g} s: see {self.servers[0].log}")
            time.sleep(_POLL_S)
        return False

    def watch(self) -> None:
        """Restarts servers that fail, until `stop` is called. Raises TrainingError if a server dies repeatedly."""
        while not self._stopped:
            for server in self.servers:
                self._look_after(server)
            time.sleep(_POLL_S)

    def _look_after(self, server: ServerProcess) -> None:
        now, longest = time.monotonic(), self.silent_s if server.healthy else self._start_s
        if server.process is None:
            if now >= server.start_at:
                _launch(server)
        elif _dead(server):
            self._bury(server, f"ended ({_ending(server.process.returncode)})")
        elif now - server.checked > _HEALTH_S:
            server.checked, status = now, _health(server.local)
            server.heard = now if status or not server.heard else server.heard
            if status == 200 and not server.healthy:
                server.healthy, server.deaths = True, 0
                self.say(f"{server.address} responds again; {self.back}")
            elif status == 503 and server.healthy:
                self._bury(server, "lost its engine")
            elif now - server.heard > longest:
                self._bury(server, f"has not responded for {longest:g} s")
            elif status == 200 and _silence(server) > self.silent_s:
                self._bury(server, f"responds, but its engine has not responded for {self.silent_s:g} s")

    def _bury(self, server: ServerProcess, what: str) -> None:
        _kill(server, signal.SIGKILL)
        if server.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(_GRACE_S)  # a hung process may take a while to die
        server.process, server.deaths = None, server.deaths + (not server.healthy)
        server.healthy = False
        if server.deaths >= _MOST_DEATHS:
            raise TrainingError(f"the server {server.address} {what} {server.deaths} times in a row:\n"
                                f"{_tail(server.log)}")
        pause = 2.0 ** server.deaths - 1
        server.start_at = time.monotonic() + pause
        self.say(f"{server.address} {what}; the server is started again" + (f" in {pause:g} s" if pause else ""))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Makes `start` and `watch` return. `close` then forwards the signal `number` to the servers. `stop` may be
        called in a signal handler."""
        self._signal, self._stopped = number, True

    def close(self) -> None:
        """Forwards the signal of `stop` to all servers, waits for them, and kills the processes that remain."""
        for server in self.servers:
            _kill(server, self._signal)
        deadline = time.monotonic() + _GRACE_S
        for server in self.servers:
            if server.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(max(deadline - time.monotonic(), 0.1))
            _kill(server, signal.SIGKILL)


def prepare(config: Config, folder: Path, *, replicas: int = 1, host: str = "127.0.0.1", port: int = 8000,
            weights: Sequence[str] = (), further: Sequence[str] = (), say: Callable[[str], None] = print,
            episodes: bool = False) -> ServerGroup:
    """Creates the ServerGroup of a config and writes its files to `folder`. The servers are not started yet.

    replicas: number of servers, at consecutive ports from `port`. weights: folders, besides those of the config, from
    which the servers may load weights. further: additional vLLM arguments, NAME=VALUE or NAME. say: prints messages.
    episodes: whether prompts grow over the turns of episodes. Raises ConfigError for an argument that vlrl sets, a port
    in use, too few GPUs, or too little memory for servers on a CPU."""
    for i in range(replicas):
        check_free(host, port + i)
    folder.mkdir(parents=True, exist_ok=True)
    policy = _blueprint(config)
    arguments = _arguments(policy, config, folder / "model", episodes)
    added = further_arguments(further, arguments)
    devices = _devices(policy, config.engine, replicas, added)
    arguments += [word for name, value in added.items() for word in (name, value) if word]
    key_file = write_key(folder / "key", config.engine.key_file)
    run = Path(config.run.dir).absolute().parent
    roots = [str(run), *(str(Path(p).absolute()) for p in (*weights, config.engine.scratch) if p)]
    shared = os.environ | {KEY: _key_of(key_file), WEIGHTS: os.pathsep.join(roots), PARENT: str(os.getpid()),
                           "VLLM_NO_USAGE_STATS": "1"}
    servers = []
    for i in range(replicas):
        command = [sys.executable, "-m", PROGRAM, *arguments, "--host", host, "--port", str(port + i)]
        servers.append(ServerProcess(f"http://{_reached(host)}:{port + i}",
                                     f"http://{_reached(host, here=True)}:{port + i}",
                                     command, shared | devices[i], folder / f"server-{port + i}.log"))
    return ServerGroup(servers, say, key_file, silent_s=max(_SILENT_S, config.engine.timeout_s))


def _blueprint(config: Config) -> Any:
    """An object with the attributes of Policy that determine the servers' arguments. No weights are read."""
    model, family = skeleton(config.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    on_gpu = torch.cuda.device_count() > 0
    return SimpleNamespace(model=model, base=base, family=family, lora=config.model.lora.rank > 0,
                           processor=load_processor(config.model, family), dtype=compute_dtype(config.model),
                           device=torch.device("cuda" if on_gpu else "cpu"))


def _arguments(policy: Any, config: Config, folder: Path, episodes: bool) -> list[str]:
    from vlrl import _torchcodec

    _torchcodec.hide_broken()
    from vlrl.engine.vllm import engine as vllm
    from vlrl.engine.vllm.inputs import model_length
    from vlrl.engine.vllm.sync import lora_options

    write_config(policy, folder)
    length = model_length(config, policy.base.config, episodes)
    options = vllm.options(policy, config, folder, length) | lora_options(policy)
    options.pop("enable_sleep_mode", None)  # only for an engine that shares its GPU with the trainer
    options.pop("distributed_executor_backend", None)
    options |= {"load_format": EMPTY, "middleware": MIDDLEWARE, "worker_extension_cls": EXTENSION,
                "disable_uvicorn_access_log": True}
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def further_arguments(given: Sequence[str], taken: Sequence[str],
                      set_by: Mapping[str, str] = _SET_BY) -> dict[str, str]:
    """Parses vLLM arguments, each NAME=VALUE or NAME, into {"--name": "value"}. Raises ConfigError for an argument that
    vlrl sets itself: those in `taken`, and those in `set_by` ({argument: the setting or option that determines it})."""
    arguments: dict[str, str] = {}
    for text in given:
        word, _, value = text.partition("=")
        option, dot, key = word.strip().lstrip("-").partition(".")  # the key of a config keeps its underscores
        name = f"--{option.replace('_', '-')}{dot}{key}"
        if name in taken or name in set_by:
            raise ConfigError(f"--vllm {text}: vlrl sets {name} itself, " + (
                f"by {set_by[name]}. Remove the argument, or set {set_by[name]}" if name in set_by
                else "to the value that trainers need. Remove the argument"))
        arguments[name] = value
    return arguments


def _devices(policy: Any, engine: EngineSettings, replicas: int, added: dict[str, str]) -> list[dict[str, str]]:
    """Environment variables that assign each server its GPUs, or its threads on a CPU: one dictionary per server. The
    dictionaries are empty with Ray, which assigns the GPUs itself. `added`: additional arguments for vLLM."""
    if added.get("--distributed-executor-backend") == "ray":
        return [{}] * replicas
    each = engine.tensor_parallel * int(added.get("--pipeline-parallel-size", 1))
    if policy.device.type != "cuda":
        if replicas * engine.memory > 1 and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            raise ConfigError(f"--replicas {replicas} with engine.memory={engine.memory:g}: the servers would take "
                              "more than the main memory. Lower one of the two values, or set VLLM_CPU_KVCACHE_SPACE "
                              "to the size of each server's KV cache in GiB")
        return [{"VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")}] * replicas
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = [*map(str, range(torch.cuda.device_count()))]
    else:
        devices = [d for d in visible.split(",") if d]
    if len(devices) < replicas * each:
        raise ConfigError(f"--replicas {replicas} with engine.tensor_parallel={engine.tensor_parallel} needs "
                          f"{replicas * each} GPUs, but {len(devices)} are visible: start fewer servers, make more "
                          "GPUs visible (CUDA_VISIBLE_DEVICES), or run each server on several hosts (docs/engines.md)")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i * each:(i + 1) * each])} for i in range(replicas)]


def write_key(path: Path, given: str = "") -> Path:
    """Returns the path of the file with the servers' key: `given`, or else `path`. A missing file is created with a
    random key, readable only by the owner. An existing key is kept, so that a run continues with restarted servers."""
    target = Path(given or path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    if not given and target.exists() and target.stat().st_mode & 0o077:
        target.unlink()  # others may have read it
    if not target.exists():
        own = target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another host has created it meanwhile
            os.link(own, target)
        own.unlink()
    return target


def _key_of(file: Path) -> str:
    key = read_key(str(file))
    if not key:
        raise ConfigError(f"engine.key_file={str(file)!r} is empty: write a key to the file, or delete the "
                          "file so that a key is generated")
    return key


@contextlib.contextmanager
def serve_lock(folder: Path) -> Iterator[None]:
    """Context manager that locks the folder of the servers, which contains their key and logs. Raises ConfigError if
    another `vlrl serve` has locked the folder."""
    path = folder / "serve.lock"
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(lock.lock(path))
        except RunError as error:
            owner = files.read_json(path)
            if owner is None:
                raise
            raise ConfigError(f"{folder} is in use by the servers of process {owner.get('pid')} on "
                              f"{owner.get('host')}: end that process, or choose another --folder (and --port) for the "
                              f"new servers. If the process no longer exists, delete {path}.") from error
        (folder / "servers.json").unlink(missing_ok=True)  # of one that was killed
        yield


def describe(servers: ServerGroup, path: Path) -> None:
    """Writes a JSON file with the servers' addresses, the path of the key file and the process id."""
    files.write_text(path, json.dumps({"servers": servers.addresses, "key_file": str(servers.key_file),
                                       "pid": os.getpid()}, indent=1) + "\n")


def _reached(host: str, here: bool = False) -> str:
    """The host name in the URL of a server that listens on `host`. `here`: whether the URL is used on this host, not on
    others."""
    if host in ("0.0.0.0", "::"):
        return ("127.0.0.1" if host == "0.0.0.0" else "[::1]") if here else socket.gethostname()
    return f"[{host}]" if ":" in host else host


def check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}. Choose another --port, or end the program "
                              f"that uses port {port}.") from None


def _launch(server: ServerProcess) -> None:
    server.process, server.checked, server.heard, server.healthy = None, time.monotonic(), 0.0, False
    with server.log.open("ab") as log:  # a session of its own: Ctrl-C reaches it through us alone
        server.process = subprocess.Popen(server.command, env=server.environment, stdin=subprocess.DEVNULL, stdout=log,
                                          stderr=subprocess.STDOUT, start_new_session=True)


def _dead(server: ServerProcess) -> bool:
    return server.process is not None and server.process.poll() is not None


def _kill(server: ServerProcess, number: int) -> None:
    if server.process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.process.pid, number)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _health(address: str) -> int:
    try:
        return httpx.get(f"{address}/health", timeout=_HEALTH_S, trust_env=False).status_code
    except (httpx.HTTPError, OSError):
        return 0


def _silence(server: ServerProcess) -> float:
    key = {"Authorization": f"Bearer {server.environment.get(KEY, '')}"}
    try:
        answer = httpx.get(f"{server.local}{ALIVE}", headers=key, timeout=_HEALTH_S, trust_env=False)
        return float(answer.json()["silent_s"])
    except (httpx.HTTPError, OSError, ValueError, TypeError, KeyError):
        return 0.0


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join([*lines[-_LAST_LINES:], f"(all of it: {log})"])
