"""Parts of `task.parts` that a reward model gives; see extra_parts.py.

    reward_model    the score of an answer, of several models the mean, the smallest, or the mean less their spread
    process         the mean score of the steps of an answer, which algo.advantage=clip_delta sees one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.rewards.ensembles import combined, mean, spread
from vlrl.rewards.process import step_spans, with_pair_scores
from vlrl.services.judge_prompts import question_text
from vlrl.task.base import Task
from vlrl.task.part import part
from vlrl.types import Answer, Parts, Sample, StepValues


@part({"reward_model": 1.0, "reward_spread": 0.0}, needs=("reward_model",))
def reward_model(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
                 combine: Literal["mean", "min", "less_variance", "less_deviation"] = "mean",
                 lam: Annotated[float, Field(ge=0)] | None = None, media: bool = True,
                 reasoning: bool = False) -> list[Parts]:
    """Score of an answer by services.reward_model, of an ensemble as `combine` says (rewards/ensembles.py), with `lam`,
    null = that of its paper. `reasoning` shows it the whole answer. `reward_spread` is the standard deviation
    over the models.
    """
    texts = [a.text if reasoning else a.final for a in answers]
    replies = services.reward_model(question_text(task, sample), tuple(sample.media) if media else (), texts)
    return [{"reward_model": None, "reward_spread": None} if scores is None else
            {"reward_model": combined(combine, scores, lam), "reward_spread": spread(scores)} for scores in replies]


@part({"process": 1.0}, needs=("reward_model",))
def process(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, pairs: bool = False,
            media: bool = True) -> list[Any]:
    """Mean over the steps of an answer, its paragraphs, of the score by services.reward_model of the text up to the end
    of the step; of an ensemble the mean. 0 for an answer without a step. The steps are kept: types.StepValues.

    With `pairs` the score of each step by itself and that of it and the next one as one text, in the mean: HRM, the
    hierarchical reward model (arXiv 2503.13551).
    """
    cuts = [step_spans(a.text) for a in answers]
    requested: list[list[str]] = []
    for answer, own in zip(answers, cuts, strict=True):
        text = answer.text
        requested.append([text[:end] for _, end in own] if not pairs else [
            *(text[start:end] for start, end in own), *(text[a:b] for (a, _), (_, b) in pairwise(own))])
    replies = iter(services.reward_model(question_text(task, sample), tuple(sample.media) if media else (),
                                         [text for texts in requested for text in texts]))
    out: list[Any] = []
    for own, texts in zip(cuts, requested, strict=True):
        scores = [next(replies) for _ in texts]
        values = [mean(score) for score in scores if score is not None]
        each = with_pair_scores(values[:len(own)], values[len(own):]) if pairs else values
        ends = tuple(end for _, end in own)
        out.append({"process": StepValues(tuple(each), ends) if len(values) == len(texts) else None})
    return out
