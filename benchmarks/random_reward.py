"""Controls: the same tasks with a reward that knows nothing. What still rises under it was not learned from reward."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.task import Task, Weight, load_class
from vlrl.types import Answer, Parts, Sample

Grounding: type[Task] = load_class("grounding")
Digits: type[Task] = load_class("digits")
Driving: type[Task] = load_class("driving")
Video: type[Task] = load_class("video")
Recall: type[Task] = load_class("recall")
Drive: type[Task] = load_class("drive")
Web: type[Task] = load_class("web")


class _Random:
    """Adds a part `random`, drawn per rollout, as the only one with weight; the true parts are still measured."""

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        stream = random.Random(f"{sample.id}/{answers[0].step if answers else 0}")
        return [{"random": stream.random()} for _ in answers]


class RandomGrounding(_Random, Grounding):
    rewards = {"iou": 0.0, "format": 0.0, "random": 1.0}


class RandomDigits(_Random, Digits):
    rewards = {"accuracy": 0.0, "format": 0.0, "random": 1.0}


class RandomDriving(_Random, Driving):
    rewards = {"speed": 0.0, "path": 0.0, "format": 0.0, "random": 1.0}


class RandomVideo(_Random, Video):
    rewards = {"accuracy": 0.0, "format": 0.0, "random": 1.0}


class RandomRecall(_Random, Recall):
    rewards = {"accuracy": 0.0, "format": 0.0, "random": 1.0}


class RandomDrive(_Random, Drive):
    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
        return {**dict.fromkeys(super().rewards_for(settings), 0.0), "random": 1.0}


class RandomWeb(_Random, Web):
    rewards = {"success": 0.0, "efficiency": 0.0, "format": 0.0, "page": 0.0, "random": 1.0}
