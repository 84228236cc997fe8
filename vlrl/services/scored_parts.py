"""Reward parts of `task.parts` computed by a reward model or from log-probabilities of answers; see extra_parts.py.

    reward_model    score of an answer; for several models their mean, minimum, or mean minus a multiple of the spread
    process         mean score of an answer's steps; algo.advantage=clip_delta uses the scores of the steps
    likelihood      probability of the reference answer after the completion's reasoning (RLPR, arXiv 2506.18254)
    consistency     bonus for correct answers that the reference policy finds likely (GRPO-CARE, arXiv 2506.16141)"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vlrl.rewards.ensembles import combined, mean, spread
from vlrl.rewards.groups import consistency_bonus
from vlrl.rewards.likelihood import debiased
from vlrl.rewards.process import step_spans, with_pair_scores
from vlrl.services.judge_prompts import question_text, reference
from vlrl.services.judged_parts import correct_by_rule
from vlrl.task.base import Task
from vlrl.task.part import part
from vlrl.task.services import Reading
from vlrl.types import Answer, Parts, Sample, StepValues


@part({"reward_model": 1.0, "reward_spread": 0.0}, needs=("reward_model",))
def reward_model(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
                 combine: Literal["mean", "min", "less_variance", "less_deviation"] = "mean",
                 lam: Annotated[float, Field(ge=0)] | None = None, media: bool = True,
                 reasoning: bool = False) -> list[Parts]:
    """The score of each answer by services.reward_model. combine: how the scores of several models are combined
    (rewards/ensembles.py). lam: factor of the spread; null = the value in the method's paper. media: whether the
    models get the images. reasoning: whether they get the whole completion instead of the final answer.
    `reward_spread` is the standard deviation over the models."""
    texts = [a.text if reasoning else a.final for a in answers]
    replies = services.reward_model(question_text(task, sample), tuple(sample.media) if media else (), texts)
    return [{"reward_model": None, "reward_spread": None} if scores is None else
            {"reward_model": combined(combine, scores, lam), "reward_spread": spread(scores)} for scores in replies]


@part({"process": 1.0}, needs=("reward_model",))
def process(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, pairs: bool = False,
            media: bool = True) -> list[Any]:
    """The mean score of an answer's steps, which are its paragraphs; 0 for an answer without steps.

    The scores of all steps are kept (types.StepValues). The score of a step is the score that services.reward_model
    gives to the text up to the end of the step; for several models, their mean. With `pairs`, it is the mean of two
    scores: of the step alone, and of the step with the next step (hierarchical reward model, HRM, arXiv 2503.13551).
    media: whether the models get the images."""
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


def _references(task: Task, sample: Sample, answers: Sequence[Answer], *, debias: bool = True) -> list[Reading]:
    right = reference(task, sample)
    return [Reading(a, right) for a in ([*answers, None] if debias else answers)] if right else []


@part({"likelihood": 1.0}, needs=("policy_logprobs",), readings=_references, replaces_outcome=True)
def likelihood(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
               debias: bool = True) -> list[Parts]:
    """The mean probability of the reference answer's tokens under the trained policy, if these tokens replace the
    completion's answer.

    0 for a completion without an answer tag. With `debias`, the mean probability without any reasoning is subtracted,
    and the result is clipped to [0, 1]. Equations 2 to 4 of RLPR (arXiv 2506.18254), whose group filter is
    curriculum.keep=std_ema."""
    readings = _references(task, sample, answers, debias=debias)
    if not readings:
        raise ValueError(f"row '{sample.id}' has no target, which the part 'likelihood' needs: add a target")
    logprobs = services.policy_logprobs(readings)
    return [{"likelihood": value} for value in debiased(logprobs[:len(answers)], logprobs[-1] if debias else None)]


@part({"consistency": 0.5}, needs=("reference_logprobs",))
def consistency(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
                margin: Annotated[float, Field(ge=0)] = 0.01) -> list[Parts]:
    """1 for a correct answer that the reference policy finds likely, else 0 (rewards/groups.py). GRPO-CARE (arXiv
    2506.16141) uses services.reference=ema.

    Each answer has the mean probability of its final tokens after its own reasoning. An answer is likely if this value
    is at least the mean of the value over the correct answers of the group, minus `margin`."""
    right = [float(correct_by_rule(task, sample, a)) for a in answers]
    likely = [float(np.exp(v).mean()) if len(v) else None for v in services.reference_logprobs(answers)]
    return [{"consistency": value} for value in consistency_bonus(right, likely, margin)]
