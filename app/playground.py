"""Generates answers to a sample or an upload for the playground, streams them, and computes rewards. No Gradio.

    play = Playground(library)
    for progress in play.answer(Ask(model="embedded/tiny-qwen3-vl", task="run:quickstart", sample="#3")).follow():
        progress.phase, progress.texts, progress.result

torch is imported when a model is loaded. Only one model is in memory at a time, and only one group is generated at a
time."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.config.registry import failure, prints_aside
from vlrl.config.schema import Config
from vlrl.engine.base import Request
from vlrl.errors import VlrlError
from vlrl.task import Task
from vlrl.training.build_task import settle_coordinates
from vlrl.types import Answer, Completion, Group, Prompt, Sample

from . import AppError, models
from .asking import Ask, SamplePreview, Tasks
from .library import Library
from .models import ModelChoice

if TYPE_CHECKING:
    from vlrl.models.policy import Policy

_LOOK_S = 0.3
"""Shortest interval in seconds between two updates of the streamed texts. Decoding the texts takes at most a fifth of
the time."""
_STREAM = 5
"""First element of the keys that seed the random sampling in the playground. Training and evaluation use smaller values
there, so their random streams are different."""


@dataclass(frozen=True, eq=False)
class AnsweredGroup:
    """A group generated in the playground, the model `chosen` for it, and the tokenizer of this model."""

    group: Group
    chosen: ModelChoice
    tokenizer: Any
    notes: tuple[str, ...] = ()
    """Remarks for the user, such as the reason why there are no rewards."""


@dataclass(frozen=True, eq=False)
class _Loaded:
    key: tuple[Any, ...]
    policy: Policy


class Playground:
    """Answers requests with the models and tasks of a library's runs. It keeps one model in memory."""

    def __init__(self, library: Library, trust_tasks: bool = False):
        self.library, self.tasks = library, Tasks(library, trust_tasks)
        self._turn = threading.Lock()
        """Lock held while a job loads a model or generates, so that other jobs wait."""
        self._asking = threading.Lock()
        """Lock held while code of a task runs, because this code may not be thread-safe."""
        self._loaded: _Loaded | None = None

    def sample(self, ask: Ask) -> SamplePreview:
        """Previews a sample without the model. Raises VlrlError if the sample or its task is missing or invalid."""
        with self._asking, prints_aside():
            return self.tasks.shown(self.tasks.config(ask, ask.model, models.run_of(self.library, ask.model)), ask)

    def answer(self, ask: Ask) -> Job:
        """Returns a Job whose result is an AnsweredGroup. The job starts when it is followed, see Job.follow."""
        return Job(lambda job: self._answer(ask, job))

    def unload(self) -> None:
        """Removes the model from memory."""
        if self._loaded:
            import torch
            self._loaded = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _answer(self, ask: Ask, job: Job) -> AnsweredGroup:
        with self._my_turn(job):
            try:
                return self._group(ask, job)
            except Exception as error:
                if not models.is_out_of_memory(error):
                    raise
            self.unload()  # outside of the handler, which keeps the failed batch alive
            raise AppError("Out of memory. Ask for fewer answers or fewer new tokens, use a smaller image or model, "
                           "or close other programs. The model was unloaded.")

    @contextmanager
    def _my_turn(self, job: Job) -> Iterator[None]:
        while not self._turn.acquire(timeout=0.1):
            job.tell("waiting", remark="The model is busy for another tab; this one is next.")
            job.check()
        try:
            yield
        finally:
            self._turn.release()

    def _group(self, ask: Ask, job: Job) -> AnsweredGroup:
        job.tell("preparing")
        chosen = models.choose(self.library, ask.model)
        config = self.tasks.config(ask, chosen.name, chosen.run)
        policy = self._load(config, chosen, job)
        job.check()
        job.tell("preparing")
        task, sample, prompt = self._prompt(ask, config, policy)
        completions = _write(policy, config, prompt, ask, job)
        job.tell("scoring")
        with self._asking, prints_aside():
            group = _scored(task, sample, prompt, completions, ask, chosen.step)
        return AnsweredGroup(group, chosen, policy.processor.tokenizer, tuple(_notes(ask, group)))

    def _load(self, config: Config, chosen: ModelChoice, job: Job) -> Policy:
        models.disable_downloads(chosen.name)
        key = (chosen.name, chosen.stamp, config.model.model_dump_json())
        if self._loaded and self._loaded.key == key:
            models.check_memory(config, loaded=True)
            return self._loaded.policy
        self.unload()
        job.tell("loading", remark=chosen.label)
        try:
            weights = models.check_memory(config, loaded=False)
            self._loaded = _Loaded(key, models.load(config, weights, lambda share: job.tell(done=share)))
        except VlrlError:
            if chosen.run and not Path(chosen.name).is_dir():
                name = f"{chosen.run}/checkpoints/{Path(chosen.name).name}"
                raise AppError(models.deleted_message(name)) from None
            raise
        return self._loaded.policy

    def _prompt(self, ask: Ask, config: Config, policy: Policy) -> tuple[Task, Sample, Prompt]:
        from vlrl.models.processing import Encoder
        with self._asking, prints_aside():
            task, sample, messages = self.tasks.messages(config, ask)
        settle_coordinates(task, config, policy.family.coordinates)
        encode = Encoder(policy.processor, policy.family, policy.positions, config)
        return task, sample, encode.prompt(sample, messages)


def _write(policy: Policy, config: Config, prompt: Prompt, ask: Ask, job: Job) -> list[Completion]:
    from vlrl.engine.hf import HFEngine
    from vlrl.rollout.generate import sampling_of
    n = ask.answers if ask.temperature else 1
    texts, due, tokens = [""] * n, 0.0, 0
    job.tell("writing", texts=tuple(texts))

    def watch(so_far: Any) -> None:
        nonlocal due, tokens
        job.check()
        tokens += 1
        if (start := time.monotonic()) > due:
            for (_, answer), text in so_far().items():
                texts[answer] = text
            due = time.monotonic() + max(_LOOK_S, 4 * (time.monotonic() - start))
            job.tell(texts=tuple(texts), done=min(1.0, tokens / ask.max_new_tokens))

    engine = HFEngine(policy, ask.seed, config.engine.batch_rollouts, config.engine.prefill_tokens)
    sampling = sampling_of(config.rollout, ask.temperature)
    (completions,) = engine.generate([Request(prompt=prompt, n=n, sampling=sampling, key=(_STREAM,))], watch=watch)
    job.tell(texts=tuple(c.text for c in completions), done=1.0)
    return completions


class _Unscored(Task):
    def __init__(self, task: Task):
        super().__init__()
        self._task: Any = task
        self._task.target = self.target

    def parse(self, sample: Sample, answer: Answer) -> Any:
        return self._task.parse(sample, answer)

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        return self._task.overlay(sample, parsed)

    def target(self, sample: Sample) -> None:
        return None


def _scored(task: Task, sample: Sample, prompt: Prompt, completions: Sequence[Completion], ask: Ask,
            step: int) -> Group:
    """Builds the scored group, as in training. For an upload, answers are only parsed and their marks drawn. `task` may
    be modified, so it must be a copy."""
    from vlrl.rollout.generate import make_group
    if not ask.upload:
        return make_group(task, sample, prompt, completions, group_id="playground", split=ask.split, step=step)
    group = make_group(_Unscored(task), sample, prompt, completions, group_id="playground", split="upload", step=step)
    return replace(group, task=task.name, rollouts=tuple(replace(r, reward=None, error=None) for r in group.rollouts))


def _notes(ask: Ask, group: Group) -> Iterator[str]:
    if ask.upload:
        yield ("No rewards: an upload has no target that an answer could be compared with. What the task parses from "
               "an answer is still drawn.")
    elif all(reward is None for reward in group.rewards):
        yield "No rewards: the task cannot score this sample; a row without a target has none."
    if ask.answers > 1 and not ask.temperature:
        yield "At temperature 0 every answer would be the same, so only one was generated."


PATIENCE_S = 30.0
"""A job stops if nobody has polled it for this many seconds, because its page was closed."""
_BETWEEN_S = 0.04
_log = logging.getLogger("vlrl.app")


@dataclass(frozen=True)
class Progress:
    """A snapshot of a job's state."""

    phase: str = "waiting"
    """What the job is doing; at the end "done", "stopped" or "failed"."""
    done: float = 0.0
    """Completed share of the phase, in [0, 1]."""
    texts: tuple[str, ...] = ()
    """The text of each answer generated so far."""
    remark: str = ""
    """A remark on the phase; the error message if the job failed."""
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "stopped", "failed")


class JobStopped(Exception):
    """Raised inside a job that was asked to stop, so that the work of the job ends."""


class Job:
    """Runs `work(job)` in a background thread. `work` reports progress with `tell`, and calls `check` regularly so that
    the job can be cancelled."""

    def __init__(self, work: Callable[[Job], Any]):
        self._work, self._now, self._looked = work, Progress(), time.monotonic()
        self._changed, self._stop = threading.Condition(), threading.Event()

    def tell(self, phase: str | None = None, **changes: Any) -> None:
        """Updates the reported progress. A new phase starts with a `done` of 0 and without a remark."""
        with self._changed:
            fresh = {"phase": phase, "done": 0.0, "remark": ""} if phase and phase != self._now.phase else {}
            then = replace(self._now, **{**fresh, **changes})
            if then != self._now:
                self._now = then
                self._changed.notify_all()

    def check(self) -> None:
        """Raises JobStopped if the job was asked to stop, or if nobody has polled it for PATIENCE_S seconds."""
        if self._stop.is_set() or time.monotonic() - self._looked > PATIENCE_S:
            raise JobStopped

    def stop(self) -> None:
        """Asks the job to stop at its next `check`."""
        self._stop.set()

    def follow(self) -> Iterator[Progress]:
        """Starts the work and yields its Progress after every change, ending with the final state. Closing the iterator
        early stops the job."""
        threading.Thread(target=self._run, name="vlrl-playground", daemon=True).start()
        shown: Progress | None = None
        try:
            while shown is None or not shown.ended:
                with self._changed:
                    self._changed.wait_for(lambda before=shown: self._now is not before, timeout=1.0)
                    now, self._looked = self._now, time.monotonic()
                if now is not shown:
                    shown = now
                    yield now
                    if not now.ended:
                        time.sleep(_BETWEEN_S)
        finally:
            self.stop()

    def _run(self) -> None:
        try:
            result = self._work(self)
            self.tell("done", done=1.0, result=result)
        except JobStopped:
            self.tell("stopped")
        except VlrlError as error:
            self.tell("failed", remark=str(error))
        except (Exception, SystemExit) as error:  # from code of a task, a decoder or a library
            _log.error("a job of the playground failed", exc_info=error)
            self.tell("failed", remark=failure(error))
