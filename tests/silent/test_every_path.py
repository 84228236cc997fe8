"""What holds on one path holds on all of them: environments that are lost, resets that fail, pictures of any kind, and
numbers of any type."""

import contextlib
import os
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from vlrl import Environment, Media, Observation, Sample, Step, Task
from vlrl.config.schema import EnvironmentSettings, LimitsSettings
from vlrl.data.media import load
from vlrl.environments.episode_reward import EpisodeReward
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.tools import Tool, ToolEnvironment
from vlrl.errors import DataError
from vlrl.services.judged_parts import judge
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.types import Answer, PastAction


class World(Environment):
    """What its sample says: a picture that is another one in every process, a reset that fails, a part of some type."""

    def __init__(self, sample):
        self.row = sample.row

    def picture(self):
        return Media(source=Image.new("RGB", (8, 8), (os.getpid() % 256, os.getpid() // 256 % 256, 0)))

    def reset(self, seed):
        if file := self.row.get("fails"):
            with open(file, "a") as log:
                log.write("x")
            if os.path.getsize(file) <= self.row["times"]:
                raise ConnectionError("the server has gone")
        return Observation("begin", [Media(source=self.row["first"])] if "first" in self.row else [])

    def step(self, action):
        if action == "die":
            os._exit(3)
        return Step(Observation("on", [self.picture()] if self.row.get("anew") else []),
                    {"won": self.row.get("part", 1.0)}, info={})


class Worlds(Task):
    rewards = {"won": 1.0}

    def environment(self, sample):
        return World(sample)


@pytest.fixture
def host():
    made = Environments(lambda convention: Worlds(), EnvironmentSettings(workers=1, step_s=20, reset_s=20))
    yield made
    made.close()


def begun(host, **row):
    episode = host.open(Sample(id="a", row=row), 1)
    return episode, host.reset([episode])[0]


def test_a_world_that_is_another_after_its_process_was_lost_ends_and_a_failed_reset_is_tried_again(host, tmp_path):
    (one, _), (other, _) = begun(host, anew=True), begun(host)
    assert isinstance(host.step([one], ["go"])[0], Step)
    host.step([other], ["die"])
    assert isinstance(host.step([one], ["go"])[0], EnvironmentFailure)
    _, shown = begun(host, fails=str(tmp_path / "log"), times=1)
    assert isinstance(shown, Observation) and shown.text == "begin"


def test_pictures_that_nobody_can_show_end_an_episode_at_most(host):
    for mode in ("La", "P"):
        _, shown = begun(host, first=Image.new(mode, (9, 9)))
        for media in () if isinstance(shown, EnvironmentFailure) else shown.media:
            assert load(media, LimitsSettings()).frames[0].mode == "RGB"
        with contextlib.suppress(DataError):  # any other error ends what asked for it
            load(Media(source=Image.new(mode, (9, 9))), LimitsSettings())
    def look() -> Image.Image:
        """Looks."""
        return Image.new("La", (9, 9))

    step = ToolEnvironment([Tool(look)]).step('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    for media in step.observation.media:
        assert load(media, LimitsSettings()).frames[0].size == (9, 9)
    assert step.observation.media or step.observation.text.startswith("Error: look")


def test_a_number_of_any_type_is_a_part_in_a_task_as_in_an_environment(host):
    class Scored(Worlds):
        environment = Task.environment

        def score(self, sample, answer):
            return {"won": sample["part"]}

    for part in (np.float32(.5), np.bool_(True), np.array(.25), Decimal("0.5"), Fraction(1, 4), True):
        (scored,) = score_group(Scored(), Sample(id="a", row={"part": part}), [Answer(text="")], 0)
        episode, _ = begun(host, part=part)
        (step,) = host.step([episode], ["go"])
        paid = EpisodeReward(("return",), None).step(part, True, {})["return"]
        assert scored.reward == float(part) == step.parts["won"] == paid


def test_a_judge_of_an_episode_sees_its_turns_and_their_pictures():
    asked, picture = [], Media(source=Image.new("RGB", (8, 8), "red"))

    def replies(questions):
        asked.extend(questions)
        return ['{"verdict": "yes"}'] * len(questions)

    class Plain(Task):
        prompt, rewards = "Open the door.", {"judge": 1.0}

    turns = (PastAction(action="push", observation="It is stuck.", media=(picture,)), PastAction(action="pull"))
    judge(Plain(), Sample(id="a"), [Answer(text="pull", final="pull", turns=turns)], Services({}, {"judge": replies}))
    (question,) = asked
    assert "It is stuck." in question.text and "push" in question.text
    assert [m.source for m in question.media] == [picture.source]
