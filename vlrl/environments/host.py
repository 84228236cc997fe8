"""Runs environments in worker processes (`environment.workers`), which are killed if a call takes too long.

    host = Environments(make, settings)         # must be created before the model is loaded, like Scorer
    episode = host.open(sample, seed)
    host.reset([episode])                       # [Observation], or [EnvironmentFailure] if the environment fails
    host.step([episode], ["left"])              # [Step], or [EnvironmentFailure]
    host.begin_step(episode, "left")            # a Future of the Step or EnvironmentFailure

A process holds many episodes and runs one call at a time, so a slow environment delays only the episodes in the same
process. If a process is killed, each of its other episodes is reset, and its actions are replayed, when the episode is
next needed. The observations must be the same as before, so an environment must be deterministic given sample, seed and
actions. A failed reset is retried."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vlrl.config.registry import failure
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments.tools import environment_of
from vlrl.environments.validation import ProtocolError, checked_observation, checked_step, fingerprint
from vlrl.rewards.worker import Worker, WorkerEnded, WorkerHung, ending_forked_copies, serve
from vlrl.task.base import Task
from vlrl.task.environment import Environment
from vlrl.task.fork_server import ForkServer
from vlrl.types import Observation, Sample, Step

_PAUSES_S = (0.25, 0.5, 1.0)
"""Pauses in seconds between the retries of a reset. All attempts together may take environment.reset_s."""
_MOST_LOST = 3
"""After this number of consecutive samples whose resets failed in all attempts, resets are attempted only once until
one succeeds. So a server that is down does not delay every episode by the full time limit."""
_START_S = 60.0  # time limit in seconds for starting a process
_NOTHING = pickle.dumps(("close", 0, None))
"""A call without effect (it closes episode 0, which never exists), sent to wait until a process has started."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvironmentFailure:
    """The reason why an environment cannot continue, returned in place of its response."""

    reason: str


@dataclass(eq=False)
class HostedEpisode:
    """An episode whose environment is in a worker process. `number` identifies the episode in that process."""

    number: int
    sample: Sample
    seed: int
    actions: list[str] = field(default_factory=list)  # the actions to which the environment has responded
    seen: list[str] = field(default_factory=list)
    """Fingerprints of the first observation and of the response to each action."""
    seconds: float = 0.0  # duration of the last call in seconds


class Environments:
    """Opens, resets, steps and closes environments in worker processes. May be used from any thread. The calls to one
    process run one after another."""

    def __init__(self, make: Callable[[str], Task], settings: EnvironmentSettings):
        self.settings, self.restarts = settings, 0
        self._convention, self._next, self._make = "", 0, make
        self._lost = set[str]()
        self._lock = threading.Lock()
        self._fork_server = ForkServer(lambda c, text: _serve(c, make(text))) if sys.platform == "linux" else None
        self._workers: list[Worker | _Hosted | None] = [None]
        if fork_server := self._fork_server:
            self._workers = [Worker(lambda: fork_server.start(self._convention)) for _ in range(settings.workers)]
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix="environments") for _ in self._workers]

    def set_convention(self, convention: str) -> None:
        """Sets the model's convention for bounding boxes, which is only known once the model is loaded."""
        self._convention = convention

    def open(self, sample: Sample, seed: int | None = None) -> HostedEpisode:
        """Creates a new episode, without running code of the task. `seed` defaults to the sample's environment_seed."""
        with self._lock:
            self._next += 1
            seed = sample.environment_seed if seed is None else seed
            assert seed is not None
            return HostedEpisode(self._next, sample, seed)

    def reset_sample(self, sample: Sample, seed: int) -> Sample:
        """Resets the sample's environment once, and returns the sample with the first observation or with the error. A
        sample without an environment is returned unchanged."""
        episode = self.open(sample, seed)
        (observation,) = self.reset([episode])
        self.close_episodes([episode])
        if isinstance(observation, EnvironmentFailure):
            return replace(sample, opening=Observation(), environment_seed=seed, reset_error=observation.reason)
        if observation is None:
            return sample
        return replace(sample, opening=observation, environment_seed=seed)

    def reset(self, episodes: Sequence[HostedEpisode]) -> list[Observation | EnvironmentFailure | None]:
        """Resets the environments of episodes. Returns for each episode the first observation or the failure; None for
        an episode without an environment."""
        return [call.result() for call in [self.begin_reset(e) for e in episodes]]

    def step(self, episodes: Sequence[HostedEpisode], actions: Sequence[str]) -> list[Step | EnvironmentFailure]:
        """Runs one action in the environment of each episode. Returns for each episode the step or the failure."""
        return [call.result() for call in [*map(self.begin_step, episodes, actions)]]

    def begin_reset(self, episode: HostedEpisode) -> Future[Observation | EnvironmentFailure | None]:
        """Starts a reset, and immediately returns a Future of the first observation or EnvironmentFailure; of None if
        the episode has no environment. Calls to one process run in the order of their starts."""
        def first() -> Observation | EnvironmentFailure | None:
            shown = self._reset(episode)
            if isinstance(shown, Observation):
                episode.seen = [fingerprint(shown)]
            return shown

        return self._begin(episode, first)

    def begin_step(self, episode: HostedEpisode, action: str) -> Future[Step | EnvironmentFailure]:
        """Starts a step, and immediately returns a Future of the Step or EnvironmentFailure."""
        return self._begin(episode, lambda: self._step(episode, action))

    def close_episodes(self, episodes: Sequence[HostedEpisode]) -> list[EnvironmentFailure | None]:
        """Closes the environments of episodes. Returns for each episode the failure, which is also logged, or None."""
        calls = [self._begin(e, partial(self._ask, e, "close", None, self.settings.step_s)) for e in episodes]
        replies = [call.result() for call in calls]
        for episode, reply in zip(episodes, replies, strict=True):
            if isinstance(reply, EnvironmentFailure):
                _log.warning("environment of sample %r: %s", episode.sample.id, reply.reason)
        return replies

    @property
    def processes(self) -> list[int]:
        """Ids of the running processes."""
        return [w.process for w in self._workers if isinstance(w, Worker) and isinstance(w.process, int)]

    def close(self) -> None:
        for queue in self._queues:
            queue.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            if isinstance(worker, Worker):
                worker.kill()
        if self._fork_server:
            self._fork_server.close()

    def _begin(self, episode: HostedEpisode, call: Callable[[], Any]) -> Future[Any]:
        def timed() -> Any:
            begun = time.monotonic()
            try:
                return call()
            finally:
                episode.seconds = time.monotonic() - begun

        return self._queues[episode.number % len(self._queues)].submit(timed)

    def _reset(self, episode: HostedEpisode) -> Observation | EnvironmentFailure | None:
        left = self.settings.reset_s
        end = time.monotonic() + left
        for pause in (*_PAUSES_S, 0.0):
            reply = self._ask(episode, "reset", (episode.sample, episode.seed), left)
            if not isinstance(reply, EnvironmentFailure):
                self._lost.clear()
                return reply
            left = end - time.monotonic() - pause
            if not pause or left <= 0 or len(self._lost) >= _MOST_LOST:
                break
            _log.info("environment of sample %r: %s; retrying", episode.sample.id, reply.reason)
            time.sleep(pause)
        self._lost.add(episode.sample.id)
        return reply

    def _step(self, episode: HostedEpisode, action: str) -> Step | EnvironmentFailure:
        reply = self._ask(episode, "step", action, self.settings.step_s)
        if reply is None:  # its process is a new one
            reply = self._replayed(episode) or self._ask(episode, "step", action, self.settings.step_s)
        if isinstance(reply, Step):
            episode.actions.append(action)
            episode.seen.append(fingerprint(reply))
        return reply if isinstance(reply,
                                   (Step, EnvironmentFailure)) else EnvironmentFailure("its process was lost twice")

    def _replayed(self, episode: HostedEpisode) -> EnvironmentFailure | None:
        """Restores the state of an environment by replaying the episode's actions. Returns the failure, or None."""
        for i, seen in enumerate(episode.seen):
            reply = (self._ask(episode, "step", episode.actions[i - 1], self.settings.step_s) if i
                     else self._reset(episode))
            if isinstance(reply, EnvironmentFailure):
                return reply
            if reply is None or fingerprint(reply) != seen:
                call = f"action {i}" if i else "the reset"
                return EnvironmentFailure(f"replay: its process was lost, and in the replay {call} returned something "
                                          "else: an environment must be deterministic given its seed and actions")
        return None

    def _ask(self, episode: HostedEpisode, call: str, given: Any, seconds: float) -> Any:
        """Sends a call with the arguments `given` to the episode's process. Returns the reply; None if the process does
        not know the episode; an EnvironmentFailure if there is no reply within `seconds`."""
        place = episode.number % len(self._workers)
        worker = self._workers[place]
        if worker is None:  # no worker processes on this system: in this process, without a time limit
            worker = self._workers[place] = _Hosted(self._make(self._convention))
        if isinstance(worker, _Hosted):
            with ending_forked_copies():
                return worker.reply(call, episode.number, given)
        try:
            request = pickle.dumps((call, episode.number, given), pickle.HIGHEST_PROTOCOL)
            if not worker.process:  # starting the process must not count as the environment's time
                worker.ask(_NOTHING, lambda: (0, _START_S))
            return pickle.loads(worker.ask(request, lambda: (0, seconds)))  # of this run's own process
        except WorkerEnded as error:
            with self._lock:
                self.restarts += 1
            why = f"no result within {seconds:g} s" if isinstance(error, WorkerHung) else "its process ended"
            _log.warning("environment of sample %r, %s: %s; the process was restarted", episode.sample.id, call, why)
            return EnvironmentFailure(f"{call}: {why}")
        except Exception as error:  # a sample with objects that cannot be sent
            return EnvironmentFailure(f"{call}: {type(error).__name__}: {error}"[:500])


# --- in the process ---------------------------------------------------------------------------------------------------


def _serve(connection: Connection, task: Task) -> None:
    hosted = _Hosted(task)

    def reply(request: bytes) -> bytes:
        answer = hosted.reply(*pickle.loads(request))  # of the training process
        try:
            return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of the task's own objects
            why = f"its return value cannot be sent between processes: {type(error).__name__}: {error}"[:500]
            return pickle.dumps(EnvironmentFailure(why))

    serve(connection, reply)


class _Hosted:
    def __init__(self, task: Task):
        self._task = task
        self._open: dict[int, Environment] = {}

    def reply(self, call: str, number: int, given: Any) -> Any:
        try:
            if call == "reset":
                sample, seed = given
                environment = environment_of(self._task, sample)
                if environment is None:
                    return None
                if not isinstance(environment, Environment):
                    return EnvironmentFailure(f"environment(sample) returned {type(environment).__name__}, expected an "
                                              "Environment")
                self._open[number] = environment
                return checked_observation(environment.reset(seed))
            if number not in self._open:
                return None
            if call == "close":
                return self._open.pop(number).close()
            return checked_step(self._open[number].step(given))
        except ProtocolError as error:
            return EnvironmentFailure(f"{call}: {error}")
        except (Exception, SystemExit) as error:  # a task's code may raise anything
            return EnvironmentFailure(f"{call}: {failure(error)}"[:500])
