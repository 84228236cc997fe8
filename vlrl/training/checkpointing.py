"""Writes checkpoints in the background: copies the state to host memory, then writes it in a thread.

    saver = Saver(folder.checkpoints, config.save)
    saver.begin(step, policy, state)      # returns once the copy is made; waits for the previous save
    saver.check()                         # raises the error of a failed save
    saver.wait()                          # everything is on disk

Used only on rank 0. `begin_at_once` may be called by a signal handler."""

import concurrent.futures
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
from vlrl.models.policy import Policy
from vlrl.monitoring.metrics import sign_of_life
from vlrl.monitoring.progress import duration
from vlrl.store import checkpoint, trainer_state

_ROOM = 1.25
"""Free memory required for a copy, as a multiple of the size of the copy."""


class Saver:
    """Saves the checkpoints of one run. `run` holds the settings that are stored in each checkpoint."""

    def __init__(self, folder: Path, settings: SaveSettings, run: Mapping[str, Any] | None = None):
        self.folder, self.settings, self._run = folder, settings, run
        self.saved = 0
        """Step of the newest complete checkpoint."""
        self.last: int | None = None
        """Step of the newest save, which may still be running."""
        self.failed: BaseException | None = None
        """Error of the last failed save."""
        self._waiting: deque[Future[None]] = deque()
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step exists or is being written."""
        if self.last == step and self._waiting:
            return True
        return not checkpoint.problems(self.folder / f"step-{step:06d}", full=False)

    def begin(self, step: int, policy: Policy, state: Mapping[str, Any],
              weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Saves a checkpoint. With save.background, returns as soon as everything is copied. Raises the error of an
        earlier save. If the model is sharded, `weights` are the weights gathered by shards.weights."""
        self.wait()
        self.last = step
        if not (self.settings.background and fits_in_memory(policy, state)):
            self._noting(partial(self._save, step, partial(policy.save, weights=weights), state))
            return
        self._submit(self._job(step, policy, trainer_state.freeze(state)))

    def begin_at_once(self, step: int, policy: Policy, state: Mapping[str, Any], frozen: trainer_state.State,
                      ready: Callable[[], bool]) -> bool:
        """Starts a save from within a signal handler. `state` is copied now; `frozen` was copied earlier. The thread
        writes the checkpoint only if `ready()` returns True in the thread. Returns False and does nothing if memory is
        short, a save is running or save.background is off."""
        if self.busy or not self.settings.background or not fits_in_memory(policy, state):
            return False
        self.last = step
        job = self._job(step, policy, trainer_state.merge(trainer_state.freeze(state), frozen))
        self._submit(lambda: job() if ready() else None)
        return True

    def save_last(self, step: int, policy: Policy, state: trainer_state.State,
                  weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Saves weights and state without copying them, so nothing may be trained until the method returns. Meanwhile
        the watchdog gets signs of life. Raises the error of the save."""
        self.last = step
        self._submit(partial(self._save, step, partial(policy.save, weights=weights), state))
        self._live()
        self.wait()

    def mark_best(self, step: int, record: Mapping[str, Any]) -> None:
        """Marks the checkpoint of a step as the best checkpoint, once it is written."""
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
        """Starts the writing thread; may not be called from a signal handler."""
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
    """Size in bytes of the trainable weights and of the tensors in the state of a trainer."""
    return sum(p.nbytes for _, p in policy.trainable()) + _bytes(state)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes(item) for item in items)


def fits_in_memory(policy: Policy, state: Mapping[str, Any]) -> bool:
    """Whether a copy of weights and state fits into the free memory of this host; False for sharded models."""
    if policy.shards:
        return False  # shards of other processes are not here
    return psutil.virtual_memory().available > _ROOM * size_of(policy, state)


def estimate(folder: Path, size: int) -> str:
    """Size and time of a save as text, such as `1.2 GB, about 9 s`, at the write speed of the newest checkpoint.
    Without such a checkpoint only the size is given."""
    pace = checkpoint.write_speed(folder)
    known = max(size, pace[0]) if pace else size
    text = f"{known / 1e9:.2f} GB" if known > 1e8 else f"{known / 1e6:.1f} MB"
    if not pace:
        return text
    seconds = known / pace[1]
    return f"{text}, about {f'{seconds:.0f} s' if seconds < 100 else duration(seconds)}"
