"""Parts of `task.parts` that a reward model gives; see extra_parts.py.

    reward_model    the score of an answer, of several models the mean, the smallest, or the mean less their spread
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.rewards.ensembles import ENSEMBLES, spread
from vlrl.task.base import Task
from vlrl.task.judge_prompts import asked
from vlrl.task.part import part
from vlrl.types import Answer, Parts, Sample


@part({"reward_model": 1.0, "reward_spread": 0.0}, needs=("reward_model",))
def reward_model(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
                 combine: Literal["mean", "min", "less_variance", "less_deviation"] = "mean",
                 lam: Annotated[float, Field(ge=0)] = 0.1, media: bool = True, reasoning: bool = False) -> list[Parts]:
    """Score of an answer by services.reward_model, of an ensemble as `combine` says (rewards/ensembles.py), with `lam`.
    `reasoning` shows it the whole answer. `reward_spread` is the standard deviation over the models.
    """
    texts = [a.text if reasoning else a.final for a in answers]
    found = services.reward_model(asked(task, sample), tuple(sample.media) if media else (), texts)
    return [{"reward_model": None, "reward_spread": None} if scores is None else
            {"reward_model": ENSEMBLES[combine](scores, lam), "reward_spread": spread(scores)} for scores in found]
