"""A request: the options of a job as one dataclass, whose fields the command line shows as options (cli/common.py).

    @dataclass(frozen=True, kw_only=True)
    class SweepRequest:
        seeds: int = option(3, "Seeds by which settings are chosen: 0, 1, ...", min=1)
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A field with its default and help text; with MISSING the option is required. `flags` replace the name made
    from the field's, e.g. "--timeout"; `more` are further keywords of typer.Option, such as `metavar`, `min` and `max`.
    """
    return field(default=default, metadata={"flags": flags, "help": help, **more})
