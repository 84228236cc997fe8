"""The services `policy_logprobs` and `reference_logprobs`: log-probabilities of texts under the trained and the
reference policy.

One forward pass per policy serves all groups that were generated together, packed as in training. It runs on every
process, after generation and before scoring. A completion, and the texts that replace its answer, share one copy of the
reasoning before them. Log-probabilities are at temperature 1. The trained policy has its current weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlrl.distributed import comm
from vlrl.engine.base import unsampled_completion
from vlrl.errors import TaskError, TrainingError
from vlrl.models.processing import Encoder
from vlrl.models.reference import Reference
from vlrl.models.token_text import TokenTexts
from vlrl.rewards.text import completion_for
from vlrl.rollout.generate import UnscoredGroup, answer_of, with_image_size
from vlrl.task import Task
from vlrl.task.services import LOGPROBS, GroupLogprobs, Key, reading_key
from vlrl.types import Completion, Prompt

_OPEN, _CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, eq=False)
class _Row:
    """A row of the forward pass: a completion, and the range start..end of the tokens whose log-probabilities are used.
    """

    group: int
    key: Key
    prompt: Prompt
    completion: Completion
    start: int
    end: int


class Likelihoods:
    """Computes the log-probabilities of texts that a task requests (`Task.readings`) for this module's services."""

    def __init__(self, reference: Reference, encode: Encoder, task: Task):
        self.reader, self.encode, self.task = reference, encode, task
        self.services = tuple(name for name in LOGPROBS if name in task.needs)
        self._decode = TokenTexts(reference.policy).decode
        self._read: dict[str, list[int]] = {}

    def __call__(self, groups: Sequence[UnscoredGroup], split: str, step: int) -> list[GroupLogprobs]:
        """Returns for each group {service: {key of a text: [t] float32 log-probabilities}}; see services.Logprobs.
        Completions follow the prompt used in training. A collective call."""
        rows, requested = self._rows(groups, step)
        own = tuple(name == "policy_logprobs" for name in self.services)
        values = self.reader.stacked([r.prompt for r in rows], [r.completion for r in rows], 1.0, own)
        known = {(r.group, r.key): v[r.start:r.end] for r, v in zip(rows, values, strict=True)}
        counts = self._read.setdefault(split, [0, 0, step])
        counts[:] = counts[0] + len(rows), counts[1] + sum(len(r.completion.tokens) for r in rows), step
        return [{name: {key: known[i, key][:, column] for key in keys.get(name, ())}
                 for column, name in enumerate(self.services)} for i, keys in enumerate(requested)]

    def metrics(self, split: str) -> dict[str, float]:
        """Numbers of texts and tokens for a split since the last call, over all processes, and the last step
        (`logprobs/policy_step`)."""
        texts, tokens, step = self._read.pop(split, (0, 0, 0))
        texts, tokens = comm.total(texts, tokens)
        return {"logprobs/texts": texts, "logprobs/tokens": tokens, "logprobs/policy_step": float(step)}

    def _rows(self, groups: Sequence[UnscoredGroup], step: int) -> tuple[list[_Row], list[dict[str, list[Key]]]]:
        rows: dict[tuple[int, Key], _Row] = {}
        requested: list[dict[str, list[Key]]] = []
        for i, group in enumerate(groups):
            requested.append(self._requested_keys(group, step))
            for key in (key for keys in requested[-1].values() for key in keys):
                if (i, key) not in rows:
                    rows[i, key] = self._row(i, key, group)
        return [*rows.values()], requested

    def _requested_keys(self, group: UnscoredGroup, step: int) -> dict[str, list[Key]]:
        """Returns {service: keys of the texts that the task requests for a group}. Raises TaskError if the task's code
        raises an exception, which ends the run: no text of a model may cause an exception there."""
        task, sample = self.task.of(group.sample), with_image_size(group.sample, group.prompt)
        answers = [answer_of(c, group.prompt, step, name) for name, c in group.members]
        if not answers:
            return {}
        needed = [name for name in self.services if name in task.needs]
        try:
            return {name: [reading_key(one, answers) for one in task.readings(name, sample, answers)]
                    for name in needed}
        except (TaskError, TrainingError):
            raise
        except Exception as error:
            raise TaskError(f"task '{task.name}': the method readings() failed for sample '{sample.id}': "
                            f"{type(error).__name__}: {error}") from error

    def _row(self, i: int, key: Key, group: UnscoredGroup) -> _Row:
        place, text = key
        whole = None if place is None else group.members[place][1]
        if text is not None:
            completion, (start, end) = self._instead(whole, text, group)
        else:
            assert whole is not None
            start, end = answer_span(self._written(whole), self._decode)
            completion = whole if whole.episode_id else replace(whole, tokens=whole.tokens[:end])
        return _Row(i, key, group.prompt, completion, start, end)

    def _instead(self, whole: Completion | None, text: str, group: UnscoredGroup) -> tuple[Completion, tuple[int, int]]:
        """Returns (a completion that ends with `text` instead of the answer, token range of `text`). The completion is
        `whole` up to its last <answer> tag, followed by `text`. The range is (0, 0) if there is no such tag or no
        text. If `whole` is None, `text` follows the prompt without reasoning."""
        if whole is not None and whole.episode_id:
            raise TaskError(f"sample '{group.sample.id}': readings() returned a Reading with a text to replace the "
                            "answer, which is not possible for an episode")
        tokens = np.zeros(0, np.int64) if whole is None else self._written(whole)
        before = completion_for(_OPEN, group.prompt.opened) if whole is None else self._decode(tokens)
        begin = before.rfind(_OPEN) + len(_OPEN)
        if begin < len(_OPEN) or not text:
            return unsampled_completion(tokens[:0]), (0, 0)
        prefix_len = bisect_right(range(len(tokens) + 1), begin, key=lambda k: len(self._decode(tokens[:k]))) - 1
        rest = before[len(self._decode(tokens[:prefix_len])):begin]
        joined = np.concatenate([tokens[:prefix_len], self.encode.answer_ids(f"{rest}{text}{_CLOSE}")[:-1]])
        start, end = _between(joined, begin, len(self._decode(joined)) - len(_CLOSE), self._decode)
        return unsampled_completion(joined[:end]), (start, end)

    def _written(self, completion: Completion) -> np.ndarray:
        tokens = completion.tokens
        return tokens[:-1] if len(tokens) and int(tokens[-1]) in self.reader.policy.eos else tokens


def answer_span(tokens: np.ndarray, decode: Callable[[Any], str]) -> tuple[int, int]:
    """Token range (start, end) of the content of the last <answer> tag in `tokens` [T]; (0, 0) without such a tag.
    Without </answer> the content extends to the end. A token that also contains a part of a tag is included. decode:
    tokens -> text."""
    text = decode(tokens)
    begin = text.rfind(_OPEN) + len(_OPEN)
    if begin < len(_OPEN):
        return 0, 0
    close = text.find(_CLOSE, begin)
    return _between(tokens, begin, len(text) if close < 0 else close, decode)


def _between(tokens: np.ndarray, begin: int, end: int, decode: Callable[[Any], str]) -> tuple[int, int]:
    if end <= begin:
        return 0, 0
    places = range(len(tokens) + 1)

    def written(k: int) -> int:
        return len(decode(tokens[:k]))

    last = bisect_right(places, end, key=written) - 1  # the last byte of a character adds none to the text
    return bisect_right(places, begin, key=written) - 1, last + (written(last) < end)
