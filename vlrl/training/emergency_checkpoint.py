"""Saves a checkpoint of the completed steps when an error ends the run before the optimizer has changed the weights.

    emergency = EmergencyCheckpoint(parts, path, lock, saver, done)
    emergency.completed(done)   # a step has ended, its line of metrics.jsonl is written
    emergency.keep()            # before sampling the next step: copies the state that sampling changes
    ...                         # generation, scoring, evaluation, the update up to its first optimizer step
    emergency.end(error)        # an error ends the run: saves the completed steps and adds a note to the error

Between the first optimizer step of an update and the next call of `completed` no such checkpoint is possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.distributed import comm
from vlrl.models import shards
from vlrl.monitoring.watchdog import Stuck
from vlrl.store import checkpoint, trainer_state
from vlrl.store.lock import Lock
from vlrl.training.checkpointing import Saver

if TYPE_CHECKING:
    from vlrl.training.build import Parts

_AHEAD_S = 600.0
"""When an error ends the run: seconds to wait for completions that are being generated ahead."""
_ROLLOUTS_S = 60.0
"""When an error ends the run: seconds to wait until other ranks have written the last completed step's rollouts."""


class NotSaved(Exception):
    """Raised if the completed steps cannot be saved; the message is the reason."""


class EmergencyCheckpoint:
    """Saves the completed steps when an error ends the run, if weights and optimizer still belong to these steps. The
    main process saves; the other ranks contribute their shards."""

    def __init__(self, parts: Parts, path: Path, lock: Lock, saver: Saver, done: int):
        self.parts, self.path, self.lock, self.saver = parts, path, lock, saver
        self.config = parts.config
        self.done = done
        self._frozen: trainer_state.State | None = None
        self._ahead: Callable[[float], dict[str, Any] | None] | None = None
        parts.optimizer.register_step_pre_hook(self._leave)

    def completed(self, done: int) -> None:
        """Records that `done` steps are completed and that all state belongs to them."""
        self._frozen, self._ahead = None, None
        self.done, self.parts.policy.updating = done, False

    def keep(self) -> None:
        """Copies the state that sampling the next step will change; on the main process only."""
        parts = self.parts
        source, self._ahead = parts.source.at_rest()
        algorithm = parts.algorithm.state_dict(parts.policy)
        algorithm.pop("reference", None)  # as large as the weights, and updated after them
        self._frozen = trainer_state.freeze({"source": source, "scaler": parts.policy.scaler.state_dict(),
                                          "algorithm": algorithm})

    def begin(self) -> bool:
        """Starts a background save from a signal handler. Returns False if a save is not possible now."""
        if self.problem() or self._frozen is None or self._ahead or self.saver.has(self.done):
            return False
        return self.saver.begin_at_once(self.done, self.parts.policy, self._live(), self._frozen,
                                        partial(self._written, _ROLLOUTS_S))

    def end(self, error: BaseException) -> None:
        """Saves the completed steps, unless their checkpoint exists, when `error` ends the run. Adds a note to `error`
        that says what is saved or lost."""
        if not self.done or error is self.saver.failed:
            return
        try:
            weights, live = self._gathered()
            if not comm.is_main():
                return
            patience = self.config.save.grace if isinstance(error, (KeyboardInterrupt, Stuck)) else _AHEAD_S
            path = self._save(weights, live, patience)
            error.add_note(f"The {self.done} completed steps are saved in {path}; the same command resumes from there.")
        except Exception as problem:
            if not comm.is_main():  # the main process reports what is lost
                if not isinstance(problem, NotSaved):
                    error.add_note(f"This process could not contribute its shards: {problem}")
                return
            last = checkpoint.latest(self.saver.folder)
            where = f"resumes from {last.path}" if last.path else "starts again with the first step"
            why = problem if isinstance(problem, NotSaved) else f"saving them failed: {problem}"
            error.add_note(f"{self.done - last.step} of the {self.done} completed steps are lost, since {why}. The "
                           f"same command {where}.")

    def problem(self) -> str:
        """The reason why weights and optimizer do not belong to the completed steps; "" if they do belong to them."""
        if self.parts.policy.updating:
            return "the next update had already changed the weights"
        if self.parts.policy.swapped:
            return "other weights were temporarily loaded and could not be swapped back"
        return ""

    def _gathered(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Returns (weights, optimizer state) gathered over the ranks of a sharded model; (None, {}) if the model is not
        sharded. Raises NotSaved unless all ranks ended at the same point."""
        policy = self.parts.policy
        if not policy.shards:
            return None, {}
        if not comm.all_ended_alike(f"{self.done} {self.problem()}"):
            raise NotSaved("the weights are sharded and the ranks ended at different points")
        if problem := self.problem():
            raise NotSaved(problem)
        return shards.weights(policy), shards.state(policy, self._live())

    def _save(self, weights: dict[str, Any] | None, live: dict[str, Any], patience: float) -> Path:
        target = self.saver.folder / f"step-{self.done:06d}"
        self.saver.settle()
        if self.saver.has(self.done):
            return target
        if problem := self.problem():
            raise NotSaved(problem)
        self.lock.check()
        if self._frozen is None:
            self.keep()
        assert self._frozen is not None
        state = trainer_state.merge(trainer_state.view(live or self._live()), self._frozen)
        if self._ahead:
            source_state = self._ahead(patience)
            if source_state is None:
                raise NotSaved("completions generated ahead were incomplete, or are on other ranks")
            state = trainer_state.merge(state, trainer_state.freeze({"source": source_state}))
        if not self._written(_ROLLOUTS_S if comm.world() > 1 else 0.0):
            raise NotSaved(f"the rollouts of step {self.done - 1} are not on disk")
        self.saver.save_last(self.done, self.parts.policy, state, weights)
        return target

    def _live(self) -> dict[str, Any]:
        """The state of the optimizer and of a moving reference, which changes in the update but not while sampling."""
        parts = self.parts
        reference = dict(parts.policy.moving_reference) if parts.algorithm.moves_reference else {}
        moving = {"algorithm": {"reference": reference}} if reference else {}
        return {"optimizer": parts.optimizer.state_dict(), **moving}

    def _written(self, seconds: float) -> bool:
        """Waits until all ranks have written the last completed step's rollouts. Returns False after `seconds`."""
        ranks = range(comm.world() if self.config.store.rollouts else 0)
        paths = [self.path / "rollouts" / f"step-{self.done - 1:06d}-rank-{rank:05d}.parquet" for rank in ranks]
        end = time.monotonic() + seconds
        while not (there := all(path.exists() for path in paths)) and time.monotonic() < end:
            time.sleep(0.05)
        return there

    def _leave(self, *_: Any) -> None:
        self.parts.policy.updating = True
