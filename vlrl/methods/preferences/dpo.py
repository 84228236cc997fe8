"""Direct preference optimisation on pairs of given answers: rows with a `solution` and a `rejected` answer to the same
prompt.

Direct Preference Optimization (arXiv 2305.18290), implemented with the code of supervised fine-tuning. A group contains
the rejected answer as its only rollout. The preferred answer is in `Group.aside`, which holds rollouts outside the
group's statistics, such as the retries of algo.guided. The loss `dpo` of algo.guided.loss trains on both answers. The
reference is the initial model. The objective itself has no gradient, because given answers have advantage 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Named
from vlrl.config.loading import derived
from vlrl.config.schema import Config
from vlrl.config.sections import GUIDED
from vlrl.errors import DataError
from vlrl.rollout.demonstrations import demonstrated
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.generate import AcceptedDraw
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.partial import PartialGroup
from vlrl.training.loop import train as train_loop
from vlrl.training.session import Session
from vlrl.training.sft import supervised_config
from vlrl.types import Group, Rollout


class PreferenceSource(GroupSource):
    """A group source for DPO: each group contains a rejected answer, and the preferred answer in `Group.aside`."""

    generates = False

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        lost = [*map(_rejected, drawn.accepted)]
        better, worse = (demonstrated(self.task, self.encode, self.engine, self.config, accepted, self.step)
                         for accepted in (drawn.accepted, lost))
        return {a.number: _pair(*both) for a, *both in zip(drawn.accepted, better, worse, strict=True)}


def train_dpo(config: Config, dpo: Named) -> Session:
    """Trains by DPO for `config.steps` steps of rollout.prompts_per_step pairs. `dpo` is the loss with its options."""
    return train_loop(preference_config(config, dpo), PreferenceSource)


def preference_config(config: Config, dpo: Named) -> Config:
    """The config of a DPO run: that of a supervised run, except that only the loss `dpo` has a gradient."""
    algo = AlgoSettings.model_validate({"advantage": "dr_grpo", "loss": "reinforce", "guided": {"loss": dpo},
                                        "aggregation": config.algo.aggregation})
    return derived(supervised_config(config), algo=algo)


def _rejected(accepted: AcceptedDraw) -> AcceptedDraw:
    text = accepted.sample.get("rejected")
    if not isinstance(text, str) or not text:
        raise DataError(f"sample '{accepted.sample.id}' has no rejected answer to compare the solution with: "
                        "add a field 'rejected' with such an answer to the row")
    return replace(accepted, sample=replace(accepted.sample, row={**accepted.sample.row, "solution": text}))


def _pair(better: Group, worse: Group) -> Group:
    (won,), (lost,) = better.rollouts, worse.rollouts
    return replace(better, rollouts=(_without_logprobs(replace(lost, correct=False, train_prompt=None)),), aside=(
        _without_logprobs(replace(won, index=1, variant=GUIDED, correct=True, trained=True)),))


def _without_logprobs(rollout: Rollout) -> Rollout:
    done = rollout.completion
    return replace(rollout, completion=replace(done, logprobs=np.full(len(done.tokens), np.nan, np.float32)))
