"""The method behind algo.guided: retries groups that have wrong completions, with guidance in the prompt, and trains on
the retries.

The guidance (guidance.WORDS) is added after the question. The retries are in no statistic of the group: the sampler,
the filters and the rewards of the step see only the completions without guidance. Retries are stored in `Group.aside`
(variant "guided"), and `trained_form` uses them as algo.guided.use says. Agent-RLVR: Training Software Engineering
Agents via Guidance and Environment Rewards (arXiv 2506.11425); the other papers are cited at their functions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from vlrl.algo.method import Method, Objectives, RolloutContext, Run
from vlrl.algo.named import Bound, bind
from vlrl.config.schema import Config
from vlrl.config.sections import GUIDED
from vlrl.distributed import comm
from vlrl.engine.base import Engine, Request
from vlrl.errors import ConfigError, DataError
from vlrl.methods.second_attempts import update
from vlrl.methods.second_attempts.guidance import WORDS, FirstAnswers
from vlrl.methods.second_attempts.members import (
    KEEPS,
    USES,
    LogprobReader,
    RetryGroup,
    as_completion,
    mark_moved,
    second_attempts,
)
from vlrl.methods.second_attempts.update import LOSSES
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.models.reference import Reference
from vlrl.rewards.text import answer_offset
from vlrl.rollout.generate import answer_of
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.training.minibatch import Minibatch
from vlrl.types import Answer, Completion, Group, Prompt, Sample


class SecondAttempts(Method):
    """Retries groups after they are scored, and trains on the kept retries as algo.guided.use says."""

    collective = True

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        loss = bind("algo.guided.loss", settings.loss, LOSSES)
        self.loss: Bound | None = loss if settings.beside else None
        """The loss algo.guided.loss; None if retries become members of their groups."""
        self.requires = loss.requires if settings.beside else frozenset()

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        if generates:
            check(self.config, task, samples)

    def start(self, run: Run) -> None:
        own = Reference(run.policy, self.config)

        def read(prompts: Sequence[Prompt], tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
            return own.logprobs(prompts, [*map(as_completion, tokens)], self.algorithm.temperature, own=True)

        self.guiding = RetryGenerator(self.config, run.encode, read)

    def scored(self, requests: Sequence[Request], groups: Sequence[Group], ask: RolloutContext) -> Sequence[Group]:
        """Retries groups and adds the retries to each group's `aside`. Retries are scored in a separate group, as if
        they were completions of the unchanged sample."""
        stays = self.guiding.trains_guided
        answers = [[answer_of(r.completion, g.prompt, ask.step, r.variant) for r in g.rollouts] for g in groups]

        def score(group: Group, sampled: Prompt, completions: Sequence[Completion]) -> Group:
            moved = [c.behind(sampled, group.prompt) if c.episode_id and not stays else c for c in completions]
            return ask.rescored(group, moved)

        return self.guiding(ask.engine, ask.task, requests, groups, answers, score)

    def chosen(self, groups: Sequence[Group]) -> Sequence[Group]:
        return [*map(self.guiding.trained_form, groups)]

    def passes(self, policy: Policy, parts: Sequence[Minibatch], drawn: Sequence[Group],
               step: int) -> Sequence[update.RetryPass | None]:
        if self.loss is None:
            return [None] * len(parts)
        return [update.make_pass(policy, part, self.algorithm, self.loss, step) for part in parts]

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        return update.metrics([one for one in passes if one])

    def metrics(self) -> Mapping[str, float]:
        return self.guiding.metrics()


log = logging.getLogger(__name__)

_STREAM = 10
"""First number of the random-stream keys of retries. The first numbers of other streams are in generate.py, episodes.py
and recording.py."""
_LOOKED_AT = 256
"""Number of training rows that are searched for guidance before the run starts."""
_MOST_LEVELS = 8
"""Maximum number of retry rounds of a group in a step."""

_COUNTED = ("groups", "retried", "attempts", "correct", "retained", "bare", "rejected", "members", "tokens", "own")
"""Counters since the last call of `metrics`.
groups: all groups; retried: groups that were retried.
attempts: all retries; correct: correct retries; retained: retries that are kept; bare: retries without reasoning before
their answer; members: retries that became members of their group.
rejected: prompts that are unusable with guidance.
tokens: trained tokens of retries; own: trained tokens of other completions.
There is also level_i: groups in which round i produced a kept retry."""

Asking = tuple[int, Request]
"""(index of a group, engine request that retries the group)."""
Score = Callable[[Group, Prompt, Sequence[Completion]], Group]
"""A function (group, prompt of the completions, completions) that scores the completions and returns a Group."""


@dataclass(eq=False)
class RetryGenerator:
    """Retries groups with guidance and counts the results. `read` computes log-probabilities under the policy."""

    config: Config
    encode: Encoder
    read: LogprobReader

    def __post_init__(self) -> None:
        self.settings: Any = self.config.algo.guided
        self.counts, self._warned = Counter[str](), False
        self.words = bind("algo.guided.words", self.settings.words, WORDS)
        self.keep = bind("algo.guided.keep", self.settings.keep, KEEPS, skip=2)
        self.use = bind("algo.guided.use", self.settings.use, USES)

    @property
    def trains_guided(self) -> bool:
        """Whether retries are trained under the prompt that contains the guidance."""
        return self.settings.use.name == "hinted"

    def __call__(self, engine: Engine, task: Task, requests: Sequence[Request], groups: Sequence[Group],
                 answers: Sequence[Sequence[Answer]], score: Score) -> list[Group]:
        """Retries groups and returns them with their retries, scored by `score`, in `aside`. `requests` and `answers`
        are the engine requests and the parsed completions of the groups. Called equally often on every process.
        Raises TaskError if `Task.guidance` fails."""
        out = [*groups]
        self.counts["groups"] += len(groups)
        for level in range(_MOST_LEVELS):
            asking = comm.together(lambda at=level: self._asking(task, requests, out, answers, at))
            if not any(comm.gather(bool(asking))):
                break
            completions = engine.generate([r for _, r in asking])
            fresh = [score(out[i], request.prompt, own) for (i, request), own in zip(asking, completions, strict=True)]
            good = self.keep([RetryGroup(task, g.sample, g.prompt, g.rollouts, self.encode) for g in fresh], self.read)
            for (i, request), attempts, retained in zip(asking, fresh, good, strict=True):
                out[i] = self._joined(out[i], request.prompt, attempts, retained)
                self.counts[f"level_{level}"] += any(retained)
        return out

    def _asking(self, task: Task, requests: Sequence[Request], groups: Sequence[Group],
                answers: Sequence[Sequence[Answer]], level: int) -> list[Asking]:
        wanted = all_wrong if self.settings.groups == "failed" else any_wrong
        return [(i, retry) for i, (request, group) in enumerate(zip(requests, groups, strict=True))
                if wanted(group) and not second_attempts(group)
                and (retry := self._again(task, request, group, answers[i], level))]

    def _again(self, task: Task, request: Request, group: Group, answers: Sequence[Answer],
               level: int) -> Request | None:
        sample = request.sample
        assert sample is not None
        text = self.words(FirstAnswers(task, sample, answers, [r.correct for r in group.rollouts], level))
        if not text:
            return None
        self.counts["retried"] += level == 0
        try:
            prompt = self.encode(task, sample, text)
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not self.config.data.quarantine:
                raise
            self.counts["rejected"] += 1
            return None
        key = (_STREAM, *request.key[1:], *([level] if level else []))
        return replace(request, prompt=prompt, n=len(answers) if self.trains_guided else self.settings.answers, key=key)

    def _joined(self, group: Group, sampled: Prompt, attempts: Group, retained: Sequence[bool]) -> Group:
        first = len(group.rollouts) + len(group.aside)
        self.counts["attempts"] += len(attempts.rollouts)
        self.counts["correct"] += sum(bool(r.correct) for r in attempts.rollouts)
        if self.settings.keep.name == "explains":
            self.counts["bare"] += sum(not answer_offset(r.completion.text) for r in attempts.rollouts)
        self.counts["retained"] += sum(retained)
        under = sampled if self.trains_guided else group.prompt
        second = [replace(r, index=first + i, variant=GUIDED, trained=good, train_prompt=under,
                          sampled_prompt=sampled.text)
                  for i, (r, good) in enumerate(zip(attempts.rollouts, retained, strict=True))]
        return replace(group, aside=(*group.aside, *second))

    def trained_form(self, group: Group) -> Group:
        """Returns the group as it is trained, with its retries used as algo.guided.use says."""
        out = mark_moved(self.use(group))
        learned = [r for r in (*out.rollouts, *out.aside) if r.trained]
        self.counts["members"] += sum(r.variant == GUIDED for r in out.rollouts)
        for r in learned:
            tokens = int(r.completion.loss_mask.sum())
            self.counts["tokens"] += tokens * (r.variant == GUIDED)
            self.counts["own"] += tokens * (r.variant != GUIDED)
        return out

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all processes: the share of groups that were retried, the shares of retries
        that are correct and that are kept, and the retries' share of all trained tokens."""
        counted, self.counts = self.counts, Counter()
        groups, retried, attempts, correct, retained, bare, rejected, members, tokens, own, *levels = comm.total(
            *(counted[name] for name in (*_COUNTED, *(f"level_{level}" for level in range(_MOST_LEVELS)))))
        out = {"guided/groups_frac": retried / max(groups, 1.0), "guided/rejected": rejected}
        if attempts:
            out |= {"guided/success": correct / attempts, "guided/kept": retained / attempts}
            if self.settings.keep.name == "explains":
                out["guided/bare_frac"] = bare / attempts
                self._warn(int(bare), int(attempts))
            out |= {f"guided/level_{i}_frac": n / retried for i, n in enumerate(levels) if i == 0 or n}
        if tokens + own:
            out["guided/tokens_frac"] = tokens / (tokens + own)
        return out | ({} if self.settings.beside else {"guided/members": members})

    def _warn(self, bare: int, attempts: int) -> None:
        if bare == attempts and not self._warned and comm.is_main():
            self._warned = True
            log.warning("algo.guided.keep=explains keeps nothing: none of %d retries has an explanation (text before "
                        "its last <answer>). Ask for <think> and <answer> in the prompt (task.prompt, task.system), or "
                        "set algo.guided.keep=correct", attempts)


def all_wrong(group: Group) -> bool:
    """Whether a group has completions known to be wrong, and none known to be correct."""
    known = [r.correct for r in group.rollouts if r.correct is not None]
    return bool(known) and not any(known)


def any_wrong(group: Group) -> bool:
    """Whether a group has a completion known to be wrong."""
    return any(r.correct is False for r in group.rollouts)


def check(config: Config, task: Task, samples: Sequence[Sample]) -> None:
    """Raises ConfigError if algo.guided has no effect because neither the task nor the rows provide guidance."""
    settings: Any = config.algo.guided
    bind("algo.guided.keep", settings.keep, KEEPS, skip=2)
    bind("algo.guided.use", settings.use, USES)
    words, nothing = bind("algo.guided.words", settings.words, WORDS), Answer(text="")
    first = [*islice(samples, _LOOKED_AT)] if words.name in WORDS else []
    if words.name == "task":
        written = any(getattr(one.guidance, "__func__", None) is not Task.guidance for one in task.members)
        if not written and not any(s.get("hints") for s in first):
            raise ConfigError(f"algo.guided retries failed groups with guidance, but task '{task.name}' has none: "
                              "define guidance(sample, answers) in the task (docs/write-a-task.md), give its rows "
                              f"`hints` (none of the first {_LOOKED_AT} has any), or set algo.guided=null")
    elif words.name in WORDS and any(map(has_environment, task.members)):
        raise ConfigError(f"algo.guided.words={words.name} refers to a single answer, but task '{task.name}' has "
                          "episodes: set algo.guided.words=task and define guidance(sample, answers) in the task")
    elif words.name in WORDS and not any(words(FirstAnswers(task, s, [nothing], [False])) for s in first):
        more = ", with reasoning before its final answer" if words.name == "hint" else ""
        raise ConfigError(f"algo.guided.words={words.name} needs a given solution, but none of the first "
                          f"{_LOOKED_AT} training rows has one{more}: give rows a `solution`, give the task an oracle, "
                          "set data.solutions to a file, or set algo.guided=null")
