"""How parts become the reward: task.combine and the weights."""

from pathlib import Path

import pytest

from tests.tables import each
from vlrl import config as configs
from vlrl.errors import ConfigError
from vlrl.task.base import Task
from vlrl.task.scoring import score_group
from vlrl.testing.findings import full_marks
from vlrl.testing.samples import rebuilt
from vlrl.training import build_task
from vlrl.types import Answer, Sample


class Judged(Task):
    rewards = {"rule": 1.0, "judge": 0.5, "format": [[0, 0.2], [10, 0.0]]}

    def score(self, sample, answer):
        return dict(zip(("rule", "judge", "format"), map(float, answer.text.split()), strict=True))


class Own(Judged):
    def combine(self, parts, weights):
        return parts["rule"] - parts["judge"]


def least(parts, weights):
    return min(weights[name] * value for name, value in parts.items())


# weights at step 0: rule 1, judge .5, format .2; at step 5 format .1; at step 10 format 0
@each("combine text step reward", [
    ("sum", "1 1 1", 0, 1.7), ("sum", "1 -1 1", 5, 0.6), ("auto", "0 1 1", 10, 0.5), ("product", "1 1 1", 0, 0.1),
    ("product", "2 1 0", 0, 0), ("product", "2 1 0", 10, 1.0), ("product", "1 1 1", 5, 0.05),
    ("gate:format", "1 1 1", 0, 1.7), ("gate:format", "1 1 0", 0, 0), ("gate:format", "1 1 -1", 0, -0.2),
    ("gate:format", "1 1 0", 10, 0), ("gate:format", "1 1 .5", 10, 1.5), ("gate:rule", "0 1 1", 0, 0),
    ("gate:rule>=0.5", ".5 1 1", 0, 1.2), ("gate:rule>=0.5", ".4 1 1", 0, 0.4), ("gate: rule >= -1", "-1 1 1", 0, -0.3),
    ("gate:rule>=1e-1", "0 1 1", 0, 0), ("gate:format>=1", "1 1 .5", 0, 0.1),
    # -1 by format (weight .2), 0 by rule, else 1 rule + .5 judge, never less than the rule alone
    ("tool_star:format,rule,judge", "1 1 0", 0, -0.2), ("tool_star:format,rule,judge", "0 1 1", 0, 0),
    ("tool_star:format,rule,judge", "1 1 1", 0, 1.5), ("tool_star:format,rule,judge", "1 -1 1", 0, 1.0),
    ("tool_star:format,rule,judge", ".4 0 1", 0, 0.4), ("tool_star:rule,judge,format", "1 1 1", 0, 0.7),
    ("max:rule,judge", ".4 1 1", 0, 0.7), ("max:rule,judge", ".6 1 1", 5, 0.7), ("max: rule, judge", "-1 -1 0", 0, -.5),
    ("max:rule,judge,format", "0 0 1", 0, 0.2), ("max:rule,format", "-1 0 0", 10, -1.0),
    ("tests.task.test_combine:least", "1 1 1", 0, 0.2)])
def test_ways_to_combine(combine, text, step, reward):
    task = Judged(combine=combine)
    (scored,) = score_group(task, Sample(id="1"), [Answer(text=text)], step)
    assert scored.error is None and scored.reward == pytest.approx(reward)
    (again,) = score_group(rebuilt(task), Sample(id="1"), [Answer(text=text)], step)
    assert again == scored


@each("combine says", [
    ("gate:formt", "no part 'formt'. Did you mean 'format'"), ("gate", "names 0 parts. Write it as gate:format"),
    ("max:rule", "Write it as max:rule,judge"), ("max:rule,rule", "names 2 parts"), ("sum:rule", "Write it as sum"),
    ("gate:rule>=", "not a finite number: write it as gate:accuracy>=0.8"), ("gate:rule>=nan", "not a finite number"),
    ("gate:rul>=1", "Did you mean 'rule'"), ("max:rule>=1,judge", "no part 'rule>=1'"),
    ("tool_star:format,rule", "names 2 parts. Write it as tool_star:format,accuracy,tools"),
    ("gate:", "no part ''"), ("prodct", "Did you mean 'product'"),
    ("no.such:thing", "for a file write path/file.py:name"), ("none.py:reward", "the file 'none.py' does not exist"),
    (3, "give a string"), ("tests.task.test_combine:pytest", "not a function")])
def test_bad_ways_are_named(combine, says):
    with pytest.raises(ConfigError, match=r"task\.combine=") as error:
        Judged(combine=combine)
    assert says in str(error.value)


def test_a_function_in_a_file_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text("def reward(parts, weights):\n    return 10 * parts['rule']\n")
    task = Judged(combine="rules.py:reward")
    assert task.combine({"rule": 0.5, "judge": 1.0}, task.weights_at(0)) == 5
    Path("broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError, match=r"task\.combine='broken.py:reward': .*broken.py:1: ModuleNotFound[^.]*$"):
        Judged(combine="broken.py:reward")
    with pytest.raises(ConfigError, match=r"rules\.py has no attribute 'rewrd'\. Did you mean 'reward'"):
        Judged(combine="rules.py:rewrd")


def test_parts_that_are_not_there_and_own_combinations():
    weights = {"rule": 1.0, "judge": 0.5, "format": 0.2}
    for combine, reward in (("sum", 1), ("product", 1), ("gate:format", 1), ("max:rule,judge", 1)):
        assert Judged(combine=combine).combine({"rule": 1.0}, weights) == reward
    assert Judged(combine="product").combine({}, weights) == 0
    star, gated = Judged(combine="tool_star:format,rule,judge"), Judged(combine="gate:rule>=0.5")
    for parts, *expected in (
            ({"rule": 1.0}, 1.0, True, 1.0, True), ({"judge": 1.0}, 0.5, True, 0.5, True),
            ({"format": 0.0, "rule": 0.4}, -0.2, False, 0.4, False), ({"rule": 0.0, "judge": 1.0}, 0, False, 0, False),
            ({"rule": 0.5, "judge": -1.0}, 0.5, True, 0.0, True)):
        found = [value for one in (star, gated) for value in (one.combine(parts, weights), one.turns_count(parts))]
        assert found == pytest.approx(expected), parts
    for task in (Own(), Own(combine="auto"), rebuilt(Own())):
        (scored,) = score_group(task, Sample(id="1"), [Answer(text="1 .25 1")], 0)
        assert scored.reward == 0.75
    with pytest.raises(ConfigError, match=r"task\.combine='sum': this task combines its parts itself"):
        Own(combine="sum")
    settings = ["task.combine=gate:format", "task.rewards.format=0"]
    config = configs.load("configs/quickstart.yaml", settings)
    task = build_task.make_task(config)
    assert task.combination == "gate:format" and full_marks(task) == 0  # the perfect answer's format has no weight
    assert task.combine({"iou": 0.5, "format": 1.0}, task.weights_at(0)) == 0.5
    assert full_marks(Judged(combine="max:rule,judge")) == pytest.approx(1.2)


@each("combine", ["sum", "product", "max:rule,judge", "tests.task.test_combine:least"])
def test_what_gates_nothing_pays_turns(combine):
    assert Judged(combine=combine).turns_count({"rule": 0.0, "judge": -1.0, "format": 0.0})
    assert Own().turns_count({"rule": 0.0})
