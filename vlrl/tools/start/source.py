"""Names functions and classes so that another process can load them: `path/file.py:name` or `module:name`.

A function that is defined in a notebook, a script or another function has no such name. Its source is written to a
file, together with what it uses: imports, other functions and classes, constants; the user's own modules are copied."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import linecache
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlrl.config.registry import FILE_MODULE, is_own
from vlrl.errors import ConfigError
from vlrl.store.files import write_text

_UNKNOWN = object()
_LARGEST = 1 << 20
"""Most characters of a constant that is written into a file."""


def named(function: Any, argument: str, cache: Path) -> dict[str, Any]:
    """Returns {"name": location, **options} for a function or class, or for a text that is such a location. The
    arguments of a functools.partial become options.

    A source that has to be written goes to a file below `cache`, named by its content. `argument` is the argument of
    the caller, for messages. Raises ConfigError for a function without source, such as a lambda, and for one that uses
    a value that cannot be written as source."""
    if isinstance(function, str):
        return {"name": function}
    if isinstance(function, functools.partial):
        if function.args:
            raise ConfigError(f"{argument}: this functools.partial binds positional arguments: bind them by name")
        return {**named(function.func, argument, cache), **function.keywords}
    if isinstance(inspect.unwrap(function), types.FunctionType):
        function = inspect.unwrap(function)  # its source has the decorators
    if not isinstance(function, (types.FunctionType, type)):
        raise ConfigError(f"{argument}={function!r}: give a function that is defined by `def`, or its name as "
                          "path/file.py:function. An object that can be called, or a method, cannot be stored with the "
                          "run")
    if function.__name__ == "<lambda>":
        raise ConfigError(f"{argument}: a lambda has no name and cannot be stored with the run: define the function by "
                          "`def`")
    return {"name": _importable(function) or _written(function, argument, cache)}


def _importable(function: Any) -> str:
    """The location of a function or class that another process can import; "" if there is none."""
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if "<" in function.__qualname__ or module is None or module.__name__ == "__main__" or not path:
        return ""
    if module.__name__.startswith(FILE_MODULE) or not module.__package__:  # a file, not a module of a package
        return f"{os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path}:{function.__qualname__}"
    return f"{module.__name__}:{function.__qualname__}"


def _written(function: Any, argument: str, cache: Path) -> str:
    writer = _Source(argument)
    writer.add(function.__name__, function)
    text = "\n\n".join(filter(None, ["\n".join(dict.fromkeys(writer.imports)), *writer.definitions.values()])) + "\n"
    digest = hashlib.sha256("\0".join([text, *writer.modules.values()]).encode()).hexdigest()[:12]
    for name, content in {**writer.modules, function.__name__: text}.items():
        write_text(cache / "source" / digest / f"{name}.py", content, sync=False)
    return f"{cache / 'source' / digest / function.__name__}.py:{function.__name__}"


class _Source:
    """Collects the source of a function and of everything that it uses. `definitions` maps each name to its source, in
    the order in which the module must define them; `modules` maps the user's own modules to their text."""

    def __init__(self, argument: str):
        self.argument = argument
        self.imports: list[str] = []
        self.definitions: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Adds the source of `value`, which the code calls `name`."""
        if name in self._values:
            if self._values[name] is not value:
                raise ConfigError(f"{self.argument}: two different values are called {name!r} in the functions that "
                                  "the reward function uses: rename one of them, or write the functions into a file")
            return
        self._values[name] = value
        if isinstance(inspect.unwrap(value), types.FunctionType):
            value = inspect.unwrap(value)
        self._add_module(value if isinstance(value, types.ModuleType) else sys.modules.get(
            getattr(value, "__module__", None) or ""))
        if isinstance(value, types.ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, (types.FunctionType, type)) and not _is_importable(value):
            self._add_definition(name, value)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) or _is_importable(value):
            self.imports.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif isinstance(value, re.Pattern):
            self.imports.append("import re")
            self.definitions[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        else:
            self.definitions[name] = f"{name} = {self._constant(name, value)}"

    def _add_module(self, module: types.ModuleType | None) -> None:
        """Keeps the text of a module that is a file of the user's, and of those that it imports."""
        path = getattr(module, "__file__", None)
        if module is None or module.__name__ in ("__main__", *self.modules) or module.__package__ or not path \
                or not is_own(path) or not path.endswith(".py") or module.__name__.startswith(FILE_MODULE):
            return
        self.modules[module.__name__] = Path(path).read_text(encoding="utf-8")
        for value in vars(module).values():
            self._add_module(value if isinstance(value, types.ModuleType) else sys.modules.get(
                getattr(value, "__module__", None) or ""))

    def _add_definition(self, name: str, value: Any) -> None:
        try:
            source = _source_of(value)
        except (OSError, TypeError):
            raise ConfigError(f"{self.argument}: the source of {value.__qualname__} is not known, so the run could not "
                              "be evaluated in another process. Write it into a file, and give "
                              f"path/file.py:{value.__name__}") from None
        for used, what in _used_by(value, source):
            if what is _UNKNOWN:
                raise ConfigError(f"{self.argument}: the definition of {value.__qualname__} uses {used!r} of the "
                                  "function around it in a decorator, default or annotation: define it at the top "
                                  "level")
            if what is not value:
                self.add(used, what)
        self.definitions[name] = source.rstrip() + ("" if value.__name__ == name else f"\n\n{name} = {value.__name__}")

    def _constant(self, name: str, value: Any) -> str:
        text = repr(value)
        try:
            same = len(text) <= _LARGEST and ast.literal_eval(text) == value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            same = False
        if not same:
            raise ConfigError(f"{self.argument}: the reward function uses {name!r}, a {type(value).__name__}, which "
                              "cannot be stored with the run: create it inside the function, or write the function "
                              "into a file that creates it, and give path/file.py:function")
        return text


def _source_of(value: Any) -> str:
    """The source of a function or class. A class of a notebook belongs to no file: its source is found in the cell of
    one of its methods. Raises OSError or TypeError if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        methods = [f for f in vars(value).values() if isinstance(f, types.FunctionType)] if isinstance(
            value, type) else []
        for code in (method.__code__ for method in methods):
            cell = linecache.getlines(code.co_filename)
            for node in ast.walk(ast.parse("".join(cell))):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__ \
                        and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                    first = min(n.lineno for n in (node, *node.decorator_list))
                    return textwrap.dedent("".join(cell[first - 1:node.end_lineno]))
        raise


def _is_importable(value: Any) -> bool:
    """Whether `from module import name` gives this value in another process."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    return bool(module and module.__name__ != "__main__" and not module.__name__.startswith(FILE_MODULE)
                and name.isidentifier() and getattr(module, name, None) is value)


def _used_by(value: Any, source: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the globals, and of the variables of enclosing functions, that a function or the methods
    of a class use."""
    functions = [value] if isinstance(value, types.FunctionType) else [
        f for one in vars(value).values() if isinstance(f := inspect.unwrap(getattr(one, "__func__", getattr(
            one, "fget", one))) if callable(getattr(one, "__func__", getattr(one, "fget", one))) else None,
            types.FunctionType)]
    scope: dict[str, Any] = dict(vars(sys.modules[value.__module__]))
    outside = set(_names_outside(source)) - _names_bound(source)
    names = set(outside)
    for function in functions:
        function = inspect.unwrap(function)
        scope |= function.__globals__ | _default_values(function) | inspect.getclosurevars(function).nonlocals
        names |= {*_globals_of(function.__code__), *function.__code__.co_freevars} - {"__class__"}
    for name in sorted(names):
        if name in scope and not (hasattr(builtins, name) and scope[name] is getattr(builtins, name)):
            yield name, scope[name]
        elif name in outside and not hasattr(builtins, name):
            yield name, _UNKNOWN


def _default_values(function: types.FunctionType) -> dict[str, Any]:
    """{name: value} of the defaults of a function that its source writes as a name. The name may be a variable of the
    enclosing function, of which only the value is left."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    nodes = [*tree.args.defaults, *(node for node in tree.args.kw_defaults if node)]
    return {node.id: value for node, value in zip(nodes, values, strict=False) if isinstance(node, ast.Name)}


def _names_bound(source: str) -> set[str]:
    """The names that a class assigns, which its later statements may use."""
    return {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield one.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _names_outside(source: str) -> Iterator[str]:
    """Yields the names that a definition uses outside of its function bodies: in decorators, annotations, defaults,
    base classes, and statements of a class."""
    tree = ast.parse(source).body[0]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outside: list[Any] = [node.args, node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            outside = [*node.bases, *node.keywords, *node.decorator_list,
                       *(s for s in node.body if not isinstance(s, (ast.FunctionDef, ast.ClassDef)))]
        else:
            continue
        yield from (n.id for part in outside if part for n in ast.walk(part) if isinstance(n, ast.Name))
