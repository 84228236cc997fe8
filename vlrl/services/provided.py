"""Which services a run has, what a group is given of them, and what they cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.services.judge import COUNTS, Judge
from vlrl.services.replies import Place
from vlrl.task import Task
from vlrl.task.services import FAILED

_MOST_THREADS = 32
T = TypeVar("T")
R = TypeVar("R")


def configured(config: Config) -> tuple[str, ...]:
    """Returns the names of the services that the settings give a run."""
    services = config.services
    given = {"judge": services.judge.url, "clip": services.clip.name, "reward_model": services.reward_model.name}
    return tuple(name for name, there in given.items() if there)


def provide(config: Config, task: Task, folder: Path | None = None) -> Provided | None:
    """Returns the services that the settings give and a task needs; None where there are none. Replies are kept in
    `folder` in place of the run's.

    Raises ConfigError for a bad address, a key that is not there, and a model that cannot be loaded.
    """
    wanted = [name for name in configured(config) if name in task.needs]
    if not wanted:
        return None
    clip = None
    if "clip" in wanted:
        from vlrl.services.clip import Clip  # loads transformers' models

        clip = Clip(config.services.clip)
    scorer = None
    if "reward_model" in wanted:
        from vlrl.services.reward_model import RewardModel  # likewise

        scorer = RewardModel(config)
    judge = (Judge(config.services.judge, folder or Path(config.run.dir), config.limits, comm.rank())
             if "judge" in wanted else None)
    return Provided(judge, clip, scorer)


@contextmanager
def serving(config: Config, task: Task) -> Iterator[Provided | None]:
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


class Given:
    """The services as one group has them."""

    def __init__(self, services: Mapping[str, Any], turn: threading.Lock):
        self.turn = turn
        """Held while a task's code runs, and not while it waits for a judge: groups wait side by side."""
        self.services = {name: _aside(service, turn) if name == "judge" else service
                         for name, service in services.items()}
        self._unwrapped = services

    @property
    def problem(self) -> str | None:
        """Why what rests on a service has no value, as the `error` of a rollout; None where all replied."""
        failures = [f"{name}: {reason}" for name, service in self._unwrapped.items()
                    for reason in getattr(service, "failures", ())]
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


class Scoring:
    """The service reward_model as one group has it; `failures` says why answers have no score."""

    def __init__(self, scorer: Callable[..., list[tuple[float, ...] | str]], place: Place):
        self._scorer, self.place = scorer, place
        self.scored = 0
        """Answers, those without a score included."""
        self.failures: list[str] = []

    def __call__(self, question: str, media: Sequence[Any], answers: Sequence[str]) -> list[tuple[float, ...] | None]:
        scores = self._scorer(question, media, answers)
        self.scored += len(scores)
        self.failures += [one for one in scores if isinstance(one, str)]
        return [None if isinstance(one, str) else one for one in scores]


class Provided:
    """The services of a run, on one process."""

    def __init__(self, judge: Judge | None = None, clip: Callable[..., Any] | None = None, scorer: Any = None):
        self.judge, self.clip, self.scorer = judge, clip, scorer
        self._turn = threading.Lock()
        self._pictures: dict[tuple[str, int], int] = {}
        self._scores: list[Scoring] = []

    @property
    def threads(self) -> int:
        """Groups that are scored side by side."""
        return min(_MOST_THREADS, self.judge.settings.concurrency) if self.judge else 1

    def at(self, place: Place) -> Given:
        """Returns the services for one group."""
        given: dict[str, Any] = {"judge": self.judge.at(place)} if self.judge else {}
        if self.clip:
            given["clip"] = partial(self._compared, place)
        if self.scorer:
            given["reward_model"] = Scoring(self.scorer, place)
            self._scores.append(given["reward_model"])
        return Given(given, self._turn)

    def alone(self, split: str, step: int) -> Given:
        """Returns the services for a group of no run."""
        return self.at(Place(split, step, step))

    def _compared(self, place: Place, images: Sequence[Any], texts: Sequence[str]) -> Any:
        key = (place.split, place.step)
        self._pictures[key] = self._pictures.get(key, 0) + len(images)
        assert self.clip
        return self.clip(images, texts)

    def warnings(self) -> list[str]:
        """Returns what does not answer now, which a run may outlive."""
        problem = self.judge.problem() if self.judge else ""
        return [f"{problem}: what it is to judge is unscorable until it answers (limits.service_errors)"] if (
            problem) else []

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Returns what was asked for a split up to a step, which is completed, over all processes: `judge/...`,
        `clip/images` and `reward_model/...`, and with `times` the seconds of a call.
        """
        out = self._of_judge(self.judge, split, step, times) if self.judge else {}
        if self.clip:
            done = [place for place in self._pictures if place[0] == split and place[1] <= step]
            out["clip/images"] = float(comm.total(sum(self._pictures.pop(place) for place in done))[0])
        return {**out, **self._of_scores(split, step)} if self.scorer else out

    def _of_scores(self, split: str, step: int) -> dict[str, float]:
        done = [s for s in self._scores if s.place.split == split and s.place.step <= step]
        self._scores = [s for s in self._scores if s not in done]
        scored, failed = comm.total(sum(s.scored for s in done), sum(len(s.failures) for s in done))
        return {"reward_model/scored": scored, "reward_model/failed": failed}

    def _of_judge(self, judge: Judge, split: str, step: int, times: bool) -> dict[str, float]:
        tally, s = judge.take(split, step), judge.settings
        counts = comm.total(*(getattr(tally, name) for name in COUNTS))
        out = {f"judge/{name}": float(count) for name, count in zip(COUNTS, counts, strict=True)}
        if s.price_in or s.price_out:
            out["judge/cost"] = (out["judge/tokens_in"] * s.price_in + out["judge/tokens_out"] * s.price_out) / 1e6
        if times:
            seconds = [value for part in comm.gather(tally.seconds) for value in part]
            out |= {"time/judge_mean_s": sum(seconds) / max(len(seconds), 1),
                    "time/judge_max_s": max(seconds, default=0.0)}
        return out

    def close(self) -> None:
        if self.judge:
            self.judge.close()


def side_by_side(services: Provided | None, work: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Returns `work` of every value in order, several at a time where groups wait for a judge."""
    values = list[T](values)
    if services is None or services.threads == 1 or len(values) < 2:
        return [work(value) for value in values]
    with ThreadPoolExecutor(min(services.threads, len(values)), "score") as pool:
        return list(pool.map(work, values))


