"""Functions that choose which retries are trained on (algo.guided.keep): `(list of RetryGroup, read) -> list of list of
bool`, one bool per retry.

They are called on every process at the same time, with or without retries, because `read` contains collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vlrl.models.processing import Encoder
from vlrl.rewards.text import answer_offset, completion_for
from vlrl.task import Task
from vlrl.task.interface import given_answer
from vlrl.types import Completion, Prompt, Rollout, Sample

LogprobReader = Callable[[Sequence[Prompt], Sequence[np.ndarray]], list[np.ndarray]]
"""A function (prompts, tokens [T] of one completion per prompt) -> [T] log-probabilities of each completion under the
current policy."""


@dataclass(frozen=True, eq=False)
class RetryGroup:
    """The retries of one group."""

    task: Task
    sample: Sample
    prompt: Prompt
    """The prompt without guidance."""
    attempts: Sequence[Rollout]
    encode: Encoder


def correct(groups: Sequence[RetryGroup], read: LogprobReader) -> list[list[bool]]:
    """Keeps the retries that the task says are correct."""
    return [[bool(r.correct) for r in g.attempts] for g in groups]


def explains(groups: Sequence[RetryGroup], read: LogprobReader) -> list[list[bool]]:
    """Keeps correct retries that explain the answer well. Under the prompt without guidance, the mean log-probability
    of the retry's tokens must exceed that of the given solution, and the true answer must be more probable after the
    explanation than without it.

    ExPO (arXiv 2507.02834). The answer is the text that begins with the last <answer>."""
    attempts = [(g, r.completion.tokens, answer_start(r.completion.tokens, g.encode.processor.tokenizer.decode))
                for g in groups for r in g.attempts]
    given = [given_answer(g.task, g.sample) for g in groups]
    solutions = [np.zeros(0, np.int64) if text is None else g.encode.answer_ids(completion_for(text, g.prompt.opened))
                 for g, text in zip(groups, given, strict=True)]
    values = iter(read([*(g.prompt for g, *_ in attempts for _ in range(2)), *(g.prompt for g in groups)],
                       [*(tokens for _, whole, at in attempts for tokens in (whole, whole[at:])), *solutions]))
    pairs = [(next(values), next(values), at) for *_, at in attempts]
    known = {id(g): float(v.mean()) if len(v) else -np.inf for g, v in zip(groups, values, strict=True)}
    good = iter([float(whole.mean()) > known[id(g)] and float(whole[at:].sum()) > float(alone.sum())
                 if len(whole) else False for (g, *_), (whole, alone, at) in zip(attempts, pairs, strict=True)])
    return [[next(good) and bool(r.correct) for r in g.attempts] for g in groups]


def answer_start(tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> int:
    """Position, in `tokens` [T], of the first token of the final answer. `decode` converts tokens to text."""
    place = answer_offset(decode(tokens))
    return max(bisect_right(range(len(tokens) + 1), place, key=lambda k: len(decode(tokens[:k]))) - 1, 0)


Keep = Callable[[Sequence[RetryGroup], LogprobReader], list[list[bool]]]
KEEPS: dict[str, Keep] = {"correct": correct, "explains": explains}


def as_completion(tokens: np.ndarray) -> Completion:
    """Wraps tokens in a Completion, only to compute their log-probabilities."""
    return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), bool),
                      text="", finish_reason="stop")
