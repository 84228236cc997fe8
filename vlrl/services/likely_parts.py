"""Parts of `task.parts` that ask how likely a policy finds an answer behind a reasoning; see extra_parts.py.

    likelihood      probability of the reference answer in place of one's own (RLPR, 2506.18254)
    consistency     right answers that the reference policy finds likely (GRPO-CARE, 2506.16141)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vlrl.rewards.groups import consistency_bonus
from vlrl.rewards.likelihood import debiased
from vlrl.services.judge_prompts import reference
from vlrl.services.judged_parts import correct_by_rule
from vlrl.task.base import Task
from vlrl.task.part import part
from vlrl.task.services import Reading
from vlrl.types import Answer, Parts, Sample


def _references(task: Task, sample: Sample, answers: Sequence[Answer], *, debias: bool = True) -> list[Reading]:
    """Returns the reference answer in place of each answer's own, and where it is `debias`ed without any reasoning."""
    right = reference(task, sample)
    return [Reading(a, right) for a in ([*answers, None] if debias else answers)] if right else []


@part({"likelihood": 1.0}, needs=("policy_logprobs",), readings=_references, replaces_outcome=True)
def likelihood(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
               debias: bool = True) -> list[Parts]:
    """Mean probability, under the policy that is trained, of the tokens of the reference answer in place of an answer's
    own; with `debias` less what it is without any reasoning; within [0, 1]. 0 without an answer tag.

    RLPR (arXiv 2506.18254) equations 2 to 4. curriculum.keep=std_ema is its filter of groups.
    """
    readings = _references(task, sample, answers, debias=debias)
    if not readings:
        raise ValueError(f"row '{sample.id}' has no target, whose likelihood the part 'likelihood' is")
    logprobs = services.policy_logprobs(readings)
    return [{"likelihood": value} for value in debiased(logprobs[:len(answers)], logprobs[-1] if debias else None)]


@part({"consistency": 0.5}, needs=("reference_logprobs",))
def consistency(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
                margin: Annotated[float, Field(ge=0)] = 0.01) -> list[Parts]:
    """1 for correct answers of whose final tokens the reference policy finds the mean probability, behind their own
    reasoning, at least the mean of the group's correct ones less `margin`; else 0 (rewards/groups.py).

    GRPO-CARE (arXiv 2506.16141), with services.reference=ema.
    """
    right = [float(correct_by_rule(task, sample, a)) for a in answers]
    likely = [float(np.exp(v).mean()) if len(v) else None for v in services.reference_logprobs(answers)]
    return [{"consistency": value} for value in consistency_bonus(right, likely, margin)]
