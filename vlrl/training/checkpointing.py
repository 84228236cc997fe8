"""Saves and restores checkpoints. They are written in the background: the state is copied to host memory, then a thread
writes the copy.

    saver = Saver(folder.checkpoints, config.save)
    saver.begin(step, policy, state)      # returns once the copy is made; waits for the previous save
    saver.check()                         # raises the error of a failed save
    saver.wait()                          # everything is on disk

A Saver is used only on rank 0; `begin_at_once` may be called by a signal handler. RunCheckpoints restores the state of
a run, and decides on every rank when to save."""

import concurrent.futures
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch

from vlrl.config.schema import SaveSettings
from vlrl.curriculum.visited import write_visited
from vlrl.distributed import comm
from vlrl.errors import RunError
from vlrl.models import saving, shards
from vlrl.models.policy import Policy
from vlrl.monitoring import trackers
from vlrl.monitoring.metrics import sign_of_life
from vlrl.monitoring.progress import duration
from vlrl.store import RunFolder, checkpoint, comparable, trainer_state
from vlrl.training.build import Parts
from vlrl.types import Sample

_ROOM = 1.25
"""A state is copied only if the free memory is at least this many times the size of the copy."""


class Saver:
    """Saves the checkpoints of one run. `run` holds the settings of the run, which are stored in each checkpoint."""

    def __init__(self, folder: Path, settings: SaveSettings, run: Mapping[str, Any] | None = None):
        self.folder, self.settings, self._run = folder, settings, run
        self.saved = 0
        """Number of completed steps in the newest complete checkpoint."""
        self.last: int | None = None
        """Number of completed steps in the newest save, which may still be running."""
        self.failed: BaseException | None = None
        """Error of the last failed save."""
        self._waiting: deque[Future[None]] = deque()
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete or being written."""
        if self.last == step and self._waiting:
            return True
        return not checkpoint.problems(self.folder / f"step-{step:06d}", full=False)

    def begin(self, step: int, policy: Policy, state: Mapping[str, Any],
              weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Saves a checkpoint. With save.background, returns as soon as everything is copied, if memory suffices for a
        copy. Raises the error of an earlier save. weights: of a sharded model, the weights gathered by
        shards.weights."""
        self.wait()
        self.last = step
        if not (self.settings.background and fits_in_memory(policy, state)):
            self._noting(partial(self._save, step, partial(policy.save, weights=weights), state))
            return
        self._submit(self._job(step, policy, trainer_state.freeze(state)))

    def begin_at_once(self, step: int, policy: Policy, state: Mapping[str, Any], frozen: trainer_state.State,
                      ready: Callable[[], bool]) -> bool:
        """Starts a save in the background, from within a signal handler. `state` is copied now; `frozen` is the rest of
        the state, which was copied earlier. Before the background thread writes the checkpoint, it calls `ready()`,
        and writes nothing if the result is False. Returns False and does nothing if memory is short, a save is
        running or save.background is off."""
        if self.busy or not self.settings.background or not fits_in_memory(policy, state):
            return False
        self.last = step
        job = self._job(step, policy, trainer_state.merge(trainer_state.freeze(state), frozen))
        self._submit(lambda: job() if ready() else None)
        return True

    def save_last(self, step: int, policy: Policy, state: trainer_state.State,
                  weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Saves weights and state without copying them. Nothing may be trained until this method returns, after the
        save. Meanwhile the watchdog gets signs of life. Raises the error of the save."""
        self.last = step
        self._submit(partial(self._save, step, partial(policy.save, weights=weights), state))
        self._live()
        self.wait()

    def mark_best(self, step: int, record: Mapping[str, Any]) -> None:
        """Marks the checkpoint of a step as the best checkpoint, once earlier saves are written. record: the evaluation
        of that checkpoint, a line of eval.jsonl."""
        self._submit(partial(checkpoint.mark_best, self.folder, step, dict(record), self.settings.keep))

    def check(self) -> None:
        """Raises the error of a failed save. Does not wait for a running save."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Waits until all saves are written, and raises their first error."""
        while self._waiting:
            concurrent.futures.wait([self._waiting[0]])
            self._waiting.popleft().result()

    def settle(self) -> None:
        """Waits until all saves have ended. Their errors are discarded."""
        self._live()
        self._waiting.clear()

    @property
    def busy(self) -> bool:
        """Whether a save is running."""
        return any(not future.done() for future in self._waiting)

    def close(self) -> None:
        """Waits for all saves and ends the thread. Raises the error of a failed save."""
        try:
            self.wait()
        finally:
            if self._thread:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None

    def start(self) -> None:
        """Starts the thread that writes checkpoints; must not be called from a signal handler."""
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()

    def _job(self, step: int, policy: Policy, state: trainer_state.State) -> Callable[[], object]:
        write = partial(policy.save, weights=policy.copied_weights(), head=policy.copied_head())
        return partial(self._save, step, write, state)

    def _save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any] | trainer_state.State) -> None:
        checkpoint.save(self.folder, step, write, state, self.settings.keep, self._run)
        self.saved = step

    def _live(self) -> None:
        """Waits for all saves, and meanwhile sends signs of life to the watchdog."""
        while self.busy:
            sign_of_life("save")
            concurrent.futures.wait(self._waiting, timeout=1.0)

    def _noting(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self.failed = error
            raise

    def _submit(self, job: Callable[[], object]) -> None:
        future: Future[None] = Future()
        self._waiting.append(future)
        self._jobs.put((future, job))

    def _work(self) -> None:
        while entry := self._jobs.get():
            future, job = entry
            try:
                self._noting(job)
                future.set_result(None)
            except BaseException as error:  # raised again by who waits for it
                future.set_exception(error)
            del entry, future, job  # the copies


def size_of(policy: Policy, state: Mapping[str, Any]) -> int:
    """Size in bytes of a checkpoint: the trainable weights, and the tensors in the trainer's state `state`."""
    return sum(p.nbytes for _, p in policy.trainable()) + _bytes(state)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes(item) for item in items)


def fits_in_memory(policy: Policy, state: Mapping[str, Any]) -> bool:
    """Whether a copy of the trainable weights and of the trainer's state `state` fits into the free memory of this
    host; always False for sharded models."""
    if policy.shards:
        return False  # shards of other processes are not here
    return psutil.virtual_memory().available > _ROOM * size_of(policy, state)


def estimate(folder: Path, size: int) -> str:
    """Expected size and duration of a save as text, such as `1.2 GB, about 9 s`, at the write speed of the newest
    checkpoint in `folder`. Only the size if there is no checkpoint."""
    pace = checkpoint.write_speed(folder)
    known = max(size, pace[0]) if pace else size
    text = f"{known / 1e9:.2f} GB" if known > 1e8 else f"{known / 1e6:.1f} MB"
    if not pace:
        return text
    seconds = known / pace[1]
    return f"{text}, about {f'{seconds:.0f} s' if seconds < 100 else duration(seconds)}"


class RunCheckpoints:
    """Restores and saves the state of a run. Its methods are called on every rank at the same time. flush: function
    that waits until the rollouts of earlier steps are written; it is called before a save, so that a checkpoint
    never has more steps than the run folder. say: prints a message."""

    def __init__(self, parts: Parts, folder: RunFolder, saver: Saver, flush: Callable[[], None],
                 say: Callable[[str], None]):
        self.parts, self.folder, self.saver, self.flush, self.say = parts, folder, saver, flush, say
        self._changed_files: set[str] = set()

    def restore(self, path: Path, done: int) -> None:
        """Loads the state of `done` completed steps from the checkpoint at `path`."""
        parts, state = self.parts, checkpoint.load_state(path, check=False)
        shards.load_optimizer(parts.policy, parts.optimizer, state["optimizer"])
        parts.source.load_state_dict(state["source"])
        parts.policy.scaler.load_state_dict(state.get("scaler", {}))
        parts.algorithm.load_state_dict(state.get("algorithm", {}), parts.policy)
        self.say(f"resuming from {path} ({done} steps completed)")
        if comm.is_main():
            self._warn_of_new_weights(done - 1)

    def try_saving(self) -> None:
        """Writes and removes a trial checkpoint without weights and optimizer. Raises RunError if the state cannot be
        saved, so that this is known before the first step."""
        parts = self.parts
        state = {"source": parts.source.state_dict(), "scaler": parts.policy.scaler.state_dict(),
                 "algorithm": parts.algorithm.state_dict(parts.policy)}
        comm.on_main(lambda: saving.try_writing(self.folder.checkpoints, lambda folder: self._write_but_weights(
            folder, state)), "trying to save")

    def _write_but_weights(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.parts.policy.save(folder, weights={})
        try:
            json.dumps(trainer_state.view(state).tree)
        except (TypeError, ValueError) as error:
            raise RunError(f"a checkpoint cannot store the state of this run: {error}. The state comes from "
                           "a component of your own: its state_dict must return types that a checkpoint can hold"
                           ) from error

    def save(self, done: int) -> None:
        """Saves a checkpoint of the `done` completed steps, unless it exists. First waits until the rollouts of these
        steps are written."""
        self.flush()
        parts, source = self.parts, self.parts.source
        with parts.clock("store"):
            comm.on_main(lambda: write_visited(self.folder.path / "prompts.parquet", source.prompts.history,
                                               source.samples), "writing prompts.parquet")
        comm.on_main(self.saver.check)
        if comm.broadcast(comm.is_main() and self.saver.has(done)):
            return
        if comm.is_main():
            self._warn_of_changed_files()
        with parts.clock("save"):
            weights = shards.weights(parts.policy)
            state = shards.state(parts.policy, {
                "optimizer": parts.optimizer.state_dict(), "source": source.state_dict(),
                "scaler": parts.policy.scaler.state_dict(), "algorithm": parts.algorithm.state_dict(parts.policy)})
            comm.on_main(lambda: self.saver.begin(done, parts.policy, state, weights), f"saving step-{done:06d}")

    def save_best(self, done: int) -> None:
        """Saves the checkpoint of `done` completed steps, marked as best, if their evaluation is the best so far."""
        metric, measured = self.parts.config.save.best, self.parts.config.eval
        if not (metric and measured.samples and measured.splits):
            return
        best = comm.on_main(lambda: trackers.best_of(comparable(self.folder.evals()), measured.splits[0], metric))
        if best and best["step"] == done:
            self.save(done)
            if comm.is_main():
                self.saver.mark_best(done, {"metric": metric, "value": best[metric], "split": best["split"]})

    def _warn_of_new_weights(self, step: int) -> None:
        """Warns if the task's code gives its reward parts other weights than in an earlier step. The settings of the
        run do not reveal such a change."""
        last = self.folder.rollouts(step, columns=["task", "weights"]).to_pylist()
        changed: list[str] = []
        for row in {row["task"]: row for row in last}.values():
            before, now = dict(row["weights"]), self.parts.task.of(Sample(id="", task=row["task"])).weights_at(step)
            changed += [f"{part} {before.get(part, 0):g} -> {now.get(part, 0):g}" for part in sorted({*before, *now})
                        if not math.isclose(before.get(part, 0), now.get(part, 0), rel_tol=1e-6)]
        if changed:
            self.say(f"warning: the reward parts of the task now have other weights: {', '.join(changed)}. To "
                     "start over: resume=never, or another run.dir")

    def _warn_of_changed_files(self) -> None:
        for name in {*self.parts.source.fingerprint.written_to()} - self._changed_files:
            self._changed_files.add(name)
            self.say(f"warning: {name} was changed, moved or removed since the run began. The run continues with "
                     "the rows that it has read; restore the file before resuming, which refuses other rows.")
