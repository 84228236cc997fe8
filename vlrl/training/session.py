"""Everything around the training loop: run folder and lock, resume, evaluation, signals, the end of a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vlrl import config
from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.config.sections import PAIRS
from vlrl.data.samples import parts_of, with_split
from vlrl.distributed import comm
from vlrl.errors import RunError, TrainingError
from vlrl.evaluation.basis import changed_basis, evaluation_basis
from vlrl.evaluation.evaluate import evaluate, evaluation_line
from vlrl.models import families
from vlrl.models.loading import ADAPTERS
from vlrl.monitoring import trackers
from vlrl.monitoring.progress import Progress
from vlrl.monitoring.signals import StopSignals, write_to_terminal
from vlrl.monitoring.watchdog import Watchdog
from vlrl.rollout.error_limits import check_errors
from vlrl.store import RunFolder, checkpoint, comparable, files
from vlrl.store.lock import Lock, NoLock
from vlrl.store.run_folder import PINS
from vlrl.store.writer import BackgroundWriter
from vlrl.task.loading import notebook_warning
from vlrl.training import callbacks, checkpointing, epochs, inert, resume, sources
from vlrl.training.build import Parts
from vlrl.training.build_engine import remove_engine_folder
from vlrl.training.checkpointing import RunCheckpoints, Saver
from vlrl.training.emergency_checkpoint import EmergencyCheckpoint
from vlrl.training.run_log import RunLog, step_line
from vlrl.training.update import PerToken
from vlrl.types import Group

_LONG_S = 10.0
"""If the previous step took longer than this many seconds, an interrupt saves the completed steps immediately."""

_NEEDS = Table({"find": "vlrl.tools.machine.needs:find"})
"""Function that finds what a run's presets need and the config lacks."""
_MEASURED = Table({PAIRS: "vlrl.methods.preferences.heldout:heldout_pairs"})
"""For a value of algo.loss whose evaluations have no rewards: function (parts, split, completed steps) that evaluates a
split and returns (record, groups)."""
_RUN = Table({"run": "vlrl.tools.run:Run"})
_HUB = Table({"pin": "vlrl.data.sources.hub:pin"})


class Session:
    """One run in one folder, as a context manager around the training loop. After entering it, `folder` is the run
    folder with `start` completed steps, and `checkpoint` is the folder to load weights from, or None. Raises RunError
    if the folder is in use or belongs to a run with other settings."""

    def __init__(self, settings: Config, accelerator: Accelerator, own_callbacks: Sequence[Any] = ()):
        self.config, self.accelerator = settings, accelerator
        self.folder = RunFolder(settings.run.dir, settings.store.media)
        self.start, self.checkpoint, self.done = 0, None, 0
        self.ended_early = ""
        """Why the run ends before its last step as finished: by eval.patience or a callback; "" while it does not."""
        self._callbacks = own_callbacks
        self.parts: Parts
        self.progress = Progress(settings.steps, 0, enabled=False)
        self._stack = contextlib.ExitStack()
        self._stop = threading.Event()
        self._writer = BackgroundWriter()
        self._saver = Saver(self.folder.checkpoints, settings.save, config.fixed_settings(settings))
        self._signals = StopSignals(self._interrupt, settings.save.grace, self._tell)
        self._emergency: EmergencyCheckpoint | None = None
        """Saves the completed steps when an error ends the run; None before `resume`."""
        self._ending = False
        self._lock: Lock = NoLock()
        self._state, self._step_s = "running", 0.0

    def __enter__(self) -> Session:
        path, warnings, shared, length = comm.on_main(self._open, "opening the run folder")
        self.config = epochs.with_length(self.config, length)
        with self._closing_on_error():
            for name, content in shared.items():
                comm.together(partial(files.await_shared, self.folder.path / name, content))
        self._stack.callback(remove_engine_folder, self.config)
        self._stack.enter_context(Watchdog(self.config.limits.stuck_s, self.folder.path))
        self.checkpoint = path
        self.start = self.done = self._saver.saved = checkpoint.step_of(path) if path else 0
        self.progress = self._stack.enter_context(Progress(self.config.steps, self.start, enabled=comm.is_main()))
        for line in (*epochs.length_lines(self.config), *(f"warning: {warning}" for warning in warnings)):
            self.progress.print(line)
        self._stack.enter_context(self._signals)
        return self

    def _open(self) -> tuple[Path | None, tuple[str, ...], dict[str, Any], epochs.Length]:
        """Locks the run folder and prepares it for this run; on rank 0. Returns (folder of the checkpoint to resume
        from, or None; warnings; {file name: content} of the files that every rank needs; length of the run)."""
        self._lock = self._stack.enter_context(self.folder.lock(self.config.run.steal_lock))
        with self._closing_on_error():
            if self.config.resume == "never":
                files.move_to_backup(self.folder.path)
            latest = resume.find_checkpoint(self.folder, self.config)
            # without a checkpoint earlier evaluations may be of another model or other settings
            self.folder.truncate(latest.step, evaluated=latest.path is not None)
            self._pin_sources(goes_on=latest.path is not None)
            length = epochs.length_of(self.config)
            settled = epochs.with_length(self.config, length)
            self.folder.create(config.dump(settled), settled.seed)
            shared = {name: files.read_json(self.folder.path / name) for name in (PINS, "env.json")}
            return latest.path, latest.warnings, shared, length

    def _pin_sources(self, goes_on: bool) -> None:
        if named := with_split([self.config.data, *(entry.data for entry in self.config.tasks)]):
            _HUB["pin"](named, self.folder.path, files.cache_folder(self.config.data.cache), goes_on)
        else:
            (self.folder.path / PINS).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Any:
        try:
            yield
        except BaseException:
            self._stack.close()
            raise

    def resume(self, parts: Parts) -> Parts:
        """Loads the state of the trainer from the checkpoint, if there is one, opens the trackers, and prints the run's
        warnings. Returns `parts`."""
        self.parts, say = parts, self.progress.print
        for part in (parts.prefetch, parts.policy, parts.engine, parts.scorer, parts.source,
                     parts.source.generator.services):
            if part is not None:
                self._stack.callback(part.close)
        found: list[Any] = [one for one in inert.find(self.config, parts.task) if not one.usual]
        if self.config.presets:
            found += _NEEDS["find"](self.config, parts.task)
        for one in found:
            say(str(one))
        self._checkpoints = RunCheckpoints(parts, self.folder, self._saver, self.flush, say)
        if self.checkpoint:
            self._checkpoints.restore(self.checkpoint, self.start)
        self._checkpoints.try_saving()
        self._log = RunLog(parts, self.folder, self.accelerator, self.progress, self.start)
        self._stack.callback(self._log.close)
        if comm.is_main():
            self._saver.start()
        self._emergency = EmergencyCheckpoint(parts, self.folder.path, self._lock, self._saver, self.start)
        policy, learns = parts.policy, parts.policy.trainable()
        trained = sum(getattr(p, "ds_numel", p.numel()) for _, p in learns)
        say(f"{self.folder.path}: {self.config.task_name} with {self.config.model.name}, {trained:,} trained "
            f"parameters on {comm.world()} x {policy.device.type}")
        counts = families.parameters_by_part(learns, policy.family)
        say(f"trained parameters{' of an adapter' if policy.lora else ''}: {counts}")
        for note in filter(None, (getattr(own, "note", "") for own in parts_of(parts.source.samples))):
            say(note)
        for notice in (families.unknown_family_notice(policy.family),
                       families.unused_layers(learns, policy.family, policy.base.config),
                       ADAPTERS["several_parts"]([name for name, _ in learns], policy.family,
                                                 self.config.model.lora.target) if policy.lora else ""):
            if notice:
                say(notice)
        names = [self.config.task.name, *(entry.name for entry in self.config.tasks)]
        kept = comm.on_main(lambda: sources.keep(self.folder.path, self.config), "copying the task's code") or ()
        for warning in (*kept, *filter(None, map(notebook_warning, names)), *parts.warnings):
            say(f"warning: {warning}")
        self._beat()
        return parts

    def finish(self) -> None:
        """Saves and evaluates the last step, unless this has been done."""
        self._checkpoints.save(self.done)
        if not self.complete:
            comm.on_main(self._saver.wait)
            self._state = "interrupted"
            self.progress.print(f"stopped after {self.done} of {self.config.steps} steps, saved in "
                                f"{self.folder.checkpoints}. The same command resumes from there.")
            return
        self.parts.engine.sync(self.parts.policy, self.done)
        self._evaluate()
        comm.on_main(self._saver.wait)
        if self.done < self.config.steps:
            self.progress.print(f"ended early after {self.done} of {self.config.steps} steps: {self.ended_early}")
        self._state = "finished"

    @property
    def complete(self) -> bool:
        """Whether the run has done its last step, or has ended early on purpose (`ended_early`)."""
        return self.done >= self.config.steps or bool(self.ended_early)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end(kind, error)
        except Exception as later:
            if error is None:
                raise
            # the first error is raised
            self._tell(f"\nwarning: while the run ended: {type(later).__name__}: {later}\n")

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self._signals.completed()
        self._ending = True
        try:
            if kind is not None:
                self._state = "interrupted" if kind is KeyboardInterrupt else "failed"
            if self._saver.busy:
                again = "once more" if self._signals.came else "Ctrl-C twice"
                self._tell(f"\nThe checkpoint that is being written is finished first; {again} ends at once.\n")
            self._end_writing(self._writer, "the rollouts of the last step are")
            if error is not None:
                comm.end_by_error(error, lambda: self._emergency.end(error) if self._emergency else None)
            self._end_writing(self._saver, "a checkpoint that was being written is")
            if comm.is_main():
                self._beat()
        finally:
            self._stack.close()

    def evaluate_if_due(self, done: int) -> None:
        """Evaluates before the first step and after every eval.every steps; `done` is the number of completed steps."""
        if self.evaluation_due(done):
            self._evaluate()

    def evaluation_due(self, done: int) -> bool:
        """Whether `evaluate_if_due` evaluates after `done` completed steps."""
        every = self.config.eval.every
        return done == 0 or (every > 0 and done % every == 0)

    def write(self, step: int, groups: Sequence[Group], per_token: PerToken) -> None:
        """Writes the rollouts of a step in the background. per_token: arrays of the rollouts in the order of `groups`;
        groups at the end that are not trained on have none."""
        if self.config.store.rollouts:
            count = sum(len(g.rollouts) for g in groups)
            padded = {k: [*arrays, *[None] * (count - len(arrays))] for k, arrays in per_token.items()}
            self._writer.submit(partial(self.folder.write_rollouts, step, comm.rank(), groups, padded))

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Writes the metrics of a step to metrics.jsonl, and updates progress, heartbeat and trackers."""
        line, spans = step_line(step, metrics, self.parts)
        self._step_s = line["time/total_s"]
        if comm.is_main():
            self._log.append(line)
        self.done = step + 1
        if self._emergency:
            self._emergency.completed(self.done)
        if comm.is_main():
            self._call("on_step", step, line)
            alerts = self._log.show(line, spans, groups)
            self._beat(reward=line.get("reward/mean"))
            self._log.track({k: v for k, v in {**line, **alerts}.items() if k != "step"}, step)
            self._log.track_groups(groups, step)

    def save_if_due(self, done: int) -> None:
        """Saves if `done` completed steps are a multiple of save.every. Raises the error of a background save."""
        self._signals.completed()
        comm.on_main(self._saver.check)
        if self.config.save.every and done % self.config.save.every == 0:
            self._checkpoints.save(self.done)

    def interrupted(self) -> bool:
        """Whether any rank has received a signal to stop the run, or a callback ends it. Called when a step is
        completed."""
        if self._callbacks and not self.ended_early:
            self.ended_early = comm.broadcast("a callback has stopped the run" if any(self._call("stop")) else "")
        stopped = any(comm.gather(self._stop.is_set() or bool(self.ended_early)))
        if self._emergency and comm.is_main():
            self._emergency.keep()
        return stopped

    @contextlib.contextmanager
    def keeping_failed(self, step: int, groups: Sequence[Group]) -> Iterator[None]:
        """Context manager around the training of a step. If the block raises a TrainingError, writes the step's
        rollouts to the folder failed/, and adds the name of their file to the message."""
        try:
            yield
        except TrainingError as error:
            failed = RunFolder(self.folder.path / "failed", self.config.store.media)
            try:
                outcome = f"The step's rollouts are in {failed.write_rollouts(step, comm.rank(), groups)}."
            except RunError as lost:
                outcome = f"The step's rollouts are lost: {lost}"
            raise type(error)(f"{error} {outcome}") from None

    def flush(self) -> None:
        """Waits until the rollouts of earlier steps are on disk. Called on every rank."""
        with self.parts.clock("store"):
            comm.together(self._writer.flush)

    def _end_writing(self, writer: BackgroundWriter | Saver, what: str) -> None:
        try:
            writer.close()
        except Exception as error:  # must not hide the error that ends the run
            self.progress.print(f"warning: {what} not on disk: {error}")

    def _evaluate(self) -> None:
        parts, done = self.parts, self.done
        self.flush()
        known = comm.broadcast({(r["step"], r["split"]): r for r in self.folder.evals()} if comm.is_main() else None)
        for split in self.config.eval.splits if self.config.eval.samples else ():
            if (done, split) in known:
                if done == self.start:  # trackers drop what was logged from this step on
                    self._log.track_evaluation(known[done, split])
                continue
            with parts.clock("eval"):
                record, groups = self._measured(split, done)
                path = self.folder.write_rollouts(done, comm.rank(), groups, split=split)
            what = f"evaluation of {split} at step {done}"
            check_errors(groups, self.config.limits, what, path)
            if comm.is_main():
                if names := changed_basis(record["measured"], split, self.folder.evals()):
                    record["changed"] = names
                    self.progress.print(f"warning: the evaluation of {split} has changed ({', '.join(names)}): it is "
                                        "not compared with earlier ones for gain and best checkpoint.")
                self.folder.append_eval(record)
                self.progress.print(evaluation_line(record))
                self._log.check_evaluations(done)
                self._call("on_evaluation", done, record)
            self._log.track_evaluation(record)
            self._log.track_groups(groups, done, split)
        self._checkpoints.save_best(done)
        self.ended_early = self.ended_early or comm.broadcast(self._out_of_patience() if comm.is_main() else "")

    def _out_of_patience(self) -> str:
        """Why the run ends early by eval.patience: its last evaluations brought no new best value; "" otherwise."""
        settings, metric = self.config.eval, self.config.save.best
        if not (settings.patience and settings.every and settings.samples and settings.splits and metric):
            return ""
        evals = comparable(self.folder.evals())
        best = trackers.best_of(evals, settings.splits[0], metric)
        later = [r["step"] for r in evals if r["split"] == settings.splits[0] and r["step"] > best["step"]] if best \
            else []
        return "" if len(set(later)) < settings.patience else (
            f"{len(set(later))} evaluations have brought no higher {metric} than {best[metric]:.4g} at step "
            f"{best['step']} (eval.patience={settings.patience})" if best else "")

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Calls a method of the callbacks on the main process. Returns the results; [] elsewhere."""
        if not (self._callbacks and comm.is_main()):
            return []
        return callbacks.call(self._callbacks, name, _RUN["run"](self.folder.path), *arguments)

    def _measured(self, split: str, done: int) -> tuple[dict[str, Any], list[Group]]:
        """Evaluates a split. Returns (record for eval.jsonl, this rank's evaluated groups: [] without rewards)."""
        parts, generator = self.parts, self.parts.source.generator
        if own := _MEASURED.get(self.config.algo.loss.name):
            record, groups = own(parts, split, done)
            return {**record, "measured": evaluation_basis(groups, self.config)}, []
        record, groups = evaluate(parts.task, parts.prefetch, parts.engine, self.config, split, done,
                                  self.progress.busy, generator.likelihoods, generator.score, generator.services)
        record["measured"] = evaluation_basis(groups, self.config)
        if not parts.source.generates:
            from vlrl.training.heldout_loss import heldout_loss  # of supervised runs
            record |= heldout_loss(parts, split, done)
        return record, groups

    def _beat(self, **more: Any) -> None:
        if comm.is_main():
            self.folder.heartbeat({"step": self.done, "steps": self.config.steps, "state": self._state,
                                   "saved": self._saver.saved, "eta_s": self.progress.eta_s, **more})

    def _tell(self, text: str) -> None:
        if comm.is_main():
            write_to_terminal(text)

    def _interrupt(self, number: int) -> None:
        """Handles the first signal to stop the run. number: the signal. Saves the completed steps in the background if
        steps take long, and prints what happens next. Takes no lock, as the main thread may hold any lock right now."""
        self._stop.set()
        if not comm.is_main() or not hasattr(self, "parts"):
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._ending:
            self._signals.completed()
            self._tell(f"\n{name}: the run ends. Press again to stop at once.\n")
            return
        optimizer = {"optimizer": self.parts.optimizer.state_dict()}
        cost = checkpointing.estimate(self.folder.checkpoints, checkpointing.size_of(self.parts.policy, optimizer))
        limit = "" if number == signal.SIGINT else f" within {self.config.save.grace:g} s"
        if self._emergency and self._step_s >= _LONG_S and self._emergency.begin():
            says = f"saving the {self.done} completed steps at once ({cost}); the current step continues{limit}"
        else:
            says = f"finishing this step{limit}, then saving ({cost})"
        self._tell(f"\n{name}: {says}. Press again to stop at once (only the current step is lost).\n")
