"""What a task returns or raises, and what the loop makes of it."""

import math

import pytest

from vlrl.errors import ConfigError, TaskError
from vlrl.scoring import score_group
from vlrl.task import Task, fill, load, weight_at
from vlrl.types import Answer, Sample

SAMPLE = Sample(id="s", row={"answer": "4"})


def task(score, group=None):
    class Odd(Task):
        rewards = {"a": 1.0, "b": 0.5}

        def score(self, sample, answer):
            return score(answer.text)

        def score_group(self, sample, answers, services):
            return group(answers) if group else []

    return Odd()


def scored(t, *texts):
    return score_group(t, SAMPLE, [Answer(text=x) for x in texts], step=0)


def test_weighted_sum():
    (one,) = scored(task(lambda x: {"a": 0.5, "b": 2}), "x")
    assert one.parts == {"a": 0.5, "b": 2.0} and one.reward == pytest.approx(1.5) and one.error is None


def test_a_scorer_that_raises_gives_zero_and_is_kept():
    def score(text):
        return {"a": 1 / len(text), "b": 1.0}
    bad, good = scored(task(score), "", "xx")
    assert bad.parts == {"a": 0.0, "b": 0.0} and bad.reward == 0.0 and "ZeroDivisionError" in bad.error
    assert good.reward == pytest.approx(1.0) and good.error is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_part_that_is_not_finite_becomes_zero(value):
    (one,) = scored(task(lambda x: {"a": value, "b": 1.0}), "x")
    assert one.parts == {"a": 0.0, "b": 1.0} and one.reward == 0.5 and "'a'" in one.error


def test_none_is_unscorable():
    (one,) = scored(task(lambda x: {"a": None, "b": 1.0}), "x")
    assert one.reward is None and one.parts == {"a": None, "b": 1.0} and one.error is None


@pytest.mark.parametrize("parts, says", [({"a": 1.0}, "left out the part 'b'"),
                                         ({"a": 1.0, "b": 1.0, "bb": 0.0}, "'bb'.*Did you mean 'b'")])
def test_wrong_part_names_stop(parts, says):
    with pytest.raises(TaskError, match=says):
        scored(task(lambda x: parts), "x")


def test_group_parts_are_laid_over_the_single_ones():
    t = task(lambda x: {"a": 1.0}, lambda answers: [{"b": float(i)} for i, _ in enumerate(answers)])
    assert [s.reward for s in scored(t, "x", "y", "z")] == [1.0, 1.5, 2.0]


def test_group_scorer_of_the_wrong_length_stops():
    with pytest.raises(TaskError, match="1 results for 2 answers"):
        scored(task(lambda x: {"a": 1.0, "b": 0.0}, lambda answers: [{}]), "x", "y")


def test_weights_may_follow_the_steps():
    class T(Task):
        rewards = {"a": [[10, 1.0], [20, 0.0]]}
    assert [T().weights_at(s)["a"] for s in (0, 10, 15, 20, 99)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert weight_at(2, 7) == 2.0


def test_settings_of_a_task_are_checked():
    class T(Task):
        most: int = 6
        rewards = {"a": 1.0}
    assert T(most=9).most == 9 and T(rewards={"a": 0.5}).weights == {"a": 0.5}
    with pytest.raises(ConfigError, match=r"task\.mots.*Did you mean 'most'"):
        T(mots=9)
    with pytest.raises(ConfigError, match=r"task\.most='many'"):
        T(most="many")
    with pytest.raises(ConfigError, match=r"task\.rewards\.aa.*Did you mean 'a'"):
        T(rewards={"aa": 1})


def test_templates_are_filled_by_plain_substitution():
    row = {"x": "{y}", "y": "no", "n": 3}
    assert fill("{n} {x} {z} {0} {{", row) in ("3 {y} {z} {0} {{", "3 no {z} {0} {{")


def test_templates_vary_by_visit_and_are_fixed_by_sample():
    class T(Task):
        prompts = ("one", "two", "three")
    t, s = T(), Sample(id="s")
    drawn = [t.template(s, visit) for visit in range(30)]
    assert set(drawn) == {"one", "two", "three"} and drawn == [t.template(s, visit) for visit in range(30)]


def test_tasks_load_by_name_module_and_file(tmp_path):
    file = tmp_path / "grounding.py"  # called like a built-in one
    file.write_text("from vlrl.task import Task\nclass Mine(Task):\n    rewards = {'a': 1.0}\n")
    assert type(load(f"{file}:Mine")).__name__ == "Mine" and type(load(str(file))).__name__ == "Mine"
    assert type(load("grounding")).__name__ == "Grounding"
    assert type(load("vlrl.tasks.grounding:Grounding")).__name__ == "Grounding"
    for name, says in (("groundin", "Did you mean 'grounding'"), (f"{file}:Nine", "no Task class 'Nine'"),
                       ("nowhere/x.py:T", "does not exist"), ("no.such.module:T", "No module named")):
        with pytest.raises(ConfigError, match=says):
            load(name)
