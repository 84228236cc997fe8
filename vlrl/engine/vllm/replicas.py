"""A pool of equivalent servers: chooses a server for each request, and retries requests when a server fails.

A request is sent to the server with the fewest outstanding completions. If a request fails, by a broken connection, a
timeout or a server error, it is retried after a pause that doubles each time, if possible on another server. The failed
server gets no requests until `admit` accepts it again: a restarted server must load the current weights first.

All decisions are made in the caller's thread. Other threads only wait for servers and report the outcome. A report on a
request that was given up is ignored, so every request gets exactly one result."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.errors import TrainingError, VlrlError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PAUSES = (0.25, 10.0)  # number of seconds before the first retry, and the longest pause between retries
_LOOK_S = 1.0  # after this number of seconds at most, the pool checks whether the run was abandoned


@dataclass(eq=False)
class ServerCall:
    """One HTTP request to a server. weight: the number of requested completions. body: a function that builds the
    content of the request; it is called in another thread."""

    path: str
    body: Callable[[], bytes]
    weight: int = 1
    failures: int = 0
    not_before: float = 0.0
    avoid: Replica | None = None  # the server on which this request failed last


CallSteps = Generator[list[ServerCall], list[Any], T]
"""A generator that performs one task in rounds. It yields the requests of a round, is sent the responses in the same
order, and finally returns the result of the task."""


@dataclass(eq=False)
class Replica:
    """A server of a ReplicaPool, whether the server is ready, and the state of its checks."""

    address: str
    ready: bool = False
    awaited: bool = True
    """Whether `admit_all` waits for this server: True if the server was ready at the last `invalidate`, or was never
    checked."""
    problem: str = "not asked yet"  # why the server is not ready
    checking: bool = False
    """Whether a check by `admit` is running, or has ended but its report is not processed yet. A check may outlast the
    call of `run` or `admit_all` that started it. The next such call then processes the report."""
    report: tuple[int, BaseException | None] | None = None
    """The outcome of `admit`: (number of calls of `invalidate` before the check, error or None)."""
    requests: int = 0  # number of requests sent to this server so far
    retry_at: float = 0.0
    pause: float = _PAUSES[0]
    heard: float = 0.0  # the time of the last response (time.monotonic)


@dataclass(eq=False)
class _Task(Generic[T]):
    number: int
    steps: CallSteps[T]
    results: list[Any] = field(default_factory=list)
    missing: int = 0


class ReplicaPool:
    """A pool of servers. `admit(address)` prepares and checks a server in another thread.

    `admit` raises Unavailable if the server cannot be used yet. Any other error ends the run. most: maximum number of
    outstanding completions per server. retries: maximum number of retries per request. wait_s: longest time without any
    ready server; a check that has begun by then may finish. patience_s: a busy server that does not respond to health
    checks for this time is dropped. setting: the setting that lists the addresses, for messages."""

    def __init__(self, addresses: Sequence[str], client: ServerClient, admit: Callable[[str], None], *, most: int = 512,
                 retries: int = 3, wait_s: float = 600.0, patience_s: float = 60.0, setting: str = "engine.servers"):
        self.replicas = [Replica(address) for address in addresses]
        self._client, self._admit = client, admit
        self._most, self._retries, self._wait_s, self._patience_s = most, retries, wait_s, patience_s
        self.setting, self.section = setting, setting.rpartition(".")[0]
        self._abandoned: VlrlError | None = None
        self._invalidations = 0
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    def abandon(self, error: VlrlError) -> None:
        """Called from another thread. A running call of `run` raises `error` within a second, and every later call
        raises it too."""
        self._abandoned = error

    def invalidate(self) -> None:
        """Marks all servers as not ready, as the weights have changed. No request is sent until `admit` accepts a
        server."""
        self._invalidations += 1
        for replica in self.replicas:
            replica.awaited = replica.ready
            replica.ready, replica.problem, replica.retry_at, replica.pause = False, "not asked yet", 0.0, _PAUSES[0]

    def admit_all(self) -> list[Replica]:
        """Checks every server that is not ready, and returns the servers that are ready afterwards. Waits until all
        servers that were ready before are checked, and at least one server is ready. Raises TrainingError if no
        server becomes ready within `wait_s` seconds."""
        return _Run(self, [], None).admit_all()

    def run(self, tasks: Iterable[CallSteps[T]], done: Callable[[int, T], None] | None = None) -> list[T]:
        """Runs all `tasks`, generators that yield the requests to send (CallSteps), and returns the results of the
        tasks in order. `done(index of the task, result)` is called for each finished task except the last one.
        Raises TrainingError if a request failed too often, or if no server was available for too long."""
        return _Run(self, tasks, done).all()

    def _examine(self, replica: Replica) -> None:
        invalidations, error = self._invalidations, None
        try:
            self._admit(replica.address)
        except BaseException as raised:  # raised again in the caller's thread
            error = raised
        with self._lock:  # else it may come between the reading and the clearing of the report
            replica.report = invalidations, error
        self._wake()


class _Run(Generic[T]):
    def __init__(self, pool: ReplicaPool, tasks: Iterable[CallSteps[T]], done: Callable[[int, T], None] | None):
        self._pool, self._done = pool, done
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[tuple[_Task[T], int, ServerCall]] = []
        self._attempts: dict[int, tuple[_Task[T], int, ServerCall, Replica]] = {}
        self._numbers = 0
        self._load = dict.fromkeys(pool.replicas, 0)
        self._pinging = set[Replica]()
        pool._wake = partial(self._events.put, lambda: None)
        self._none_since = time.monotonic()
        self._tasks = [_Task(i, steps) for i, steps in enumerate(tasks)]
        self._results: dict[int, T] = {}

    def all(self) -> list[T]:
        for task in self._tasks:
            self._advance(task, None)
        while len(self._results) < len(self._tasks):
            if self._pool._abandoned:
                raise self._pool._abandoned
            self._revive()
            self._dispatch()
            self._ping()
            self._next_event()
            self._check_alive()
        return [self._results[i] for i in range(len(self._tasks))]

    def admit_all(self) -> list[Replica]:
        for replica in self._pool.replicas:
            replica.retry_at = 0.0
        self._revive()
        while any(r.awaited and r.checking for r in self._pool.replicas) or not self._ready():
            self._next_event()
            self._hear()
            self._check_alive()
            if not self._ready():
                self._revive()
        return self._ready()

    # --- tasks and their calls ---------------------------------------------------------------------------------------

    def _advance(self, task: _Task[T], results: list[Any] | None) -> None:
        try:
            calls = task.steps.send(results)  # pyright: ignore[reportArgumentType] - None starts a generator
            while not calls:
                calls = task.steps.send([])
        except StopIteration as end:
            self._results[task.number] = end.value
            if self._done and len(self._results) < len(self._tasks):
                self._done(task.number, end.value)
            return
        task.results, task.missing = [None] * len(calls), len(calls)
        self._waiting += [(task, place, call) for place, call in enumerate(calls)]

    def _dispatch(self) -> None:
        now, later = time.monotonic(), []
        for entry in self._waiting:
            replica = self._choose(entry[2]) if entry[2].not_before <= now else None
            if replica is None:
                later.append(entry)
            else:
                self._send(*entry, replica)
        self._waiting = later

    def _choose(self, call: ServerCall) -> Replica | None:
        ready = self._ready()
        others = [r for r in ready if r is not call.avoid] or ready
        free = [r for r in others if not self._load[r] or self._load[r] + call.weight <= self._pool._most]
        return min(free, key=lambda r: (self._load[r], r.requests), default=None)

    def _send(self, task: _Task[T], place: int, call: ServerCall, replica: Replica) -> None:
        number = self._numbers = self._numbers + 1
        self._attempts[number] = task, place, call, replica
        self._load[replica] += call.weight
        if self._load[replica] == call.weight:
            replica.heard = time.monotonic()  # it was idle before
        replica.requests += 1

        def work() -> Callable[[], None]:
            try:
                result = self._pool._client.post(replica.address, call.path, call.body())
            except Unavailable as error:
                return partial(self._failed, number, str(error))
            return lambda: self._complete(number, result)

        self._thread(work)

    def _complete(self, number: int, result: Any) -> None:
        if number not in self._attempts:  # abandoned before
            return
        task, place, call, replica = self._attempts.pop(number)
        self._load[replica] -= call.weight
        replica.heard = time.monotonic()
        task.results[place] = result
        task.missing -= 1
        if not task.missing:
            self._advance(task, task.results)

    def _failed(self, number: int, reason: str) -> None:
        if number not in self._attempts:
            return
        task, place, call, replica = self._attempts.pop(number)
        self._load[replica] -= call.weight
        self._drop(replica, reason)
        call.failures += 1
        call.avoid = replica
        if call.failures > self._pool._retries:
            raise TrainingError(f"a request failed {call.failures} times, the last time at {replica.address}: "
                                f"{reason}. See the log of the server. To allow more or longer attempts, raise "
                                f"{self._pool.section}.retries or {self._pool.section}.timeout_s.")
        call.not_before = time.monotonic() + min(_PAUSES[0] * 2 ** (call.failures - 1), _PAUSES[1])
        self._waiting.insert(0, (task, place, call))  # it has waited longest

    # --- servers -----------------------------------------------------------------------------------------------------

    def _ready(self) -> list[Replica]:
        return [r for r in self._pool.replicas if r.ready]

    def _drop(self, replica: Replica, reason: str) -> None:
        if replica.ready:
            _log.warning("the server %s gets no requests until it responds again: %s", replica.address, reason)
            replica.ready, replica.problem = False, reason
            replica.pause, replica.retry_at = _PAUSES[0], time.monotonic()
            if not self._ready():
                self._none_since = time.monotonic()

    def _revive(self) -> None:
        self._hear()
        for replica in self._pool.replicas:
            with self._pool._lock:
                ask = (not replica.ready and not replica.checking and replica.retry_at <= time.monotonic()
                       and not self._is_late())
                replica.checking = replica.checking or ask
            if ask:
                threading.Thread(target=self._pool._examine, args=(replica,), daemon=True, name="vlrl-replica").start()

    def _hear(self) -> None:
        for replica in self._pool.replicas:
            with self._pool._lock:
                report, replica.report = replica.report, None
                replica.checking = replica.checking and report is None
            if report is None:
                continue
            invalidations, error = report
            if invalidations != self._pool._invalidations:  # about old weights
                replica.retry_at = 0.0
            elif error is None:
                if replica.problem != "not asked yet":
                    _log.warning("the server %s responds again", replica.address)
                replica.ready, replica.awaited, replica.problem = True, True, ""
                replica.pause, replica.heard = _PAUSES[0], time.monotonic()
            elif isinstance(error, Unavailable):
                replica.problem, replica.retry_at = str(error), time.monotonic() + replica.pause
                replica.pause = min(2 * replica.pause, _PAUSES[1])
            else:
                _raising(error)()

    def _ping(self) -> None:
        """Sends health checks to servers that have outstanding requests, even if they were dropped. If a host
        disappears, the connection to it is not closed, so only a health check notices."""
        now = time.monotonic()
        for replica in self._pool.replicas:
            quiet = now - replica.heard
            if not self._load[replica]:
                continue
            if quiet > self._pool._patience_s:
                for number in [n for n, (*_, who) in self._attempts.items() if who is replica]:
                    self._failed(number, f"no response to health checks for {quiet:.0f} s")
            elif quiet > self._pool._patience_s / 6 and replica not in self._pinging:
                self._pinging.add(replica)
                self._thread(lambda replica=replica: self._pinged(replica))

    def _pinged(self, replica: Replica) -> Callable[[], None]:
        try:
            self._pool._client.get(replica.address, "/health")
            heard = True
        except Unavailable:
            heard = False

        def report() -> None:
            self._pinging.discard(replica)
            replica.heard = time.monotonic() if heard else replica.heard
        return report

    def _check_alive(self) -> None:
        if self._ready():
            self._none_since = time.monotonic()
        elif self._is_late() and not any(r.checking for r in self._pool.replicas):
            reasons = "; ".join(f"{r.address}: {r.problem}" for r in self._pool.replicas)
            raise TrainingError(f"no server of {self._pool.setting} was available for {self._pool._wait_s:g} s "
                                f"({reasons}). Start `vlrl serve` again and resume with the same command. "
                                f"The limit is {self._pool.section}.timeout_s.")

    def _is_late(self) -> bool:
        return not self._ready() and time.monotonic() - self._none_since > self._pool._wait_s

    # --- threads -----------------------------------------------------------------------------------------------------

    def _thread(self, work: Callable[[], Callable[[], None]]) -> None:
        """Runs `work` in a separate thread. The function that `work` returns is then called in the caller's thread. An
        error in `work` is raised in the caller's thread."""
        def run() -> None:
            try:
                event = work()
            except BaseException as error:
                event = _raising(error)
            self._events.put(event)
        threading.Thread(target=run, daemon=True, name="vlrl-replica").start()

    def _next_event(self) -> None:
        now, ends = time.monotonic(), [time.monotonic() + _LOOK_S]
        ends += [call.not_before for _, _, call in self._waiting if call.not_before > now]
        ends += [r.retry_at for r in self._pool.replicas if not r.ready and not r.checking]
        try:
            event = self._events.get(timeout=max(min(ends) - now, 0.001))
        except queue.Empty:
            return
        event()


def _raising(error: BaseException) -> Callable[[], None]:
    def event() -> None:
        raise error.with_traceback(None) if isinstance(error, VlrlError) else error
    return event
