"""Functions that choose which retries are trained on (algo.guided.keep), and functions that say how retries change
their group (algo.guided.use).

A function of algo.guided.keep maps the groups' retries to one bool per retry: `(list of RetryGroup, read) -> list of
list of bool`. It is called on every process at the same time, with or without retries, because `read` contains
collectives. A function of algo.guided.use maps a Group to a Group. It is called when all statistics of the group's
first completions are computed, but not its advantages. Retries are in `Group.aside`, and those that may be trained on
have trained=True. A retry that becomes a member of its group is trained under the prompt without guidance
(`train_prompt`), except with `hinted`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlrl.config.sections import GUIDED, REPLACED
from vlrl.models.processing import Encoder
from vlrl.rewards.text import answer_offset, completion_for
from vlrl.task import Task
from vlrl.task.interface import given_answer
from vlrl.types import Completion, Group, Prompt, Rollout, Sample


def second_attempts(group: Group) -> list[Rollout]:
    """Returns the retries in the group's `aside` that may be trained on."""
    return [r for r in group.beside if r.variant == GUIDED]


def mark_moved(group: Group) -> Group:
    """Sets `moved` on retries that became members of the group, and on the completions that were replaced by such
    retries. Group.plain uses `moved` to find the group's first completions."""
    return replace(group, rollouts=tuple(replace(r, moved=True) if r.variant == GUIDED else r for r in group.rollouts),
                   aside=tuple(replace(r, moved=True) if r.variant == REPLACED else r for r in group.aside))


def beside(group: Group) -> Group:
    """Returns the group unchanged: its retries are trained by the separate loss algo.guided.loss."""
    return group


def join(group: Group) -> Group:
    """Adds the first kept retry to the group's members. Advantages are then computed over all members.

    Critique-GRPO (arXiv 2506.03106), which adds one refinement per prompt."""
    attempts = second_attempts(group)[:1]
    return replace(group, rollouts=(*group.rollouts, *attempts), aside=_untrained_aside(group, attempts))


def replace_wrong(group: Group) -> Group:
    """Replaces the last wrong completion of the group by the first kept retry. EGSR (arXiv 2505.08364)."""
    attempts = second_attempts(group)[:1]
    wrong = [i for i, r in enumerate(group.rollouts) if r.correct is False]
    if not attempts or not wrong:
        return replace(group, aside=_untrained_aside(group, ()))
    members = [*group.rollouts]
    out, members[wrong[-1]] = _as_replaced(members[wrong[-1]], group), attempts[0]
    return replace(group, rollouts=tuple(members), aside=(*_untrained_aside(group, attempts), out))


def hinted(group: Group) -> Group:
    """Replaces all members by the retries of the first round that has a kept retry. The new members are trained with
    the hint of that round in the prompt. If no retry is kept, the members do not change, which is our choice.

    GHPO (arXiv 2507.10628)."""
    attempts = second_attempts(group)[:1]
    if not attempts:
        return replace(group, aside=_untrained_aside(group, ()))
    prompt = attempts[0].train_prompt
    assert prompt is not None
    members = [r for r in group.aside if r.variant == GUIDED and r.train_prompt is prompt]
    rest = [*_untrained_aside(group, members), *(_as_replaced(r, group) for r in group.rollouts)]
    return replace(group, prompt=prompt, aside=tuple(rest),
                   rollouts=tuple(replace(r, train_prompt=None, trained=True) for r in members))


def _as_replaced(rollout: Rollout, group: Group) -> Rollout:
    return replace(rollout, variant=REPLACED, trained=False, sampled_prompt=rollout.sampled_prompt or group.prompt.text)


def _untrained_aside(group: Group, taken: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The group's `aside` without the retries in `taken`; all remaining retries are marked as not trained."""
    rest = (r for r in group.aside if not any(r is one for one in taken))
    return tuple(replace(r, trained=False) if r.variant == GUIDED else r for r in rest)


USES: dict[str, Callable[[Group], Group]] = {"beside": beside, "join": join, "replace": replace_wrong, "hinted": hinted}


LogprobReader = Callable[[Sequence[Prompt], Sequence[np.ndarray]], list[np.ndarray]]
"""A function (prompts, tokens [T] of one completion per prompt) -> [T] log-probabilities of each completion under the
current policy."""


@dataclass(frozen=True, eq=False)
class RetryGroup:
    """The retries of one group."""

    task: Task
    sample: Sample
    prompt: Prompt
    """The prompt without guidance."""
    attempts: Sequence[Rollout]
    encode: Encoder


def correct(groups: Sequence[RetryGroup], read: LogprobReader) -> list[list[bool]]:
    """For each retry, whether it is correct according to the task."""
    return [[bool(r.correct) for r in g.attempts] for g in groups]


def explains(groups: Sequence[RetryGroup], read: LogprobReader) -> list[list[bool]]:
    """For each retry, whether it is correct and explains the answer well. Under the prompt without guidance, the mean
    log-probability of the retry's tokens must exceed that of the given solution. In addition, the true answer must
    be more probable after the retry's explanation than without an explanation.

    ExPO (arXiv 2507.02834). The answer is the text that begins with the last <answer>."""
    attempts = [(g, r.completion.tokens, answer_start(r.completion.tokens, g.encode.processor.tokenizer.decode))
                for g in groups for r in g.attempts]
    given = [given_answer(g.task, g.sample) for g in groups]
    solutions = [np.zeros(0, np.int64) if text is None else g.encode.answer_ids(completion_for(text, g.prompt.opened))
                 for g, text in zip(groups, given, strict=True)]
    values = iter(read([*(g.prompt for g, *_ in attempts for _ in range(2)), *(g.prompt for g in groups)],
                       [*(tokens for _, whole, at in attempts for tokens in (whole, whole[at:])), *solutions]))
    pairs = [(next(values), next(values), at) for *_, at in attempts]
    known = {id(g): float(v.mean()) if len(v) else -np.inf for g, v in zip(groups, values, strict=True)}
    good = iter([float(whole.mean()) > known[id(g)] and float(whole[at:].sum()) > float(alone.sum())
                 if len(whole) else False for (g, *_), (whole, alone, at) in zip(attempts, pairs, strict=True)])
    return [[next(good) and bool(r.correct) for r in g.attempts] for g in groups]


def answer_start(tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> int:
    """Position, in `tokens` [T], of the first token of the final answer. `decode` converts tokens to text."""
    place = answer_offset(decode(tokens))
    return max(bisect_right(range(len(tokens) + 1), place, key=lambda k: len(decode(tokens[:k]))) - 1, 0)


Keep = Callable[[Sequence[RetryGroup], LogprobReader], list[list[bool]]]
KEEPS: dict[str, Keep] = {"correct": correct, "explains": explains}


def as_completion(tokens: np.ndarray) -> Completion:
    """Wraps tokens in a Completion, only to compute their log-probabilities."""
    return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), bool),
                      text="", finish_reason="stop")
