"""Defines the options of a job as one dataclass, whose fields become command-line options (cli/common.py).

    @dataclass(frozen=True, kw_only=True)
    class SweepRequest:
        seeds: int = option(3, "Number of seeds on which the settings are selected.", min=1)"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A dataclass field with its default and help text. With MISSING as the default, the option is required.

    `flags` replace the option name derived from the field, e.g. "--timeout". `more` are further keywords of
    typer.Option, such as `metavar`, `min` and `max`."""
    return field(default=default, metadata={"flags": flags, "help": help, **more})
