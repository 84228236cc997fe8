"""Supervised fine-tuning on the same data, encode, packing, update, evaluation and checkpoints as RL.

`vlrl sft CONFIG [key=value ...]` trains on `solution` of each row, or on the task's oracle answer, with
cross-entropy on the answer alone; the config is that of an RL run, whose sampling settings, group filters and engine
are not used: only evaluations generate, with the training model. Where the sample has an environment,
`Task.oracle_actions` are played in it by the EpisodeEngine, so a demonstration is the row of a rollout with these
actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.config.base import Named
from vlrl.config.schema import AlgoSettings, AsyncSettings, Config, CurriculumSettings, EngineSettings
from vlrl.engine.base import Done
from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.rollout.episodes import EpisodeEngine, turn_of
from vlrl.rollout.generate import Asked, make_group, sampling_of
from vlrl.rollout.group_source import Drawn, GroupSource
from vlrl.rollout.partial import Held
from vlrl.task import Task, task_oracle, task_oracle_actions
from vlrl.training.loop import train as train_loop
from vlrl.training.session import Session
from vlrl.types import Completion, Group, Request, Sample, Turn


class SupervisedSource(GroupSource):
    """Groups of one given answer each, instead of generated ones."""

    generates = False

    def _answer(self, drawn: Drawn, tokens: int | None) -> dict[int, Group | Held]:
        engine: Any = Demonstrations(self.task, self.encode)
        if isinstance(self.engine, EpisodeEngine):
            engine = self.engine.over(engine)
        sampling = sampling_of(self.config.rollout, 0.0)
        given = engine.generate([Request(prompt=a.prompt, n=1, sampling=sampling, key=(0, a.number), sample=a.sample)
                                 for a in drawn.asked])
        return {a.number: self._group(a, completion) for a, (completion,) in zip(drawn.asked, given, strict=True)}

    def _group(self, asked: Asked, given: Completion) -> Group:
        if given.episode_id:
            _check_played(given, task_oracle_actions(self.task, asked.sample), asked.sample)
        group = make_group(self.task, asked.sample, asked.prompt, [given], group_id=f"{asked.number:08d}",
                           split="train", step=self.step)
        # trained, not sampled: there is no sampler to compare with
        return replace(group, rollouts=tuple(replace(r, train_prompt=asked.prompt) for r in group.rollouts))


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
        return [[self._completion(self._text(request))] for request in requests]

    def _text(self, request: Request) -> str:
        sample = request.sample
        assert sample is not None
        if sample.opening is None:
            text = sample.get("solution") or task_oracle(self.task, sample)
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


def train(config: Config) -> Session:
    """Runs `config.steps` supervised steps of rollout.prompts_per_step samples; see loop.train."""
    return train_loop(supervised(config), SupervisedSource)


def supervised(config: Config) -> Config:
    """Returns the settings of a supervised run: those of an RL run, with cross-entropy as its objective."""
    algo = AlgoSettings(advantage=Named(name="dr_grpo"), loss=Named(name="supervised"),
                        aggregation=config.algo.aggregation)
    everything = {name: CurriculumSettings.model_fields[name].default for name in ("keep", "oversample", "select")}
    curriculum = config.curriculum.model_copy(update=everything)  # a group of one right answer is never mixed
    engine = config.engine if config.engine.name == "hf" else EngineSettings()
    return config.model_copy(update={"algo": algo, "curriculum": curriculum, "engine": engine,
                                     "asynchronous": AsyncSettings()})
