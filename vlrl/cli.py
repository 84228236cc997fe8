"""The `vlrl` command: what it can do, and how an error or Ctrl-C becomes a message and an exit code.

Exit codes: 0 only on success; 1 an error that the message explains, or a check that failed; 2 the command line itself
is wrong; 130 stopped by Ctrl-C or SIGTERM after saving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vlrl import __version__
from vlrl.commands import data, looking, scoring, tasks, training
from vlrl.errors import VlrlError

app = typer.Typer(name="vlrl", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Fine-tune vision-language models by reinforcement learning with verifiable rewards.",
                  epilog="First steps:\n\nvlrl train configs/quickstart.yaml\n\nvlrl tasks new count\n\nvlrl doctor")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vlrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="Show the version and exit.")] = False) -> None:
    pass


training.register(app)
scoring.register(app)
app.add_typer(tasks.app)
app.add_typer(data.app)
looking.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    """The `vlrl` command; returns the exit code."""
    return _run(typer.main.get_command(app), sys.argv[1:] if argv is None else argv, "vlrl")


def train(argv: Sequence[str]) -> int:
    """`train.py`: the same as `vlrl train`; returns the exit code."""
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                        context_settings={"help_option_names": ["-h", "--help"]})
    alone.command(epilog=training.TRAIN_EXAMPLES)(training.train)
    return _run(typer.main.get_command(alone), argv, "train.py")


def _run(command: Any, argv: Sequence[str], name: str) -> int:
    try:
        command.main(args=list(argv), prog_name=name)
    except VlrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BrokenPipeError:  # the reader has gone, as in `vlrl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0

