"""Controls: the same tasks with a random reward, under which an improvement was not learned from the reward."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.task import Task, Weight, load_class
from vlrl.types import Answer, Parts, Sample


class _Random:
    """Gives a part `random`, drawn per rollout, all of the weight; the true parts are still measured."""

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
        return {**dict.fromkeys(super().rewards_for(settings), 0.0), "random": 1.0}  # type: ignore[misc]

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        stream = random.Random(f"{sample.id}/{answers[0].step if answers else 0}")
        return [{"random": stream.random()} for _ in answers]


def _control(name: str) -> type[Task]:
    return type(f"Random{name.title()}", (_Random, load_class(name)), {"__module__": __name__})


RandomGrounding, RandomDigits, RandomDriving, RandomVideo, RandomRecall, RandomDrive, RandomWeb = map(
    _control, ("grounding", "digits", "driving", "video", "recall", "drive", "web"))
