"""The id of a run at its trackers, with which a resumed run continues, and the best evaluation of a run."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.errors import RunError
from vlrl.store.files import read_json, write_text


def run_id(folder: Path) -> str:
    """The id of a run at its trackers: WANDB_RUN_ID if set, else the id stored in tracker.json of the run folder."""
    path = folder / "tracker.json"
    known = (read_json(path) or {}).get("id")
    wanted = os.environ.get("WANDB_RUN_ID") or known or uuid.uuid4().hex[:8]
    if wanted != known:
        write_text(path, json.dumps({**(read_json(path) or {}), "id": wanted}) + "\n")
    return str(wanted)


def options(folder: Path, start: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments for opening each tracker, by tracker name, for a run that resumes after `start` steps.

    A killed process may have logged steps after `start`. TensorBoard hides these steps, and Weights & Biases ignores
    further values for them. MLflow continues the run that `note_mlflow_run` stored, and has these steps twice."""
    name = run_id(folder)
    known = (read_json(folder / "tracker.json") or {}).get("mlflow") if start else None
    return {"tensorboard": {"purge_step": start} if start else {}, "wandb": {"id": name, "resume": "allow"},
            "trackio": {"name": f"{folder.name}-{name}", "resume": "allow"},
            "mlflow": {"run_id": known} if known else {"run_name": f"{folder.name}-{name}"}}


def note_mlflow_run(folder: Path, mlflow_run: str) -> None:
    """Stores the id of MLflow's run in tracker.json."""
    path = folder / "tracker.json"
    write_text(path, json.dumps({**(read_json(path) or {}), "mlflow": mlflow_run}) + "\n")


def direction(metric: str) -> int:
    """Returns 1 if higher values of a metric in eval.jsonl are better, -1 if lower values are better, as for `loss`."""
    return -1 if metric == "loss" else 1


_ANSWERED = {"completion/length_mean", "unscorable"}
"""Keys of a line of eval.jsonl that show that its evaluation sampled completions."""


def best_of(evals: Sequence[Mapping[str, Any]], split: str, metric: str) -> Mapping[str, Any] | None:
    """Returns the line of eval.jsonl with the best `metric` of a split: the highest value, for `loss` the lowest; of
    equal lines, the first. Lines before the first training step do not count. None if no line has a value. Raises
    RunError if evaluations with rewards lack the metric."""
    lines = [line for line in evals if line.get("split") == split]
    scored = [line for line in lines if "reward/mean" in line or not _ANSWERED & line.keys()]
    if scored and not any(metric in line for line in lines):
        names = sorted(k for k, v in lines[-1].items() if f"{k}/ci95_low" in lines[-1])
        raise RunError(f"save.best={metric!r} is not a metric in eval.jsonl; the metrics of split {split} are "
                       f"{', '.join(names)}")
    values = [(line, line.get(metric)) for line in lines if line.get("step")]
    known = [(line, value) for line, value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return max(known, key=lambda pair: direction(metric) * pair[1])[0] if known else None


def flat_settings(settings: Config) -> dict[str, Any]:
    """Returns {dotted name: value} of all settings, with values that trackers accept."""
    def walk(tree: Mapping[str, Any], prefix: str) -> Any:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            elif prefix + key != "alerts.webhook":  # its path may be a secret
                yield prefix + key, value if isinstance(value, (int, float, str, bool)) else str(value)
    return dict(walk(settings.model_dump(mode="json"), ""))
