"""Generation with the training model itself, so no weights have to be copied or transferred.

Each prompt (and its images) is prefilled once. If the attention supports it, the group shares one copy of the prompt's
cache. Finished rows are removed from the batch. Every rollout has its own random stream, selected by (seed, request
key, index). So its tokens do not depend on the batch or the process, except for the last bits of the logits. The cache
of an episode is kept until the next turn, so that only the new observation is prefilled (cache.py)."""

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

from vlrl.engine.base import Done, Request, Watch, make_completion
from vlrl.engine.cache import (
    CopiedRows,
    RowCache,
    SharedRows,
    TurnCaches,
    answer_rows,
    cache_argument,
    join_caches,
    roomy_cache,
    stack_row_caches,
)
from vlrl.engine.capacity import Capacity, Job, automatic, batches, chunks, same_prefix, split_jobs
from vlrl.engine.decoding import DecodedBatch, DecodingBatch
from vlrl.errors import NotFiniteError, TrainingError
from vlrl.models.loading import not_finite
from vlrl.models.oom import release, short_of_memory
from vlrl.models.packing import aligned_inputs, media_inputs, to_device
from vlrl.models.policy import Policy
from vlrl.models.token_text import TokenTexts
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt

_COMPACT = 0.75  # finished rows are removed from the batch when at most this share of its rows is still being decoded
_log = logging.getLogger(__name__)


class HFEngine:
    """An engine that generates with the policy's own transformers model.

    batch_rollouts: completions per batch; auto = as many as fit into memory (capacity.py). prefill_tokens: maximum
    number of prompt tokens, including padding, that are prefilled at once. If memory runs out, the current batch is
    split in halves, and the limit for later batches is halved."""

    def __init__(self, policy: Policy, seed: int, batch_rollouts: int | Literal["auto"] = "auto",
                 prefill_tokens: int = 16384):
        self.policy, self.seed, self.prefill_tokens = policy, seed, prefill_tokens
        room = automatic(policy)
        self.capacity = room if batch_rollouts == "auto" else Capacity(rows=batch_rollouts)
        self.turn_caches = TurnCaches(room.total / 2 // room.token)
        """KV caches of running episodes. They may use one half of the memory, and the batch the other half."""
        self._texts = TokenTexts(policy)

    def sync(self, policy: Policy, step: int) -> None:
        """Uses the policy's weights without a copy. Weights that are sharded (FSDP) are gathered on every process."""
        self.policy = policy
        self.turn_caches.clear()
        policy.gather()

    def close(self) -> None:
        """Does nothing, because the engine has no resources of its own."""

    @torch.inference_mode()  # a tenth faster than no_grad on small models; nothing of it enters a graph
    def generate(self, requests: Sequence[Request], done: Done | None = None,
                 watch: Watch | None = None) -> list[list[Completion]]:
        """Returns the `request.n` completions of each request, sampled with the model in evaluation mode. For `done`
        see Engine.generate. `watch` is called after every token to observe the completions; it does not change them."""
        out: list[list[Completion]] = [[] for _ in requests]
        with self.policy.evaluating(), self.policy.autocast():
            shares = 2 if any(r.continues for r in requests) else 1
            for jobs in batches(requests, lambda *size: self.capacity.fits(*size, shares=shares)):
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
        try:
            names = [(i, rollout) for i, rollouts in jobs for rollout in rollouts]
            on_token = watch and (lambda writing: watch(lambda: self._so_far(writing, names)))
            written = self._decode([(requests[i], rollouts) for i, rollouts in jobs], on_token)
            return [(i, self._completion(written, row, requests[i], _before(requests[i], rollout)))
                    for row, (i, rollout) in enumerate(names)]
        except NotFiniteError as error:
            held = not_finite(self.policy.base)
            raise NotFiniteError(f"{error}: {held or 'all weights are finite, so the forward pass overflows'}. "
                                 f"{'Start from other weights.' if held else 'Set model.dtype=float32.'}") from None
        except (RuntimeError, MemoryError) as error:
            if not short_of_memory(error):
                raise
            rows = sum(len(rollouts) for _, rollouts in jobs)
            if rows == 1:
                raise TrainingError(f"out of memory while decoding a single completion ({error}). Lower "
                                    "model.max_pixels, rollout.max_new_tokens or engine.prefill_tokens.") from None
        # outside of the handler, which keeps the failed batch alive
        self.capacity = replace(self.capacity, rows=rows // 2)
        _log.warning("out of memory with %d completions in a batch: later batches have at most %d completions", rows,
                     rows // 2)
        release(self.policy.device)
        return [pair for part in split_jobs(jobs, rows // 2) for pair in self._run(requests, part, watch)]

    def _completion(self, written: DecodedBatch, row: int, request: Request, before: Completion | None) -> Completion:
        n, turns = int(written.lengths[row]), before.turns if before else ()
        return make_completion(written.tokens[row, :n], written.logprobs[row, :n], written.sampled[row, :n],
                               request.sampling.stop, self.policy.eos, self._texts.decode, turns)

    def _so_far(self, writing: DecodingBatch, names: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        written = writing.written()
        rows = (row[:n] for row, n in zip(written.tokens.tolist(), written.lengths.tolist(), strict=True))
        ended = [row[:-1] if row and row[-1] in self.policy.eos else row for row in rows]
        return {name: self._texts.decode(row).rstrip("\ufffd") for name, row in zip(names, ended, strict=True)}

    def _decode(self, work: Sequence[tuple[Request, list[int]]],
                on_token: Callable[[DecodingBatch], None] | None = None) -> DecodedBatch:
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
        if not isinstance(cache_rows, SharedRows) or not any(request.continues for request, _ in work):
            return
        requests = [(request, i) for request, numbers in work for i in numbers]
        for place, number in enumerate(rows.tolist()):
            request, i = requests[number]
            if request.continues and not live[place]:
                tokens = writing.tokens_of(number)[:-1]  # the last one was not read yet
                layers = partial(cache_rows.row, place, len(tokens))
                self.turn_caches.keep(request.continues[i], request.prompt, tokens, layers)

    def _begin(self, work: Sequence[tuple[Request, list[int]]]
               ) -> tuple[torch.Tensor, CopiedRows | SharedRows, torch.Tensor]:
        """Prefills a batch of R completions, given as a list of (request, indices of the completions in the batch).
        Returns the logits [R, V] of each completion's next token, the KV cache of all completions, and the position
        [R] of that token."""
        prompts: list[tuple[Prompt, RowCache | None]] = []
        owner: list[int] = []
        for request, rows in work:
            if not request.begun:
                alone = request.continues[0] if request.n == 1 and request.continues else None
                cached = self.turn_caches.take(alone, request.prompt) if alone else None
                prompts.append(cached or (request.prompt, None))
            for place, i in enumerate(rows):
                # a prefix is prefilled as part of its own prompt, once for equal prefixes

                if request.begun and not (place and same_prefix(request, rows[place - 1], i)):
                    prompts.append((request.prompt.followed_by(request.begun[i].written.tokens), None))
                owner.append(len(prompts) - 1)
        logits, cache, mask, position = self._prefill_all(prompts)
        of = torch.tensor(owner, device=self.policy.device)
        return logits[of], answer_rows(cache, mask, of, self._text_config, self.policy.family.shared), position[of]

    def _next(self, token: torch.Tensor, position: torch.Tensor, cache_rows: CopiedRows | SharedRows) -> torch.Tensor:
        """Appends a token to every row (`token` and `position`: [R]), and returns the logits [R, V] of the token after
        it. This is the only model call of a decoding step. A compiled forward or a CUDA graph would be used here.
        Shapes change after `cache_rows.select` and as the cache grows."""
        at = position[None, :, None].expand(3, -1, -1) if self.policy.family.mrope else position[:, None]
        return self.policy.model(input_ids=token[:, None], position_ids=at, use_cache=True, logits_to_keep=1,
                                 **cache_rows.inputs(self._cache_argument)).logits[:, -1]

    def _prefill_all(self, prompts: Sequence[tuple[Prompt, RowCache | None]]
                     ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """Prefills prompts in chunks of at most `prefill_tokens` tokens, and concatenates the results of `_prefill`.
        Prompts with a cached beginning are prefilled separately."""
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
        """Prefills left-padded prompts. `cached`: for each prompt the KV cache of the tokens before it; empty if no
        prompt has cached tokens before it. Returns the last logits [P, V], the cache, the attention mask [P, L] and
        the next position [P]."""
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

    def _draws(self, request: Request, index: int, count: int) -> np.ndarray:
        place = request.begun[index].index if request.begun else index
        stream = np.random.SeedSequence([self.seed, *request.key, place])
        return np.random.Generator(np.random.Philox(stream)).random(count, dtype=np.float32)


def _before(request: Request, rollout: int) -> Completion | None:
    return request.begun[rollout].written if request.begun else None
