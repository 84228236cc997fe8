"""Given answers as rollouts: the row's `solution`, or the task's perfect answer, where a policy would have answered.

    groups = demonstrated(task, encode, engine, config, asked, step=0)      # one group of one answer each

Where the sample has an environment, `Task.oracle_actions` are played in it by the EpisodeEngine, so a demonstration is
the row of a rollout with these actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.engine.base import Done, EpisodePlayer, Request, turn_of
from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.rewards.text import completion_for
from vlrl.rollout.generate import AcceptedDraw, make_group, sampling_of
from vlrl.task import Task, task_oracle_actions
from vlrl.task.interface import given_answer
from vlrl.types import Completion, Group, Sample, Turn


class Demonstrations:
    """An Engine that writes what is to be learned from: the answer to a sample, or the next action of its oracle."""

    def __init__(self, task: Task, encode: Encoder):
        self.task, self.encode = task, encode

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing: no weights are asked."""

    def close(self) -> None:
        """Does nothing."""

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns one completion for each request, of log-probability 0. Raises DataError where there is none."""
        return [[self._completion(completion_for(self._text(request), request.prompt.opened))] for request in requests]

    def _text(self, request: Request) -> str:
        sample = request.sample
        assert sample is not None
        if sample.opening is None:
            text = given_answer(self.task, sample)
            if text is None:
                raise DataError(f"sample '{sample.id}': no answer to learn from; give the row a 'solution', or the "
                                "task an oracle")
            return text
        actions, turn = task_oracle_actions(self.task, sample), turn_of(request)
        if not actions:
            raise DataError(f"sample '{sample.id}': no actions to learn from; give the task oracle_actions(sample)")
        if turn >= len(actions):
            raise DataError(f"sample '{sample.id}': its episode goes on after the {len(actions)} actions of "
                            "oracle_actions(sample); give all of them, or end the episode with Step(done=True)")
        return actions[turn]

    def _completion(self, text: str) -> Completion:
        tokens = self.encode.answer_ids(text)
        return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32),
                          loss_mask=np.ones(len(tokens), bool), text=text, finish_reason="stop",
                          turns=(Turn(start=0, end=len(tokens)),))


def has_demonstration(task: Task, sample: Sample) -> bool:
    """Returns whether a sample, its environment reset where it has one, has an answer or actions to learn from. Raises
    DataError where it could not be reset."""
    if sample.reset_error:
        raise DataError(f"sample '{sample.id}': its environment failed: {sample.reset_error}")
    return bool(task_oracle_actions(task, sample) if sample.opening is not None else given_answer(task, sample))


def demonstrated(task: Task, encode: Encoder, engine: Any, config: Config, accepted: Sequence[AcceptedDraw], step: int,
                 split: str = "train") -> list[Group]:
    """Returns a scored group of one given answer for each; `engine` is that of the run, which plays episodes.

    Raises DataError where there is no answer, or an environment does not take the actions.
    """
    written: Any = Demonstrations(task, encode)
    if isinstance(engine, EpisodePlayer):
        written = engine.over(written)
    sampling = sampling_of(config.rollout, 0.0)
    given = written.generate([Request(prompt=a.prompt, n=1, sampling=sampling, key=(0, a.number), sample=a.sample)
                              for a in accepted])
    return [_group(task, a, completion, step, split) for a, (completion,) in zip(accepted, given, strict=True)]


def _group(task: Task, accepted: AcceptedDraw, given: Completion, step: int, split: str) -> Group:
    if given.episode_id:
        _check_played(given, task_oracle_actions(task, accepted.sample), accepted.sample)
    group = make_group(task, accepted.sample, accepted.prompt, [given], group_id=f"{accepted.number:08d}", split=split,
                       step=step)
    # trained, not sampled: there is no sampler to compare with
    return replace(group, rollouts=tuple(replace(r, train_prompt=accepted.prompt) for r in group.rollouts))


def _check_played(given: Completion, actions: Sequence[str], sample: Sample) -> None:
    """Raises DataError where an environment failed, or ended before all actions were played."""
    played = sum(turn.role == "assistant" for turn in given.turns)
    if given.error:
        raise DataError(f"sample '{sample.id}': its environment failed under action {played} of oracle_actions: "
                        f"{given.error}")
    if played < len(actions):
        reason = given.finish_reason
        why = "its environment ended it" if reason == "stop" else f"raise episode.max_{reason}"
        raise DataError(f"sample '{sample.id}': its episode ended after {played} of the {len(actions)} actions of "
                        f"oracle_actions: {why}")
