"""Removes reward parts that need services which the run does not have. Does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vlrl.errors import ConfigError, did_you_mean
from vlrl.task.base import Task
from vlrl.task.mixture import Mixture
from vlrl.task.services import SERVICES, AbsentService, Services
from vlrl.types import Answer, Sample

_WAYS = {"judge": "Set services.judge.url and services.judge.model. ",
         "clip": "Set services.clip.name. ",
         "reward_model": "Set services.reward_model.name. "}


def without_unserved_parts(task: Task, sample: Sample, answers: Sequence[Answer], services: Services) -> tuple[Task,
                                                                                                               list[str]]:
    """Returns (the task without the reward parts whose service is missing, the names of these parts). The task's
    scoring methods are called to find out which parts they return."""
    given: set[str] = set()
    lacking = False
    for method in (lambda: [task.score(sample, a) for a in answers],
                   lambda: task.score_group(sample, answers, services)):
        try:
            given.update(*method())
        except AbsentService:
            lacking = True
        except (Exception, SystemExit):  # raised again in scoring, which stores it
            continue
    left_out = [name for name in task.weights if name not in given]
    return (without_parts(task, left_out), left_out) if (given or lacking) and left_out else (task, [])


def without_parts(task: Task, left_out: Collection[str]) -> Task:
    """Returns a copy of the task without the reward parts `left_out`. If the task's score_group asks for a missing
    service, score_group of the copy returns []."""
    reduced: Any = copy.copy(task)
    reduced.weights = {name: weight for name, weight in task.weights.items() if name not in left_out}

    def score_group(sample: Sample, answers: Sequence[Answer], services: Services) -> Any:
        try:
            scores = task.score_group(sample, answers, services)
        except AbsentService:
            return []
        if not isinstance(scores, list) or not all(isinstance(parts, Mapping) for parts in scores):
            return scores  # scoring reports what is wrong with it
        return [{name: value for name, value in parts.items() if name not in left_out} for parts in scores]

    reduced.score_group = score_group
    return reduced


def served_task(task: Task, available: Iterable[str], samples: Sequence[Sample]) -> Task:
    """Returns the task without the reward parts whose service is not in `available`; see `unserved_parts`. For a
    mixture, the same is done with each of its tasks."""
    if isinstance(task, Mixture):
        firsts = {s.task: s for s in samples[:len(task.tasks)]}  # a mixture begins with one of each
        return task.each(lambda label, one: served_task(one, available, [firsts[label]]))
    parts = unserved_parts(task, available, samples)
    return without_parts(task, parts) if parts else task


def unserved_parts(task: Task, available: Iterable[str], samples: Sequence[Sample]) -> list[str]:
    """Names of the reward parts that a run leaves out, because they need a service that is not in `available`. Raises
    ConfigError for an unknown service, and if such a part has a weight other than 0. If `task.needs` is only a set
    of services, the parts that `score` does not return are assumed to need them."""
    parts: list[str] = []
    for service in sorted(set(task.needs) - set(available)):
        if service not in SERVICES:
            raise ConfigError(f"task '{task.name}' needs the service {service!r}, which is not known."
                              f"{did_you_mean(str(service), SERVICES)} Known: {', '.join(SERVICES)}.")
        named = task.needs.get(service, ()) if isinstance(task.needs, Mapping) else _group_parts(task, samples)
        for part in named:
            weight = task.weights.get(part, 0.0)
            if weight if isinstance(weight, (int, float)) else any(value for _, value in weight):
                raise ConfigError(f"task '{task.name}': the part '{part}' needs the service '{service}', which this "
                                  f"run does not have. {_WAYS.get(service, '')}To leave the part out, set "
                                  f"task.rewards.{part}=0")
        parts += [part for part in named if part not in parts]
    return parts


def _group_parts(task: Task, samples: Sequence[Sample]) -> list[str]:
    try:
        own = task.score(samples[0], Answer(text=""))
        return [part for part in task.weights if part not in own]
    except (Exception, SystemExit):  # raised again in scoring
        return list(task.weights)
