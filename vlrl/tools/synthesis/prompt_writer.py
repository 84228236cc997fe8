"""`vlrl data synthesize --endpoint`: new prompts written by a model behind an OpenAI-compatible server, the generator.

Each new prompt is a variation of an existing prompt, its parent. The right answer is computed by the task; if the task
cannot compute it, it is the majority of a teacher model's answers, as in SwS (arXiv 2506.08989). An answer that the
generator gives does not count.

    name.written.jsonl      every reply of the generator with its tokens, written when it arrives
    name.votes.jsonl        every answer of the teacher"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.data.row_samples import checked_sample
from vlrl.engine.base import Request, Sampling
from vlrl.errors import ConfigError, DataError
from vlrl.progress import Progress
from vlrl.rewards.verdicts import last_object, sanitized
from vlrl.rollout.generate import make_group, sampling_of
from vlrl.services.service_set import ServiceSet, serving
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.tools.clients.chat_prompts import ChatEncoder
from vlrl.tools.clients.endpoint import completion_of
from vlrl.tools.clients.replies import Place, Replies
from vlrl.tools.evaluation.grid import Server, endpoint_of
from vlrl.tools.evaluation.measure import task_facts
from vlrl.tools.synthesis.parents import VARIATIONS
from vlrl.tools.synthesis.proposals import Candidate, Search
from vlrl.tools.synthesis.row_export import MediaLocation, child
from vlrl.types import Completion, Prompt, Rollout, Row, Sample

_ROLLOUT = ("max_new_tokens", "stop")
_GENERATOR, _TEACHER = 17, 19  # first numbers in the request keys for the generator and for the teacher
_WRITTEN = 2048  # largest number of tokens in a reply of the generator
_LONGEST = 8000  # largest number of characters of a reply, or of a string in a reply, that are used
_MOST_OPTIONS = 26


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """Settings of the generator, the model that writes new prompts, and of the teacher, which answers them."""

    generator: Server
    teacher: Server | None = None  # the server of the teacher; None = the generator is also the teacher
    votes: int = 8
    temperature: float = 1.0
    price_in: float | None = None
    """Price of a million input tokens of generator and teacher. None = the cost is not computed."""
    price_out: float | None = None  # price of a million output tokens


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files in which the replies of the generator and the answers of the teacher are stored."""

    written: Path
    votes: Path


def check(task: Task, parents: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if a generator cannot write prompts for the task, or if the right answers to its prompts could
    not be determined."""
    if has_environment(task):
        raise ConfigError(f"--endpoint with task '{task.name}': its prompts have environments, which cannot be "
                          "written as text. Leave --endpoint out, so that the task proposes prompts itself")
    if not any(_fields(task, row) for row in parents):
        raise ConfigError(f"--endpoint with task '{task.name}': its rows have none of the fields that may be written "
                          f"({', '.join(task.written_fields)}): set Task.written_fields (docs/write-a-task.md)")
    own = any(getattr(getattr(task, name), "__func__", None) is not getattr(Task, name)
              for name in ("solved", "answered"))
    if not own and not any("answer" in row for row in parents):
        raise ConfigError(f"--endpoint with task '{task.name}': its rows have no `answer`, so the right answer to a "
                          "new prompt is unknown: implement Task.solved or Task.answered (docs/write-a-task.md)")


def _fields(task: Task, row: Mapping[str, Any]) -> list[str]:
    return [name for name in task.written_fields if row.get(name) not in (None, "", [])]


# --- requests and replies of the generator ----------------------------------------------------------------------


def request_text(task: Task, parent: Mapping[str, Any], variation: str, other: Mapping[str, Any] | None = None) -> str:
    """The text that asks the generator for one new prompt, a variation of the row `parent`. `variation` is the kind of
    variation, a key of parents.VARIATIONS. If the row `other` is given, the new prompt is to combine both rows."""
    fields = _fields(task, parent)
    texts = [json.dumps({name: row[name] for name in fields if name in row}, ensure_ascii=False)
             for row in (parent, other) if row is not None]
    about = "It is about the same picture or video. " if {"image", "images", "video"} & parent.keys() else ""
    return (f"Problems for a model are JSON objects with the fields {', '.join(fields)}. The model is asked:\n\n"
            f"{task.templates[0]}\n\n" + "".join(f"A problem:\n{text}\n\n" for text in texts)
            + f"Write one new problem {VARIATIONS[variation]}. {about}It has exactly one right answer, which can be "
            "checked. Reply with its JSON object, which has the same fields, and nothing else.")


def read_reply(text: str, task: Task, parent: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a new prompt, parsed from the generator's reply. None unless the reply has all fields of `parent`
    that may be written, with values of the same types.

    Replies are untrusted: other fields are dropped, and strings with control characters or special tokens of chat
    templates are refused."""
    entries = last_object(text[-_LONGEST:])
    fields = _fields(task, parent)
    if entries is None or not all(name in entries and _same_type(entries[name], parent[name]) for name in fields):
        return None
    return {name: entries[name] for name in fields}


def _same_type(value: Any, parent_value: Any) -> bool:
    """Whether a value has the same type as the parent's value: a string, a number, or a list of strings."""
    if isinstance(parent_value, list):
        return (isinstance(value, list) and 0 < len(value) <= _MOST_OPTIONS
                and all(isinstance(one, str) and _same_type(one, "") for one in value))
    if isinstance(parent_value, str):
        return isinstance(value, str) and bool(value.strip()) and len(value) <= _LONGEST and sanitized(value) == value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and isinstance(parent_value, (int, float)) and abs(value) < float("inf")


# --- the work ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class PromptWriter:
    """Requests new prompts from a generator, and determines the right answers to them."""

    config: Config
    task: Task
    search: Search
    settings: WriterSettings
    files: Files
    location: MediaLocation
    known: Mapping[str, Any]  # everything that the prompts depend on, as JSON
    progress: Progress

    def __post_init__(self) -> None:
        self.encode = ChatEncoder(self.config)
        self.unanswered = 0
        self.costs: dict[str, Any] = {}

    def candidates(self) -> list[Candidate]:
        """The candidates written by the generator, in order. Replies that are already stored are not requested again.

        Raises ConfigError if the server refuses API key, path or model; TrainingError if no request succeeds."""
        with contextlib.closing(endpoint_of(self.config, self.settings.generator)) as server:
            replies = Replies.open(self.files.written, {**self.known, "generator": server.model,
                                                  "temperature": self.settings.temperature})
            wanted = [(number, 0) for number in range(self.search.candidates)]
            self.unanswered += replies.fill(server, wanted, self._requests, self.progress, "asking the generator")
            self.costs["generator"] = replies.cost(self.settings.price_in, self.settings.price_out)
            return [self._candidate(number, replies, str(server.model)) for number, _ in wanted]

    def _requests(self, wanted: Sequence[Place]) -> list[Request]:
        sampling = Sampling(max_new_tokens=_WRITTEN, temperature=self.settings.temperature)
        return [Request(prompt=self._prompt(number), n=1, sampling=sampling, key=(_GENERATOR, number, i))
                for number, i in wanted]

    def _prompt(self, number: int) -> Prompt:
        """The generator's prompt for a candidate: the media of its parent, then the text of the request."""
        row, variation, other = self.search.parent(number)
        sample = self._sample(row)
        text = request_text(self.task, row, variation, other)
        content = [*({"type": media.kind} for media in sample.media), {"type": "text", "text": text}]
        return self.encode.prompt(sample, [{"role": "user", "content": content}])

    def _sample(self, row: Mapping[str, Any]) -> Sample:
        return checked_sample(self.task, row, self.location.root)

    def _candidate(self, number: int, replies: Replies, generator: str) -> Candidate:
        reply = replies.reply((number, 0))
        if reply is None:
            return Candidate(number=number, reason="not answered")
        row, variation, _ = self.search.parent(number)
        fields = read_reply(reply.text, self.task, row) if reply.finish_reason == "stop" else None
        if fields is None:
            return Candidate(number=number, reason="malformed")
        return Candidate(number=number, row=child(row, fields, number, f"{generator}: {variation}"))

    def verified(self, rows: Mapping[int, Row]) -> tuple[list[Row], Counter[str]]:
        """Returns two values: the rows whose right answer is known, with the column `verifier`; and reason -> number of
        rows removed for it. A row is removed if the task refuses it, if the teacher's answers have no majority, or
        if answers are missing."""
        counts, done, pending = Counter[str](), dict[int, Row](), dict[int, tuple[Row, Prompt]]()
        for number, row in rows.items():
            try:
                known = self.task.solved(row)
                row = dict(known or row)
                prompt = self.encode(self.task, self._sample(row))
            except DataError:
                counts["refused by the task"] += 1
                continue
            if known is not None:
                done[number] = {**row, "verifier": f"worked out by task {self.task.name}"}
            else:
                pending[number] = row, prompt
        if pending:
            done |= self._agreed(pending, counts)
        return [done[number] for number in rows if number in done], counts

    def _agreed(self, pending: Mapping[int, tuple[Row, Prompt]], counts: Counter[str]) -> dict[int, Row]:
        out = dict[int, Row]()
        sampling = sampling_of(self.config.rollout, self.settings.temperature)
        with (contextlib.closing(endpoint_of(self.config, self.settings.teacher or self.settings.generator)) as server,
              serving(self.config, self.task) as services):
            replies = Replies.open(self.files.votes, {**self.known, **task_facts(self.config, _ROLLOUT), "teacher":
                                                server.model, "temperature": self.settings.temperature})
            wanted = [(number, vote) for number in pending for vote in range(self.settings.votes)]
            self.unanswered += replies.fill(server, wanted, lambda places: [
                Request(prompt=pending[n][1], n=1, sampling=sampling, key=(_TEACHER, n, vote)) for n, vote in places],
                self.progress, "asking the teacher")
            self.costs["teacher"] = replies.cost(self.settings.price_in, self.settings.price_out)
            for number, (row, prompt) in pending.items():
                votes = [completion_of(reply) for vote in range(self.settings.votes)
                         if (reply := replies.reply((number, vote)))]
                agreed = self.majority(row, prompt, votes, services)
                if agreed:
                    out[number] = {**agreed[0],
                                   "verifier": f"{agreed[1]} of {self.settings.votes} answers of {server.model}"}
                else:
                    counts["no majority" if len(votes) == self.settings.votes else "not all votes"] += 1
        return out

    def majority(self, row: Row, prompt: Prompt, votes: Sequence[Completion],
                 services: ServiceSet | None) -> tuple[Row, int] | None:
        """Finds the answer that more than half of the teacher's answers `votes` agree on. Returns (the row with this
        answer, the number of answers that agree); None if there is no such answer.

        Two answers agree if the task scores one of them as correct when the other is the ground truth. Truncated
        answers do not count."""
        tried: list[Any] = []
        for first in self._scored(row, prompt, votes, services):
            if first.completion.truncated or first.parsed is None or first.parsed in tried:
                continue
            tried.append(first.parsed)
            answered = self.task.answered(row, first.parsed)
            with contextlib.suppress(DataError):  # not a valid answer to such a row
                again = self._scored(dict(answered), prompt, votes, services) if answered else ()
                agree = sum(r.correct is True and not r.completion.truncated for r in again)
                if answered and 2 * agree > self.settings.votes:
                    return dict(answered), agree
        return None

    def _scored(self, row: Row, prompt: Prompt, votes: Sequence[Completion],
                services: ServiceSet | None) -> tuple[Rollout, ...]:
        return make_group(self.task, self._sample(row), prompt, votes, group_id=str(row["id"]), split="candidates",
                          step=0, served=services).rollouts
