"""docs/your-reward.md, in an empty folder: functions, a part, a subclass and a recipe on a built-in task, and a changed
reward on stored completions."""

import json
import re
import shlex

import pytest

from tests.e2e.runs import ROOT
from vlrl.cli.main import main
from vlrl.config import config_of
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.tools.start.settings import settings_of
from vlrl.training.build_task import make_task

PAGE = (ROOT / "docs" / "your-reward.md").read_text(encoding="utf-8")
SMALL = ("steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_and_the_subclass_score_as_the_page_says(folder):
    for name, settings, earned in (("grounding", {"recipe": f"{folder}/my_recipe.py:strict"}, [1.1, 0.1, 0.0]),
                                   (f"{folder}/near.py:Near", {}, [1.5, 0.0, 0.0])):
        task = load(name, {**settings, "drawn": True})
        sample = task.samples("train")[0]
        texts = [task.oracle(sample), "[0, 0, 1, 1]", "there"]
        found = [s.reward for s in score_group(task, sample, [parse_answer(text) for text in texts], 0)]
        assert found == pytest.approx(earned, abs=0.01)


@pytest.mark.slow
def test_the_commands(folder, capsys):
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    for command in re.findall(r"^vlrl (.*)$", PAGE, re.MULTILINE):
        words = shlex.split(command)
        small = SMALL if words[0] == "train" and "--dry-run" not in words else ()
        assert main([*words, *small]) == 0, capsys.readouterr()
        said.append(capsys.readouterr().out)
    function, tight, trained, near, strict, score = said
    assert "right" in function and (folder / "runs" / "rows-right" / "source" / "rewards.py").exists()
    assert "concise 1.000 x 1" in tight and "near 1.000 x 0.5" in near and "hit 1.000 x 1" in strict
    assert "concise" in trained and "near" in score and "rewards changed" in score


def test_the_functions_score_as_the_page_says(folder):
    settings = settings_of(data=[{"question": "?", "answer": "B"}] * 2, reward=["rewards.py:right", "rewards.py:short"],
                           prompt="{question}", settings={"data.cache": str(folder)})
    task = make_task(config_of(settings, **{"task.rewards.short": 0.5}))
    sample = task.samples("train")[0]
    found = [s.reward for s in score_group(task, sample, [parse_answer("b"), parse_answer("x" * 200)], 0)]
    assert found == pytest.approx([1 + 0.5 * 199 / 200, 0])
