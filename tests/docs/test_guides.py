"""The short pages of docs/ and AGENTS.md agree with the code and one another."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from vlrl import config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHORT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
         for name in ("README", "faq", "glossary", "python", "install")}
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


def test_the_api_can_be_imported():
    names = [name for cell in first_cells(SHORT["python"]) for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_terms_are_in_order():
    terms = [cell.strip().lower() for cell in first_cells(SHORT["glossary"])]
    assert len(terms) > 20 and terms == sorted(terms)


def test_what_agents_are_sent_to_exists():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    found = [*re.findall(r"\]\(([^)#]+)", text), *re.findall(r"`((?:\w+/)+[\w.]*)`", text)]
    assert len(found) > 15 and [path for path in found if not (ROOT / path).exists()] == []
    hooks = import_module("vlrl.config.base").MethodSettings
    assert all(hasattr(hooks, name) for name in ("active", "problem"))
