"""Where a run of race.py lies, for those that write it and those that read it."""

from __future__ import annotations

from pathlib import Path


def run_folder(runs: Path, mix: str, sampler: str, seed: int) -> Path:
    """The folder of one sampler on one mix with one seed; what is no letter or digit becomes an underscore."""
    return runs / f"{mix}-{''.join(c if c.isalnum() else '_' for c in sampler)}-{seed}"
