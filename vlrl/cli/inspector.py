"""`vlrl app`."""

from __future__ import annotations

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
    host: Annotated[str, typer.Option(help="Address to listen on; another one than this machine's own needs a "
                                           "password.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(
        min=1, max=65535, show_default=False,
        help="Port to listen on, this one or none. Default: the first free one from 7860 on.")] = None,
    password: Annotated[str | None, typer.Option(envvar="VLRL_APP_PASSWORD", show_envvar=True, show_default=False,
                                                 help="What everyone has to say first. Others on the machine can read "
                                                      "a command line: use the variable.")] = None,
    trust_tasks: Annotated[bool, typer.Option("--trust-tasks", help="Run the task code that a run's config names by "
                                                                    "path or module. It can do whatever you can.")
                           ] = False,
    root_path: Annotated[str, typer.Option(
        metavar="PATH", show_default=False,
        help="Path under which a proxy serves it, such as /user/me/proxy/7860; cut off by the proxy or not.")] = "",
    allow_host: Annotated[list[str] | None, typer.Option(
        metavar="NAME", show_default=False,
        help="Host name of a proxy that it is reached under (*.NAME: all below NAME), beside this machine's own; "
             "others come in by it, so it needs a password. --host 0.0.0.0 answers any name, but with this option "
             "only those given. May be repeated.")] = None,
    allow_frame: Annotated[list[str] | None, typer.Option(
        metavar="ORIGIN", show_default=False,
        help="Origin of a page that may hold it in a frame, such as http://localhost:8888 (Jupyter). Default: none. "
             "May be repeated.")] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = False,
) -> None:
    """Inspect runs in the browser: curves, every answer with images and tokens, comparisons, a playground.

    Reads run folders only, also of runs in progress. Nothing is sent to another machine. Ctrl-C ends it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`vlrl app` needs {', '.join(missing)}, which is not installed: pip install 'vlrl[app]'")
    from vlrl.app import server  # pyright: ignore[reportMissingImports]  # on vlrl.__path__

    def started(url: str, taken: int) -> None:
        if port is None and taken != server.PORT:
            typer.echo(f"port {server.PORT} is taken, so {taken} is used; --port settles on one")
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
