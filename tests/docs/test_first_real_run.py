"""docs/first-real-run.md: its commands and configs work, and every figure of memory is what `vlrl plan` says."""

import re
import shlex

import pytest

import vlrl
from tests.docs.test_benchmarks import module
from tests.docs.test_readme import BLOCK, DOCS, ROOT
from vlrl import config

PAGE = (DOCS / "first-real-run.md").read_text(encoding="utf-8")
LINES = [shlex.split(line) for kind, body in BLOCK.findall(PAGE) if kind == "bash" for line in body.splitlines()]
FIGURE = re.compile(r"^.*\d ?Gi?B\b.*$", re.MULTILINE)
NO_ESTIMATES = ("first run", "one GPU with 24 GB", "VLLM_CPU_KVCACHE_SPACE", "84 GB", "0.5 GB",
                "adapter on 80 GB")
"""Words of lines with sizes of cards, files and main memory."""


def tables_out(text):
    return re.sub(r"<!-- plan.*?/plan -->", "", text, flags=re.DOTALL)


@pytest.fixture
def tables():
    return module("plan_tables")


def test_configs_of_commands_load_and_settings_exist():
    lines = [line for line in LINES if ".yaml" in " ".join(line)]
    assert len(lines) >= 8
    for words in lines:
        place = next(i for i, word in enumerate(words) if word.endswith(".yaml"))
        found = config.load(words[place], [word for word in words[place + 1:] if re.match(r"[a-z.]+=", word)])
        named = {word for word in words if word.startswith("runs/")}
        assert all(word.startswith(found.run.dir) for word in named) and found.eval.every and found.save.every, words
    known = {setting for setting, *_ in config.describe()} | {"extends", "engine"}
    named = re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?:=[^`]*)?`", BLOCK.sub("", tables_out(PAGE)))
    named = {name for name in named if not name.endswith((".yaml", ".jsonl"))}
    assert len(named) > 2 and named <= known, named - known


@pytest.mark.slow
def test_the_tables_and_examples_are_what_the_command_says(tables):
    for path in tables.PAGES:
        text = path.read_text(encoding="utf-8")
        assert tables.page(text) == text, f"{path.name} is out of date; run: python benchmarks/plan_tables.py"
    command = "configs/first_run/qwen2_5_vl_3b_24gb.yaml --card L4 --gpu-memory 8"
    assert not tables.told(command)["fits"]
    found = tables.told("configs/models/qwen2_5_vl_7b.yaml task=grounding extends=engines/vllm.yaml --gpu-memory 80")
    assert found["fits"] and found["engine"]


def test_tables_are_written_in_their_places_and_no_other_place_has_figures(tables, monkeypatch):
    text = "".join(path.read_text(encoding="utf-8") for path in tables.PAGES)
    assert {*re.findall(r"<!-- plan: ([\w-]+) -->", text), "where"} == {*tables.TABLES}
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: iter([("", "GiB"), ("3B", "4.0")])})
    empty = "before\n<!-- plan: one -->\n<!-- /plan -->\nafter\n<!-- plan: one -->\n\nold\n\n<!-- /plan -->\n"
    written = tables.page(empty)
    assert written.count("|  | GiB |\n| --- | --- |\n| 3B | 4.0 |\n") == 2 and "old" not in written
    assert tables.page(written) == written
    places = [ROOT / "README.md", *DOCS.glob("*.md"), *(vlrl.HOME / "configs").rglob("*.yaml")]
    for path in places:
        text = tables.BLOCK.sub("", path.read_text(encoding="utf-8"))
        for line in FIGURE.findall(text):
            assert any(words in line for words in NO_ESTIMATES), f"{path.name}: {line.strip()}"
