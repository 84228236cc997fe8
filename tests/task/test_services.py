"""Services of score_group: answers of variants, what is not available, and how likely an answer is."""

import math

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
from vlrl.task.scoring import score_group
from vlrl.task.services import AbsentService, Reading, Services, precomputed_logprobs, reading_key, without_absent_parts
from vlrl.training.loop import train
from vlrl.types import Answer, Sample


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
