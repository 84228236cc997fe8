"""Services of score_group: answers of variants, and what is not available."""

import pytest

from tests.e2e.runs import write_config
from tests.rollout.test_group_source import Number
from tests.rollout.test_group_source import source as scripted
from tests.tables import each
from vlrl import config as configs
from vlrl.errors import ConfigError, TaskError
from vlrl.services.missing import unserved_parts, without_parts
from vlrl.task.scoring import score_group
from vlrl.task.services import AbsentService, Services, without_absent_parts
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
