"""The short pages of docs/ and AGENTS.md agree with the code and one another."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import vlrl
from vlrl import config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHORT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
         for name in ("README", "faq", "glossary", "python", "install")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_index_names_every_page_and_links_lead_somewhere():
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", SHORT["README"]))
    assert named == {p.name for p in DOCS.glob("*.md")} - {"README.md"}
    for page in (ROOT / "README.md", ROOT / "AGENTS.md", *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            assert (page.parent / target).exists(), (page.name, target)


def test_settings_exist_and_terms_are_in_order():
    known = {setting for setting, *_ in config.describe()} | {"eval.jsonl"}
    for name, text in SHORT.items():
        found = re.findall(r"`((?:model|train|algo|engine|eval|log|save|rollout)\.[a-z_.]+)(?:=[^`]*)?`",
                           BLOCK.sub("", text))
        assert {*found} <= known, name
    terms = [cell.strip().lower() for cell in first_cells(SHORT["glossary"])]
    assert len(terms) > 20 and terms == sorted(terms)


def test_the_api_and_what_agents_are_sent_to_exists():
    names = [name for cell in first_cells(SHORT["python"]) for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    found = re.findall(r"`((?:\w+/)+[\w.]*)`", (ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    assert len(found) > 9 and [path for path in found if not (ROOT / path).exists()] == []
    hooks = import_module("vlrl.config.base").MethodSettings
    assert all(hasattr(hooks, name) for name in ("active", "problem"))


SMALL = 'steps=2, rollout={"prompts_per_step": 2, "group_size": 2}, eval={"samples": 2}, log={"samples_every": 0}'


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shrunk = 0
    for block in (body for kind, body in BLOCK.findall(SHORT["python"]) if kind == "python"):
        if block.startswith("# bright.py"):
            (tmp_path / "bright.py").write_text(block)
        shrunk += "steps=20" in block
        exec(block.replace("steps=20", SMALL).replace('"samples": 256', '"samples": 3'), {})
    out = capsys.readouterr().out
    assert shrunk == 2 and "2 of 2 steps" in out and "Evaluation before and after" in out and "'mean'" in out
    assert {run.path.name: run.metrics.num_rows for run in map(vlrl.load_run, (tmp_path / "runs").iterdir())} == {
        "quickstart": 2, "bright": 2}


def test_the_page_names_every_public_name():
    assert all(f"`vlrl.{name}`" in SHORT["python"] for name in vlrl.__all__)
