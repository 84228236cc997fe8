"""Scores of made rollouts, for tests of what looks at rewards."""

import numpy as np
import torch

from vlrl.algo.inputs import ActionCredit, Scores

NAN = float("nan")


def numbers(values):
    """[R] float64; None is NaN."""
    return torch.tensor([NAN if v is None else float(v) for v in values], dtype=torch.float64)


def scores(groups, **more):
    """Scores of lists of rewards, one a group; None = unscorable. Arrays a rollout are given flat."""
    rewards = numbers(r for g in groups for r in g)
    count = len(rewards)
    arrays = {k: numbers(more.pop(k)) for k in ("lengths", "greedy") if k in more}
    for name in ("parts", "part_weights"):
        arrays[name] = {k: numbers(v if isinstance(v, list) else [v] * count) for k, v in more.pop(name, {}).items()}
    if "tokens" in more:
        more["tokens"] = [np.array(t) for t in more["tokens"]]
        more.setdefault("masks", [np.ones(len(t), bool) for t in more["tokens"]])
        more.setdefault("turns", [[ActionCredit(0, len(t))] for t in more["tokens"]])
    group = torch.tensor([i for i, g in enumerate(groups) for _ in g], dtype=torch.int64)
    made = {"rewards": rewards, "group": group, "lengths": torch.full((count,), 4.0, dtype=torch.float64),
            "task": torch.zeros(count, dtype=torch.int64), "task_names": ["x"], "max_length": 10}
    return Scores(**{**made, **arrays, **more})
