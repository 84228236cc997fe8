"""Log-probabilities of answers under the reference policy, or under the policy: a pass without gradient, packed as for
training, on every process. The reference is that of the KL term: the disabled adapter under LoRA, else a frozen copy of
the model the run began with, or what algo.reference makes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from vlrl.config.schema import Config
from vlrl.models.packing import Batch
from vlrl.models.policy import Policy
from vlrl.models.reading import read_tokens
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt


class Reference:
    """Reads answers under a policy and its reference."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.config = policy, config

    def logprobs(self, prompts: Sequence[Prompt], answers: Sequence[Completion], temperature: float,
                 own: bool = False) -> list[np.ndarray]:
        """Returns [answer][T] float32 of all tokens (with windows of actions, 0 elsewhere), under the reference
        or the policy's `own` weights; an empty answer is not computed. Called on every process at the same time.
        """
        return [values[:, 0] for values in self.both(prompts, answers, temperature, (own,))]

    def both(self, prompts: Sequence[Prompt], answers: Sequence[Completion], temperature: float,
             own: Sequence[bool] = (True, False)) -> list[np.ndarray]:
        """Returns [answer][T, len(own)], each column as in `logprobs`: one loop over the same batches, which go through
        the vision tower once where it is the same in both.
        """
        def read(batch: Batch) -> torch.Tensor:
            with self.policy.sharing_features() if len(own) > 1 else contextlib.nullcontext():
                batch = batch.to(self.policy.device)
                return torch.stack([self._read(batch, temperature, one) for one in own], -1)

        with phase("reference"):
            return read_tokens(self.policy, prompts, answers, self.config.train, read, len(own))

    def _read(self, batch: Batch, temperature: float, own: bool) -> torch.Tensor:
        if own:
            return self.policy.logprobs(batch, temperature).logprobs
        return self.policy.reference_logprobs(batch, temperature)
