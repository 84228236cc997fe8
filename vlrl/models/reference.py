"""The service `reference_logprobs`: how likely the reference policy finds each answer's own answer.

One pass without gradient over all groups of a round, packed as for training: it runs after generation and before the
groups are scored, on every process. The reference is that of the KL term: the disabled adapter under LoRA, else a
frozen copy of the model the run began with.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlrl.config.schema import Config
from vlrl.models.packing import Batch
from vlrl.models.policy import Policy
from vlrl.models.reading import read_tokens
from vlrl.models.token_text import Texts
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt

_OPEN, _CLOSE = "<answer>", "</answer>"


class Reference:
    """Log-probabilities under the policy's reference of what stands in the answer tags."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.config = policy, config
        self._decode = Texts(policy).decode

    def __call__(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[np.ndarray]]:
        """Returns [group][answer] -> [t] float32 at temperature 1, of the tokens of its last <answer> content; empty
        without.

        Each answer is read under the prompt it is trained under. Called on every process at the same time.
        """
        spans = [self._span(c) for _, answers in groups for c in answers]
        completions = (c for _, answers in groups for c in answers)
        read = [c if c.episode_id else replace(c, tokens=c.tokens[:end])
                for (_, end), c in zip(spans, completions, strict=True)]
        values = self.logprobs([prompt for prompt, answers in groups for _ in answers], read, 1.0)
        sliced = iter([v[start:end] for v, (start, end) in zip(values, spans, strict=True)])
        return [[next(sliced) for _ in answers] for _, answers in groups]

    def _span(self, completion: Completion) -> tuple[int, int]:
        tokens = completion.tokens
        ended = len(tokens) > 0 and int(tokens[-1]) in self.policy.eos
        return answer_span(tokens[:-1] if ended else tokens, self._decode)

    def logprobs(self, prompts: Sequence[Prompt], answers: Sequence[Completion], temperature: float,
                 own: bool = False) -> list[np.ndarray]:
        """Returns [answer][T] float32 of all tokens (with windows of actions, 0 elsewhere), under the reference
        or the policy's `own` weights; an empty answer is not computed. Called on every process at the same time.
        """
        def read(batch: Batch) -> torch.Tensor:
            if own:
                return self.policy.logprobs(batch, temperature).logprobs
            return self.policy.reference_logprobs(batch, temperature)

        with phase("reference"):
            return read_tokens(self.policy, prompts, answers, self.config.train, read)


def answer_span(tokens: np.ndarray, decode: Callable[[Any], str]) -> tuple[int, int]:
    """Returns (first, end) of the tokens [T] that hold a character of the last <answer> content; (0, 0) without the
    tag.

    Content that no </answer> closes goes to the end. A token that holds part of a tag too counts as content.
    """
    text = decode(tokens)
    begin = text.rfind(_OPEN) + len(_OPEN)
    if begin < len(_OPEN):
        return 0, 0
    close = text.find(_CLOSE, begin)
    end = len(text) if close < 0 else close
    if end <= begin:
        return 0, 0
    places = range(len(tokens) + 1)

    def written(k: int) -> int:
        return len(decode(tokens[:k]))

    return bisect_right(places, begin, key=written) - 1, bisect_left(places, end, key=written)
