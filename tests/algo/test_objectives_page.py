"""docs/objectives.md tells of every variant, and its example works as it stands."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from vlrl import config
from vlrl.algo import aggregation, reference, tables
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.named import parameters
from vlrl.methods.demonstrations import mixes as demonstrations
from vlrl.methods.distillation import method as distillation
from vlrl.methods.replay import rules as stored

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
TABLES = (tables.ADVANTAGES, tables.SHAPINGS, tables.BATCHES, tables.LOSSES, tables.WEIGHTS, tables.ENTROPIES,
          tables.CORRECTIONS, tables.KLS, reference.REFERENCES, demonstrations.MIXES, distillation.LOSSES, stored.RULES,
          stored.DRAWS, stored.SCHEDULES)


def test_every_name_and_option_stands_there():
    words = set(re.findall(r"`([\w-]+)`", PAGE))
    assert [name for table in (*TABLES, aggregation.AGGREGATIONS) for name in table if name not in words] == []
    options = {name: parameters(f, 2 if table is stored.DRAWS else 1) for table in TABLES for name, f in table.items()}
    assert [(name, o) for name, known in options.items() for o in known if o not in words] == []
    assert [p.stem for p in (ROOT / "configs" / "algorithms").glob("*.yaml") if p.stem not in words] == []


def test_the_example_is_short_and_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = re.findall(r"`([\w.]+)`\n\n```\w+\n(.*?)```", PAGE, re.S)
    assert [name for name, _ in found] == ["tempered.py", "tempered.yaml", "test_tempered.py"]
    assert sum(len(text.splitlines()) for _, text in found) < 40
    for name, text in found:
        (tmp_path / name).write_text(text)
    try:
        importlib.import_module("test_tempered").test_by_hand()
    finally:
        for name in ("tempered", "test_tempered"):
            sys.modules.pop(name, None)
    bound = Algorithm(config.load(ROOT / "configs" / "quickstart.yaml", ["extends=tempered.yaml"])).objective.term
    assert bound.options == {"power": pytest.approx(0.25)} and bound.name == "tempered.py:tempered"
