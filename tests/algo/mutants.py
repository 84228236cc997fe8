"""Mistakes that the goldens must see: each is put into a copy of a module's source, and its tests have to fail.

    python -m tests.algo.mutants [MODULE ...]     tells which mutants live; exit code 1 when one does
    python -m tests.algo.mutants --write          also notes in killers.json which test saw each; it is the first to run

mutant_rows.py lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.algo.mutant_rows import MUTANTS, Row
from tests.mutants import running

ROOT = running.ROOT
TESTS = {"clip": ["terms"], "terms": ["terms", "turn_advantage"],
         "policy_terms": ["terms", "turn_advantage"], "objective_advantages": ["advantage", "outcome"],
         "turn_advantage": ["turn_advantage", "turn_levels"],
         "turns": ["turn_advantage", "turn_levels", "gae"],
         "inputs": ["outcome", "terms", "group_terms", "aggregation", "weights", "correction"],
         "grouped": ["outcome", "advantage"], "token_advantage": ["advantage"], "tree_advantage": ["advantage"]}
"""Whose tests look at a module that has none of its own name."""
METHODS = {"demonstrations": "methods.demonstrations.mixes", "guided": "methods.second_attempts.loss",
           "stored": "methods.replay.rules", "tree_advantage": "methods.tree.advantage", "gae": "methods.critic.gae",
           "policy_terms": "methods.objectives.terms", "objective_advantages": "methods.objectives.advantage",
           **{name: f"methods.objectives.{name}" for name in (
               "group_terms", "shaping", "weights", "entropy", "recompose", "token_advantage", "turn_advantage")}}
"""Modules that lie elsewhere than in vlrl/algo under that name."""
KILLERS = Path(__file__).with_name("killers.json")
"""By mutant the test that saw it. Where that one no longer does, the others of the module are tried."""


def mutated(module: str, function: str, old: str, new: str) -> str:
    """The source of a module with one mistake in it. Raises ValueError when the text is not in the function once."""
    return running.mutated(_file(module), old, new, function)


def line_of(row: Row) -> str:
    """A mutant as a line."""
    return f"{row[0]}.{row[1]}: {row[2]!r} -> {row[3]!r}"


def read_killers() -> dict[str, str]:
    """By mutant the test that saw it, from `tests/algo` on."""
    return json.loads(KILLERS.read_text(encoding="utf-8")) if KILLERS.exists() else {}


def _file(module: str) -> Path:
    return ROOT.joinpath(*_dotted(module).split(".")).with_suffix(".py")


def _dotted(module: str) -> str:
    return f"vlrl.{METHODS.get(module, f'algo.{module}')}"


def put(module: str, code: types.CodeType) -> None:
    """Gives the functions and classes of a loaded module the code of another source, wherever they are known."""
    loaded = importlib.import_module(_dotted(module))
    made = types.ModuleType(loaded.__name__)
    exec(code, vars(made))
    for name, new in vars(made).items():
        old = getattr(loaded, name, None)
        if getattr(new, "__module__", None) != loaded.__name__:
            continue
        if isinstance(new, types.FunctionType):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(old, part, getattr(new, part))
        elif isinstance(new, type):
            for part, value in vars(new).items():
                if part not in ("__dict__", "__weakref__"):
                    setattr(old, part, value)


class Trial:
    """A pytest plugin: collects once, then runs tests of a module again for each of its mutants.

    The first is the one that saw the mutant last time (`killers`), then all, those first that take the least time.
    """

    def __init__(self, modules: list[str], killers: Mapping[str, str]):
        self.modules, self.killers, self.alive = modules, killers, []
        self.killed_by: dict[str, str] = {}
        """By mutant the test that saw it."""
        self._seconds: dict[pytest.Item, float] = {}
        """Of the tests that passed without a mutant."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.disable()  # it would make each process copy the memory that it shares with this one
        for module in self.modules:
            files = {f"test_{name}" for name in TESTS.get(module, [module])}
            tests = {_name(item): item for item in session.items if item.path.stem in files}
            rows = [row for row in MUTANTS if row[0] == module]
            known = dict.fromkeys(tests[name] for row in rows if (name := self.killers.get(line_of(row))) in tests)
            if self._sound(known):
                for row in rows:
                    self._try(row, tests)
        return True

    def _try(self, row: Row, tests: Mapping[str, pytest.Item]) -> None:
        code = compile(mutated(*row), f"{row[0]}.py", "exec")
        known = tests.get(self.killers.get(line_of(row), ""))
        by = _killer([known], row[0], code) if known else None
        if by is None and self._sound(tests.values()):
            by = _killer(sorted(tests.values(), key=self._seconds.__getitem__), row[0], code)
        if by is None:
            self.alive.append(line_of(row))
        else:
            self.killed_by[line_of(row)] = by

    def _sound(self, items: Iterable[pytest.Item]) -> bool:
        """Whether tests pass without a mutant."""
        new = [item for item in items if item not in self._seconds]
        self._seconds |= {item: sum(report.duration for report in reports) for item, reports in _run(new)}
        failed = next((_name(item) for item in new if item not in self._seconds), None)
        if failed:
            self.alive.append(f"{failed} fails without a mutant")
        return failed is None


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/algo/")


def _run(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, list[pytest.TestReport]]]:
    """Yields each test with its reports, up to the first that fails, which is left out."""
    for item, after in zip(items, [*items[1:], None], strict=False):
        reports = runtestprotocol(item, log=False, nextitem=after)
        if any(report.failed for report in reports):
            return
        yield item, reports


def _killer(items: list[pytest.Item], module: str, code: types.CodeType) -> str | None:
    """The first of the tests that fails with that code of the module, in a process of its own; None when all pass."""
    reader, writer = os.pipe()

    def passes() -> bool:
        put(module, code)
        passed = len(list(_run(items)))
        os.write(writer, b"." * passed)
        return passed == len(items)

    died = not running.forked(passes)
    os.close(writer)
    with open(reader, "rb") as output:
        passed = len(output.read())
    return _name(items[passed]) if died else None


def main(words: list[str]) -> int:
    """Tells which mutants of the modules (default: of all) live."""
    every = list(dict.fromkeys(row[0] for row in MUTANTS))
    parser = argparse.ArgumentParser(prog="python -m tests.algo.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of vlrl.algo; all by default: {' '.join(every)}")
    parser.add_argument("--write", action="store_true", help=f"write to {KILLERS.name} which test saw each mutant")
    given = parser.parse_args(words)
    modules = given.modules or every
    trial = Trial(modules, read_killers())
    code, output = _pytest(trial, dict.fromkeys(name for module in modules for name in TESTS.get(module, [module])))
    if code:
        print(output)
    print("\n".join(trial.alive) or "every mutant died")
    others = sum(trial.killers.get(mutant) != test for mutant, test in trial.killed_by.items())
    if others and not given.write:
        print(f"{others} were seen by another test than {KILLERS.name} says, which takes long: --write notes it")
    if given.write:
        known = read_killers() | trial.killed_by
        ordered = {line: known[line] for line in map(line_of, MUTANTS) if line in known}
        KILLERS.write_text(json.dumps(ordered, indent=0) + "\n", encoding="utf-8")
    return 1 if code or trial.alive else 0


def _pytest(trial: Trial, names: Iterable[str]) -> tuple[int, str]:
    """Runs the trial on tests of these names; returns pytest's exit code and output."""
    torch.set_num_threads(1)  # a forked process waits for ever for the threads of the one that it is forked from
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=(
        hypothesis.Phase.explicit, hypothesis.Phase.generate))  # that a test fails is enough; no simpler case is asked
    hypothesis.settings.load_profile("mutants")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=native", "--assert=plain", "-W",
                            "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={ROOT}",
                            *(f"{ROOT}/tests/algo/test_{name}.py" for name in names)], plugins=[trial])
    return code, output.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
