"""Parts of a reward: how task.combine puts them together, what services they need, how likely an answer is."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runs import write_config
from tests.rollout.test_group_source import Number
from tests.rollout.test_group_source import source as scripted
from tests.services.test_parts import ROW, task_of
from tests.tables import each
from vlrl import config as configs
from vlrl.errors import ConfigError, TaskError
from vlrl.rewards.likelihood import debiased, mean_probability
from vlrl.rewards.text import parse_answer
from vlrl.services.missing import unserved_parts, without_parts
from vlrl.task.base import Task
from vlrl.task.scoring import score_group
from vlrl.task.services import AbsentService, Reading, Services, precomputed_logprobs, reading_key, without_absent_parts
from vlrl.testing.findings import full_marks
from vlrl.testing.samples import rebuilt
from vlrl.training import build_task
from vlrl.training.loop import train
from vlrl.types import Answer, Sample


class Parts(Task):
    rewards = {"rule": 1.0, "judge": 0.5, "format": [[0, 0.2], [10, 0.0]]}

    def score(self, sample, answer):
        return dict(zip(("rule", "judge", "format"), map(float, answer.text.split()), strict=True))


class Own(Parts):
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
    ("tests.task.test_services:least", "1 1 1", 0, 0.2)])
def test_ways_to_combine(combine, text, step, reward):
    task = Parts(combine=combine)
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
    (3, "give a string"), ("tests.task.test_services:pytest", "not a function")])
def test_bad_ways_are_named(combine, says):
    with pytest.raises(ConfigError, match=r"task\.combine=") as error:
        Parts(combine=combine)
    assert says in str(error.value)


def test_a_function_in_a_file_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text("def reward(parts, weights):\n    return 10 * parts['rule']\n")
    task = Parts(combine="rules.py:reward")
    assert task.combine({"rule": 0.5, "judge": 1.0}, task.weights_at(0)) == 5
    Path("broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError, match=r"task\.combine='broken.py:reward': .*broken.py:1: ModuleNotFound[^.]*$"):
        Parts(combine="broken.py:reward")
    with pytest.raises(ConfigError, match=r"rules\.py has no attribute 'rewrd'\. Did you mean 'reward'"):
        Parts(combine="rules.py:rewrd")


def test_parts_that_are_not_there_and_own_combinations():
    weights = {"rule": 1.0, "judge": 0.5, "format": 0.2}
    for combine, reward in (("sum", 1), ("product", 1), ("gate:format", 1), ("max:rule,judge", 1)):
        assert Parts(combine=combine).combine({"rule": 1.0}, weights) == reward
    assert Parts(combine="product").combine({}, weights) == 0
    star, gated = Parts(combine="tool_star:format,rule,judge"), Parts(combine="gate:rule>=0.5")
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
    assert full_marks(Parts(combine="max:rule,judge")) == pytest.approx(1.2)


@each("combine", ["sum", "product", "max:rule,judge", "tests.task.test_services:least"])
def test_what_gates_nothing_pays_turns(combine):
    assert Parts(combine=combine).turns_count({"rule": 0.0, "judge": -1.0, "format": 0.0})
    assert Own().turns_count({"rule": 0.0})


class Judged(Number):
    rewards = {"right": 1.0, "quality": 0.5, "order": 0.25}
    needs = {"judge": ("quality",)}

    def score_group(self, sample, answers, services):
        order = [{"order": float(i)} for i, _ in enumerate(answers)]
        if "judge" not in services:
            return order
        said = services.judge([a.text for a in answers])
        return [{**parts, "quality": float(text == "good")} for parts, text in zip(order, said, strict=True)]


class Misspelt(Judged):
    needs = frozenset({"jugde"})


class Asking(Judged):
    needs = frozenset({"judge"})

    def score_group(self, sample, answers, services):
        return [{"quality": float(services.judge([a.text])[0]), "order": 0.0} for a in answers]


class Unnamed(Asking):
    """Asks for what it does not name."""

    needs = frozenset()


SEVEN = Sample(id="7", row={"n": 7, "answer": "7"})


def test_a_service_that_is_absent_is_named_at_the_start(tmp_path):
    services = Services(given={"judge": len})
    assert services.judge([1, 2]) == 2 and "judge" in services and "clip" not in services and services.variants == {}
    assert not hasattr(services, "clip")
    with pytest.raises(AbsentService, match="the service 'clip' is not available"):
        _ = services.clip
    with pytest.raises(TaskError, match="the service 'judge' is not available"):
        score_group(Unnamed(), SEVEN, [Answer(text="7")], 0)
    path = write_config(tmp_path, tmp_path / "no-model")
    text = (tmp_path / "shades.py").read_text()  # before the model, which is not available, is loaded
    (tmp_path / "shades.py").write_text(text.replace("    rewards", '    needs = {"clip": ["short"]}\n    rewards'))
    with pytest.raises(ConfigError, match=r"'Shades'|'shades'.*'short' needs the service 'clip'.*task.rewards.short=0"):
        train(configs.load(path, [f"run.dir={tmp_path}/run"]))


@each("task skipped parts", [
    (Judged(), ["quality"], {"right": 1.0, "order": 0.0}), (Asking(), ["quality", "order"], {"right": 1.0})])
def test_parts_without_their_service_are_left_out(task, skipped, parts):
    answers = [Answer(text="7")]
    reduced, found = without_absent_parts(task, SEVEN, answers, Services())
    assert found == skipped and score_group(reduced, SEVEN, answers, 0, Services())[0].parts == parts
    assert score_group(task, SEVEN, answers, 0)[0].parts == parts
    assert without_absent_parts(task, SEVEN, answers, Services(given={"judge": len}))[0] is task


def test_a_run_leaves_out_what_weighs_nothing_and_refuses_the_rest():
    names = [SEVEN]
    assert unserved_parts(Judged(), {"judge"}, names) == [] == unserved_parts(Number(), (), names)
    for task in (Judged(), Asking(), Judged(rewards={"quality": [[0, 0], [9, 1]]})):
        with pytest.raises(ConfigError, match=r"part 'quality' needs the service 'judge'.*task\.rewards\.quality=0"):
            unserved_parts(task, ("reference_logprobs",), names)
    without = Judged(rewards={"quality": 0.0})
    assert unserved_parts(without, (), names) == ["quality"]
    assert unserved_parts(Asking(rewards={"quality": 0, "order": 0}), (), names) == ["quality", "order"]
    s = scripted(lambda prompt, i: prompt.text)
    s.task = s.generator.task = without_parts(without, ["quality"])
    (group,) = s.next_groups(1, 0)
    assert group.weights == {"right": 1.0, "order": 0.25} and group.rewards == [1.0, 1.25, 1.5]
    with pytest.raises(ConfigError, match=r"'jugde', which is not known\. Did you mean 'judge'"):
        unserved_parts(Misspelt(), (), names)


def test_likelihoods_and_their_readings():
    assert mean_probability([math.log(0.5), math.log(0.25), 0.0]) == pytest.approx(1.75 / 3, abs=1e-9)
    assert mean_probability([]) == 0 and mean_probability([-800.0]) == 0
    # .9, .5 and .2 of one token each, less .3 without reasoning.
    reasoned = [[math.log(p)] for p in (0.9, 0.5, 0.2)] + [[]]
    assert debiased(reasoned, [math.log(0.2), math.log(0.4)]) == pytest.approx([0.6, 0.2, 0, 0], abs=1e-9)
    assert debiased(reasoned, None) == pytest.approx([0.9, 0.5, 0.2, 0], abs=1e-9)
    task = task_of("likelihood", rewards={"accuracy": 0, "format": 0})
    sample, answers = task.sample_from_row(ROW), [parse_answer("<answer>4</answer>")]
    task.target = lambda sample: None
    assert task.readings("policy_logprobs", sample, answers) == []
    (found,) = score_group(task, sample, answers, 0, likely(task, sample, answers, "policy_logprobs", None))
    assert found.reward is None and "has no target" in (found.error or "")
    task = task_of("likelihood", "consistency", rewards={"accuracy": 1, "format": 0})
    sample, answers = task.sample_from_row(ROW), [parse_answer("<answer>4</answer>")]
    assert [type(r) for r in task.readings("policy_logprobs", sample, answers)] == [Reading, Reading]
    assert task.readings("reference_logprobs", sample, answers) == answers
    with pytest.raises(ConfigError, match=r"task\.parts\.0\.debias='x'"):
        task_of({"name": "likelihood", "debias": "x"})


def likely(task, sample, answers, service, value_of):
    """The service, knowing what the task's readings ask for: `value_of(asked)` -> probabilities of its tokens."""
    asked = task.readings(service, sample, answers)
    known = {reading_key(one, answers): np.log(np.asarray(value_of(one), np.float64)) for one in asked}
    return Services(given={service: precomputed_logprobs(service, answers, known)})


def test_the_reference_answer_in_place_of_one_s_own():
    """Without reasoning .3; behind the reasonings .5 and .8 (mean of .6 and 1), none without a tag."""
    task = task_of("likelihood", rewards={"accuracy": 0, "format": 0})
    assert task.needs == {"policy_logprobs": ("likelihood",)}
    sample = task.sample_from_row(ROW)
    texts = ("<think>a</think><answer>5</answer>", "<think>b</think><answer>4</answer>", "4")
    answers = [parse_answer(text) for text in texts]
    values = {"a": [0.5], "b": [0.6, 1.0], "": []}

    def value_of(one):
        assert isinstance(one, Reading) and one.text == "4"
        return [0.3] if one.answer is None else values[one.answer.reasoning]
    found = score_group(task, sample, answers, 0, likely(task, sample, answers, "policy_logprobs", value_of))
    assert [s.reward for s in found] == pytest.approx([0.2, 0.5, 0], abs=1e-9)
    plain = task_of({"name": "likelihood", "debias": False}, rewards={"accuracy": 0, "format": 0})
    assert [r.answer for r in plain.readings("policy_logprobs", sample, answers)] == answers
    found = score_group(plain, sample, answers, 0, likely(plain, sample, answers, "policy_logprobs", value_of))
    assert [s.reward for s in found] == pytest.approx([0.5, 0.8, 0], abs=1e-9)


def test_correct_answers_that_the_reference_finds_likely():
    """Of three correct ones .9, .7 and .86 the mean is .82; less .01 the second is below. A wrong one earns nothing."""
    task = task_of("consistency", rewards={"accuracy": 1, "format": 0})
    assert task.weights["consistency"] == 0.5 and task.needs == {"reference_logprobs": ("consistency",)}
    sample = task.sample_from_row(ROW)
    answers = [parse_answer(f"<think>{i}</think><answer>{a}</answer>") for i, a in enumerate((4, 4, 4, 5))]
    values = {"0": [0.9], "1": [0.4, 1.0], "2": [0.86], "3": [0.99]}

    def services(one):
        return likely(one, sample, answers, "reference_logprobs", lambda a: values[a.reasoning])
    found = score_group(task, sample, answers, 0, services(task))
    assert [s.parts["consistency"] for s in found] == [1, 0, 1, 0]
    assert [s.reward for s in found] == [1.5, 1, 1.5, 0]
    wide = task_of({"name": "consistency", "margin": 0.13}, rewards={"accuracy": 1, "format": 0})
    assert [s.parts["consistency"] for s in score_group(wide, sample, answers, 0, services(wide))] == [1, 1, 1, 0]
