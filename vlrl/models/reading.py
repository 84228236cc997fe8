"""What a pass without gradient finds of each token of completions, packed as for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vlrl.config.schema import TrainSettings
from vlrl.models.packing import Batch, training_rows
from vlrl.models.policy import Policy
from vlrl.types import Completion, Prompt


def read_tokens(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Completion], settings: TrainSettings,
                read: Callable[[Batch], torch.Tensor], *shape: int) -> list[np.ndarray]:
    """Returns of each answer [T, *shape] float32, what `read` finds [N, *shape] of the tokens of a batch (with windows
    of actions, 0 elsewhere); an empty answer is not computed. Called on every process at the same time.
    """
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
