"""What surrounds the loop: the run folder and its lock, resume, evaluation, saving, logging, Ctrl-C, the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from vlrl import checkpoint, config, dist, families, files, sharding
from vlrl.assemble import Parts, remove_engine_folder
from vlrl.curriculum.visited import write_visited
from vlrl.errors import RunError, TrainingError
from vlrl.evaluate import evaluate
from vlrl.metrics import peak_gib
from vlrl.progress import Progress
from vlrl.rollout import check_score_errors
from vlrl.settings import Config
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.types import Group, Sample
from vlrl.update import PerToken
from vlrl.writer import BackgroundWriter

_SHOWN = 20
"""Rejected prompts that are printed."""


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
        self._state, self._rejections = "running", 0

    # --- beginning and end ---------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        path, warnings = dist.on_main(self._open)
        self._stack.callback(remove_engine_folder, self.config)
        self.checkpoint = path
        self.start = self.done = checkpoint.step_of(path) if path else 0
        self.progress = self._stack.enter_context(
            Progress(self.config.steps, self.start, enabled=dist.is_main()))
        for warning in warnings:
            self.progress.print(f"warning: {warning}")
        self._stack.enter_context(_on_interrupt(self._interrupt))
        return self

    def _open(self) -> tuple[Path | None, tuple[str, ...]]:
        """Locks the folder and decides where to go on; on rank 0."""
        self._stack.enter_context(self.folder.lock())
        with self._closing_on_error():
            if self.config.resume == "never":
                _set_aside(self.folder.path)
            found = checkpoint.latest(self.folder.checkpoints, full=True)
            if found.path is None and self.config.resume == "must":
                raise RunError(f"resume=must, but {self.folder.checkpoints} holds no whole checkpoint. "
                               "Start with resume=auto.")
            if found.path is not None:
                self._check_settings()
            # without a checkpoint nothing says that an earlier evaluation was of this model and these settings
            self.folder.truncate(found.step, evaluated=found.path is not None)
            self.folder.create(config.dump(self.config), self.config.seed)
            return found.path, found.warnings

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
        changed = config.differences(before, self.config)
        if changed:
            raise RunError(f"{self.folder.path} holds a run with other settings, so its checkpoint cannot go on:\n  "
                           + "\n  ".join(changed) + "\nSet them back, choose another run.dir, or start over with "
                           "resume=never (the old run is kept beside).")

    def resume(self, parts: Parts) -> Parts:
        """Takes the trainer's state from the checkpoint, if there is one, and opens the trackers."""
        self.parts = parts
        self._stack.callback(parts.prefetch.close)
        self._stack.callback(parts.engine.close)
        self._stack.callback(parts.source.close)
        parts.source.tell = self.progress.busy
        if self.checkpoint:
            state = checkpoint.load_state(self.checkpoint, check=False)
            sharding.load_optimizer(parts.optimizer, state["optimizer"])
            parts.source.load_state_dict(state["source"])
            parts.policy.scaler.load_state_dict(state.get("scaler", {}))
            parts.algorithm.load_state_dict(state.get("algorithm", {}), parts.policy)
            self.progress.print(f"going on from {self.checkpoint} ({self.start} steps completed)")
            if dist.is_main():
                self._tell_new_weights(parts.task)
        dist.on_main(self._write_tokenizer)
        if self.config.log.trackers:
            self.accelerator.init_trackers(self.config.log.project, _flat_settings(self.config))
        trained = sum(p.numel() for _, p in parts.policy.trainable())
        self.progress.print(f"{self.folder.path}: {self.config.task_name} with {self.config.model.name}, "
                            f"{trained:,} trained parameters on {dist.world()} x {parts.policy.device.type}")
        if said := families.notice(parts.policy.family):
            self.progress.print(said)
        self._beat()
        return parts

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
            self._state = "interrupted"
            self.progress.print(f"stopped after {self.done} of {self.config.steps} steps, saved in "
                                f"{self.folder.checkpoints}. The same command goes on from there.")
            return
        self.parts.engine.sync(self.parts.policy, self.done)
        self._evaluate()
        self._state = "finished"

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is not None:
                self._state = "interrupted" if kind is KeyboardInterrupt else "failed"
            self._end_writing()
            if dist.is_main():
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
            self._writer.submit(partial(self.folder.write_rollouts, step, dist.rank(), groups, padded))

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """One line of metrics.jsonl; progress, heartbeat and trackers."""
        times, spans = self.parts.clock.take(), self.parts.clock.take_spans()
        work = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/completion", 0.0)
        features = self.parts.policy.features
        cached = {} if features is None else features.metrics()
        line = {"step": step, **metrics, **cached, **times, "tokens_per_s": work / times["time/total_s"],
                "memory/peak_gib": peak_gib()}
        self.done = step + 1
        if not dist.is_main():
            return
        self._tell_rejected(step)
        self.folder.append_metrics(line)
        if self.config.asynchronous.max_staleness:
            self.folder.append_timeline(step, spans)
        supervised = self.config.algo.loss.name == "supervised"  # a given answer says nothing of the model
        self.progress.update(self.done, {k: v for k, v in line.items()
                                         if not (supervised and k.startswith("reward/"))})
        every = self.config.log.samples_every
        if groups and every and step % every == 0:
            self.progress.sample_answer(groups[0])
        self._beat(reward=line.get("reward/mean"))
        if self.config.log.trackers:
            self.accelerator.log({k: v for k, v in line.items() if k != "step"}, step=step)

    def save_if_due(self, done: int) -> None:
        """Saves every save.every steps."""
        if self.config.save.every and done % self.config.save.every == 0:
            self._save()

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed on any process; the step it fell into is completed."""
        return any(dist.gather(self._stop.is_set()))

    @contextlib.contextmanager
    def keeping_failed(self, step: int, groups: Sequence[Group]) -> Iterator[None]:
        """Writes the rollouts of a step that could not be trained on, and says where."""
        try:
            yield
        except TrainingError as error:
            failed = RunFolder(self.folder.path / "failed", self.config.store.media)
            path = failed.write_rollouts(step, dist.rank(), groups)
            raise type(error)(f"{error} The step's rollouts are in {path}; the last checkpoint is intact.") from None

    # --- inside --------------------------------------------------------------------------------------------------

    def _tell_rejected(self, step: int) -> None:
        """Prints why prompts were left out (the first ones) and keeps every reason in rejected.jsonl."""
        rejected = self.parts.source.rejected
        for reason in rejected.take():
            files.append_line(self.folder.path / "rejected.jsonl", json.dumps({"step": step, "reason": reason}))
            self._rejections += 1
            if self._rejections <= _SHOWN:
                self.progress.print(f"left out: {reason}")

    def _flush(self) -> None:
        with self.parts.clock("store"):
            dist.together(self._writer.flush)

    def _end_writing(self) -> None:
        try:
            self._writer.close()
        except Exception as error:  # the run ends by another error, which is to be seen
            self.progress.print(f"warning: the rollouts of the last step are not on disk: {error}")

    def _evaluate(self) -> None:
        parts, done = self.parts, self.done
        self._flush()
        known = dist.broadcast({(r["step"], r["split"]) for r in self.folder.evals()} if dist.is_main() else None)
        for split in self.config.eval.splits if self.config.eval.samples else ():
            if (done, split) in known:
                continue
            with parts.clock("eval"):
                record, groups = evaluate(parts.task, parts.prefetch, parts.engine, self.config, split, done,
                                          self.progress.busy, parts.source.reference)
                path = self.folder.write_rollouts(done, dist.rank(), groups, split=split)
            check_score_errors(groups, self.config.limits.score_errors, f"evaluation of {split} at step {done}", path)
            if dist.is_main():
                self.folder.append_eval(record)
                self.progress.print(_evaluation_line(record))
            if self.config.log.trackers:
                self.accelerator.log({f"eval/{split}/{k}": v for k, v in record.items() if k != "split"}, step=done)

    def _save(self) -> None:
        """The checkpoint of `done` steps, unless a whole one is there already. What came before it is on disk then."""
        self._flush()
        source = self.parts.source
        with self.parts.clock("store"):
            dist.on_main(lambda: write_visited(self.folder.path / "prompts.parquet", source.prompts.history,
                                               source.samples))
        if dist.broadcast(not checkpoint.problems(self.folder.checkpoints / f"step-{self.done:06d}", full=False)):
            return
        parts = self.parts
        with parts.clock("save"):
            write = partial(parts.policy.save, weights=sharding.weights(parts.policy))
            state = sharding.whole({
                "optimizer": parts.optimizer.state_dict(), "source": parts.source.state_dict(),
                "scaler": parts.policy.scaler.state_dict(), "algorithm": parts.algorithm.state_dict(parts.policy)})
            dist.on_main(lambda: checkpoint.save(
                self.folder.checkpoints, self.done, write, state, self.config.save.keep) and None)

    def _beat(self, **more: Any) -> None:
        if dist.is_main():
            self.folder.heartbeat({"step": self.done, "steps": self.config.steps, "state": self._state,
                                   "eta_s": self.progress.eta_s, **more})

    def _interrupt(self) -> None:
        self._stop.set()
        if dist.is_main():  # straight to the terminal: a signal may fall into the middle of a print
            os.write(2, b"\nCtrl-C: finishing this step, then saving. Press again to stop at once "
                        b"(the step in flight is lost, nothing else).\n")


@contextlib.contextmanager
def _on_interrupt(first: Any) -> Any:
    """The first Ctrl-C (or SIGTERM) calls `first`, the second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, frame: Any) -> None:
        for s, old in before.items():
            signal.signal(s, old)
        first()

    for s in before:
        signal.signal(s, handler)
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


def _set_aside(path: Path) -> None:
    """Moves what an earlier run left in a folder into a folder beside it; nothing is deleted."""
    left = [p for p in path.iterdir() if p.name != "run.lock"]
    if not left:
        return
    number = next(i for i in range(1, 10**6) if not path.with_name(f"{path.name}.before-{i}").exists())
    aside = path.with_name(f"{path.name}.before-{number}")
    aside.mkdir()
    for item in left:
        item.rename(aside / item.name)


def _evaluation_line(record: Mapping[str, Any]) -> str:
    labels = tuple(k.removesuffix("n") for k in record if k.endswith("/n"))
    words = [f"{k} {v:.3f} [{record[f'{k}/ci95_low']:.3f}, {record[f'{k}/ci95_high']:.3f}]"
             for k, v in record.items() if f"{k}/ci95_low" in record and not k.startswith("completion/")
             and (k.endswith("/reward/mean") or not k.startswith(labels))]
    left_out = f", {record['rejected']} left out" if record["rejected"] else ""
    return f"evaluation of {record['split']} at step {record['step']} (n={record['n']}{left_out}): {', '.join(words)}"


def _flat_settings(settings: Config) -> dict[str, Any]:
    def walk(tree: Mapping[str, Any], prefix: str) -> Any:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value if isinstance(value, (int, float, str, bool)) else str(value)
    return dict(walk(settings.model_dump(mode="json"), ""))


def last_words(session: Session) -> int:
    """Prints the table before/after, draws reward.png, and says where the rollouts lie; on rank 0.

    Returns the exit code: 0, or 130 when the run was stopped before its last step.
    """
    from vlrl import report

    if session.done < session.config.steps:
        return 130
    if not dist.is_main():
        return 0
    show, path = session.progress.print, session.folder.path
    show(report.summary_table(session.folder))
    show(f"reward curve   {report.plot_reward(session.folder)}")
    show(f"model          {session.folder.checkpoints / f'step-{session.done:06d}'}")
    show(f"every rollout  {path / 'rollouts'} (parquet), the evaluated answers in {path / 'eval-rollouts'}")
    return 0
