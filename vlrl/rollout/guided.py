"""Second attempts under guidance: `algo.guided`.

A group without a correct answer is asked again, with what `Task.guidance` says behind the question. These answers are
in no statistic of the group (`Group.aside`, variant "guided"); the correct ones are learned from under the prompt
alone.
Agent-RLVR: Training Software Engineering Agents via Guidance and Environment Rewards (arXiv 2506.11425).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from vlrl.algo.guided import LOSSES
from vlrl.algo.named import bind
from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Engine
from vlrl.errors import ConfigError, DataError, TaskError, VlrlError
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.task import Task
from vlrl.task.variants import GUIDED
from vlrl.types import Answer, Completion, Group, Prompt, Request, Sample

_STREAM = 10
"""First number of the keys of second attempts; the others are in generate.py, episodes.py and recording.py."""
_LOOKED_AT = 256
"""Rows that are searched for hints before a run."""

Asking = tuple[int, Request]
"""Place of a group, and what is asked of the engine for it."""


@dataclass(eq=False)
class Guiding:
    """Has groups without a correct answer asked again, and counts what became of it."""

    config: Config
    encode: Encoder
    groups: int = 0
    asked: int = 0
    """Groups among them that were asked again."""
    attempts: int = 0
    correct: int = 0
    rejected: int = 0
    """Groups whose prompt cannot be read with the guidance behind it."""

    def __call__(self, engine: Engine, asking: Sequence[Asking], groups: Sequence[Group],
                 score: Callable[[Group, Prompt, Sequence[Completion]], Group]) -> list[Group]:
        """Returns the groups with second attempts aside; `score` makes a group of completions to a prompt. Called on
        every process, as often as on the others.
        """
        out = [*groups]
        self.groups += len(groups)
        if any(comm.gather(bool(asking))):
            for (i, request), made in zip(asking, engine.generate([r for _, r in asking]), strict=True):
                out[i] = self._joined(groups[i], request.prompt, score(groups[i], request.prompt, made))
        return out

    def asking(self, task: Task, requests: Sequence[Request], groups: Sequence[Group],
               answers: Sequence[Sequence[Answer]]) -> list[Asking]:
        """Returns what is to be asked again, by the place of the group: of each the request for its first answers, and
        these. Called on every process. Raises TaskError where `Task.guidance` fails."""
        return comm.together(lambda: [
            (i, found) for i, (request, group) in enumerate(zip(requests, groups, strict=True))
            if failed(group) and (found := self._again(task, request, answers[i]))])

    def _again(self, task: Task, request: Request, answers: Sequence[Answer]) -> Request | None:
        sample = request.sample
        assert sample is not None and self.config.algo.guided
        guidance = guidance_of(task, sample, answers)
        if not guidance:
            return None
        self.asked += 1
        try:
            prompt = self.encode(task, sample, guidance)
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not self.config.data.quarantine:
                raise
            self.rejected += 1
            return None
        return replace(request, prompt=prompt, n=self.config.algo.guided.answers, key=(_STREAM, *request.key[1:]))

    def _joined(self, group: Group, sampled: Prompt, attempts: Group) -> Group:
        first = len(group.rollouts) + len(group.aside)
        self.attempts += len(attempts.rollouts)
        self.correct += sum(bool(r.correct) for r in attempts.rollouts)
        second = [replace(r, index=first + i, variant=GUIDED, trained=bool(r.correct), train_prompt=group.prompt,
                          sampled_prompt=sampled.text) for i, r in enumerate(attempts.rollouts)]
        return replace(group, aside=(*group.aside, *second))

    def metrics(self) -> dict[str, float]:
        """Returns, since the last call and over all processes, the share of groups that were asked again, and of second
        attempts that are correct."""
        groups, asked, attempts, correct, rejected = comm.total(self.groups, self.asked, self.attempts, self.correct,
                                                                self.rejected)
        self.groups = self.asked = self.attempts = self.correct = self.rejected = 0
        return {"guided/groups_frac": asked / max(groups, 1.0), "guided/rejected": rejected,
                **({"guided/success": correct / attempts} if attempts else {})}


def failed(group: Group) -> bool:
    """Returns whether answers of a group are known to be wrong, and none to be correct."""
    known = [r.correct for r in group.rollouts if r.correct is not None]
    return bool(known) and not any(known)


def guidance_of(task: Task, sample: Sample, answers: Sequence[Answer]) -> str | None:
    """Returns what a second attempt is told; None where the task has nothing to say, an empty text included. Raises
    TaskError when `guidance` fails or gives anything else."""
    task = task.of(sample)
    try:
        found: Any = task.guidance(sample, answers)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': guidance of sample '{sample.id}' failed: {failure(error)}") from error
    if found is not None and not isinstance(found, str):
        raise TaskError(f"task '{task.name}': guidance of sample '{sample.id}' gave {type(found).__name__}, expected a "
                        "text, or None")
    return found or None


def check(config: Config, task: Task, samples: Sequence[Sample]) -> None:
    """Raises ConfigError where algo.guided could not act: no task has guidance, and no row a hint."""
    if config.algo.guided is None:
        return
    bind("algo.guided.loss", config.algo.guided.loss, LOSSES)
    written = any(getattr(one.guidance, "__func__", None) is not Task.guidance for one in task.members)
    if not written and not any(s.get("hints") for s in islice(samples, _LOOKED_AT)):
        raise ConfigError(f"algo.guided asks failed groups again under guidance, and task '{task.name}' has none: give "
                          "it guidance(sample, answers) (docs/write-a-task.md), or its rows `hints` (none of the first "
                          f"{_LOOKED_AT} has any), or set algo.guided=null")
