"""The short pages of docs/, CONTRIBUTING.md and the README's figures of memory agree with the code and one another."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from vlrl import config
from vlrl.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHORT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
         for name in ("README", "gpu", "faq", "glossary", "python", "extras")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_index_names_every_page():
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", SHORT["README"]))
    assert named == {p.name for p in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("name", SHORT)
def test_links_and_settings_exist(name):
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", SHORT[name]):
        assert (DOCS / target).exists(), target
    known = {setting for setting, *_ in config.describe()}
    prose = BLOCK.sub("", SHORT[name])
    for setting in re.findall(r"`((?:model|train|algo|engine|eval|log|save|rollout)\.[a-z_.]+)(?:=[^`]*)?`", prose):
        assert setting in known | {"eval.jsonl"}, setting


def test_the_guide_to_gpus():
    (text,) = [body for kind, body in BLOCK.findall(SHORT["gpu"]) if kind == "yaml"]
    written = yaml.safe_load(text)
    assert (ROOT / "configs" / written.pop("extends")).is_file() and config.validate(
        {"model": {"name": "x"}, **written}).eval.every == 25
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name or group.typer_instance.info.name for group in app.registered_groups}
    lines = [line for name in SHORT for kind, body in BLOCK.findall(SHORT[name]) if kind == "bash"
             for line in body.splitlines()]
    assert len(lines) > 6 and {line.split()[1] for line in lines if line.startswith("vlrl ")} <= known


def test_the_api_can_be_imported():
    names = [name for cell in first_cells(SHORT["python"]) for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_the_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [cell.strip(" `") for cell in first_cells(SHORT["extras"])] == ["demo", *(e for e in extras if e != "demo")]


def test_terms_are_in_order():
    terms = [cell.strip().lower() for cell in first_cells(SHORT["glossary"])]
    assert len(terms) > 20 and terms == sorted(terms)


def test_memory_in_the_readme_is_that_of_the_presets():
    rows = re.findall(r"^\| `(configs/models/\w+\.yaml)` \| (\d+) \| (\d+) \| (\d+) \|$",
                      (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {path for path, *_ in rows} == {str(p.relative_to(ROOT)) for p in (ROOT / "configs/models").glob("*.yaml")}
    for path, *figures in rows:
        said = re.search(r"LoRA (\d+) GiB, LoRA over 4-bit weights (\d+) GiB, full fine-tune (\d+) GiB",
                         (ROOT / path).read_text(encoding="utf-8"))
        assert said and list(said.groups()) == figures, path
