"""`vlrl data distill`: requests answers from a teacher model behind an OpenAI-compatible server, and keeps answers that
the task scores as right.

    name.jsonl              the kept answers, for data.solutions (data/sources/solutions.py)
    name.drawn.jsonl        every reply with its tokens, written when it arrives; a repeated command continues it
    name.about.json         settings, counts and cost

An answer is kept only if `Task.correct` accepts it or, with `least`, if its reward is at least `least`. What the
teacher says about its answer does not count."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
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
from vlrl.store.files import write_text
from vlrl.task import Task, task_samples
from vlrl.task.environment import has_environment
from vlrl.tools.clients.chat_prompts import ChatEncoder
from vlrl.tools.clients.endpoint import Endpoint, completion_of
from vlrl.tools.clients.replies import Replies
from vlrl.tools.evaluation.answers import answer_fields
from vlrl.tools.evaluation.grid import Server, endpoint_of
from vlrl.tools.evaluation.measure import task_facts
from vlrl.tools.stages.selection import CHOICES, every, select_answers
from vlrl.training.build_task import make_task
from vlrl.types import Group, Prompt, Sample

_ROLLOUT = ("max_new_tokens", "stop")
_STREAM = 13  # first number of the request keys for the teacher's answers
_NAMED = 8  # number of skipped rows whose reasons are listed in the report


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """How answers are sampled from the teacher, and which of them are kept."""

    answers: int = 1
    rows: int | None = None  # number of rows to use, from the start of the training split; None = all
    temperature: float = 1.0
    choose: Named = field(default_factory=lambda: Named(name="shortest"))
    least: float | None = None  # Smallest reward of a right answer. None = the task decides which answers are right.
    price_in: float | None = None  # Price of a million input tokens. None = the cost is not computed.
    price_out: float | None = None  # price of a million output tokens


@dataclass(frozen=True)
class DistillFiles:
    """Paths of the files of a distillation: `out` has the kept answers, and the others are next to it."""

    out: Path

    @property
    def drawn(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.drawn.jsonl")

    @property
    def about(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.about.json")


def check(config: Config, settings: DistillSettings, files: DistillFiles) -> Bound:
    """Returns the function (from `settings.choose`) that selects which right answers are kept. Raises ConfigError for
    settings that cannot be used together."""
    choose = bind("--choose", settings.choose, CHOICES)
    if files.out.suffix != ".jsonl":
        raise ConfigError(f"--out {files.out}: data.solutions reads lines of JSON. Give a name that ends in .jsonl")
    if config.data.solutions:
        raise ConfigError(f"data.solutions={config.data.solutions!r} already provides answers to the rows: remove "
                          "this setting")
    if any(map(has_environment, make_task(config).members)):
        raise ConfigError(f"vlrl data distill stores an answer as a row's `solution`, but episodes of task "
                          f"{config.task_name!r} are not single answers: choose a task without environments")
    if settings.answers > 1 and not settings.temperature:
        raise ConfigError(f"--temperature 0 with --answers {settings.answers}: the answers to a row would all be the "
                          "same. Raise --temperature, or set --answers 1")
    return choose


def distill_answers(config: Config, server: Server, settings: DistillSettings, files: DistillFiles,
                    progress: Progress) -> dict[str, Any]:
    """Requests the answers that are missing, scores all answers and writes the ones that are kept. Returns counts and
    cost.

    Raises ConfigError if the server refuses API key, path or model; TrainingError if no request succeeds or
    scoring fails too often. If the call is repeated, answers whose requests failed are requested again."""
    choose, task = check(config, settings, files), make_task(config)
    with contextlib.closing(endpoint_of(config, server)) as teacher:
        facts = {**task_facts(config, _ROLLOUT), "teacher": teacher.model, "temperature": settings.temperature}
        work = _Work(config=config, task=task, samples=[*_samples(task, config, settings.rows)], settings=settings,
                     progress=progress, replies=Replies.open(files.drawn, facts), encode=ChatEncoder(config))
        failed = work.draw(teacher)
    with serving(config, task) as services:
        rows, figures = work.verified(choose, services, str(teacher.model))
    write_rows(files.out, rows)
    results = {**figures, "kept": len(rows), "unanswered": failed, "left_out": len(work.left_out),
               "cost": work.replies.cost(settings.price_in, settings.price_out)}
    about = {**results, "facts": facts, "endpoint": teacher.address, "answers_each": settings.answers,
             "choose": settings.choose.model_dump(), "least": settings.least,
             "first_left_out": [*work.left_out.values()][:_NAMED]}
    write_text(files.about, json.dumps(about, indent=1) + "\n")
    return results


def _samples(task: Task, config: Config, most: int | None) -> Iterator[tuple[int, Sample]]:
    """Yields (index in the training split, sample) for the first `most` rows (None = all). With data.quarantine, rows
    that cannot be read are left out."""
    samples = task_samples(task, "train")
    for place in islice(range(len(samples)), most):
        sample = readable(samples, place) if config.data.quarantine else samples[place]
        if sample is not None:
            yield place, sample


@dataclass(eq=False, kw_only=True)
class _Work:
    """The state of a distillation. `samples` has (index in the training split, sample) for each row that the teacher is
    asked about; `left_out` maps the index of a row that could not be asked to the reason."""

    config: Config
    task: Task
    samples: Sequence[tuple[int, Sample]]
    settings: DistillSettings
    progress: Progress
    replies: Replies
    encode: ChatEncoder
    left_out: dict[int, str] = field(default_factory=dict)

    def draw(self, teacher: Endpoint) -> int:
        """Requests the missing answers of the teacher. Returns the number of failed requests."""
        wanted = [(place, i) for place, _ in self.samples for i in range(self.settings.answers)]
        return self.replies.fill(teacher, wanted, self._requests, self.progress, "asking the teacher")

    def _requests(self, wanted: Sequence[tuple[int, int]]) -> list[Request]:
        sampling = sampling_of(self.config.rollout, self.settings.temperature)
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
        """Scores all answers. Returns (rows with the answers that are kept, counts of prompts and answers). `choose`
        selects the answers that are kept; `teacher` is the teacher's name."""
        rows: list[dict[str, Any]] = []
        groups: list[Group] = []
        counts = Counter[str]({"prompts": 0, "answers": 0, "right": 0, "solved": 0})
        for n, (place, sample) in enumerate(self.samples):
            self.progress("scoring", n, len(self.samples))
            drawn = [(i, reply) for i in range(self.settings.answers) if (reply := self.replies.reply((place, i)))]
            prompt = self._prompt(place, sample) if drawn else None
            if prompt is None:
                continue
            group = make_group(self.task, sample, prompt, [completion_of(reply) for _, reply in drawn],
                               group_id=f"{place:08d}", split="train", step=0, served=services)
            groups.append(replace(group, prompt=replace(prompt, media=(), mm={})))  # without images, to save memory
            scored = [{**answer_fields(self.task, group, r.completion, r), "index": i,
                       "tokens": reply.tokens_out or len(reply.text)}
                      for (i, reply), r in zip(drawn, group.rollouts, strict=True)]
            taken = select_answers(scored, choose, self.settings.least)
            right = len(select_answers(scored, every, self.settings.least))
            counts.update(prompts=1, answers=len(drawn), right=right, solved=right > 0)
            rows += [{"number": place, "id": sample.id, "solution": row["answer"], "reward": row["reward"],
                      "correct": row["correct"], "tokens": row["tokens"], "answer": row["index"],
                      "of": self.settings.answers, "teacher": teacher} for row in taken]
        self.progress("scoring", len(self.samples), len(self.samples))
        check_errors(groups, self.config.limits, "scoring the teacher's answers", self.replies.path)
        return rows, dict(counts)
