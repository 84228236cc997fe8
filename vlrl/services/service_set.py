"""The services of a run, their view for one group, and their metrics."""

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
"""Sections of `services` -> (config, folder of replies) -> Service."""
_MOST_THREADS = 32


class Service(Protocol):
    """A model beside the policy, on one process."""

    concurrency: int
    """Groups that may wait for it at once; 1 = it computes in this process, for one group at a time."""

    def at(self, place: ServiceContext) -> Callable[..., Any]:
        """The service for one group; its `failures`, if it has them, say why something has no reply."""
        ...

    def problem(self) -> str:
        """Why it seems unusable now, which need not end the run; "" if it works."""
        ...

    def metrics(self, split: str, step: int, times: bool) -> dict[str, float]:
        """The requests for a split up to a completed step, over all processes, which are forgotten afterwards; with
        `times` the duration of a call."""
        ...

    def close(self) -> None: ...


def provide(config: Config, task: Task, folder: Path | None = None) -> ServiceSet | None:
    """The services that the settings provide and a task needs; None if there are none. Replies are cached in `folder`
    instead of the run's.

    Raises ConfigError for a wrong address, a missing key, and a model that cannot be loaded.
    """
    wanted = [name for name in config.services.given if name in task.needs]
    return ServiceSet({name: KINDS[name](config, folder or Path(config.run.dir))
                       for name in wanted}) if wanted else None


@contextmanager
def serving(config: Config, task: Task) -> Iterator[ServiceSet | None]:
    """The services that the settings provide and a task needs, outside of a run: replies are cached until the block
    ends, or in services.judge.cache."""
    with TemporaryDirectory(prefix="vlrl-services-") as folder:
        services = provide(config, task, Path(folder))
        try:
            yield services
        finally:
            if services:
                services.close()


class GroupServiceSet:
    """The services for one group."""

    def __init__(self, services: Mapping[str, Service], place: ServiceContext, turn: threading.Lock):
        self.turn = turn
        """Held while a task's code runs, and released while it waits for a server, so that groups wait in parallel."""
        self._asked = {name: service.at(place) for name, service in services.items()}
        self.services = {name: _aside(self._asked[name], turn) if service.concurrency > 1 else self._asked[name]
                         for name, service in services.items()}

    @property
    def problem(self) -> str | None:
        """Why a part that depends on a service has no value, as the `error` of a rollout; None if all services replied.
        """
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
    """The services of a run by name, on one process."""

    def __init__(self, services: Mapping[str, Service]):
        self._services, self._turn = services, threading.Lock()

    @property
    def threads(self) -> int:
        """Number of groups that are scored in parallel."""
        return min(_MOST_THREADS, max(service.concurrency for service in self._services.values()))

    def at(self, place: ServiceContext) -> GroupServiceSet:
        """The services for one group."""
        return GroupServiceSet(self._services, place, self._turn)

    def alone(self, split: str, step: int) -> GroupServiceSet:
        """The services for a group outside of a run."""
        return self.at(ServiceContext(split, step, step))

    def warnings(self) -> list[str]:
        """The services that are unavailable now, which need not end the run."""
        return [f"{problem}: what it is to judge is unscorable until it responds (limits.service_errors)"
                for service in self._services.values() if (problem := service.problem())]

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """The requests for a split up to a completed step, over all processes: `judge/...`, `clip/images` and
        `reward_model/...`, and with `times` the duration of a call."""
        out: dict[str, float] = {}
        for service in self._services.values():
            out |= service.metrics(split, step, times)
        return out

    def close(self) -> None:
        for service in self._services.values():
            service.close()
