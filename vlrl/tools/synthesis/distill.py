"""Answers of a teacher behind an OpenAI-compatible server, kept where the task's own score says that they are right:
`vlrl data distill`.

    name.jsonl              the answers that are kept, for data.solutions (data/sources/solutions.py)
    name.drawn.jsonl        every reply with its tokens, written as it comes; the command goes on in it
    name.about.json         what was asked and kept, and what it cost

Whatever the teacher says of itself, an answer enters only where `Task.correct` says so, or its reward reaches `least`.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vlrl.algo.named import Bound, bind
from vlrl.config.base import Named
from vlrl.config.schema import Config
from vlrl.data import readable, write_rows
from vlrl.engine.base import Request
from vlrl.errors import ConfigError, DataError
from vlrl.progress import Progress
from vlrl.rollout.error_limits import check_errors
from vlrl.rollout.generate import make_group, sampling_of
from vlrl.services.service_set import ServiceSet, serving
from vlrl.store.files import read_json, write_text
from vlrl.task import Task, task_samples
from vlrl.task.environment import has_environment
from vlrl.tools.clients.chat_prompts import ChatEncoder
from vlrl.tools.clients.endpoint import Endpoint, completion_of
from vlrl.tools.clients.replies import Replies
from vlrl.tools.evaluation.answers import answer_fields
from vlrl.tools.evaluation.grid import Server
from vlrl.tools.evaluation.measure import task_facts
from vlrl.tools.stages.selection import CHOICES, chosen, every
from vlrl.training.build_task import make_task
from vlrl.types import Group, Prompt, Sample

_ROLLOUT = ("max_new_tokens", "stop")
_STREAM = 13
"""First number of the keys of a teacher's answers."""
_NAMED = 8
"""Reasons for rows left out that are told."""


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """What is asked of a teacher, and what is kept."""

    answers: int = 1
    """To each prompt."""
    rows: int | None = None
    """First rows of the training split; None = all."""
    temperature: float = 1.0
    choose: Named = field(default_factory=lambda: Named(name="shortest"))
    least: float | None = None
    """Reward from which an answer is right; None = as the task says."""
    price_in: float | None = None
    """Of a million tokens of prompts; None = no price is told."""
    price_out: float | None = None


@dataclass(frozen=True)
class DistillFiles:
    """The files around that of the answers that are kept."""

    out: Path

    @property
    def drawn(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.drawn.jsonl")

    @property
    def about(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.about.json")


def goes_on(places: DistillFiles) -> bool:
    """Returns whether the file of kept answers is that of a command which left some unanswered."""
    return bool((read_json(places.about) or {}).get("unanswered"))


def check(config: Config, order: DistillSettings, places: DistillFiles) -> Bound:
    """Returns what chooses among right answers. Raises ConfigError where nothing could be kept."""
    choose = bind("--choose", order.choose, CHOICES)
    if places.out.suffix != ".jsonl":
        raise ConfigError(f"{places.out}: data.solutions reads lines of JSON; give --out a name that ends in .jsonl")
    if config.data.solutions:
        raise ConfigError(f"data.solutions={config.data.solutions!r} gives the rows answers already: leave it out")
    if any(map(has_environment, make_task(config).members)):
        raise ConfigError(f"vlrl data distill keeps answers as a row's `solution`, and the episodes of task "
                          f"{config.task_name!r} are no single answers")
    if order.answers > 1 and not order.temperature:
        raise ConfigError(f"--temperature 0 draws one answer, and --answers {order.answers} would all be the same: "
                          "raise the one, or set the other to 1")
    return choose


def distill_answers(config: Config, server: Server, order: DistillSettings, places: DistillFiles,
                    progress: Progress) -> dict[str, Any]:
    """Has the answers drawn that are not there yet, scores all, and writes those that are kept; returns the figures.

    Raises ConfigError where the server refuses key, path or model, TrainingError where it answers nothing at all or
    scoring fails too often. What it did not answer is asked again by the same command.
    """
    choose, task = check(config, order, places), make_task(config)
    with contextlib.closing(Endpoint(server.url, server.model, seed=config.seed, key=server.key,
                                     timeout_s=server.timeout_s, retries=server.retries,
                                     concurrency=server.concurrency, option=server.option)) as teacher:
        facts = {**task_facts(config, _ROLLOUT), "teacher": teacher.model, "temperature": order.temperature}
        work = _Work(config=config, task=task, samples=[*_samples(task, config, order.rows)], order=order,
                     progress=progress, replies=Replies.of(places.drawn, facts), encode=ChatEncoder(config))
        failed = work.draw(teacher)
    with serving(config, task) as services:
        rows, figures = work.verified(choose, services, str(teacher.model))
    write_rows(places.out, rows)
    results = {**figures, "kept": len(rows), "unanswered": failed, "left_out": len(work.left_out),
               "cost": work.replies.cost(order.price_in, order.price_out)}
    about = {**results, "facts": facts, "endpoint": teacher.address, "answers_each": order.answers,
             "choose": order.choose.model_dump(), "least": order.least,
             "first_left_out": [*work.left_out.values()][:_NAMED]}
    write_text(places.about, json.dumps(about, indent=1) + "\n")
    return results


def _samples(task: Task, config: Config, most: int | None) -> Iterator[tuple[int, Sample]]:
    """Yields the rows that are asked, with their places in the training split."""
    samples = task_samples(task, "train")
    for place in islice(range(len(samples)), most):
        sample = readable(samples, place) if config.data.quarantine else samples[place]
        if sample is not None:
            yield place, sample


@dataclass(eq=False, kw_only=True)
class _Work:
    """Rows that are asked, with their places in the training split, and what came of it."""

    config: Config
    task: Task
    samples: Sequence[tuple[int, Sample]]
    order: DistillSettings
    progress: Progress
    replies: Replies
    encode: ChatEncoder
    left_out: dict[int, str] = field(default_factory=dict)
    """Place of a row that could not be asked -> why."""

    def draw(self, teacher: Endpoint) -> int:
        """Has the missing answers drawn, each kept as it comes; returns how many the teacher did not give."""
        wanted = [(place, i) for place, _ in self.samples for i in range(self.order.answers)]
        return self.replies.fill(teacher, wanted, self._requests, self.progress, "asking the teacher")

    def _requests(self, wanted: Sequence[tuple[int, int]]) -> list[Request]:
        """Returns a request for each answer to a row that can be asked."""
        sampling = sampling_of(self.config.rollout, self.order.temperature)
        rows = dict(self.samples)
        prompts = {place: self._prompt(place, rows[place]) for place in dict.fromkeys(place for place, _ in wanted)}
        return [Request(prompt=prompt, n=1, sampling=sampling, key=(_STREAM, place, answer), sample=rows[place])
                for place, answer in wanted if (prompt := prompts[place]) is not None]

    def _prompt(self, place: int, sample: Sample) -> Prompt | None:
        try:
            return self.encode(self.task, sample)
        except DataError as error:
            if not self.config.data.quarantine:
                raise
            self.left_out[place] = str(error)
            return None

    def verified(self, choose: Bound, services: ServiceSet | None,
                 teacher: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Returns the rows that are kept, and figures of all replies to the rows that are asked."""
        rows: list[dict[str, Any]] = []
        groups: list[Group] = []
        counts = Counter[str]({"prompts": 0, "answers": 0, "right": 0, "solved": 0})
        for n, (place, sample) in enumerate(self.samples):
            self.progress("scoring", n, len(self.samples))
            drawn = [(i, reply) for i in range(self.order.answers) if (reply := self.replies.reply((place, i)))]
            prompt = self._prompt(place, sample) if drawn else None
            if prompt is None:
                continue
            group = make_group(self.task, sample, prompt, [completion_of(reply) for _, reply in drawn],
                               group_id=f"{place:08d}", split="train", step=0, served=services)
            groups.append(replace(group, prompt=replace(prompt, media=(), mm={})))  # the pictures are not kept
            scored = [{**answer_fields(self.task, group, r.completion, r), "index": i,
                       "tokens": reply.tokens_out or len(reply.text)}
                      for (i, reply), r in zip(drawn, group.rollouts, strict=True)]
            taken = chosen(scored, choose, self.order.least)
            right = len(chosen(scored, every, self.order.least))
            counts.update(prompts=1, answers=len(drawn), right=right, solved=right > 0)
            rows += [_row(place, sample, row, self.order.answers, teacher) for row in taken]
        self.progress("scoring", len(self.samples), len(self.samples))
        check_errors(groups, self.config.limits, "scoring the teacher's answers", self.replies.path)
        return rows, dict(counts)


def _row(place: int, sample: Sample, row: Mapping[str, Any], answers: int, teacher: str) -> dict[str, Any]:
    return {"number": place, "id": sample.id, "solution": row["answer"], "reward": row["reward"],
            "correct": row["correct"], "tokens": row["tokens"], "answer": row["index"], "of": answers,
            "teacher": teacher}
