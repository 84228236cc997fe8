"""Restores the state of a run from a checkpoint, and saves checkpoints when they are due or after the best evaluation.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlrl.curriculum.visited import write_visited
from vlrl.distributed import comm
from vlrl.errors import RunError
from vlrl.models import saving, shards
from vlrl.monitoring import trackers
from vlrl.store import RunFolder, checkpoint, comparable, trainer_state
from vlrl.training.build import Parts
from vlrl.training.checkpointing import Saver
from vlrl.types import Sample


class RunCheckpoints:
    """Restores and saves the state of a run. Its methods are called on every rank at the same time. `flush` waits until
    the rollouts of earlier steps are written, so a checkpoint never has more steps than the run folder."""

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
        """Saves the first `done` steps, all completed, unless their checkpoint is complete. Waits for earlier writes.
        """
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
        """Saves the checkpoint of `done` completed steps and marks it as best, if their evaluation is the best so far.
        """
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
