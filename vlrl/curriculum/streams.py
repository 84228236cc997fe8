"""Random streams of samplers."""

from __future__ import annotations

import numpy as np


def stream(*key: int) -> np.random.Generator:
    """The random generator of a key; the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(k) for k in key])))
