"""`vlrl app`: starts the inspector."""

import importlib.util
import signal
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import examples
from vlrl.errors import ConfigError

_NEEDED = ("gradio", "duckdb")


@examples(
    "vlrl app                                      the runs under runs/",
    "vlrl app runs/quickstart                      one run",
    "VLRL_APP_PASSWORD=... vlrl app --host 0.0.0.0   from other machines",
    "vlrl app --root-path /proxy/7860 --allow-frame http://localhost:8888   in Jupyter")
def inspect(
    runs: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="A folder of runs, or one run folder.")
                    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on. Any address other than this machine's own "
                                           "(loopback) requires a password.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, show_default=False, help=(
        "Port to listen on; the command fails if it is taken. Default: the first free port from 7860 "
        "upwards."))] = None,
    password: Annotated[str | None, typer.Option(envvar="VLRL_APP_PASSWORD", show_envvar=True, show_default=False,
                                                 help="Password that every visitor must enter. Other users of this "
                                                      "machine can read command lines, so set the environment "
                                                      "variable instead.")] = None,
    trust_tasks: Annotated[bool, typer.Option("--trust-tasks", help=(
        "Run the task code that a run's config names by path or module. That code runs with your "
        "permissions."))] = False,
    root_path: Annotated[str, typer.Option(metavar="PATH", show_default=False, help=(
        "Path under which a proxy serves the inspector, such as /user/me/proxy/7860, whether or not the proxy removes "
        "that path from requests."))] = "",
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME", show_default=False, help=(
        "Accept requests addressed to this host name, e.g. of a proxy, in addition to this machine's own names "
        "(*.NAME: all subdomains of NAME). Requires a password, since others can reach the inspector through it. With "
        "--host 0.0.0.0 any name is accepted unless this option limits the names. May be repeated."))] = None,
    allow_frame: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", show_default=False, help=(
        "Origin of a page that may embed the inspector in a frame, such as http://localhost:8888 (Jupyter). Default: "
        "none. May be repeated."))] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the inspector in the browser.")] = False,
) -> None:
    """Inspect runs in the browser: curves, every answer with its images and tokens, comparisons, a playground.

    Reads only the run folders; runs may be in progress. Nothing is sent to another machine. Press Ctrl-C to stop."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`vlrl app` needs {', '.join(missing)}, which is not installed: pip install 'vlrl[app]'")
    from vlrl.app import server  # pyright: ignore[reportMissingImports]  # on vlrl.__path__

    def started(url: str, taken: int) -> None:
        if port is None and taken != server.PORT:
            typer.echo(f"port {server.PORT} is taken, so port {taken} is used; set a fixed port with --port")
        typer.echo(f"{url}  shows {runs}; Ctrl-C ends it")
        if opened:
            webbrowser.open(url)

    for number in (signal.SIGINT, signal.SIGTERM):  # nohup and some shells hand down an ignored Ctrl-C
        signal.signal(number, signal.default_int_handler)
    try:
        server.serve(runs, host=host, port=port, password=password, trust_tasks=trust_tasks, root_path=root_path,
                     allow_hosts=allow_host or (), allow_frames=allow_frame or (), started=started)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
