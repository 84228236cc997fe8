"""Generation in parallel with the update: while one step is trained, a thread generates the next steps
(async.max_staleness).

    step t   take the groups of t   ->  weights to the engine  ->  begin t + 1  ->  update
                                                                   [ thread: generate and score t + 1 ]

With max_staleness = s, the engine receives new weights whenever the queue of generated steps is empty, that is, every s
steps. The engine then generates the next s steps one after another. So no completion is more than s steps old, and the
speed of generation or training does not decide which weights sample a completion. The main thread draws prompts,
encodes them, filters groups and runs all collectives, always in the same order. The thread only generates and scores.
docs/asynchronous.md has the full picture.

A checkpoint holds the completions in the queue, by the keys of their random streams. A resumed run scores these
completions again and continues as if it had not been interrupted. For episodes the checkpoint holds the actions, which
are replayed in the environments."""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from vlrl.config.schema import Config
from vlrl.curriculum import ProbingSampler
from vlrl.distributed import comm
from vlrl.engine.base import Done, Engine, EpisodePlayer, Request
from vlrl.errors import ConfigError
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.partial import PartialGroup, completion_of, completion_state, draw_of, draw_state
from vlrl.types import Completion, Group

CompletionsByKey = dict[tuple[int, ...], Sequence[Completion]]
"""The completions of each request, by Request.key, which selects the random streams of the request."""


@dataclass(eq=False, kw_only=True)
class AheadBatch(DrawBatch):
    """The prompts drawn for a later step, and the completions generated for these prompts so far. In a resumed run the
    prompts are encoded only when training reaches that step."""

    step: int
    policy_step: int
    """How many training steps had been completed when the engine received the weights that sample this batch."""
    completions: CompletionsByKey = field(default_factory=dict)
    """The completions that this process has generated so far; in a resumed run, also the completions of all other
    processes."""
    work: Future[list[Group] | None] | None = None
    """The future of this batch's generation in the thread. The future's result is the scored groups, or None if the
    main thread has to score. `work` is None before generation begins, and for a batch restored from a checkpoint."""
    keys: set[tuple[int, ...]] = field(default_factory=set)
    """Keys of all requests that this process generates; set when generation begins."""
    span: tuple[float, float] | None = None
    """Start and end time of the thread's work on this batch; None until that work has ended."""

    @property
    def is_complete(self) -> bool:
        """Whether all completions of the batch exist. Waits until generation ends."""
        return bool(self.completions) if self.work is None else self.work.exception() is None

    def state(self, completions: CompletionsByKey) -> dict[str, Any]:
        """Returns the batch as a dict for a checkpoint. `completions` are those of all processes, or {} if the batch is
        to be generated again."""
        return {"step": self.step, "policy_step": self.policy_step,
                "made": {key: [*map(completion_state, answers)] for key, answers in completions.items()},
                "draws": [[number, draw_state(draw)] for number, draw in self.draws.items()]}


class AsyncGroupSource(GroupSource):
    """A group source that generates the groups of later steps in a thread while the current step is trained."""

    overlaps_update = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.queue: deque[AheadBatch] = deque()
        """Batches of later steps, in the order of the steps; at most async.max_staleness of them."""
        self.synced = -1
        """How many training steps had been completed when the engine received its weights; -1 = no weights yet."""
        self._policy: Any = None
        self._ages: list[int] = []
        self._ahead_s = 0.0
        card = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "ahead", _set_up_thread, (max(1, torch.get_num_threads() // 2), card))

    def at_rest(self) -> tuple[dict[str, Any], Callable[[float], dict[str, Any] | None] | None]:
        return super().state_dict(), partial(_emergency_state, [*self.queue])

    def sync(self, policy: Any, step: int, now: bool = True) -> None:
        """Hands the policy's weights to the engine if `now` is set, or if the queue has no batch for a later step;
        waits first until the thread has finished generating. Otherwise the weights are handed over later. Batches in
        the queue do not change."""
        self._policy, self.step = policy, step
        if now or all(batch.step <= step for batch in self.queue):
            self._ready()

    def next_groups(self, count: int, step: int) -> list[Group]:
        """Returns the groups of a step, as GroupSource does. If the queue is then empty, also draws the prompts of the
        following steps and starts to generate their completions. An error in the generation of a step is raised when
        the groups of that step are requested."""
        groups = super().next_groups(count, step)
        self._ages = [step - r.policy_step for g in groups for r in g.rollouts]
        if not self.queue:
            self._ready()
            last = min(step + self.config.asynchronous.max_staleness, self.config.steps - 1)
            self.queue += [self._ahead(count, following) for following in range(step + 1, last + 1)]
            self.step = step
            for batch in self.queue:  # after all draws: a task's code runs in one thread at a time
                self._begin(batch)
        return groups

    def close(self) -> None:
        """Stops the generation that is running in the thread, and drops its results."""
        if any(batch.work and not batch.work.done() for batch in self.queue):
            getattr(self.engine, "abandon", lambda: None)()
        self._thread.shutdown(cancel_futures=True)

    def _ready(self) -> None:
        with self.clock("rollout"):
            concurrent.futures.wait([batch.work for batch in self.queue if batch.work])
        if self.synced != self.step:
            self.engine.sync(self._policy, self.step)
            self.synced = self.step

    def _ahead(self, count: int, step: int) -> AheadBatch:
        self.step = step
        drawn = self._numbered(comm.on_main(partial(self._next, self.filters.oversampled(count))))
        batch = AheadBatch(drawn.draws, drawn.fresh, step=step, policy_step=self.synced)
        super()._encode(batch)
        return batch

    def _begin(self, batch: AheadBatch) -> None:
        writer = self.generator.with_engine(RecordingEngine(self.engine, batch.completions), Clock(), batch.policy_step)
        batch.keys = writer.keys(batch.accepted)
        batch.work = self._thread.submit(self._write, batch, writer)

    def _write(self, batch: AheadBatch, writer: Any) -> list[Group] | None:
        """Generates a batch with `writer`, a group generator; runs in the thread. Returns this process's scored groups,
        or None if the main thread has to score."""
        start, accepted = time.perf_counter(), batch.accepted
        try:
            if accepted and self.config.rollout.score_ahead and not writer.collective:
                return writer.groups(accepted, batch.step)
            return writer.write(accepted) if accepted else None
        finally:
            batch.span = start, time.perf_counter()

    def _draw(self, wanted: int, carried_over: Mapping[int, PartialGroup]) -> DrawBatch:
        if self.queue and self.queue[0].step == self.step:
            return self.queue.popleft()
        self._ready()
        return super()._draw(wanted, carried_over)

    def _encode(self, drawn: DrawBatch) -> None:
        if not drawn.encoded:
            super()._encode(drawn)
            # its generation had failed when the checkpoint was written
            if isinstance(drawn, AheadBatch) and not drawn.completions:
                self._ready()

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        if not isinstance(drawn, AheadBatch) or not (drawn.work or drawn.completions):
            return super()._answer(drawn, tokens)
        groups: Sequence[Group | PartialGroup] | None = drawn.work.result() if drawn.work else None
        if drawn.span:
            self.clock.span("ahead", *drawn.span)
            self._ahead_s = drawn.span[1] - drawn.span[0]
        if groups is None and (drawn.accepted or self.generator.collective):
            engine = ReplayEngine(drawn.completions, None if drawn.work else self.engine)
            scorer = self.generator.with_engine(engine, self.clock, drawn.policy_step)
            groups = scorer.groups(drawn.accepted, drawn.step)
        return {a.number: group for a, group in zip(drawn.accepted, groups or (), strict=True)}

    def metrics(self) -> dict[str, float]:
        """The metrics of GroupSource, the age in steps of the weights that sampled the trained completions (mean and
        maximum), and the seconds that the thread worked."""
        ages = [age for part in comm.gather(self._ages) for age in part]
        seconds, self._ahead_s = self._ahead_s, 0.0
        return {**super().metrics(), "async/staleness_mean": sum(ages) / max(len(ages), 1),
                "async/staleness_max": float(max(ages, default=0)), "time/ahead_s": seconds}

    def state_dict(self) -> dict[str, Any]:
        """The state of GroupSource, and the queue of all processes. Waits until generation ends. A batch whose
        generation failed is saved without completions, so that a resumed run generates it again."""
        with self.clock("rollout"):
            whole = [all(comm.gather(batch.is_complete)) for batch in self.queue]
        completions = [{key: answers for part in comm.gather(batch.completions) for key, answers in part.items()}
                       if done else {} for batch, done in zip(self.queue, whole, strict=True)]
        return {**super().state_dict(),
                "queue": [batch.state(answers) for batch, answers in zip(self.queue, completions, strict=True)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.queue = deque(
            AheadBatch({number: draw_of(draw) for number, draw in b["draws"]}, len(b["draws"]), step=b["step"],
                  policy_step=b["policy_step"],
                  completions={key: [completion_of(**a) for a in answers] for key, answers in b["made"].items()})
            for b in state.get("queue", ()))


def _emergency_state(queue: Sequence[AheadBatch], seconds: float) -> dict[str, Any] | None:
    """Returns {"queue": [state of each batch]} for an emergency checkpoint, even if scoring has failed. Waits at most
    `seconds` for generation. Returns None if completions are missing or there are several processes."""
    concurrent.futures.wait([batch.work for batch in queue if batch.work], seconds)
    whole = all(batch.keys <= batch.completions.keys() if batch.work else batch.completions for batch in queue)
    return {"queue": [batch.state(batch.completions) for batch in queue]} if whole and comm.world() == 1 else None


class RecordingEngine:
    """An engine that passes requests to `engine`, and adds the completions to `completions` by Request.key."""

    def __init__(self, engine: Engine, completions: CompletionsByKey):
        self.engine, self.completions = engine, completions

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing, because a batch is sampled entirely with the weights that the engine has when its generation
        begins."""

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        completions = self.engine.generate(requests, done)
        self.completions |= {request.key: answers for request, answers in zip(requests, completions, strict=True)}
        return completions

    def close(self) -> None:
        """Does nothing: the wrapped engine is closed by its owner."""


class ReplayEngine:
    """An engine that returns recorded completions. For episodes, the wrapped engine (attribute `engine`) replays the
    recorded actions in new environments."""

    def __init__(self, completions: CompletionsByKey, engine: Engine | None = None):
        self.completions, self.engine = completions, engine

    def sync(self, policy: Any, step: int) -> None:
        """Does nothing: recorded completions need no weights."""

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        completions = [[*self.completions[request.key]] for request in requests]
        return self.engine.replayed(requests, completions) if isinstance(self.engine, EpisodePlayer) else completions

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


def check(config: Config, sampler: Any) -> None:
    """Raises ConfigError if async.max_staleness is set and the sampler is a ProbingSampler, which needs answers of the
    current policy before it can draw the prompts of a step."""
    if config.asynchronous.max_staleness and isinstance(sampler, ProbingSampler):
        raise ConfigError(f"async.max_staleness={config.asynchronous.max_staleness}: curriculum.name="
                          f"{config.curriculum.name} needs answers of the current policy before it draws the prompts "
                          "of a step, so no later step can be generated during the update. Choose another "
                          "curriculum.name, or set async.max_staleness=0")


def _set_up_thread(threads: int, card: int | None) -> None:
    """Initializes the generation thread: limits PyTorch to `threads` CPU threads in it, and selects the process's GPU
    `card` (None = no GPU)."""
    torch.set_num_threads(threads)
    if card is not None:  # a new thread starts on GPU 0
        torch.cuda.set_device(card)
