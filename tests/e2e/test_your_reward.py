"""docs/your-reward.md, in an empty folder: a part, a subclass and a recipe on a built-in task, and a changed reward on
stored completions."""

import re
import shlex

import pytest

from tests.e2e.runs import ROOT
from vlrl.cli.main import main
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group

PAGE = (ROOT / "docs" / "your-reward.md").read_text(encoding="utf-8")
BUILT_IN = PAGE.partition("\n## A built-in task")[2]
SMALL = ("rollout.prompts_per_step=2", "eval.samples=2")


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
def test_the_commands_for_a_built_in_task(folder, capsys):
    commands = re.findall(r"^vlrl (.*)$", BUILT_IN, re.MULTILINE)
    said = {}
    for command in commands:
        words = shlex.split(command)
        small = SMALL if words[0] == "train" and "--dry-run" not in words else ()
        assert main([*words, *small]) == 0, capsys.readouterr()
        said[command] = capsys.readouterr().out
    tight, trained, near, strict, score = said.values()
    assert "concise 1.000 x 1" in tight and "near 1.000 x 0.5" in near and "hit 1.000 x 1" in strict
    assert (folder / "runs" / "concise" / "rollouts").is_dir() and "concise" in trained
    assert "near" in score and "rewards changed" in score
