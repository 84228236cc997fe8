"""The angle of a prompt: the similarity of the policy's hidden states for the prompt's tokens. The sampler gain_rl
orders prompts by their angles.

With h the hidden states of the last layer as unit vectors, q the tokens of the question and b the tokens before it:

    angle = mean over i, j in q of h_i . h_j  +  mean over i in q, j in b of h_i . h_j

(GAIN-RL, 2506.02281: the angle concentration inside the question's segment, and between it and the preceding segment.)
The mean over pairs equals the product of the mean unit vectors, so no tokens x tokens matrix is needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.errors import DataError
from vlrl.models.logprobs import answer_states
from vlrl.models.packing import Batch, Piece, plan
from vlrl.models.policy import Policy
from vlrl.models.processing import PromptTooLong
from vlrl.models.token_text import TokenTexts
from vlrl.monitoring.metrics import phase
from vlrl.progress import Progress
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import Task, task_messages
from vlrl.types import Prompt, Sample

CHUNK = 32
"""Number of prompts that are encoded and packed together. All prompts of a chunk are computed by one process, so the
angles have the same bits with any number of processes (without FSDP)."""


class Angles:
    """Measures the angles of samples' prompts under the policy."""

    def __init__(self, policy: Policy, config: Config, task: Task, prefetch: Prefetcher):
        self.policy, self.config, self.task, self.prefetch = policy, config, task, prefetch
        self._decode = TokenTexts(policy).decode

    def __call__(self, samples: Sequence[Sample], indices: np.ndarray,
                 progress: Progress) -> np.ndarray:
        """[n] float32 angles in [-2, 2] of the samples with these `indices` [n]. NaN for a prompt that is too long or,
        with data.quarantine, unreadable. Called on every process at the same time; the result is the same on all
        processes. progress: called with (text, number of prompts done, number of all prompts). Raises DataError for
        media that cannot be read."""
        chunks = [indices[i:i + CHUNK] for i in range(0, len(indices), CHUNK)]
        values: list[np.ndarray] = []
        for first in range(0, len(chunks), comm.world()):
            turn = chunks[first:first + comm.world()]
            own = turn[comm.rank()] if comm.rank() < len(turn) else indices[:0]
            following = chunks[first + comm.world() + comm.rank():][:1]
            prompts = comm.together(lambda own=own, following=following: self._encoded(samples, own, following))
            values += comm.gather(self.of(prompts))
            progress("measuring angles of prompts", min((first + comm.world()) * CHUNK, len(indices)), len(indices))
        return np.concatenate(values) if values else np.zeros(0, np.float32)

    def of(self, prompts: Sequence[tuple[Prompt, str] | None]) -> np.ndarray:
        """[n] float32 angles of encoded prompts, each given with the text of its question; NaN where the prompt is
        None. Called on every process."""
        policy, train = self.policy, self.config.train
        angles = np.full(len(prompts), np.nan, np.float32)
        places = {Piece(p[0], (), ()): (i, p[1]) for i, p in enumerate(prompts) if p is not None}
        alone = policy.layout(train.packing) == "padded"  # one prompt per pass, so that there is no padding
        parts = policy.fill([[p] for p in places] if alone else plan([*places], train.tokens_per_batch))
        with phase("angles"), torch.no_grad(), policy.evaluating():
            for part in parts:
                states, end = self._states(policy.pack(part, train)), 0
                for piece in part:
                    start, end = end, end + len(piece.prompt)
                    if piece in places:  # filler pieces have no question
                        i, question = places[piece]
                        span = question_span(piece.prompt.ids, question, policy.banned, self._decode)
                        angles[i] = angle(states[start:end], *span)
        return angles

    def _states(self, batch: Batch) -> torch.Tensor:
        """[T, H] float32 input of the output layer for every token, from a batch that consists of one row."""
        policy = self.policy
        batch = batch.to(policy.device)
        with policy.autocast():
            inputs = {**policy.inputs(batch.inputs), "use_cache": False}
            hidden, head = answer_states(policy.model, policy.base, inputs)
            if head.layer is None:  # these are logits
                hidden = policy.model(**inputs, output_hidden_states=True).hidden_states[-1]
        return hidden[0].float()

    def _encoded(self, samples: Sequence[Sample], indices: np.ndarray,
                 following: Sequence[np.ndarray]) -> list[tuple[Prompt, str] | None]:
        """Encodes the prompts of the samples at `indices`, with the prompt template of their first draw. Returns
        (prompt, text of its question) for each sample, or None if the prompt is unusable. Meanwhile, threads
        prefetch the samples at `following`."""
        def make(place: int) -> Sample:
            sample = samples[place]
            return replace(sample, prompt=self.task.of(sample).template(sample, 0))

        def begin(some: np.ndarray) -> None:
            self.prefetch.begin({("angle", place): partial(make, place) for place in some.tolist()})

        begin(indices)
        for some in following:
            begin(some)
        return [self._prompt(place, partial(make, place)) for place in indices.tolist()]

    def _prompt(self, place: int, make: Callable[[], Sample]) -> tuple[Prompt, str] | None:
        try:
            sample, prompt = self.prefetch.take(("angle", place), make)
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not self.config.data.quarantine:
                raise
            return None
        return prompt, _question(task_messages(self.task, sample))


def angle(states: torch.Tensor, first: int, end: int) -> float:
    """The angle of a prompt, from its hidden states [P, H]. The question is tokens first .. end - 1. If no tokens
    precede the question, the mean over pairs with earlier tokens is 0."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    own = unit[first:end].mean(0)
    before = unit[:first].mean(0) if first else torch.zeros_like(own)
    return float(own @ own + own @ before)


def question_span(ids: np.ndarray, question: str, visual: torch.Tensor,
                  decode: Callable[[Any], str]) -> tuple[int, int]:
    """Returns (first, end), the span of the tokens of a prompt `ids` [P] that contain the text `question`. The text is
    searched for after the last visual token (a token in `visual`). If the text is not found, the span covers all
    tokens after the last visual token. If the last visual token is the last token of the prompt, the span covers the
    whole prompt."""
    visual_places = np.flatnonzero(np.isin(ids, visual.cpu().numpy()))
    start = int(visual_places[-1]) + 1 if len(visual_places) else 0
    tail = ids[start:]
    if not len(tail):
        return 0, len(ids)
    begin = decode(tail).rfind(question) if question else -1
    if begin < 0:
        return start, len(ids)
    places = range(len(tail) + 1)

    def written(k: int) -> int:
        return len(decode(tail[:k]))

    return (start + bisect_right(places, begin, key=written) - 1,
            start + bisect_left(places, begin + len(question), key=written))


def _question(messages: Sequence[dict[str, Any]]) -> str:
    content = messages[-1]["content"] if messages else ""
    if isinstance(content, str):
        return content.strip()
    return next((part["text"].strip() for part in reversed(content) if part.get("type") == "text"), "")
