"""What surrounds the loop: the run folder and its lock, resume, evaluation, saving, logging, signals, the end."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from vlrl import config
from vlrl.config.schema import Config
from vlrl.curriculum.visited import write_visited
from vlrl.distributed import comm
from vlrl.errors import RunError, TrainingError
from vlrl.evaluation.evaluate import evaluate, evaluation_line
from vlrl.models import families, fsdp
from vlrl.monitoring import trackers
from vlrl.monitoring.alerts import Alerts, watched
from vlrl.monitoring.metrics import peak_gib
from vlrl.monitoring.progress import Progress
from vlrl.monitoring.signals import StopSignals, to_terminal
from vlrl.monitoring.watchdog import Watchdog
from vlrl.rollout.group_source import check_score_errors
from vlrl.store import RunFolder, checkpoint, files
from vlrl.store.lock import Lock, Unlocked
from vlrl.store.writer import BackgroundWriter
from vlrl.task import Task
from vlrl.task.mixture import Turns
from vlrl.training import checkpointing, inert
from vlrl.training.build import Parts, remove_engine_folder
from vlrl.training.checkpointing import Saver
from vlrl.training.emergency_checkpoint import Rest
from vlrl.training.update import PerToken
from vlrl.types import Group, Sample

_SHOWN = 20
"""Rejected prompts that are printed."""
_LONG_S = 10.0
"""A step that takes longer may be interrupted: what came before it can then be saved while it goes on."""


class Session:
    """One run in one folder, from where it stood to its end. A context manager around the loop.

    After `with`: `folder` is the run folder with `start` completed steps; `checkpoint` is the folder to take weights
    from, or None. Raises RunError when the folder is in use or holds a run of other settings.
    """

    def __init__(self, settings: Config, accelerator: Accelerator):
        self.config, self.accelerator = settings, accelerator
        self.folder = RunFolder(settings.run.dir, settings.store.media)
        self.start, self.checkpoint, self.done = 0, None, 0
        self.parts: Parts
        self.progress = Progress(settings.steps, 0, enabled=False)
        self._stack = contextlib.ExitStack()
        self._stop = threading.Event()
        self._writer = BackgroundWriter()
        self._saver = Saver(self.folder.checkpoints, settings.save)
        self._signals = StopSignals(self._interrupt, settings.save.grace, self._tell)
        self._rest: Rest | None = None
        """From the first step on."""
        self._ending = False
        self._lock: Lock = Unlocked()
        self._state, self._rejections, self._step_s = "running", 0, 0.0
        self._changed_files: set[str] = set()

    # --- beginning and end ---------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        path, warnings, environment = comm.on_main(self._open, "opening the run folder")
        with self._closing_on_error():
            comm.together(lambda: files.await_shared(self.folder.path / "env.json", environment))
        self._stack.callback(remove_engine_folder, self.config)
        self._stack.enter_context(Watchdog(self.config.limits.stuck_s, self.folder.path))
        self.checkpoint = path
        self.start = self.done = checkpoint.step_of(path) if path else 0
        self.progress = self._stack.enter_context(
            Progress(self.config.steps, self.start, enabled=comm.is_main()))
        for warning in warnings:
            self.progress.print(f"warning: {warning}")
        self._stack.enter_context(self._signals)
        return self

    def _open(self) -> tuple[Path | None, tuple[str, ...], Any]:
        """Locks the folder and decides where to go on, on rank 0; also returns what env.json says."""
        self._lock = self._stack.enter_context(self.folder.lock(self.config.run.steal_lock))
        with self._closing_on_error():
            if self.config.resume == "never":
                files.set_aside(self.folder.path)
            found = checkpoint.latest(self.folder.checkpoints, full=True)
            if found.path is None and self.config.resume == "must":
                raise RunError(f"resume=must, but {self.folder.checkpoints} holds no whole checkpoint. "
                               "Start with resume=auto.")
            if found.path is not None:
                self._check_settings()
            # without a checkpoint nothing says that an earlier evaluation was of this model and these settings
            self.folder.truncate(found.step, evaluated=found.path is not None)
            self.folder.create(config.dump(self.config), self.config.seed)
            return found.path, found.warnings, files.read_json(self.folder.path / "env.json")

    @contextlib.contextmanager
    def _closing_on_error(self) -> Any:
        try:
            yield
        except BaseException:
            self._stack.close()
            raise

    def _check_settings(self) -> None:
        path = self.folder.path / "config.yaml"
        try:
            before = config.validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunError(f"{self.folder.checkpoints} holds a checkpoint, but the settings it was made with cannot be "
                           f"read from {path}: {error} Restore that file, or start over with resume=never.") from None
        config.refuse_other_kind(before, self.config, self.folder.path)
        changed = config.differences(before, self.config)
        if changed:
            raise RunError(f"{self.folder.path} holds a run with other settings, so its checkpoint cannot go on:\n  "
                           + "\n  ".join(changed) + "\nSet them back, choose another run.dir, or start over with "
                           "resume=never (the old run is kept beside).")

    def resume(self, parts: Parts) -> Parts:
        """Takes the trainer's state from the checkpoint, if there is one, and opens the trackers."""
        self.parts = parts
        self._stack.callback(parts.prefetch.close)
        self._stack.callback(parts.policy.close)
        self._stack.callback(parts.engine.close)
        self._stack.callback(parts.scorer.close if parts.scorer else lambda: None)
        self._stack.callback(parts.source.close)
        for one in inert.find(self.config, parts.task):
            self.progress.print(str(one))
        if self.checkpoint:
            state = checkpoint.load_state(self.checkpoint, check=False)
            fsdp.load_optimizer(parts.optimizer, state["optimizer"])
            parts.source.load_state_dict(state["source"])
            parts.policy.scaler.load_state_dict(state.get("scaler", {}))
            parts.algorithm.load_state_dict(state.get("algorithm", {}), parts.policy)
            self.progress.print(f"going on from {self.checkpoint} ({self.start} steps completed)")
            if comm.is_main():
                self._tell_new_weights(parts.task)
        if not self.start and comm.is_main():
            self._keep_left_out()
        comm.on_main(self._write_tokenizer)
        if self.config.log.trackers:
            options = trackers.options(self.folder.path, self.start) if comm.is_main() else {}
            self.accelerator.init_trackers(self.config.log.project, trackers.flat_settings(self.config), options)
        if comm.is_main():
            self._saver.start()
        self._rest = Rest(parts, self.folder.path, self._lock, self._saver, self.start)
        trained = sum(getattr(p, "ds_numel", p.numel()) for _, p in parts.policy.trainable())
        self.progress.print(f"{self.folder.path}: {self.config.task_name} with {self.config.model.name}, "
                            f"{trained:,} trained parameters on {comm.world()} x {parts.policy.device.type}")
        if said := families.notice(parts.policy.family):
            self.progress.print(said)
        for warning in parts.warnings:
            self.progress.print(f"warning: {warning}")
        self._watch_metrics()
        self._beat()
        return parts

    def _watch_metrics(self) -> None:
        if comm.is_main():
            self.alerts = Alerts(watched(self.config), self.folder.path, self.progress.print, self.folder.metrics())
            self._stack.callback(self.alerts.close)

    def _write_tokenizer(self) -> None:
        """For showing token ids as text; a tokenizer that is none of `tokenizers`, or holds own code, is left out."""
        text, fast = None, getattr(self.parts.policy.processor.tokenizer, "backend_tokenizer", None)
        if self.config.store.rollouts and fast is not None:
            with contextlib.suppress(Exception):  # what it raises for own code has no class of its own
                text = fast.to_str()
        if text is not None:
            self.folder.write_tokenizer(text)

    def _tell_new_weights(self, task: Task) -> None:
        """Warns when the task's file gives its parts other weights than the last step had: no setting shows that."""
        last = self.folder.rollouts(self.start - 1, columns=["task", "weights"]).to_pylist()
        changed: list[str] = []
        for row in {row["task"]: row for row in last}.values():
            before, now = dict(row["weights"]), task.of(Sample(id="", task=row["task"])).weights_at(self.start - 1)
            changed += [f"{part} {before.get(part, 0):g} -> {now.get(part, 0):g}" for part in sorted({*before, *now})
                        if not math.isclose(before.get(part, 0), now.get(part, 0), rel_tol=1e-6)]
        if changed:
            self.progress.print(f"warning: the task weighs its parts otherwise than the steps before: "
                                f"{', '.join(changed)}. To start over: resume=never, or another run.dir")

    def finish(self) -> None:
        """Saves and evaluates the last step, if that was not done."""
        self._save()
        if self.done < self.config.steps:
            comm.on_main(self._saver.wait)
            self._state = "interrupted"
            self.progress.print(f"stopped after {self.done} of {self.config.steps} steps, saved in "
                                f"{self.folder.checkpoints}. The same command goes on from there.")
            return
        self.parts.engine.sync(self.parts.policy, self.done)
        self._evaluate()
        comm.on_main(self._saver.wait)
        self._state = "finished"

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end(kind, error)
        except Exception as later:
            if error is None:
                raise
            # the first error is raised on
            self._tell(f"\nwarning: while the run ended: {type(later).__name__}: {later}\n")

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self._signals.completed()
        self._ending = True
        try:
            if kind is not None:
                self._state = "interrupted" if kind is KeyboardInterrupt else "failed"
            if self._saver.busy:
                self._tell("\nThe checkpoint that is being written is finished first; once more ends at once.\n")
            self._end_writing(self._writer, "the rollouts of the last step are")
            if error is not None:
                comm.ended(error, lambda: self._rest.end(error) if self._rest else None)
            self._end_writing(self._saver, "a checkpoint that was being written is")
            if comm.is_main():
                self._beat()
            if self.config.log.trackers and hasattr(self, "parts"):
                self.accelerator.end_training()
        finally:
            self._stack.close()

    # --- during the run ------------------------------------------------------------------------------------------

    def evaluate_if_due(self, done: int) -> None:
        """Evaluates before the first step and every eval.every steps; `done` steps are completed."""
        if self.evaluation_due(done):
            self._evaluate()

    def evaluation_due(self, done: int) -> bool:
        """Whether `evaluate_if_due` evaluates."""
        every = self.config.eval.every
        return done == 0 or (every > 0 and done % every == 0)

    def write(self, step: int, groups: Sequence[Group], per_token: PerToken) -> None:
        """Writes the step's rollouts in the background; those after the trained ones have no per-token values."""
        if self.config.store.rollouts:
            count = sum(len(g.rollouts) for g in groups)
            padded = {k: [*arrays, *[None] * (count - len(arrays))] for k, arrays in per_token.items()}
            self._writer.submit(partial(self.folder.write_rollouts, step, comm.rank(), groups, padded))

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """One line of metrics.jsonl; progress, heartbeat and trackers."""
        times, spans = self.parts.clock.take(), self.parts.clock.take_spans()
        work = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/completion", 0.0)
        features = self.parts.policy.features
        cached = {} if features is None else features.metrics()
        line = {"step": step, **metrics, **cached, **times, "tokens_per_s": work / times["time/total_s"],
                "memory/peak_gib": peak_gib()}
        self._step_s = times["time/total_s"]
        if comm.is_main():
            self._tell_rejected(step)
            self.folder.append_metrics(line)
        self.done = step + 1
        if self._rest:
            self._rest.completed(self.done)
        if not comm.is_main():
            return
        told = self.alerts.check(line)
        if self.config.asynchronous.max_staleness:
            self.folder.append_timeline(step, spans)
        supervised = self.config.algo.loss.name == "supervised"  # a given answer says nothing of the model
        self.progress.update(self.done, {k: v for k, v in line.items()
                                         if not (supervised and k.startswith("reward/"))})
        every = self.config.log.samples_every
        if groups and every and step % every == 0:
            self.progress.sample_answer(groups[0])
        self._beat(reward=line.get("reward/mean"))
        self._track({k: v for k, v in {**line, **told}.items() if k != "step"}, step)

    def save_if_due(self, done: int) -> None:
        """Saves every save.every steps. Raises what a save in the background raised."""
        self._signals.completed()
        comm.on_main(self._saver.check)
        if self.config.save.every and done % self.config.save.every == 0:
            self._save()

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed on any process; the step it fell into is completed."""
        stopped = any(comm.gather(self._stop.is_set()))
        if self._rest and comm.is_main():
            self._rest.keep()
        return stopped

    @contextlib.contextmanager
    def keeping_failed(self, step: int, groups: Sequence[Group]) -> Iterator[None]:
        """Writes the rollouts of a step that could not be trained on, and says where."""
        try:
            yield
        except TrainingError as error:
            failed = RunFolder(self.folder.path / "failed", self.config.store.media)
            try:
                told = f"The step's rollouts are in {failed.write_rollouts(step, comm.rank(), groups)}."
            except RunError as lost:
                told = f"The step's rollouts are lost: {lost}"
            raise type(error)(f"{error} {told}") from None

    # --- inside --------------------------------------------------------------------------------------------------

    def _tell_rejected(self, step: int) -> None:
        """Prints why prompts were left out (the first ones) and keeps every reason in rejected.jsonl."""
        rejected = self.parts.source.rejected
        for reason in rejected.take():
            files.append_line(self.folder.path / "rejected.jsonl", json.dumps({"step": step, "reason": reason}))
            self._rejections += 1
            if self._rejections <= _SHOWN:
                self.progress.print(f"left out: {reason}")

    def _keep_left_out(self) -> None:
        """Rows that were left out when the data was read, in rejected.jsonl too."""
        samples = self.parts.source.samples
        for own in samples.parts.values() if isinstance(samples, Turns) else (samples,):
            for bad in getattr(own, "quarantined", ()):
                line = {"step": 0, "reason": f"{bad.where}: {bad.reason}"}
                files.append_line(self.folder.path / "rejected.jsonl", json.dumps(line))

    def _tell_changed_files(self) -> None:
        """Says once of each file that it is no longer what was read."""
        for name in {*self.parts.source.fingerprint.written_to()} - self._changed_files:
            self._changed_files.add(name)
            self.progress.print(f"warning: {name} was written to, moved or removed since the run began, which goes on "
                                "with the rows that it found there. Bring the file back before the run is resumed: "
                                "other rows are refused then.")

    def _flush(self) -> None:
        with self.parts.clock("store"):
            comm.together(self._writer.flush)

    def _end_writing(self, writer: BackgroundWriter | Saver, what: str) -> None:
        try:
            writer.close()
        except Exception as error:  # the run ends by another error, which is to be seen
            self.progress.print(f"warning: {what} not on disk: {error}")

    def _evaluate(self) -> None:
        parts, done = self.parts, self.done
        self._flush()
        known = comm.broadcast({(r["step"], r["split"]) for r in self.folder.evals()} if comm.is_main() else None)
        for split in self.config.eval.splits if self.config.eval.samples else ():
            if (done, split) in known:
                if done == self.start:  # trackers drop from there on what the run had told them before
                    self._track_eval(next(r for r in self.folder.evals() if (r["step"], r["split"]) == (done, split)))
                continue
            with parts.clock("eval"):
                answering = parts.source.answering
                record, groups = evaluate(parts.task, parts.prefetch, parts.engine, self.config, split, done,
                                          self.progress.busy, answering.reference, answering.score)
                path = self.folder.write_rollouts(done, comm.rank(), groups, split=split)
            check_score_errors(groups, self.config.limits.score_errors, f"evaluation of {split} at step {done}", path)
            if comm.is_main():
                self.folder.append_eval(record)
                self.progress.print(evaluation_line(record))
                self._track(self.alerts.evaluated(self.folder.evals(), self.config.save.best or "reward/mean"), done)
            self._track_eval(record)
        self._keep_best()

    def _track_eval(self, record: Mapping[str, Any]) -> None:
        self._track({f"eval/{record['split']}/{k}": v for k, v in record.items() if k != "split"}, record["step"])

    def _track(self, values: Mapping[str, Any], step: int) -> None:
        if values and self.config.log.trackers:
            self.accelerator.log(dict(values), step=step)

    def _keep_best(self) -> None:
        """Saves and marks the checkpoint of `done` steps when its evaluation is the best so far."""
        metric, measured = self.config.save.best, self.config.eval
        if not (metric and measured.samples and measured.splits):
            return
        best = comm.on_main(lambda: trackers.best_of(self.folder.evals(), measured.splits[0], metric))
        if best and best["step"] == self.done:
            self._save()
            if comm.is_main():
                self._saver.mark_best(self.done, {"metric": metric, "value": best[metric], "split": best["split"]})

    def _save(self) -> None:
        """The checkpoint of `done` steps, unless a whole one is there already. What came before it is on disk then."""
        self._flush()
        source = self.parts.source
        with self.parts.clock("store"):
            comm.on_main(lambda: write_visited(self.folder.path / "prompts.parquet", source.prompts.history,
                                               source.samples), "writing prompts.parquet")
        comm.on_main(self._saver.check)
        if comm.broadcast(comm.is_main() and self._saver.has(self.done)):
            return
        if comm.is_main():
            self._tell_changed_files()
        parts = self.parts
        with parts.clock("save"):
            weights = fsdp.weights(parts.policy)
            state = fsdp.whole({"optimizer": parts.optimizer.state_dict(), "source": parts.source.state_dict(),
                                    "scaler": parts.policy.scaler.state_dict(),
                                    "algorithm": parts.algorithm.state_dict(parts.policy)})
            comm.on_main(lambda: self._saver.begin(self.done, parts.policy, state, weights),
                         f"saving step-{self.done:06d}")

    def _beat(self, **more: Any) -> None:
        if comm.is_main():
            self.folder.heartbeat({"step": self.done, "steps": self.config.steps, "state": self._state,
                                   "eta_s": self.progress.eta_s, **more})

    def _tell(self, text: str) -> None:
        if comm.is_main():
            to_terminal(text)

    def _interrupt(self, number: int) -> None:
        """The first signal. Between two lines of anything: no lock may be taken here."""
        self._stop.set()
        if not comm.is_main() or not hasattr(self, "parts"):
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._ending:
            self._signals.completed()
            self._tell(f"\n{name}: the run ends. Press again to stop at once.\n")
            return
        optimizer = {"optimizer": self.parts.optimizer.state_dict()}
        cost = checkpointing.expected(self.folder.checkpoints, checkpointing.size_of(self.parts.policy, optimizer))
        limit = "" if number == signal.SIGINT else f" within {self.config.save.grace:g} s"
        if self._rest and self._step_s >= _LONG_S and self._rest.begin():
            says = f"saving the {self.done} completed steps at once ({cost}); the step in flight goes on{limit}"
        else:
            says = f"finishing this step{limit}, then saving ({cost})"
        self._tell(f"\n{name}: {says}. Press again to stop at once (the step in flight is lost, nothing else).\n")
