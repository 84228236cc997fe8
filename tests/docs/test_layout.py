"""Where modules lie and what they import: the parts that import-linter's contracts in pyproject.toml do not say."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import grimp
import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = {"__init__", "__main__", "_torchcodec", "_torchvision", "errors", "media", "types"}
BRANCHES = ("methods", "services", "environments", "data.formats", "data.media_edits", "data.sources", "data.video",
            "engine.vllm", "checks", "testing", "tools", "cli")
"""Of vlrl, what the trunk names in tables of texts alone; modules whose names begin so."""
UNDER_VLRL = {"tasks": {"vlrl/tools/tiny/cold_start.py", "vlrl/tools/tiny/episode_start.py"},
              "app": {"vlrl/cli/inspecting.py", "vlrl/cli/looking.py", "vlrl/cli/publishing.py"}}
"""Files that import vlrl.tasks or vlrl.app by these names, which import-linter does not take for tasks and app."""


@pytest.fixture(scope="module")
def graph():
    """Every import between modules, those inside functions and for types included."""
    return grimp.build_graph("vlrl", "tasks", "app", cache_dir=None)


def _groups(edges):
    """Sets of names that reach each other."""
    names = sorted({name for edge in edges for name in edge})
    place = {name: i for i, name in enumerate(names)}
    rows, columns = ([place[edge[side]] for edge in edges] for side in (0, 1))
    count, labels = connected_components(coo_array((np.ones(len(edges)), (rows, columns)), (len(names),) * 2),
                                         connection="strong")
    groups = [[name for name, label in zip(names, labels, strict=True) if label == i] for i in range(count)]
    return [group for group in groups if len(group) > 1]


def _package(module):
    return module if module.split(".")[0] != "vlrl" else ".".join(module.split(".")[:2])


def test_the_root_of_the_package_holds_seven_modules():
    assert {path.stem for path in (ROOT / "vlrl").glob("*.py")} == AT_THE_ROOT


def test_no_modules_import_each_other(graph):
    edges = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    assert len(edges) > 1000 and _groups(edges) == []


def test_no_packages_import_each_other(graph):
    edges = {(_package(a), _package(b)) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    assert _groups([edge for edge in edges if edge[0] != edge[1]]) == []


def test_the_trunk_imports_no_branch(graph):
    """Imports inside functions and for types are counted too."""
    branches = tuple(f"vlrl.{name}" for name in BRANCHES)
    trunk = [m for m in graph.modules if m.startswith("vlrl.") and not m.startswith((*branches, "vlrl.__main__"))]
    assert len(trunk) > 200
    assert [(m, other) for m in trunk for other in graph.find_modules_directly_imported_by(m)
            if other.startswith((*branches, "app", "tasks"))] == []


def test_only_the_registry_imports_by_name():
    """A table of texts (config.registry.Table) is the one way from the trunk to a branch."""
    found = set()
    for path in (ROOT / "vlrl").rglob("*.py"):
        place = path.relative_to(ROOT / "vlrl").with_suffix("").as_posix().replace("/", ".")
        if not place.startswith(BRANCHES):
            found |= {place for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                      if getattr(node, "attr", getattr(node, "id", "")) in ("import_module", "__import__")}
    assert found == {"config.registry", "__init__"}  # the names of `import vlrl` are imported when they are asked for


def test_tasks_and_app_are_imported_where_they_may_be():
    """An import of vlrl.tasks is one of tasks, which only the layers above it may make."""
    found = {"tasks": set(), "app": set()}
    for path in (ROOT / "vlrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [])
            for name in names:
                top, _, rest = name.partition(".")
                folder = rest.partition(".")[0]
                if top == "vlrl" and folder in found:
                    found[folder].add(path.relative_to(ROOT).as_posix())
    assert found == UNDER_VLRL


@pytest.mark.parametrize("name", ["vlrl.vlrl", "vlrl.vlrl.types", "vlrl.train", "vlrl.setup", "vlrl.tests"])
def test_nothing_else_of_a_checkout_is_part_of_the_package(name):
    with pytest.raises(ImportError):
        importlib.import_module(name)


@pytest.mark.parametrize("name", ["tasks.digits", "tasks", "app.html", "app"])
def test_tasks_and_app_are_part_of_the_package(name):
    assert importlib.import_module(f"vlrl.{name}").__name__ == f"vlrl.{name}"


def test_old_names_of_what_users_import():
    code = ("from vlrl.config import load, validate; from vlrl.data import Drawn, read_rows, write_rows; "
            "from vlrl.rewards.boxes import iou; from vlrl.rewards.text import parse_answer; "
            "from vlrl.store import RunFolder, SCHEMA; from vlrl.task import Task, load as task; "
            "from vlrl.types import Media, Sample; import sys; sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("folder", sorted({path.parent for path in (ROOT / "benchmarks").rglob("*.py")}),
                         ids=lambda folder: folder.name)
def test_no_two_scripts_of_a_benchmark_import_each_other(folder):
    edges = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            edges |= {(path.stem, name) for name in names}
    assert not edges or _groups(sorted(edges)) == []
