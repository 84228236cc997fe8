"""Mutation testing: cosmic-ray changes one operator, number, condition or loop at a time, and a test has to fail.

    make mutants ARGS="--area packing --count 8 --seed 1"
    python -m tests.mutants --out before.json           draws mutants, says which test killed each
    python -m tests.mutants --again before.json         the same mutants, found by their lines, in this source

Mutants are put into a copy of the working tree, never into the tree itself. Changed annotations and docstrings are no
mutants. A mutant that survives is a missing assertion, or equivalent to the source: a person has to look. `--slow` lets
the slow tests run after the fast ones."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "objective": ("vlrl/algo/*.py vlrl/methods/objectives/*terms.py vlrl/methods/objectives/[esw]*.py", "tests/algo"),
    "packing": ("vlrl/models/packing.py", "tests/models/test_packing.py tests/models/test_episodes.py "
                "tests/models/test_prefix_tree.py tests/engine/test_hf.py"),
    "attention": ("vlrl/models/attention.py", "tests/models/test_attention.py tests/models/test_packing.py "
                  "tests/engine/test_hf.py"),
    "resume": ("vlrl/store/checkpoint.py vlrl/store/trainer_state.py vlrl/training/resume.py "
               "vlrl/training/*checkpoint*.py", "tests/store tests/training/test_checkpointing.py "
               "tests/training/test_resume.py tests/training/test_emergency_checkpoint.py tests/training/test_rest.py"),
    "credit": ("vlrl/training/advantages.py vlrl/methods/objectives/*advantage.py vlrl/methods/tree/advantage.py "
               "vlrl/methods/critic/gae.py", "tests/algo/test_advantage.py tests/algo/test_outcome.py "
               "tests/algo/test_turn_advantage.py tests/algo/test_gae.py "
               "tests/algo/test_credit.py tests/algo/test_shaping.py tests/algo/test_presets.py"),
}
"""Source files, and the folders and files of tests, by area."""
OBVIOUS = re.compile(r"_(Bit\w+|[LR]Shift|Pow|FloorDiv|Mod|Invert|Is|IsNot)$")
"""Replacements that nobody writes by mistake: most of them end in a TypeError, which any test sees."""
LIMIT_S = 900
"""Seconds for the tests of one mutant, as some loop for ever."""
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # torch reads it when it is first imported
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["torch", "transformers", "peft", "pytest"])
FAST, SLOW = "not slow and not vllm and not browser and not gpu", "slow and not vllm and not browser and not gpu"


def _code(source: str) -> str:
    """The syntax tree without annotations, which running code does not show."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
    return ast.dump(tree)


def draw(area: str, count: int, seed: int) -> list[dict]:
    """Random mutants of an area's files: area, file, lines before and after, first line's number."""
    operators = {name: get_operator(name)() for name in operator_names()
                 if not get_operator(name).arguments() and not OBVIOUS.search(name)}
    files = sorted({path for pattern in AREAS[area][0].split() for path in ROOT.glob(pattern)})
    sites = [(path, name, i) for path in files for nodes in [[*ast_nodes(get_ast(path.read_text("utf-8")))]]
             for name, operator in operators.items()
             for i in range(sum(len([*operator.mutation_positions(node)]) for node in nodes))]
    random.Random(f"{area} {seed}").shuffle(sites)
    drawn = []
    for path, name, i in sites:
        if len(drawn) == count:
            break
        source = path.read_text("utf-8")
        mutated = mutate_code(source, operators[name], i)
        try:
            if mutated is None or _code(mutated) == _code(source):
                continue
        except SyntaxError:
            continue
        a, b = source.splitlines(), mutated.splitlines()
        changes = [c for c in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if c[0] != "equal"]
        first, last = changes[0], changes[-1]
        drawn.append({"area": area, "file": str(path.relative_to(ROOT)), "line": first[1] + 1, "operator": name,
                      "before": "\n".join(a[first[1]:last[2]]), "after": "\n".join(b[first[3]:last[4]])})
    return drawn


def put(tree: Path, mutant: dict) -> Path | None:
    """Writes a mutant into a tree and returns its file; None where its lines are not there or not unique."""
    lines = mutant["before"].splitlines()
    named = tree / mutant["file"]
    for path in [named] if named.exists() else sorted((tree / "vlrl").rglob("*.py")):
        source = path.read_text("utf-8").splitlines()
        places = [i for i in range(len(source)) if source[i:i + len(lines)] == lines]
        if places:
            i = min(places, key=lambda k: abs(k + 1 - mutant["line"]))
            source[i:i + len(lines)] = mutant["after"].splitlines()
            path.write_text("\n".join(source) + "\n", "utf-8")
            return path
    return None


def _pytest(tree: Path, words: list[str], output: Path) -> None:
    """Body of a process forked from one that has imported torch: pytest in another tree."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "vlrl")]:
        del sys.modules[name]
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path = [str(tree), *(path for path in sys.path if Path(path) != ROOT)]
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest
    sys.exit(pytest.main(words))


def killer(tree: Path, mutant: dict, slow: bool) -> tuple[str, str]:
    """A mutant's result (killed, survived, gone, error) and the first test that failed."""
    path = put(tree, mutant)
    if path is None:
        return "gone", ""
    words = [w for w in path.stem.split("_") if len(w) > 3]
    files = [str(f.relative_to(tree)) for folder in AREAS[mutant["area"]][1].split()
             for f in ((tree / folder).glob("test_*.py") if (tree / folder).is_dir() else tree.glob(folder))]
    files.sort(key=lambda f: (-sum(w in f for w in words), f))
    output = tree / "output.txt"
    try:
        for marks in (FAST, SLOW)[:1 + slow]:
            command = [*"-q -x -n0 -p no:cacheprovider -W".split(), "ignore:Module already imported", "-m", marks]
            process = FORKING.Process(target=_pytest, args=(tree, [*command, *files], output))
            process.start()
            process.join(LIMIT_S)
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
                return "killed", "timeout"
            text = output.read_text(errors="replace")
            if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M):
                return "killed", failed[1]
            if process.exitcode not in (0, 5):
                return "error", text[-300:]
        return "survived", ""
    finally:
        shutil.copy(ROOT / path.relative_to(tree), path)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=[*AREAS], help="all by default; may be given several times")
    parser.add_argument("--count", type=int, default=8, help="mutants per area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="run slow tests where the fast ones pass")
    parser.add_argument("--again", type=Path, help="mutants of an earlier --out instead of random ones")
    parser.add_argument("--out", type=Path, help="JSON file for mutants and results")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    given = parser.parse_args(words)
    areas = given.area or [*AREAS]
    mutants = (json.loads(given.again.read_text()) if given.again else
               [m for area in areas for m in draw(area, given.count, given.seed)])
    trees: SimpleQueue[Path] = SimpleQueue()

    def run(mutant: dict) -> None:
        tree, begun = trees.get(), time.monotonic()
        mutant["result"], mutant["by"] = killer(tree, mutant, given.slow)
        mutant["seconds"] = round(time.monotonic() - begun, 1)
        trees.put(tree)
        print("{area:<9} {result:<8} {seconds:6.1f} s  {file}:{line} {by}\n  - {before}\n  + {after}".format(**mutant),
              flush=True)
        if given.out:
            given.out.write_text(json.dumps(mutants, indent=1))

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        for i in range(given.jobs):
            trees.put(Path(shutil.copytree(ROOT, Path(folder, str(i)), ignore=shutil.ignore_patterns(
                ".git", ".venv*", "runs", "site", "__pycache__", "*.egg-info"))))
        [*pool.map(run, [m for m in mutants if m["area"] in areas])]
    results = [m.get("result") for m in mutants]
    print(", ".join(f"{results.count(r)} {r}" for r in ("killed", "survived", "gone", "error")))
    return int("survived" in results or "error" in results)


if __name__ == "__main__":
    sys.exit(main())
