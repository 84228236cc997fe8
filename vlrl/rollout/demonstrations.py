"""Demonstrations as rollouts: instead of a sampled completion, the row's `solution` or the task's perfect answer
(oracle).

    groups = demonstrated(task, encode, engine, config, accepted, step=0)      # groups of one completion each

For a sample with an environment, the EpisodeEngine plays the actions of `Task.oracle_actions` as a regular episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlrl.config.schema import Config
from vlrl.engine.base import Done, EpisodePlayer, Request, turn_of, unsampled_completion
from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.rewards.text import completion_for
from vlrl.rollout.generate import AcceptedDraw, make_group, sampling_of
from vlrl.task import Task, task_oracle_actions
from vlrl.task.interface import given_answer
from vlrl.types import Completion, Group, Sample


class Demonstrations:
    """An Engine whose completions are demonstrations: a sample's reference answer or, in an episode, the next action of
    the task's `oracle_actions`."""

    def __init__(self, task: Task, encode: Encoder):
        self.task, self.encode = task, encode

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing, because this engine has no weights."""

    def close(self) -> None:
        pass

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns one completion per request, with log-probabilities of 0. Raises DataError if a demonstration is
        missing. `done` is not used."""
        texts = (completion_for(self._text(request), request.prompt.opened) for request in requests)
        return [[unsampled_completion(self.encode.answer_ids(text), text)] for text in texts]

    def _text(self, request: Request) -> str:
        sample = request.sample
        assert sample is not None
        if sample.opening is None:
            text = given_answer(self.task, sample)
            if text is None:
                raise DataError(f"sample '{sample.id}': there is no answer to learn from: give the row a 'solution', "
                                "or define the task's oracle")
            return text
        actions, turn = task_oracle_actions(self.task, sample), turn_of(request)
        if not actions:
            raise DataError(f"sample '{sample.id}': there are no actions to learn from: define oracle_actions(sample) "
                            "in the task")
        if turn >= len(actions):
            raise DataError(f"sample '{sample.id}': its episode has not ended after the {len(actions)} actions of "
                            "oracle_actions(sample): return further actions, or end the episode with Step(done=True)")
        return actions[turn]


def has_demonstration(task: Task, sample: Sample) -> bool:
    """Whether there is a demonstration for the sample: an answer or, for a sample with an environment, actions. The
    environment must have been reset. Raises DataError if the reset failed."""
    if sample.reset_error:
        raise DataError(f"sample '{sample.id}': its environment failed: {sample.reset_error}")
    return bool(task_oracle_actions(task, sample) if sample.opening is not None else given_answer(task, sample))


def demonstrated(task: Task, encode: Encoder, engine: Any, config: Config, accepted: Sequence[AcceptedDraw], step: int,
                 split: str = "train") -> list[Group]:
    """Returns a scored group of one demonstration for each accepted prompt. `engine` is the run's engine, which plays
    episodes. Raises DataError if a sample has no demonstration, or if an environment does not accept the actions."""
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
    # not sampled: there are no sampler log-probabilities to compare with
    return replace(group, rollouts=tuple(replace(r, train_prompt=accepted.prompt) for r in group.rollouts))


def _check_played(given: Completion, actions: Sequence[str], sample: Sample) -> None:
    played = sum(turn.role == "assistant" for turn in given.turns)
    if given.error:
        raise DataError(f"sample '{sample.id}': its environment failed at action {played} of oracle_actions: "
                        f"{given.error}")
    if played < len(actions):
        reason = given.finish_reason
        why = "the environment ended it" if reason == "stop" else f"raise episode.max_{reason}"
        raise DataError(f"sample '{sample.id}': its episode ended after {played} of the {len(actions)} actions of "
                        f"oracle_actions: {why}")
