"""`vlrl compare --sequential`: trains configs with further seeds until a group-sequential test decides between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl import config
from vlrl.errors import ConfigError
from vlrl.progress import Progress, no_progress
from vlrl.store import plain
from vlrl.store.files import write_text
from vlrl.tools.experiments.many_runs import Job, check_plan, deciding_split, final_score, run_jobs
from vlrl.tools.experiments.sequential import InterimAnalysis, Sequential


@dataclass(frozen=True)
class SequentialResult:
    """The finished test of `vlrl compare --sequential`, and the scores that it used."""

    test: Sequential
    metric: str
    split: str
    scores: dict[str, list[float]]  # config -> score of each seed, in the order of the seeds
    folder: Path

    @property
    def runs(self) -> int:
        return sum(map(len, self.scores.values()))

    def plain(self) -> dict[str, Any]:
        """The result as the JSON value that `vlrl compare --sequential --json` prints."""
        pairs = [{"a": a, "b": b, "higher": higher or None} for (a, b), higher in self.test.decisions.items()]
        looks = [{"block": look.block, "spent": look.spent,
                  "statistics": {f"{a} - {b}": value for (a, b), value in look.statistics.items()},
                  "thresholds": {f"{a} - {b}": value for (a, b), value in look.thresholds.items()},
                  "decided": [{"a": a, "b": b, "higher": name} for (a, b), name in look.decided.items()]}
                 for look in self.test.looks]
        return {"metric": self.metric, "split": self.split, "alpha": self.test.alpha, "n": self.test.n,
                "blocks": self.test.blocks, "decisions": pairs, "looks": looks, "scores": self.scores,
                "runs": self.runs, "folder": str(self.folder)}


def run_sequential(configs: Sequence[str], settings: Sequence[str], folder: Path, *, metric: str = "reward/mean",
        split: str | None = None, n: int = 5, blocks: int = 5, alpha: float = 0.05, resamples: int = 10_000,
        jobs: int = 1, first_seed: int = 0, progress: Progress = no_progress,
        after_block: Callable[[InterimAnalysis], None] | None = None) -> SequentialResult:
    """Trains configs with `n` further seeds at a time (a block), until every pair of configs is decided or `blocks`
    blocks have run. In each block, only configs of undecided pairs are trained.

    `settings` are overrides of all configs. `jobs` runs are trained in parallel, with seeds from `first_seed` on. For
    `alpha` and `resamples` see Sequential. The score of a run is `metric` in its last evaluation of `split`. The runs
    are in FOLDER/<config>-<seed>. A finished run is not repeated, so the same call continues after an interruption. All
    runs use the same held-out samples (data.seed). After each block, sequential.json is written to the folder and
    `after_block` is called with the state of the test. Raises ConfigError for fewer than two configs, for invalid
    numbers, and for configs or options that differ from those with which the folder was started."""
    loaded = {name: config.load(path, settings) for name, path in _names(configs).items()}
    split = deciding_split(loaded, split, settings, "--seeds, -o")
    try:
        test = Sequential(tuple(loaded), n=n, blocks=blocks, alpha=alpha, resamples=resamples)
    except ValueError as error:
        raise ConfigError(f"--sequential: {error}") from None
    own = {name: one.model_dump(mode="json", exclude={"seed", "run"}) for name, one in loaded.items()}
    check_plan(folder / "plan.json", {"n": n, "blocks": blocks, "alpha": alpha, "resamples": resamples,
                                      "metric": metric, "split": split, "first_seed": first_seed, "configs": own})
    paths, scores = _names(configs), {name: list[float]() for name in loaded}
    while test.undecided:
        first = first_seed + len(test.looks) * n
        block = {name: [Job(folder / f"{name}-{seed}", ("train", paths[name], *settings, f"seed={seed}"))
                        for seed in range(first, first + n)] for name in test.waiting}
        run_jobs([job for place in range(n) for own in block.values() for job in own[place:place + 1]], jobs, progress,
               f"block {len(test.looks) + 1}: runs")
        new = {name: [final_score(job.folder, split, metric) for job in own] for name, own in block.items()}
        look = test.add(new)
        for name, values in new.items():
            scores[name] += values
        decided = SequentialResult(test, metric, split, scores, folder)
        write_text(folder / "sequential.json", json.dumps(plain(decided.plain()), indent=1) + "\n")
        if after_block:
            after_block(look)
    return SequentialResult(test, metric, split, scores, folder)


def _names(configs: Sequence[str]) -> dict[str, str]:
    """Name -> path of each config. The name is the file's stem, preceded by its folder if another config has it too."""
    stems = [Path(path).stem for path in configs]
    names = [stem if stems.count(stem) == 1 else f"{Path(path).absolute().parent.name}-{stem}"
             for path, stem in zip(configs, stems, strict=True)]
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(f"--sequential {' '.join(configs)}: name two or more different configs, e.g. a.yaml b.yaml")
    return dict(zip(names, configs, strict=True))
