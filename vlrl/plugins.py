"""Anyone's own code: variants by name or `module:function`, where it failed, and where its prints go."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.errors import ConfigError, VlrlError, did_you_mean

_NOT_OWN = ("<", str(Path(__file__).parent) + os.sep, *{sysconfig.get_path(k) + os.sep
                                                        for k in ("stdlib", "purelib", "platlib")})


def resolve(setting: str, name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """The function or class that `name` stands for. Raises ConfigError naming `setting` when there is none."""
    if name in table:
        return table[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}={name!r} is not known.{did_you_mean(name, table)} "
                          f"Known: {', '.join(table)}; your own: module:name.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # the module is anyone's code
        raise ConfigError(f"{setting}={name!r}: {failure(error)}") from None
    if not callable(found):
        raise ConfigError(f"{setting}={name!r} is of type {type(found).__name__}, not a function or class")
    return found


def failure(error: BaseException) -> str:
    """What went wrong and where in the user's own code: `path/file.py:3: SyntaxError: invalid syntax`.

    The place is the last one outside the library and the installed packages; without any it is left out.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    return f"{place(error)}{type(error).__name__}: {error}"[:500]


def place(error: BaseException) -> str:
    """`path/file.py:3: `, the last place outside the library and the installed packages; "" without any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{f.filename}:{f.lineno}: " for f in frames if _is_own(f.filename)]
    return own[-1] if own else ""


def _is_own(filename: str) -> bool:
    """Whether code is the user's: neither vlrl's nor of a package installed anywhere, in another environment too."""
    return not filename.startswith(_NOT_OWN) and not {"site-packages", "dist-packages"} & {*Path(filename).parts}


@contextlib.contextmanager
def prints_aside() -> Iterator[None]:
    """What own code prints goes to standard error meanwhile: standard output is for results. Also a decorator."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
