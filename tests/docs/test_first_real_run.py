"""docs/first-real-run.md: its commands and configs work, and every figure of memory is what `vlrl plan` says."""

import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

import vlrl
from tests.docs.test_benchmarks import module
from tests.docs.test_readme import BLOCK, DOCS, ROOT
from vlrl import config
from vlrl.cli.main import main

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


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder in which the commands of "Bring the data" have been followed, as working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    records, noise = [], np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(noise.integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(f"rows/{i}.png")
        records.append({"id": str(i), "image": f"{i}.png", "width": 96, "height": 64, "expression": "mug",
                        "boxes": [{"box": [8, 8, 40, 40]}]})
    (tmp_path / "rows" / "annotations.json").write_text(json.dumps(records))
    for words in [line[1:] for line in LINES if line[:2] == ["vlrl", "data"]]:
        assert main(words) == 0, words
    return tmp_path


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
@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "first_run").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_dry_run_finds_nothing_wrong(path, rows, tiny_models, capsys):
    assert ["vlrl", "train", path.name, "--dry-run"] in LINES
    tiny = [f"model.name={tiny_models['qwen2_5_vl']}", "model.max_pixels=50176", "engine=hf"]
    code = main(["train", str(path), *tiny, "--dry-run"])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0, said
    assert "Locate the mug" in said and "reward 0.98" in said and "vlrl plan" in said


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
