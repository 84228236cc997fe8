"""Looks up functions and classes by name, `module:name` or `path/file.py:name`, and handles errors of user code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from vlrl.config.paths import searched_in, similar_file
from vlrl.errors import ConfigError, VlrlError, did_you_mean

_NOT_OWN = ("<", str(Path(__file__).parents[1]) + os.sep, *{sysconfig.get_path(k) + os.sep
                                                        for k in ("stdlib", "purelib", "platlib")})

FILE_MODULE = "vlrl_user_file_"
"""Prefix of the names of modules that are loaded from files."""

FOLDERS: set[Path] = set()
"""Folders that were added to sys.path because a file was loaded from them."""


USED: dict[str, Path] = {}
"""Files of user code that this process has loaded, by the name under which settings refer to them: a path, or a module.
A run keeps copies of them (training/sources.py)."""

COPIES: dict[str, Path] = {}
"""Copies of files of user code, by the same names. A copy is loaded if the file or module does not exist any more."""


class MissingFile(ConfigError):
    """Raised if a file that should contain user code does not exist."""


class Table(MutableMapping[str, Any]):
    """A mapping from names to functions or classes. An entry may be a string "module:name", which is imported when the
    entry is looked up. So a run imports only what it uses, and a package can refer to modules of higher layers
    without importing them."""

    def __init__(self, entries: Mapping[str, Any]):
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        name, _, attribute = entry.partition(":")
        return getattr(module(name), attribute)

    def __setitem__(self, name: str, entry: Any) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, more: Mapping[str, Any]) -> Table:
        return Table({**self._entries, **(more._entries if isinstance(more, Table) else more)})


def module(name: str) -> ModuleType:
    """Imports a module by name. All dynamic imports by name in vlrl go through this function."""
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] or name not in COPIES:
            raise
        return file_module(COPIES[name])
    if not name.startswith("vlrl.") and (file := getattr(found, "__file__", None)) and is_own(file):
        USED[name] = Path(file)
    return found


def resolve(setting: str, name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function or class `name`: an entry of `table`, or user code (module:name or path/file.py:name). If
    there is none, raises ConfigError naming the setting `setting`."""
    if name in table:
        return table[name]
    place, colon, attribute = name.partition(":")
    if not colon:
        from vlrl.config.value_hints import preset_hint
        if place.endswith(".py"):
            raise ConfigError(f"{setting}={name!r} names a file: add the name of a function in it, as in "
                              f"{setting}={place}:{_first_function(place)}")
        raise ConfigError(f"{setting}={name!r} is not known.{preset_hint(setting, name) or did_you_mean(name, table)} "
                          f"Known: {', '.join(table)}; your own: path/file.py:name or module:name.")
    try:
        own = file_module(Path(place)) if place.endswith(".py") else module(place)
    except MissingFile as error:
        raise ConfigError(f"{setting}={name!r}: {error}") from None
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        what = failure(error)
        if what.startswith("ModuleNotFoundError"):  # the module itself, not one that it imports
            what += ". A module must be importable; for a file write path/file.py:name."
        raise ConfigError(f"{setting}={name!r}: {what}") from None
    if not hasattr(own, attribute):
        raise ConfigError(f"{setting}={name!r}: {place} has no attribute {attribute!r}."
                          f"{did_you_mean(attribute, vars(own))}")
    function = getattr(own, attribute)
    if not callable(function):
        raise ConfigError(f"{setting}={name!r} is of type {type(function).__name__}, not a function or class. "
                          "Name a function or class")
    return function


def _first_function(file: str) -> str:
    """The name of the first public function or class in a Python file, which is not executed; "name" if there is
    none."""
    try:
        names = re.findall(r"^(?:async def|def|class) ([a-zA-Z]\w*)", Path(file).read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return "name"
    return next(iter(names), "name")


def file_module(path: Path) -> ModuleType:
    """Returns the module of a Python file, which is executed once per process. Raises MissingFile, or any error that
    the file raises. The file can import modules in its folder. This folder is appended to sys.path, so that its
    modules do not shadow other modules."""
    given = str(path)
    if not os.path.isfile(path):
        if given not in COPIES:
            raise MissingFile(f"the file {given!r} does not exist{searched_in(given)}{similar_file(path)}")
        path = COPIES[given]
    path = path.resolve()
    USED.setdefault(given, path)
    # named by its path, so that files of the same name, or named like a library, do not collide
    name = f"{FILE_MODULE}{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        FOLDERS.add(path.parent)
    loader = SourceFileLoader(name, str(path))  # named, so that a link to a file of another name works
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        loader.exec_module(made)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return made


def failure(error: BaseException) -> str:
    """Formats an error as text, with its location in user code: `path/file.py:3: SyntaxError: invalid syntax`. The
    location is the last stack frame outside of vlrl and installed packages; it is omitted if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    return f"{place(error)}{type(error).__name__}: {error}"[:500]


def place(error: BaseException) -> str:
    """The location of an error in user code, as `path/file.py:3: `; "" for an error outside of user code. The location
    is the last stack frame outside of vlrl and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{f.filename}:{f.lineno}: " for f in frames if is_own(f.filename)]
    return own[-1] if own else ""


def is_own(filename: str) -> bool:
    """Whether a file is user code, not part of vlrl or of an installed package."""
    return not filename.startswith(_NOT_OWN) and not {"site-packages", "dist-packages"} & {*Path(filename).parts}


@contextlib.contextmanager
def prints_aside() -> Iterator[None]:
    """Context manager or decorator: user code prints to standard error, because standard output is for results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
