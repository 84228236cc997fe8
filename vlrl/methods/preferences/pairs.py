"""Makes groups from pairs of given answers: each group has two rollouts, the better answer with reward 1, then the
worse answer with reward 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.rewards.text import completion_for
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.generate import AcceptedDraw
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.partial import PartialGroup
from vlrl.task import Task
from vlrl.types import Completion, Group, Rollout


def pair_groups(task: Task, encode: Encoder, accepted: Sequence[AcceptedDraw], step: int,
           split: str = "train") -> list[Group]:
    """Creates a group of two rollouts for each draw in `accepted`. `encode` converts answers to tokens; `step` and
    `split` are stored in the group. Raises DataError if a sample has no pair of answers, or if its two answers are
    equal."""
    return [_group(task, encode, one, step, split) for one in accepted]


def _group(task: Task, encode: Encoder, accepted: AcceptedDraw, step: int, split: str) -> Group:
    own = task.of(accepted.sample)
    pair = own.pair(accepted.sample)
    if pair is None or pair[0] == pair[1]:
        what = "no pair of answers" if pair is None else "two equal answers"
        raise DataError(f"sample '{accepted.sample.id}' has {what} to learn from (algo.loss=bradley_terry). "
                        "Either give its row the fields 'chosen' and 'rejected', and set task.name=preference and "
                        "task.recipe=respond; or define pair() in the task")
    rollouts = [_rollout(encode, accepted, place, text, step) for place, text in enumerate(pair)]
    return Group(id=f"{accepted.number:08d}", task=own.name, split=split, sample=accepted.sample,
                 prompt=accepted.prompt, rollouts=tuple(rollouts))


def _rollout(encode: Encoder, accepted: AcceptedDraw, place: int, text: str, step: int) -> Rollout:
    text = completion_for(text, accepted.prompt.opened)
    tokens = encode.answer_ids(text)
    completion = Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32),
                            loss_mask=np.ones(len(tokens), bool), text=text, finish_reason="stop")
    # not sampled: there is no sampler to compare with
    return Rollout(group_id=f"{accepted.number:08d}", index=place, completion=completion, policy_step=step,
                   reward=1.0 - place, correct=place == 0, parsed=text, train_prompt=accepted.prompt)


class PairSource(GroupSource):
    """A group source for reward models: each group is a better and a worse given answer to one prompt."""

    generates = False

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        groups = pair_groups(self.task, self.encode, drawn.accepted, self.step)
        return {a.number: group for a, group in zip(drawn.accepted, groups, strict=True)}
