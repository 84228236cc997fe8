"""Supervised fine-tuning on the same data, encode, packing, update, evaluation and checkpoints as RL.

`vlrl sft CONFIG [key=value ...]` trains on `solution` of each row, or on the task's oracle answer, with
cross-entropy on the answer alone; the config is that of an RL run, whose sampling settings, group filters and engine
are not used: only evaluations generate, with the training model.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vlrl.config.base import Named
from vlrl.config.schema import AlgoSettings, AsyncSettings, Config, CurriculumSettings, EngineSettings
from vlrl.errors import DataError
from vlrl.rollout.generate import make_group
from vlrl.rollout.group_source import Drawn, GroupSource
from vlrl.rollout.partial import Held
from vlrl.task import task_oracle
from vlrl.training.loop import train as train_loop
from vlrl.training.session import Session
from vlrl.types import Completion, Group, Prompt, Sample, Turn


class SupervisedSource(GroupSource):
    """Groups of one given answer each, instead of generated ones."""

    generates = False

    def _answer(self, drawn: Drawn, tokens: int | None) -> dict[int, Group | Held]:
        return {a.number: self._given(a.number, a.sample, a.prompt) for a in drawn.asked}

    def _given(self, number: int, sample: Sample, prompt: Prompt) -> Group:
        group = make_group(self.task, sample, prompt, [], group_id=f"{number:08d}", split="train", step=self.step)
        text = sample.get("solution") or task_oracle(self.task, group.sample)
        if text is None:
            raise DataError(f"sample '{sample.id}': no answer to learn from; give the row a 'solution', or the task "
                            "an oracle")
        tokens = self.encode.answer_ids(text)
        given = Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32),
                           loss_mask=np.ones(len(tokens), bool), text=text, finish_reason="stop",
                           turns=(Turn(start=0, end=len(tokens)),))
        group = make_group(self.task, group.sample, prompt, [given], group_id=group.id, split="train", step=self.step)
        # trained, not sampled: there is no sampler to compare with
        return replace(group, rollouts=tuple(replace(r, train_prompt=prompt) for r in group.rollouts))


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
