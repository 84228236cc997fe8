"""Reports the steps of a run: metrics.jsonl, rejected.jsonl, progress, alerts and trackers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from vlrl.config.algo import SUPERVISED
from vlrl.config.registry import Table
from vlrl.data.samples import parts_of
from vlrl.distributed import comm
from vlrl.models.token_text import tokenizer_file
from vlrl.monitoring import trackers
from vlrl.monitoring.alerts import Alerts, resolved_alerts
from vlrl.monitoring.metrics import peak_gib
from vlrl.monitoring.progress import Progress
from vlrl.store import RunFolder, comparable, files
from vlrl.task import Task
from vlrl.training.build import Parts
from vlrl.types import Group

_PICTURES = Table({name: f"vlrl.monitoring.tracked_groups:{function}" for name, function in {
    "view": "group_view", "send": "send"}.items()})
_SHOWN = 20
"""Number of rejected prompts that are printed."""


class RunLog:
    """Writes and shows the metrics of steps and evaluations. Made on every rank, because every rank has trackers.
    `append`, `show` and `check_evaluations` are called only on the main process."""

    def __init__(self, parts: Parts, folder: RunFolder, accelerator: Accelerator, progress: Progress, start: int):
        self.parts, self.config, self.folder = parts, parts.config, folder
        self.accelerator, self.progress, self._rejections = accelerator, progress, 0
        if not start and comm.is_main():
            self._append_left_out()
        comm.on_main(self._write_tokenizer)
        if self.config.log.trackers:
            options = trackers.options(folder.path, start) if comm.is_main() else {}
            accelerator.init_trackers(self.config.log.project, trackers.flat_settings(self.config), options)
            if comm.is_main() and "mlflow" in self.config.log.trackers:
                run: Any = accelerator.get_tracker("mlflow", unwrap=True)
                trackers.note_mlflow_run(folder.path, run.info.run_id)
        self._alerts = Alerts(resolved_alerts(self.config), folder.path, progress.print, folder.metrics(),
                              _paid_parts(parts.task)) if comm.is_main() else None

    def append(self, line: Mapping[str, float]) -> None:
        """Writes `line`, the metrics of a step, to metrics.jsonl, and the reasons for rejected prompts to
        rejected.jsonl. Also prints the first reasons."""
        for reason in self.parts.source.rejected.take():
            self._append_rejected(int(line["step"]), reason)
            self._rejections += 1
            if self._rejections <= _SHOWN:
                self.progress.print(f"left out: {reason}")
        self.folder.append_metrics(line)

    def show(self, line: Mapping[str, float], spans: Sequence[Any], groups: Sequence[Group]) -> dict[str, float]:
        """Shows a step in the progress display. Returns the alerts of the step as metrics for trackers. line: the
        step's metrics. spans: time spans of phases, written to timeline.jsonl if async.max_staleness is set."""
        step = int(line["step"])
        alerts = self.alerts.check(line)
        if self.config.asynchronous.max_staleness:
            self.folder.append_timeline(step, spans)
        supervised = self.config.algo.loss.name in SUPERVISED  # answers of the data set show nothing about the model
        self.progress.update(step + 1, {k: v for k, v in line.items()
                                        if not (supervised and k.startswith("reward/"))})
        every = self.config.log.samples_every
        if groups and every and step % every == 0:
            self.progress.sample_answer(groups[0])
        return alerts

    def check_evaluations(self, done: int) -> None:
        """Raises an alert if the metric that save.best names has dropped in the last evaluation. If save.best is not
        set, or lower values of the metric are better, the mean reward is checked instead."""
        best = self.config.save.best or "reward/mean"
        evals = comparable(self.folder.evals())
        self.track(self.alerts.evaluated(evals, best if trackers.direction(best) > 0 else "reward/mean"), done)

    def track_evaluation(self, record: Mapping[str, Any]) -> None:
        """Sends the record of an evaluation (a line of eval.jsonl) to the trackers."""
        self.track({f"eval/{record['split']}/{k}": v for k, v in record.items()
                    if k not in ("split", "measured", "changed")}, record["step"])

    def track(self, values: Mapping[str, Any], step: int) -> None:
        """Sends metrics to the trackers."""
        if values and self.config.log.trackers:
            self.accelerator.log(dict(values), step=step)

    def track_groups(self, groups: Sequence[Group], step: int, split: str = "") -> None:
        """Sends images, completions and histograms of this rank's groups to the trackers, if log.pictures is set.
        `split` is the split of an evaluation; empty for a training step."""
        most, every = self.config.log.pictures, self.config.log.pictures_every
        if not most or not groups or not comm.is_main() or (not split and step % every):
            return
        view = _PICTURES["view"](groups, most, step)
        for name in self.config.log.trackers:
            run = self.accelerator.get_tracker(name, unwrap=True)
            _PICTURES["send"](name, run, view, f"eval-groups/{split}" if split else "groups", step)

    @property
    def alerts(self) -> Alerts:
        """The object that checks metrics for alerts; only on the main process."""
        assert self._alerts
        return self._alerts

    def close(self) -> None:
        """Closes the trackers and sends pending alerts to the webhook. The process group stays open."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self._alerts:
            self._alerts.close()

    def _append_rejected(self, step: int, reason: str) -> None:
        files.append_line(self.folder.path / "rejected.jsonl", json.dumps({"step": step, "reason": reason}))

    def _append_left_out(self) -> None:
        for own in parts_of(self.parts.source.samples):
            for bad in getattr(own, "quarantined", ()):
                self._append_rejected(0, f"{bad.where}: {bad.reason}")

    def _write_tokenizer(self) -> None:
        text = tokenizer_file(self.parts.policy.processor.tokenizer) if self.config.store.rollouts else None
        if text is not None:
            self.folder.write_tokenizer(text)


def step_line(step: int, metrics: Mapping[str, float], parts: Parts) -> tuple[dict[str, float], Sequence[Any]]:
    """Returns (the metrics of a step as a line of metrics.jsonl, the time spans of the step's phases). Takes times and
    spans from the clock of `parts`, which restarts."""
    times, spans, features = parts.clock.take(), parts.clock.take_spans(), parts.policy.features
    work = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/completion", 0.0)
    cached = {} if features is None else features.metrics()
    return {"step": step, **metrics, **cached, **times, "tokens_per_s": work / times["time/total_s"],
            "memory/peak_gib": peak_gib()}, spans


def _paid_parts(task: Task) -> list[str]:
    return sorted({part for one in task.members for part, weight in one.weights_at(0).items()
                   if weight > 0 and one.best_parts.get(part, 1.0) > 0})
