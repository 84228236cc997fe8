"""Where modules lie and what they import: the parts that import-linter's contracts in pyproject.toml do not say."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vlrl.config.sections import PAIRS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = {"__init__", "__main__", "_torchcodec", "_torchvision", "errors", "media", "progress", "types"}
BRANCHES = ("methods", "services", "environments", "checks", "testing", "tools", "cli", "curriculum.shares",
            "data.formats", "data.media_edits", "data.row_fields", "data.sources", "data.video", "engine.copied_engine",
            "engine.vllm", "models.adapters", "models.attention_kernels", "models.balance", "models.media_forms",
            "models.sharding", "models.tool_prompts", "models.vision_cache", "monitoring.notebook",
            "monitoring.tracked_groups", "monitoring.webhook", "rewards._math_worker", "rewards.answers",
            "rewards.chart", "rewards.closed_loop", "rewards.codes", "rewards.confidence", "rewards.constraints",
            "rewards.contrast", "rewards.detection", "rewards.driving", "rewards.ensembles", "rewards.groups",
            "rewards.likelihood", "rewards.literals", "rewards.math", "rewards.points", "rewards.process",
            "rewards.regions", "rewards.spans", "rewards.stem", "rewards.steps", "rewards.tracks", "task.mixture",
            "task.part", "task.recipes")
"""Of vlrl, what the trunk names in tables of texts alone, and what tasks and services alone use; modules whose names
begin so."""
UNDER_VLRL = {"tasks": {"vlrl/tools/tiny/cold_start.py", "vlrl/tools/tiny/episode_start.py"},
              "app": {"vlrl/cli/inspector.py", "vlrl/cli/status.py", "vlrl/cli/data_publish.py"}}
"""Files that import vlrl.tasks or vlrl.app by these names, which import-linter does not take for tasks and app."""
PLAIN = set("""
    adaptive add angle asynchronous bonus branch check cosine curricula demonstrations difficulty dump forget gaussian
    hierarchical kimi lifecycle multiply nodes objectives overlong pass_at_k preferences prioritised recap replay rest
    retrospective right rose rover sec siren source staged stored success sws temperature tempo thor tree values
    weakness
    """.split())
"""Names of methods and of their functions that are words of the field too, or short ones."""
NAMING = ("config.sections", "algo.tables")
"""Modules that are there to name methods."""
MENTIONED = {
    ("config.other_names", "algo.critic"): "the table of what settings are called elsewhere",
    ("config.other_names", "critic"): "such a name",
    ("config.preset_header", "critic"): "a cost that a preset has",
    ("config.presets", "rorecomp"): "the table of presets that have another name now",
    ("config.presets", "length_bonus"): "the same table",
}
"""Module, and the name of a method that it mentions nevertheless -> why."""


@pytest.fixture(scope="module")
def graph():
    """Every import between modules, those inside functions and for types included."""
    return grimp.build_graph("vlrl", "tasks", "app", cache_dir=None)


def _groups(edges):
    names = sorted({name for edge in edges for name in edge})
    place = {name: i for i, name in enumerate(names)}
    rows, columns = ([place[edge[side]] for edge in edges] for side in (0, 1))
    count, labels = connected_components(coo_array((np.ones(len(edges)), (rows, columns)), (len(names),) * 2),
                                         connection="strong")
    groups = [[name for name, label in zip(names, labels, strict=True) if label == i] for i in range(count)]
    return [group for group in groups if len(group) > 1]


def _package(module):
    return module if module.split(".")[0] != "vlrl" else ".".join(module.split(".")[:2])


def test_no_modules_packages_or_scripts_import_each_other(graph):
    edges = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    assert len(edges) > 1000 and _groups(edges) == []
    assert _groups([(a, b) for a, b in {(_package(a), _package(b)) for a, b in edges} if a != b]) == []
    for folder in {path.parent for path in (ROOT / "benchmarks").rglob("*.py")}:
        edges = {(path.stem, name) for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                 for name in _imported(node)}
        assert not edges or _groups(sorted(edges)) == [], folder


def test_the_trunk_imports_no_branch_and_contracts_name_them(graph):
    """Imports inside functions and for types are counted too."""
    branches = tuple(f"vlrl.{name}" for name in BRANCHES)
    trunk = [m for m in graph.modules if m.startswith("vlrl.") and not m.startswith((*branches, "vlrl.__main__"))]
    assert len(trunk) > 150
    assert [(m, other) for m in trunk for other in graph.find_modules_directly_imported_by(m)
            if other.startswith((*branches, "app", "tasks"))] == []
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = next(one["forbidden_modules"] for one in contracts if one["id"] == "within")
    assert sorted(named) == sorted(f"vlrl.{name}" for name in BRANCHES if "." in name)
    assert {path.stem for path in (ROOT / "vlrl").glob("*.py")} == AT_THE_ROOT


def _trunk():
    """Yields module and syntax tree of each file of the trunk."""
    for path in sorted((ROOT / "vlrl").rglob("*.py")):
        module = path.relative_to(ROOT / "vlrl").with_suffix("").as_posix().replace("/", ".")
        if not module.startswith((*BRANCHES, "__main__")):
            yield module, ast.parse(path.read_text(encoding="utf-8"))


def _tables(tree):
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Table")


def _names_of_methods():
    """Sections, their last words, folders, and what the tables have in them."""
    names = {*SECTIONS, *(section.rpartition(".")[2] for section in SECTIONS), PAIRS,
             *(path.parent.name for path in (ROOT / "vlrl" / "methods").glob("*/__init__.py"))}
    for _, tree in _trunk():
        for entries in (table.args[0] for table in _tables(tree) if table.args and isinstance(table.args[0], ast.Dict)):
            names |= {ast.literal_eval(key) for key, where in zip(entries.keys, entries.values, strict=True)
                      if isinstance(key, ast.Constant) and ast.unparse(where).startswith("'vlrl.methods.")}
            of_modules = (map(ast.literal_eval, one.args) for one in entries.values if isinstance(one, ast.Call))
            names |= {name.partition("=")[0] for module, listed in of_modules if module.startswith("vlrl.methods.")
                      for name in listed.split()}  # **_of("vlrl.methods...", "name other=Class")
    return names


def _said(tree):
    """Yields texts, but those of documentation and tables, and names in a module, as `snake_case`."""
    aside = {id(part) for whole in ast.walk(tree) if _is_aside(whole) for part in ast.walk(whole)}
    for node in ast.walk(tree):
        if id(node) not in aside:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.Attribute):
                yield ast.unparse(node)
            yield from (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("_", " ")
                        for kind in ("id", "attr", "arg", "name", "module")
                        if isinstance(name := getattr(node, kind, None), str))


def _is_aside(node):
    """Docstrings, descriptions of settings, tables of texts, and the field that a section is."""
    return ((isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.keyword) and node.arg == "description")
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == "Table")
            or (isinstance(node, ast.AnnAssign) and "section(" in ast.unparse(node.annotation)))


def test_the_trunk_names_no_method_and_only_the_registry_imports_by_name():
    """Neither in names nor in texts: what a method needs of it enters by the hooks of algo/method.py."""
    names = _names_of_methods()
    assert len(names) > 90 and names >= PLAIN
    forms = (re.escape(name.removesuffix("s")).replace("_", "[ _]") + "s?" for name in names - PLAIN)
    mention = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(forms, key=len, reverse=True))})(?!\w)")
    found = {(module, match[0]) for module, tree in _trunk() if module not in NAMING
             for text in _said(tree) for match in mention.finditer(text)}
    assert found == MENTIONED.keys()
    # a table of texts (config.registry.Table) is the one way from the trunk to a branch
    found = set()
    for path in (ROOT / "vlrl").rglob("*.py"):
        place = path.relative_to(ROOT / "vlrl").with_suffix("").as_posix().replace("/", ".")
        if not place.startswith(BRANCHES):
            found |= {place for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                      if getattr(node, "attr", getattr(node, "id", "")) in ("import_module", "__import__")}
    assert found == {"config.registry", "__init__"}  # the names of `import vlrl` are imported when they are asked for


def _imported(node):
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []


def test_tasks_and_app_are_imported_where_they_may_be():
    """An import of vlrl.tasks is one of tasks, which only the layers above it may make."""
    found = {"tasks": set(), "app": set()}
    for path in (ROOT / "vlrl").rglob("*.py"):
        for name in (n for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for n in _imported(node)):
            top, _, rest = name.partition(".")
            if top == "vlrl" and (folder := rest.partition(".")[0]) in found:
                found[folder].add(path.relative_to(ROOT).as_posix())
    assert found == UNDER_VLRL


def test_of_a_checkout_tasks_and_app_are_part_of_the_package():
    for name in ("vlrl.vlrl", "vlrl.vlrl.types", "vlrl.train", "vlrl.setup", "vlrl.tests"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    for name in ("tasks.digits", "tasks", "app.html", "app"):
        assert importlib.import_module(f"vlrl.{name}").__name__ == f"vlrl.{name}"
    code = ("from vlrl.config import load, validate; from vlrl.data import Drawn, read_rows, write_rows; "
            "from vlrl.rewards.boxes import iou; from vlrl.rewards.text import parse_answer; "
            "from vlrl.store import RunFolder, SCHEMA; from vlrl.task import Task, load as task; "
            "from vlrl.types import Media, Sample; import sys; sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
