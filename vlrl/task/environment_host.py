"""Environments in processes of their own (`environment.workers`), which are ended when a call takes too long.

    host = Environments(make, settings)         # before the model is loaded, as Scorer
    episode = host.open(sample, seed)
    host.reset([episode])                       # [Observation], or [Failed] where it hangs, dies or returns nonsense
    host.step([episode], ["left"])              # [Step], or [Failed]
    host.begin_step(episode, "left")            # a Future of the same

A process holds many episodes, and has one call at a time: what an environment waits for holds up the others of its
process, and of no other. When one of them ends it, the others are reset and their actions replayed when they are
next asked for: an environment is the same for the same sample, seed and actions.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vlrl.config.registry import failure
from vlrl.config.schema import EnvironmentSettings
from vlrl.errors import DataError
from vlrl.rewards.worker import Hung, Killed, Worker
from vlrl.task.base import Task
from vlrl.task.environment import Environment
from vlrl.task.keeper import Keeper
from vlrl.task.tools import environment_of
from vlrl.types import Media, Observation, Sample, Step

MOST_TEXT = 100_000
"""Characters of an observation, and of an `info` as JSON."""
_START_S = 60.0
"""Seconds that the start of a process may take."""
_NOTHING = pickle.dumps(("close", 0, None))
"""A call that a process answers as soon as it is there; no episode has the number 0."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failed:
    """An environment that cannot go on: why."""

    reason: str


@dataclass(eq=False)
class Episode:
    """An environment in a host, by its number."""

    number: int
    sample: Sample
    seed: int
    actions: list[str] = field(default_factory=list)
    """Those that it answered."""
    seconds: float = 0.0
    """That the last call took."""


class Environments:
    """Opens, resets, steps and closes environments. Calls of one process go one after the other, from any thread."""

    def __init__(self, make: Callable[[str], Task], settings: EnvironmentSettings):
        self.settings, self.restarts = settings, 0
        self._convention, self._next, self._make = "", 0, make
        self._lock = threading.Lock()
        self._keeper = Keeper(lambda c, text: _serve(c, make(text))) if sys.platform == "linux" else None
        self._workers = [self._worker() for _ in range(settings.workers if self._keeper else 1)]
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix="environments") for _ in self._workers]

    def settle(self, convention: str) -> None:
        """How the model writes boxes, which is known once it is loaded."""
        self._convention = convention

    def open(self, sample: Sample, seed: int) -> Episode:
        """Returns a new episode; nothing of the task runs yet."""
        with self._lock:
            self._next += 1
            return Episode(self._next, sample, seed)

    def opened(self, sample: Sample, seed: int) -> Sample:
        """Returns the sample with what its environment shows at a reset; as it is where the task has none for it.

        Raises DataError when the reset fails.
        """
        episode = self.open(sample, seed)
        (observation,) = self.reset([episode])
        self.close_episodes([episode])
        if isinstance(observation, Failed):
            raise DataError(f"sample '{sample.id}': its environment failed: {observation.reason}")
        if observation is None:
            return sample
        return replace(sample, opening=observation, environment_seed=seed)

    def reset(self, episodes: Sequence[Episode]) -> list[Observation | Failed | None]:
        """Returns what each shows first; None for a sample that has no environment."""
        return [call.result() for call in [self.begin_reset(e) for e in episodes]]

    def step(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[Step | Failed]:
        """Returns what the action of each does."""
        return [call.result() for call in [*map(self.begin_step, episodes, actions)]]

    def begin_reset(self, episode: Episode) -> Future[Observation | Failed | None]:
        """Returns at once what the episode will show first; calls of one process go on in the order of these."""
        return self._begin(episode, lambda: self._ask(episode, "reset", (episode.sample, episode.seed),
                                                      self.settings.reset_s))

    def begin_step(self, episode: Episode, action: str) -> Future[Step | Failed]:
        """Returns at once what the action will do."""
        return self._begin(episode, lambda: self._step(episode, action))

    def close_episodes(self, episodes: Sequence[Episode]) -> list[Failed | None]:
        """Closes their environments; one that cannot close is told, and returned as Failed."""
        calls = [self._begin(e, partial(self._ask, e, "close", None, self.settings.step_s)) for e in episodes]
        replies = [call.result() for call in calls]
        for episode, reply in zip(episodes, replies, strict=True):
            if isinstance(reply, Failed):
                _log.warning("environment of sample %r: %s", episode.sample.id, reply.reason)
        return replies

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that run."""
        return [w.process for w in self._workers if isinstance(w, Worker) and isinstance(w.process, int)]

    def close(self) -> None:
        """Ends all processes."""
        for queue in self._queues:
            queue.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            if isinstance(worker, Worker):
                worker.kill()
        if self._keeper:
            self._keeper.close()

    def _worker(self) -> Worker | _Hosted | None:
        keeper = self._keeper
        return Worker(lambda: keeper.start(self._convention)) if keeper else None

    def _begin(self, episode: Episode, call: Callable[[], Any]) -> Future[Any]:
        """Has its process do a call after those before."""
        def timed() -> Any:
            begun = time.monotonic()
            try:
                return call()
            finally:
                episode.seconds = time.monotonic() - begun

        return self._queues[episode.number % len(self._queues)].submit(timed)

    def _step(self, episode: Episode, action: str) -> Step | Failed:
        reply = self._ask(episode, "step", action, self.settings.step_s)
        if reply is None:  # its process is a new one
            reply = self._replayed(episode) or self._ask(episode, "step", action, self.settings.step_s)
        if isinstance(reply, Step):
            episode.actions.append(action)
        return reply if isinstance(reply, (Step, Failed)) else Failed("its process was lost twice")

    def _replayed(self, episode: Episode) -> Failed | None:
        """Brings an environment to where it was; returns why it cannot be."""
        reply = self._ask(episode, "reset", (episode.sample, episode.seed), self.settings.reset_s)
        for action in episode.actions:
            if isinstance(reply, Failed):
                break
            reply = self._ask(episode, "step", action, self.settings.step_s)
        return reply if isinstance(reply, Failed) else None

    def _ask(self, episode: Episode, call: str, given: Any, seconds: float) -> Any:
        """Returns the reply of its process; None where that does not know the episode."""
        place = episode.number % len(self._workers)
        worker = self._workers[place]
        if worker is None:  # no processes here: in this one, without a limit
            worker = self._workers[place] = _Hosted(self._make(self._convention))
        if isinstance(worker, _Hosted):
            return worker.reply(call, episode.number, given)
        try:
            request = pickle.dumps((call, episode.number, given), pickle.HIGHEST_PROTOCOL)
            if not worker.process:  # how long a process takes to start is not the environment's
                worker.ask(_NOTHING, lambda: (0, _START_S))
            return pickle.loads(worker.ask(request, lambda: (0, seconds)))  # of this run's own process
        except Killed as error:
            with self._lock:
                self.restarts += 1
            why = f"no result within {seconds:g} s" if isinstance(error, Hung) else "its process ended"
            _log.warning("environment of sample %r, %s: %s; the process was started again", episode.sample.id, call,
                         why)
            return Failed(f"{call}: {why}")
        except Exception as error:  # a sample with objects that cannot be sent
            return Failed(f"{call}: {type(error).__name__}: {error}"[:500])


# --- in the process ---------------------------------------------------------------------------------------------------


def _serve(connection: Connection, task: Task) -> None:
    """Answers until nobody asks any more."""
    hosted = _Hosted(task)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        reply = hosted.reply(*pickle.loads(request))  # of the training process
        try:
            sent = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of the task's own objects
            sent = pickle.dumps(Failed(f"what it returned cannot be sent: {type(error).__name__}: {error}"[:500]))
        connection.send_bytes(sent)


class _Hosted:
    """The environments of one process, by number."""

    def __init__(self, task: Task):
        self._task = task
        self._open: dict[int, Environment] = {}

    def reply(self, call: str, number: int, given: Any) -> Any:
        """Returns an Observation, a Step or why there is none; None for an unknown number."""
        try:
            if call == "reset":
                sample, seed = given
                environment = environment_of(self._task, sample)
                if environment is None:
                    return None
                if not isinstance(environment, Environment):
                    return Failed(f"environment(sample) returned {type(environment).__name__}, expected an Environment")
                self._open[number] = environment
                return _observation(environment.reset(seed))
            if number not in self._open:
                return None
            if call == "close":
                return self._open.pop(number).close()
            return _step(self._open[number].step(given))
        except _Wrong as error:
            return Failed(f"{call}: {error}")
        except (Exception, SystemExit) as error:  # a task's code may raise anything
            return Failed(f"{call}: {failure(error)}"[:500])


class _Wrong(Exception):
    """What an environment returned is not what it must be."""


def _observation(observation: Any) -> Observation:
    if isinstance(observation, Observation) and observation.results:
        return Observation.of_results([_observation(result) for result in observation.results])
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise _Wrong(f"returned {type(observation).__name__}, expected an Observation with a text")
    if len(observation.text) > MOST_TEXT:
        raise _Wrong(f"returned a text of {len(observation.text)} characters; at most {MOST_TEXT} are shown")
    if not isinstance(observation.media, (list, tuple)) or not all(isinstance(m, Media) for m in observation.media):
        raise _Wrong("the media of its observation are no list of Media(source=...)")
    return replace(observation, text=observation.text.encode("utf-8", "replace").decode(),
                   media=tuple(observation.media))


def _step(step: Any) -> Step:
    if not isinstance(step, Step):
        raise _Wrong(f"returned {type(step).__name__}, expected a Step")
    if not isinstance(step.parts, Mapping):
        raise _Wrong(f"parts is {type(step.parts).__name__}, expected {{part: number}}")
    parts = {}
    for name, value in step.parts.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise _Wrong(f"the part {name!r} is {str(value)[:60]!r}, no finite number")
        parts[str(name)] = float(value)
    state = None if step.state is None else str(step.state)[:MOST_TEXT]
    return Step(_observation(step.observation), parts, bool(step.done), state, _info(step.info))


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise _Wrong(f"info is {type(info).__name__}, expected {{name: value}}")
    try:
        text = json.dumps(dict(info), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Wrong(f"info cannot be written as JSON: {error}") from None
    if len(text) > MOST_TEXT:
        raise _Wrong(f"info has {len(text)} characters as JSON; at most {MOST_TEXT} are kept")
    return json.loads(text)
