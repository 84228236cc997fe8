"""Log-probabilities of completions under the reference model or the policy, in passes without gradient, packed as in
training.

The reference model is that of the KL term: under LoRA the model with its adapter disabled, otherwise a frozen copy of
the initial model, or the moving reference of algo.reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vlrl.config.schema import Config, TrainSettings
from vlrl.models.packing import Batch, training_rows
from vlrl.models.policy import Policy
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt


def read_tokens(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Completion], settings: TrainSettings,
                read: Callable[[Batch], torch.Tensor], *shape: int) -> list[np.ndarray]:
    """Returns values of all completion tokens, computed without gradient: a float32 array [T, *shape] for each
    completion of T tokens. `read` computes the values [N, *shape] of the N tokens of a batch. In completions with
    windows, tokens outside the actions get 0. Called on all ranks together."""
    rows = [(i, place, row) for i, answer in enumerate(answers) for place, row in training_rows(answer)]
    planned = policy.plan([prompts[i] for i, *_ in rows], [row.tokens for *_, row in rows], settings,
                          shown=[row.shown for *_, row in rows])
    out = [np.zeros((len(answer.tokens), *shape), np.float32) for answer in answers]
    with torch.no_grad(), policy.evaluating():
        for pieces in planned:
            batch = policy.pack(pieces, settings)
            order = torch.unique_consecutive(batch.rollout_id).tolist()
            values = read(batch).float().cpu()
            for r, piece in zip(order, values.split([len(rows[r][2].tokens) for r in order]), strict=True):
                i, place, _ = rows[r]
                out[i][place] = piece.numpy()[len(piece) - (place.stop - place.start):]
    return out


class Reference:
    """Computes log-probabilities of completions under a policy and under its reference model."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.config = policy, config

    def logprobs(self, prompts: Sequence[Prompt], answers: Sequence[Completion], temperature: float,
                 own: bool = False) -> list[np.ndarray]:
        """An array [T] float32 per completion: log-probabilities under the reference, or with `own` under the policy.
        See read_tokens."""
        return [values[:, 0] for values in self.stacked(prompts, answers, temperature, (own,))]

    def stacked(self, prompts: Sequence[Prompt], answers: Sequence[Completion], temperature: float,
             own: Sequence[bool] = (True, False)) -> list[np.ndarray]:
        """An array [T, len(own)] float32 per completion, with a column per entry of `own`: True = policy, False =
        reference. All columns are computed in one loop over the batches. Media are encoded once if policy and reference
        have the same vision tower."""
        def one_pass(batch: Batch, own_weights: bool) -> torch.Tensor:
            if own_weights:
                return self.policy.logprobs(batch, temperature).logprobs
            return self.policy.reference_logprobs(batch, temperature)

        def read(batch: Batch) -> torch.Tensor:
            with self.policy.sharing_features() if len(own) > 1 else contextlib.nullcontext():
                batch = batch.to(self.policy.device)
                return torch.stack([one_pass(batch, own_weights) for own_weights in own], -1)

        with phase("reference"):
            return read_tokens(self.policy, prompts, answers, self.config.train, read, len(own))
