"""Evaluates a reward model: how often it gives the better of two held-out answers the higher score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlrl.curriculum import Draw
from vlrl.distributed import comm
from vlrl.errors import DataError
from vlrl.evaluation.stats import mean_ci
from vlrl.methods.preferences.pairs import pair_groups
from vlrl.models.processing import PromptTooLong
from vlrl.models.reference import read_tokens
from vlrl.rollout.generate import AcceptedDraw
from vlrl.task.interface import first_samples
from vlrl.training.build import Parts
from vlrl.types import Group, Sample

_CHUNK = 64
"""Number of pairs that are scored together, over all processes."""


def heldout_pairs(parts: Parts, name: str, step: int) -> tuple[dict[str, Any], list[Group]]:
    """Evaluates the reward model on the pairs of split `name`. Returns a line for eval.jsonl as a dict, and the groups
    of this process's pairs. `parts`: the objects of the run, such as task and model. `step`: stored in line and
    groups. Called on every process.

    With s+ and s- the scores of the better and the worse answer, the line has these columns with 95 % intervals:
    `accuracy` is the share of pairs with s+ > s- (equal scores count .5), `loss` the mean of -log sigmoid(s+ - s-),
    `margin` the mean of s+ - s-."""
    samples = list(enumerate(first_samples(parts.task, name, parts.config.eval.samples)))
    margins: dict[str, float] = {}
    rejected, pairs = 0, list[Group]()
    for start in range(0, len(samples), _CHUNK):
        mine = samples[start:start + _CHUNK][comm.rank()::comm.world()]
        groups, refused = comm.together(lambda mine=mine: _groups(parts, name, mine, step))
        rejected += int(comm.total(refused)[0])
        pairs += groups
        margins |= {id: m for part in comm.gather(_margins(parts, groups)) for id, m in part.items()}
    differences = np.array([margins[id] for id in sorted(margins)], np.float64)
    columns = {"accuracy": (differences > 0) + 0.5 * (differences == 0), "loss": np.logaddexp(0, -differences),
               "margin": differences}
    out: dict[str, Any] = {"step": step, "split": name, "n": len(differences), "rejected": rejected, "unscorable": 0,
                           "score_errors": 0.0}
    for column, values in columns.items() if len(differences) else ():
        mean, low, high = mean_ci(values.tolist())
        out |= {column: mean, f"{column}/ci95_low": low, f"{column}/ci95_high": high}
    return out, pairs


def _groups(parts: Parts, name: str, samples: Sequence[tuple[int, Sample]], step: int) -> tuple[list[Group], int]:
    accepted, refused = [], 0
    for number, sample in samples:
        try:
            accepted.append(AcceptedDraw(number, Draw(number, 0), sample, parts.encode(parts.task, sample)))
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not parts.config.data.quarantine:
                raise
            refused += 1
    return pair_groups(parts.task, parts.encode, accepted, step, name), refused


def _margins(parts: Parts, groups: Sequence[Group]) -> dict[str, float]:
    policy = parts.policy
    head = policy.head
    assert head is not None
    rows = [(g.prompt, r.completion) for g in groups for r in g.rollouts]
    token_scores = read_tokens(policy, [prompt for prompt, _ in rows], [answer for _, answer in rows],
                               parts.config.train, lambda batch: head(policy.states(batch)))
    scores = [float(values[-1]) for values in token_scores]
    return {g.id: scores[2 * i] - scores[2 * i + 1] for i, g in enumerate(groups)}
