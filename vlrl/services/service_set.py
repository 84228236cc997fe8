"""Which services a run has, what a group is given of them, and what they cost."""

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
    """Groups that may wait for it side by side; 1 = it computes here and is asked by one at a time."""

    def at(self, place: ServiceContext) -> Callable[..., Any]:
        """Returns it as one group has it; `failures`, where it has them, say why something has no reply."""
        ...

    def problem(self) -> str:
        """Returns why it seems to be of no use now, which a run may outlive; "" where it answers."""
        ...

    def metrics(self, split: str, step: int, times: bool) -> dict[str, float]:
        """Returns what was asked for a split up to a step, which is completed, over all processes, and forgets it;
        with `times` the seconds of a call.
        """
        ...

    def close(self) -> None: ...


def provide(config: Config, task: Task, folder: Path | None = None) -> ServiceSet | None:
    """Returns the services that the settings give and a task needs; None where there are none. Replies are kept in
    `folder` in place of the run's.

    Raises ConfigError for a bad address, a key that is not there, and a model that cannot be loaded.
    """
    wanted = [name for name in config.services.given if name in task.needs]
    return ServiceSet({name: KINDS[name](config, folder or Path(config.run.dir))
                       for name in wanted}) if wanted else None


@contextmanager
def serving(config: Config, task: Task) -> Iterator[ServiceSet | None]:
    """The services that the settings give and a task needs, apart from any run: replies are kept as long as the block
    lasts, or in services.judge.cache.
    """
    with TemporaryDirectory(prefix="vlrl-services-") as folder:
        services = provide(config, task, Path(folder))
        try:
            yield services
        finally:
            if services:
                services.close()


class GroupServiceSet:
    """The services as one group has them."""

    def __init__(self, services: Mapping[str, Service], place: ServiceContext, turn: threading.Lock):
        self.turn = turn
        """Held while a task's code runs, and not while it waits for a server: groups wait side by side."""
        self._asked = {name: service.at(place) for name, service in services.items()}
        self.services = {name: _aside(self._asked[name], turn) if service.concurrency > 1 else self._asked[name]
                         for name, service in services.items()}

    @property
    def problem(self) -> str | None:
        """Why what rests on a service has no value, as the `error` of a rollout; None where all replied."""
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
        """Groups that are scored side by side."""
        return min(_MOST_THREADS, max(service.concurrency for service in self._services.values()))

    def at(self, place: ServiceContext) -> GroupServiceSet:
        """Returns the services for one group."""
        return GroupServiceSet(self._services, place, self._turn)

    def alone(self, split: str, step: int) -> GroupServiceSet:
        """Returns the services for a group of no run."""
        return self.at(ServiceContext(split, step, step))

    def warnings(self) -> list[str]:
        """Returns what does not answer now, which a run may outlive."""
        return [f"{problem}: what it is to judge is unscorable until it answers (limits.service_errors)"
                for service in self._services.values() if (problem := service.problem())]

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Returns what was asked for a split up to a step, which is completed, over all processes: `judge/...`,
        `clip/images` and `reward_model/...`, and with `times` the seconds of a call.
        """
        out: dict[str, float] = {}
        for service in self._services.values():
            out |= service.metrics(split, step, times)
        return out

    def close(self) -> None:
        for service in self._services.values():
            service.close()
