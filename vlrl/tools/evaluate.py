"""`vlrl.evaluate`: evaluates a model on a config's task from Python, as `vlrl eval` does."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlrl.config import Config, config_of
from vlrl.errors import ConfigError
from vlrl.rollout.error_limits import check_errors
from vlrl.tools.evaluation.measure import choose_model, measure
from vlrl.tools.run import Run, load_run
from vlrl.tools.start.settings import with_heldout, with_task_named

_NOT_METRICS = {"step", "n", "rejected", "unscorable", "score_errors"}


def evaluate(config_or_run: str | Path | Config | Mapping[str, Any] | Run, /, *, checkpoint: str | Path | None = None,
             heldout: Any = None, **settings: Any) -> dict[str, dict[str, Any]]:
    """Evaluates a model on each of eval.splits. The run folder is neither locked nor changed.

    The first argument is a run or its folder, or a config as for `train`. `heldout` are other rows to evaluate on, in
    the forms of `train`. `checkpoint` is the folder of a checkpoint,
    or a run folder, which stands for its newest checkpoint. Without `checkpoint`, the newest checkpoint of run.dir is
    evaluated, or model.name if run.dir has no checkpoint. Returns split -> {"n": number of samples, "metrics": {name:
    {"mean", "low", "high"}}} with 95 % intervals; "low" and "high" are None for a metric without an interval. Raises
    ConfigError if there is nothing to evaluate, RunError for a damaged checkpoint."""
    settings = {**with_heldout(heldout, settings), **with_task_named(settings)}
    config_or_run = with_task_named(config_or_run) if isinstance(config_or_run, Mapping) else config_or_run
    if isinstance(config_or_run, (str, Path)) and os.path.isdir(config_or_run):
        config_or_run = load_run(Path(config_or_run))
    if isinstance(config_or_run, Run):  # the run's own settings, in its present folder
        config = config_of(config_or_run.config, **{"run.dir": config_or_run.path, **settings})
    else:
        config = config_of(config_or_run, **settings)
    if config.eval.samples == 0 or not config.eval.splits:
        raise ConfigError(f"eval.samples={config.eval.samples} and eval.splits={list(config.eval.splits)}: there is "
                          "nothing to measure. Set both, e.g. eval={'samples': 256, 'splits': ['heldout']}")
    nowhere = checkpoint is None and not config.run.dir
    chosen = choose_model(config, config.model.name if nowhere else None,
                          None if checkpoint is None else Path(checkpoint))
    for warning in chosen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    by_split = {}
    for record, groups in measure(config, chosen):
        split = record["split"]
        check_errors(groups, config.limits, f"evaluation of {split}", names=("score_errors",))
        by_split[split] = {"n": record["n"], "metrics": metrics_of(record)}
    return by_split


def metrics_of(record: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns metric -> {"mean", "low", "high"} from a line of eval.jsonl. low, high: 95 % interval, or None."""
    names = [name for name, value in record.items() if isinstance(value, (int, float)) and name not in _NOT_METRICS
             and "/ci95_" not in name and not name.endswith("/n")]
    return {name: {"mean": _finite(record[name]), "low": _finite(record.get(f"{name}/ci95_low")),
                   "high": _finite(record.get(f"{name}/ci95_high"))} for name in names}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
