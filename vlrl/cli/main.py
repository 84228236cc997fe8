"""The `vlrl` command: its subcommands, and how an error or Ctrl-C becomes a message and an exit code.

Exit codes: 0 on success only; 1 for an error that the message explains, or a failed check; 2 for a wrong command line;
130 if stopped, after saving, by Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP."""

import io
import logging
import os
import shutil
import sys

import vlrl.cli.interrupt  # isort: skip # noqa: F401 - before what takes time to import

from collections import UserDict
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vlrl import __version__
from vlrl.cli.common import add, flowing
from vlrl.cli.terminal import printable
from vlrl.config.registry import Table, failure, place
from vlrl.errors import RunError, VlrlError
from vlrl.monitoring import LEAST_WIDTH

_MOST = 8000  # characters of one message

GROUPS = {
    "Train": {"train": "train:train", "sft": "train:sft", "presets": "presets:presets", "sweep": "compare:sweep"},
    "Data and tasks": {"data": "data:app", "tasks": "tasks:app", "play": "play:play", "score": "score:score",
                       "judge": "judge:app"},
    "Measure and look": {"status": "status:status", "app": "inspector:inspect", "report": "status:report",
                         "eval": "evaluate:evaluate", "compare": "compare:compare"},
    "Models and serving": {"export": "export:export", "extrapolate": "models:extrapolate", "serve": "serve:serve",
                           "tiny": "models:tiny"},
    "Machine": {"doctor": "status:doctor", "plan": "plan:plan"},
}
"""Heading in `vlrl --help` -> name of each command -> its function, or the typer application of its subcommands."""
_COMMANDS = Table({name: f"vlrl.cli.{place}" for group in GROUPS.values() for name, place in group.items()})
"""Command name -> its function or application, imported when the command is called."""


class _Commands(UserDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            own, found = typer.Typer(), _COMMANDS[name]
            own.add_typer(found) if isinstance(found, typer.Typer) else add(own, found, name)
            for command in (*own.registered_commands, *(c for g in own.registered_groups if g.typer_instance
                                                         for c in g.typer_instance.registered_commands)):
                command.help = flowing(command.callback)
            panel = next(heading for heading, group in GROUPS.items() if name in group)
            self.data |= typer.main.get_group(own).commands
            self.data[name].rich_help_panel = panel  # type: ignore[union-attr]
        return self.data[name]


class _Group(TyperGroup):
    def __init__(self, **given: Any):
        super().__init__(**given)
        self.commands = _Commands(dict.fromkeys(_COMMANDS))


app = typer.Typer(name="vlrl", cls=_Group, no_args_is_help=True, rich_markup_mode="rich",
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
                  help="Fine-tune vision-language models by reinforcement learning with verifiable rewards.",
                  epilog="First steps:\n\nvlrl train quickstart.yaml\n\n"
                         "vlrl train --data FILE --reward file.py:f --model NAME\n\nvlrl app runs\n\nvlrl doctor")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"vlrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="Show the version and exit.")] = False) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `vlrl` command line and returns the exit code."""
    return _run(typer.main.get_command(app), sys.argv[1:] if argv is None else argv, "vlrl")


def train_script(argv: Sequence[str]) -> int:
    """Runs `train.py`, which is the same as `vlrl train`, and returns the exit code."""
    from vlrl.cli.train import train
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                        context_settings={"help_option_names": ["-h", "--help"]})
    alone.command(epilog=train.epilog.replace("vlrl train", "train.py"))(train)  # type: ignore[attr-defined]
    return _run(typer.main.get_command(alone), argv, "train.py")


class _Printable(logging.Formatter):
    """Formats log records without control characters: warnings contain ids and names from data files, which could
    otherwise control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), _MOST)


def _run(command: Any, argv: Sequence[str], name: str) -> int:
    _prepare_terminal()
    if logging.lastResort:  # prints warnings if logging is not set up
        logging.lastResort.setFormatter(_Printable())
    try:
        code = _called(command, argv, name)
        sys.stdout.flush()
        return code
    except VlrlError as error:
        message = _noted(str(error), error)
    except (Exception, SystemExit) as error:
        if place(error):  # a task's own code, or another variant
            message = _noted(failure(error), error)
        elif isinstance(error, OSError):
            message = _noted(_of_the_system(error), error)
        else:
            raise
    if message:
        print(f"error: {printable(message, _MOST)}", file=sys.stderr)
    return 1


def _noted(message: str, error: BaseException) -> str:
    return " ".join([message, *getattr(error, "__notes__", ())]) if message else ""


def _called(command: Any, argv: Sequence[str], name: str) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:  # some libraries exit the process in that case
        raise RunError("the working directory does not exist any more: change to another directory") from None
    try:
        command.main(args=list(argv), prog_name=name)
    except SystemExit as end:
        if place(end):  # sys.exit of a task's own code says nothing about the command
            raise
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _prepare_terminal() -> None:
    """Prepares standard output. Characters that the encoding of the terminal lacks are printed as "?". Tables are at
    least LEAST_WIDTH columns wide, even if the terminal, or COLUMNS, is narrower."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for a character that the terminal's encoding lacks
    given = os.environ.get("COLUMNS", "")
    if shutil.get_terminal_size().columns < LEAST_WIDTH or (given.isdecimal() and int(given) < LEAST_WIDTH):
        os.environ["COLUMNS"] = str(LEAST_WIDTH)


def _of_the_system(error: OSError) -> str:
    """Returns an error message for an OSError; "" if the reader of a pipe has exited, as in `vlrl ... | head`."""
    refused = False
    try:
        sys.stdout.write("\n" if error.filename is None else "")  # what was too large for the buffer is not kept in it
        sys.stdout.flush()
    except OSError:  # at exit Python would try again and print an error
        refused = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return ""
    if refused:
        return f"cannot write to stdout: {error.strerror or error}. Free space on disk, or send the output elsewhere."
    if error.filename is None:
        return f"cannot read or write: {error.strerror or error}. Free space on disk, or write elsewhere."
    return f"cannot use {str(error.filename)!r}: {error.strerror}. Name another path, or fix the path's permissions."

