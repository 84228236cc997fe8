"""The services of a run, access to them for one group, and their metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.task import Task
from vlrl.task.services import FAILED, ServiceContext

KINDS = Table({
    "judge": "vlrl.services.judge:of_run",
    "clip": "vlrl.services.clip:of_run",
    "reward_model": "vlrl.services.reward_model:of_run",
})
"""Section of `services` -> "module:name" of the function that creates the service: (config, folder for replies) ->
Service."""
_MOST_THREADS = 32


class Service(Protocol):
    """The interface of a service: a model other than the policy that computes reward parts, in one process."""

    concurrency: int
    """Number of groups that may use the service at once. It is 1 for a service that computes in this process."""

    def at(self, context: ServiceContext) -> Callable[..., Any]:
        """The service for one group, as a callable. Requests are counted under `context`, the split and step of the
        group. If the callable has a list `failures`, it contains the reasons for missing replies."""
        ...

    def problem(self) -> str:
        """Why the service seems unusable now; "" if it works. A problem need not end the run."""
        ...

    def metrics(self, split: str, step: int, times: bool) -> dict[str, float]:
        """Metrics for a split since the last call, in steps up to `step`, over all processes. With `times`, also the
        duration of requests."""
        ...

    def close(self) -> None: ...


def provide(config: Config, task: Task, folder: Path | None = None) -> ServiceSet | None:
    """Creates the services that are configured under `services.*` and needed by the task; None if there are none.
    folder: where replies are stored; None = the run's folder. Raises ConfigError for an invalid address, a missing
    key, or a model that cannot be loaded."""
    wanted = [name for name in config.services.given if name in task.needs]
    return ServiceSet({name: KINDS[name](config, folder or Path(config.run.dir))
                       for name in wanted}) if wanted else None


@contextmanager
def serving(config: Config, task: Task) -> Iterator[ServiceSet | None]:
    """Context manager that yields the services that are configured and needed by the task (None if there are none), for
    use outside of a run. Replies are stored in services.judge.cache, or else only until the context ends."""
    with TemporaryDirectory(prefix="vlrl-services-") as folder:
        services = provide(config, task, Path(folder))
        try:
            yield services
        finally:
            if services:
                services.close()


class GroupServiceSet:
    """The services that score one group of answers: `services` is {name: callable}."""

    def __init__(self, services: Mapping[str, Service], context: ServiceContext, turn: threading.Lock):
        self.turn = turn
        """A lock that is held while the task's code runs. It is released while the code waits for a server, so that
        groups can wait in parallel."""
        self._asked = {name: service.at(context) for name, service in services.items()}
        self.services = {name: _aside(self._asked[name], turn) if service.concurrency > 1 else self._asked[name]
                         for name, service in services.items()}

    @property
    def problem(self) -> str | None:
        """A text for the `error` of the group's rollouts if replies of a service are missing: the first reason, and the
        number of further reasons. None if no reply is missing."""
        failures = [f"{name}: {reason}" for name, asked in self._asked.items()
                    for reason in getattr(asked, "failures", ())]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return f"{FAILED}{failures[0]}{more}" if failures else None


def _aside(service: Callable[[Any], Any], turn: threading.Lock) -> Callable[[Any], Any]:
    def ask(questions: Any) -> Any:
        turn.release()
        try:
            return service(questions)
        finally:
            turn.acquire()

    return ask


class ServiceSet:
    """The services of a run by name, in one process."""

    def __init__(self, services: Mapping[str, Service]):
        self._services, self._turn = services, threading.Lock()

    @property
    def threads(self) -> int:
        """Number of groups that may be scored in parallel."""
        return min(_MOST_THREADS, max(service.concurrency for service in self._services.values()))

    def at(self, context: ServiceContext) -> GroupServiceSet:
        """The services for one group. Requests are counted under `context`, the split and step of the group."""
        return GroupServiceSet(self._services, context, self._turn)

    def standalone(self, split: str, step: int) -> GroupServiceSet:
        """Returns the services for a group that is scored outside of a run, as if the group had been sampled with the
        weights of `step`."""
        return self.at(ServiceContext(split, step, step))

    def warnings(self) -> list[str]:
        """Warnings about services that are unavailable now, which need not end the run."""
        return [f"{problem}: answers that need it cannot be scored until it responds (limits.service_errors)"
                for service in self._services.values() if (problem := service.problem())]

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Metrics `judge/...`, `clip/images` and `reward_model/...` for a split since the last call, in steps up to
        `step`, over all processes. With `times`, also the duration of requests."""
        out: dict[str, float] = {}
        for service in self._services.values():
            out |= service.metrics(split, step, times)
        return out

    def close(self) -> None:
        for service in self._services.values():
            service.close()
