"""One fault in a module's source, and whether tests see it."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
"""A test that takes longer with a mutant, such as one that never ends, has seen it."""
PRELOADED = ("torch", "torch._dynamo", "vlrl._torchvision", "torchvision", "transformers", "transformers.cache_utils",
             "transformers.modeling_utils", "transformers.generation.utils", "transformers.processing_utils",
             "accelerate", "peft", "pydantic", "pyarrow.parquet", "hypothesis", "PIL.Image", "psutil", "scipy.stats",
             "safetensors.torch", "tokenizers", "yaml", "typer")
"""What takes most of the time to start tests and is no part of vlrl: imported once, before the processes fork."""


OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", f"--rootdir={ROOT}",
           "-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis is imported before pytest can rewrite it


class Mutant(NamedTuple):
    """A small fault that somebody could make."""

    file: str
    """From the root of the repository."""
    text: str
    """Stands once in the file."""
    replacement: str
    tests: tuple[str, ...]
    """Files and node ids, one of which fails with the fault."""
    effect: str
    """What the fault would do to a user."""


# --- a fault in a source ----------------------------------------------------------------------------------------------


def mutated(file: Path, text: str, replacement: str, function: str = "") -> str:
    """The source of a file with the text replaced; ValueError when the text does not stand there once.

    With `function` (or Class.method) it is the text inside of that function, docstring apart.
    """
    source, tree = _parsed(file)
    lines = source.splitlines(keepends=True)
    first, begin, end, last = 0, len(lines), len(lines), len(lines)
    if function:
        node = _find(tree, function.split("."))
        first, last, docstring = node.lineno - 1, node.end_lineno or 0, node.body[0]
        begin, end = (docstring.lineno - 1, docstring.end_lineno) if ast.get_docstring(node) else (first, first)
    head, body = "".join(lines[first:begin]), "".join(lines[end:last])
    count = head.count(text) + body.count(text)
    if count != 1 or text == replacement:
        where = f"{file.stem}.{function}" if function else str(file)
        raise ValueError(f"{where} holds {text!r} {count} times, not once, or it is not changed")
    return "".join([*lines[:first], head.replace(text, replacement), *lines[begin:end],
                    body.replace(text, replacement), *lines[last:]])


@cache
def _parsed(file: Path) -> tuple[str, ast.Module]:
    source = file.read_text(encoding="utf-8")
    return source, ast.parse(source)


def _find(tree: ast.Module | ast.ClassDef, path: list[str]) -> ast.FunctionDef | ast.ClassDef:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == path[0]:
            if len(path) == 1:
                return node
            assert isinstance(node, ast.ClassDef)
            return _find(node, path[1:])
    raise ValueError(f"there is no {'.'.join(path)}")


class _Loader(SourceFileLoader):
    """Executes another source than the file's."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str):
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, with a fault in it."""

    def __init__(self, name: str, file: Path, source: str):
        self.name, self._loader = name, _Loader(name, str(file), source)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


# --- tests in a process of their own ----------------------------------------------------------------------------------


def forked(work: Callable[[], bool]) -> bool:
    """Whether `work` returns True in a child of this process; False when it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            code = int(not work())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Recorder:
    """A pytest plugin that notes the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"collection of {report.nodeid}"


class Result(NamedTuple):
    """What became of a mutant."""

    killed_by: str
    """Node id of the test that failed; "" when none did."""
    seconds: float
    error: str = ""
    """Why nothing is known: a test that is not there, a module that no test imports."""


def _run(tests: Sequence[str], mutant: Mutant | None, out: Connection) -> None:
    """Runs tests up to the first that fails, and sends its name and what is wrong with the tests themselves."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.setpgrp()
    recorder, name = _Recorder(), ""
    if mutant:
        name = ".".join(Path(mutant.file).with_suffix("").parts)
        source = mutated(ROOT / mutant.file, mutant.text, mutant.replacement)
        sys.meta_path.insert(0, _Finder(name, ROOT / mutant.file, source))
    code = pytest.main([*OPTIONS, *tests], plugins=[recorder])
    wrong = {4: "no such test", 5: "no test was run", 3: "pytest broke"}.get(int(code), "")
    if not wrong and not recorder.failed and name and name not in sys.modules:
        wrong = f"no test imports {name}"
    out.send((recorder.failed or ("?" if code in (1, 2) else ""), wrong))
    out.close()
    os._exit(0)


def results(work: Sequence[tuple[Sequence[str], Mutant | None]], jobs: int,
            limit_s: float = LIMIT_S) -> Iterator[tuple[int, Result]]:
    """The results of (tests, mutant or None) by their numbers, as they come; `jobs` processes at a time."""
    context = multiprocessing.get_context("fork")
    waiting = deque(enumerate(work))
    running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess, float]] = {}
    for name in PRELOADED:
        importlib.import_module(name)
    while waiting or running:
        while waiting and len(running) < jobs:
            number, (tests, mutant) = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(tests, mutant, sender))
            process.start()
            sender.close()
            running[receiver] = number, process, time.monotonic()
        for receiver in [*wait([*running], timeout=1.0), *_late(running, limit_s)]:
            assert isinstance(receiver, Connection)
            if receiver not in running:
                continue
            number, process, begun = running.pop(receiver)
            seconds = time.monotonic() - begun
            try:
                failed, wrong = receiver.recv() if receiver.poll() else ("(takes too long)", "")
            except EOFError:
                failed, wrong = "(ended the process)", ""
            _end(process)
            yield number, Result(failed, seconds, wrong)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kills what a process and its tests have left."""
    with suppress(OSError):
        os.killpg(process.pid or os.getpid(), signal.SIGKILL)
    process.join()


def _late(running: dict, limit_s: float) -> list[Connection]:
    return [receiver for receiver, (_, _, begun) in running.items() if time.monotonic() - begun > limit_s]
