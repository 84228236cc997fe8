"""The examples of docs/python.md run in order, at two small steps."""

import re
from pathlib import Path

import pytest

import vlrl

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"),
                    re.MULTILINE | re.DOTALL)
SMALL = 'steps=2, rollout={"prompts_per_step": 2, "group_size": 2}, eval={"samples": 2}, log={"samples_every": 0}'


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shrunk = 0
    for block in BLOCKS:
        if block.startswith("# bright.py"):
            (tmp_path / "bright.py").write_text(block)
        shrunk += "steps=20" in block
        exec(block.replace("steps=20", SMALL).replace('"samples": 256', '"samples": 3'), {})
    out = capsys.readouterr().out
    assert shrunk == 2 and "2 of 2 steps" in out and "Evaluation before and after" in out and "'mean'" in out
    assert {run.path.name: run.metrics.num_rows for run in map(vlrl.load_run, (tmp_path / "runs").iterdir())} == {
        "quickstart": 2, "bright": 2}


def test_the_page_names_every_public_name():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(f"`vlrl.{name}`" in text for name in vlrl.__all__)
