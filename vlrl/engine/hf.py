"""Generation with the training model itself: no second copy, no sync.

Each prompt (and its images) is computed once, and its cache is kept once for the whole group where the attention
allows it. Rows that have finished leave the batch. Every rollout draws from a random stream of its own, named by (seed,
request key, index): its answer does not depend on the batch or process it ran in, beyond the last bits of the logits.
Of an episode the cache stays alive until the next turn, which reads the observation alone (living.py).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from vlrl.engine.base import Done, Request, Watch
from vlrl.engine.cache import (
    CopiedRows,
    SharedRows,
    answer_rows,
    cache_argument,
    join_caches,
    roomy_cache,
    stack_row_caches,
)
from vlrl.engine.capacity import Capacity, Job, automatic, batches, begin_alike, chunks, split_jobs
from vlrl.engine.decoding import DecodedBatch, DecodingBatch
from vlrl.engine.turn_cache import RowCache, TurnCaches
from vlrl.errors import NotFiniteError, TrainingError
from vlrl.models.finite import not_finite
from vlrl.models.oom import release, short_of_memory
from vlrl.models.packing import aligned_inputs, media_inputs, to_device
from vlrl.models.policy import Policy
from vlrl.models.token_text import TokenTexts
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt, Turn

_COMPACT = 0.75
"""Finished rows leave when at most this share of the batch is still writing."""
_log = logging.getLogger(__name__)


class HFEngine:
    """Engine over the policy's own transformers model.

    batch_rollouts: answers side by side, or auto: as many as fit (see capacity). prefill_tokens: most tokens of
    prompts, padding included, that are computed at once. When memory does not suffice after all, the batch is
    halved, and so are those that follow.
    """

    def __init__(self, policy: Policy, seed: int, batch_rollouts: int | Literal["auto"] = "auto",
                 prefill_tokens: int = 16384):
        self.policy, self.seed, self.prefill_tokens = policy, seed, prefill_tokens
        room = automatic(policy)
        self.capacity = room if batch_rollouts == "auto" else Capacity(rows=batch_rollouts)
        self.living = TurnCaches(room.total / 2 // room.token)
        """Of episodes; the other half is for the batch."""
        self._texts = TokenTexts(policy)

    def sync(self, policy: Policy, step: int) -> None:
        """Shares the weights; where they are sharded, each process gathers all of them."""
        self.policy = policy
        self.living.clear()
        policy.gather()

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    @torch.inference_mode()  # a tenth faster than no_grad on small models; nothing of it enters a graph
    def generate(self, requests: Sequence[Request], done: Done | None = None,
                 watch: Watch | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions per request. The model is in evaluation mode meanwhile.

        `watch` follows the answers while they are written, and changes none of them.
        """
        out: list[list[Completion]] = [[] for _ in requests]
        with self.policy.evaluating(), self.policy.autocast():
            beside = 2 if any(r.continues for r in requests) else 1
            for jobs in batches(requests, lambda *size: self.capacity.fits(*size, beside=beside)):
                with phase("generate"):
                    written = self._run(requests, jobs, watch)
                for i, completion in written:
                    out[i].append(completion)
                whole = [i for i, _ in jobs if len(out[i]) == requests[i].n]
                if done and (len(whole) < len(jobs) or jobs[-1][0] < len(requests) - 1):
                    for i in whole:
                        done(i, out[i])
        return out

    def _run(self, requests: Sequence[Request], jobs: Sequence[Job],
             watch: Watch | None = None) -> list[tuple[int, Completion]]:
        """Returns completions of a batch with the numbers of their requests, in order; in halves where memory is
        short.
        """
        try:
            names = [(i, rollout) for i, rollouts in jobs for rollout in rollouts]
            on_token = watch and (lambda writing: watch(lambda: self._so_far(writing, names)))
            written = self._decode([(requests[i], rollouts) for i, rollouts in jobs], on_token)
            return [(i, self._completion(written, row, requests[i], _before(requests[i], rollout)))
                    for row, (i, rollout) in enumerate(names)]
        except NotFiniteError as error:
            held = not_finite(self.policy.base)
            raise NotFiniteError(f"{error}: {held or 'all weights are finite, and what is computed of them is not'}. "
                                 f"{'Begin with other weights.' if held else 'Set model.dtype=float32.'}") from None
        except (RuntimeError, MemoryError) as error:
            if not short_of_memory(error):
                raise
            rows = sum(len(rollouts) for _, rollouts in jobs)
            if rows == 1:
                raise TrainingError(f"out of memory while one answer alone was written ({error}). Lower "
                                    "model.max_pixels, rollout.max_new_tokens or engine.prefill_tokens.") from None
        # outside of the handler, which keeps the failed batch alive
        self.capacity = replace(self.capacity, rows=rows // 2)
        _log.warning("out of memory with %d answers side by side: from here on %d", rows, rows // 2)
        release(self.policy.device)
        return [pair for part in split_jobs(jobs, rows // 2) for pair in self._run(requests, part, watch)]

    def _completion(self, written: DecodedBatch, row: int, request: Request, before: Completion | None) -> Completion:
        n = int(written.lengths[row])
        tokens, sampled = written.tokens[row, :n], written.sampled[row, :n]
        ended = int(tokens[-1]) in self.policy.eos
        text = self._texts.decode(tokens[:-1] if ended else tokens)
        stopped = ended or any(stop in text for stop in request.sampling.stop)
        turns = before.turns if before else ()
        return Completion(tokens=tokens, logprobs=written.logprobs[row, :n], loss_mask=sampled, text=text,
                          finish_reason="stop" if stopped else "length",
                          turns=(*turns, Turn(start=turns[-1].end if turns else 0, end=n)))

    def _so_far(self, writing: DecodingBatch, names: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """Returns the texts of a batch, without end tokens; a character of which bytes are missing is left out."""
        written = writing.written()
        rows = (row[:n] for row, n in zip(written.tokens.tolist(), written.lengths.tolist(), strict=True))
        ended = [row[:-1] if row and row[-1] in self.policy.eos else row for row in rows]
        return {name: self._texts.decode(row).rstrip("\ufffd") for name, row in zip(names, ended, strict=True)}

    def _decode(self, work: Sequence[tuple[Request, list[int]]],
                on_token: Callable[[DecodingBatch], None] | None = None) -> DecodedBatch:
        """Returns all rollouts of a batch, a token of each at a time; `on_token` is called after each."""
        sampling = [request.sampling for request, rows in work for _ in rows]
        longest = max(s.max_new_tokens for s in sampling)
        draws = np.stack([self._draws(request, i, longest) for request, rows in work for i in rows])
        writing = DecodingBatch(sampling, draws, self._texts,
                                [_before(request, i) for request, rows in work for i in rows])
        with phase("prefill"):
            logits, cache_rows, position = self._begin(work)
        rows = torch.arange(len(sampling), device=self.policy.device)
        live = torch.ones_like(rows, dtype=torch.bool)
        for _ in range(writing.steps):
            token, live = writing.write(rows, live, logits)
            if on_token:
                on_token(writing)
            alive = int(live.sum())
            if not alive:
                break
            if alive <= _COMPACT * len(rows):
                self._keep(work, writing, cache_rows, rows, live)
                keep = live.nonzero()[:, 0]
                rows, position, token, live = (x[keep] for x in (rows, position, token, live))
                cache_rows.select(keep)
            logits = self._next(token, position, cache_rows)
            position = position + 1
        self._keep(work, writing, cache_rows, rows, live)
        return writing.written()

    def _keep(self, work: Sequence[tuple[Request, list[int]]], writing: DecodingBatch,
              cache_rows: CopiedRows | SharedRows,
              rows: torch.Tensor, live: torch.Tensor) -> None:
        """Keeps the caches of the rows [R] of a batch that have ended, where they will be continued."""
        if not isinstance(cache_rows, SharedRows) or not any(request.continues for request, _ in work):
            return
        requests = [(request, i) for request, numbers in work for i in numbers]
        for place, number in enumerate(rows.tolist()):
            request, i = requests[number]
            if request.continues and not live[place]:
                tokens = writing.tokens_of(number)[:-1]  # the last one was not read yet
                layers = partial(cache_rows.row, place, len(tokens))
                self.living.keep(request.continues[i], request.prompt, tokens, layers)

    def _begin(self, work: Sequence[tuple[Request, list[int]]]
               ) -> tuple[torch.Tensor, CopiedRows | SharedRows, torch.Tensor]:
        """Returns logits [R, V] of each row's first token, its cache, and its position [R]."""
        prompts: list[tuple[Prompt, RowCache | None]] = []
        owner: list[int] = []
        for request, rows in work:
            if not request.begun:
                alone = request.continues[0] if request.n == 1 and request.continues else None
                cached = self.living.take(alone, request.prompt) if alone else None
                prompts.append(cached or (request.prompt, None))
            for place, i in enumerate(rows):
                # what an answer wrote before is read as part of a prompt of its own, once for those that wrote the same
                if request.begun and not (place and begin_alike(request, rows[place - 1], i)):
                    prompts.append((request.prompt.followed_by(request.begun[i].written.tokens), None))
                owner.append(len(prompts) - 1)
        logits, cache, mask, position = self._prefill_all(prompts)
        of = torch.tensor(owner, device=self.policy.device)
        return logits[of], answer_rows(cache, mask, of, self._text_config, self.policy.family.shared), position[of]

    def _next(self, token: torch.Tensor, position: torch.Tensor, cache_rows: CopiedRows | SharedRows) -> torch.Tensor:
        """Returns logits [R, V] after one more token [R] of every row: all that a decoding step asks of the model.

        A compiled or captured forward belongs here; shapes change with `cache_rows.select` and as the cache grows.
        """
        return self.policy.model(input_ids=token[:, None], position_ids=self._at(position), use_cache=True,
                                 logits_to_keep=1, **cache_rows.inputs(self._cache_argument)).logits[:, -1]

    def _prefill_all(self, prompts: Sequence[tuple[Prompt, RowCache | None]]
                     ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """As `_prefill`, at most `prefill_tokens` at once (a longer prompt by itself); those behind a cache apart."""
        parts = []
        for _, run in itertools.groupby(prompts, key=lambda pair: pair[1] is not None):
            pending = deque(run)
            for chunk in chunks([prompt for prompt, _ in pending], self.prefill_tokens):
                parts.append(self._prefill(chunk, [one for _ in chunk if (one := pending.popleft()[1])]))
        if len(parts) == 1:
            return parts[0]
        logits, caches, masks, position = zip(*parts, strict=True)
        width = max(mask.shape[1] for mask in masks)
        mask = torch.cat([F.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
        return torch.cat(logits), join_caches(caches), mask, torch.cat(position)

    def _prefill(self, prompts: Sequence[Prompt], cached: Sequence[RowCache]
                 ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """Returns the last logits [P, V], cache, attention mask [P, L] and next position [P] of left-padded prompts,
        each behind its kept cache where there are any.
        """
        device, width = self.policy.device, max(map(len, prompts))
        ids, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        positions = np.ones((len(prompts[0].positions), len(prompts), width), dtype=np.int64)
        for b, prompt in enumerate(prompts):
            ids[b, width - len(prompt):] = prompt.ids
            mask[b, width - len(prompt):] = 1
            positions[:, b, width - len(prompt):] = prompt.positions
        past = max((len(k.ids) for k in cached), default=0)
        before = [np.arange(past) >= past - len(k.ids) for k in cached]
        mask = np.concatenate([np.array(before, np.int64), mask], axis=1) if cached else mask
        inputs = self.policy.inputs(to_device(
            {"input_ids": torch.from_numpy(ids), **aligned_inputs([[p] for p in prompts], width, right=True),
             **media_inputs(prompts)}, device))
        attention = torch.from_numpy(mask).to(device)
        at = torch.from_numpy(positions if len(positions) > 1 else positions[0]).to(device)
        cache = stack_row_caches([k.layers for k in cached],
                                 self._text_config) if cached else roomy_cache(self._text_config)
        out = self.policy.model(**inputs, attention_mask=attention, position_ids=at, use_cache=True, logits_to_keep=1,
                                **{self._cache_argument: cache})
        following = torch.tensor([p.next_position for p in prompts], device=device)
        return out.logits[:, -1], cache, attention, following

    @property
    def _cache_argument(self) -> str:
        return cache_argument(type(self.policy.base))

    @property
    def _text_config(self) -> Any:
        return self.policy.base.config.get_text_config(decoder=True)

    def _at(self, position: torch.Tensor) -> torch.Tensor:
        """Returns position ids of one new token per row, as the model takes them."""
        return position[None, :, None].expand(3, -1, -1) if self.policy.family.mrope else position[:, None]

    def _draws(self, request: Request, index: int, count: int) -> np.ndarray:
        """Returns [count] uniform numbers of one rollout's own stream; a longer call begins with those of a shorter
        one.
        """
        place = request.begun[index].index if request.begun else index
        stream = np.random.SeedSequence([self.seed, *request.key, place])
        return np.random.Generator(np.random.Philox(stream)).random(count, dtype=np.float32)


def _before(request: Request, rollout: int) -> Completion | None:
    """Returns what a rollout of a request has written before."""
    return request.begun[rollout].written if request.begun else None
