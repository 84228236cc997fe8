"""docs/choosing.md: thirty troubles. Presets and settings that it names load and act; figures stand on their page."""

import re
import shlex
from pathlib import Path

import pytest

from vlrl import config
from vlrl.config import presets
from vlrl.tools.machine import needs
from vlrl.training import inert
from vlrl.training.build_task import make_task

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| symptom")]
OWN = {"FIELD": "category", "FOLDER": "some/model", "FILE": "rows.jsonl"}
LONG = ["rollout.max_new_tokens=512"]
EPISODES = PAGE[PAGE.index("## Episodes"):PAGE.index("## Speed")]
YOURS = {"field", "reasoning", "writes"}
"""Needs that rows or a model of the reader's have, and a shipped config has not."""


def test_thirty_rows_that_each_name_a_setting_and_a_page():
    assert len(ROWS) == 30 and len({row[0] for row in ROWS}) == 30 and {len(row) for row in ROWS} == {4}
    for _, tried, _, evidence in ROWS:
        assert re.fullmatch(r"`[^`]+`", tried) and "=" in tried
        assert evidence == "not measured" or (ROOT / "docs" / evidence.partition("](")[2].partition(")")[0]).is_file()
    assert len(PAGE.split()) <= 1500


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "_", row[0]))
def test_what_it_names_loads_and_acts(row):
    words = shlex.split(re.sub(r"\b[A-Z]{4,}\b", lambda match: OWN[match[0]], row[1].strip("`")))
    base = "recall.yaml" if row[1] in EPISODES else "quickstart.yaml"
    for found in (presets.find_preset(word.removeprefix("extends=")) for word in words if word.startswith("extends=")):
        assert found, row[1]
        base = found.task
    laid = config.load(ROOT / "configs" / base, [*LONG, *words])
    task = make_task(laid)
    assert [one.need for one in needs.find(laid, task) if one.need.partition(" ")[0] not in YOURS] == [] or (
        "tis" in row[1]), row
    silent = {str(one) for one in inert.find(config.load(ROOT / "configs" / base, LONG), task)}
    assert {str(one) for one in inert.find(laid, task)} - silent == set() or "tis" in row[1], row


def test_figures_stand_on_their_page():
    checked = 0
    for text, page in re.findall(r"\[([^\]]*\d[^\]]*)\]\((\.\./benchmarks[^)]*)\)", PAGE):
        if "lower" in text:  # a difference of two figures
            continue
        results = (ROOT / "docs" / page).read_text(encoding="utf-8")
        known = [float(number) for number in re.findall(r"\d*\.\d+", results)]
        for number in re.findall(r"\d*\.\d+", text):
            places = len(number.partition(".")[2])
            assert float(number) in {round(one, places) for one in known}, (text, page)
            checked += 1
    assert checked >= 12
