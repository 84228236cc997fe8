"""Generation with the training model itself: no second copy, no sync.

Each prompt (and its images) is computed once, and its cache is kept once for the whole group where the attention
allows it. Rows that have finished leave the batch. Every rollout draws from a random stream of its own, named by (seed,
request key, index): its answer does not depend on the batch or process it ran in, beyond the last bits of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vlrl.engine.cache import roomy_cache, spread
from vlrl.packing import aligned_inputs, media_inputs, to_device
from vlrl.policy import Policy
from vlrl.types import Completion, Prompt, Request, Turn

_COMPACT = 0.75
"""Finished rows leave when at most this share of the batch is still writing."""

_Job = tuple[int, list[int]]
"""(number of the request, its rollouts in this batch)"""


class HFEngine:
    """Engine over the policy's own transformers model."""

    def __init__(self, policy: Policy, seed: int, batch_rollouts: int):
        self.policy, self.seed, self.batch_rollouts = policy, seed, batch_rollouts
        self.step = 0
        self._eos = torch.tensor(sorted(policy.eos), device=policy.device)

    def sync(self, policy: Policy, step: int) -> None:
        """The weights are shared; only the step is noted."""
        self.policy, self.step = policy, step

    def close(self) -> None:
        """Nothing is held."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`request.n` completions per request. The model is in evaluation mode meanwhile."""
        out: list[list[Completion]] = [[] for _ in requests]
        with self.policy.evaluating(), self.policy.autocast():
            for jobs in _batches(requests, self.batch_rollouts):
                for i, completion in self._run([(requests[i], rows) for i, rows in jobs], jobs):
                    out[i].append(completion)
        return out

    def _run(self, work: Sequence[tuple[Request, list[int]]], jobs: Sequence[_Job]) -> Iterator[tuple[int, Completion]]:
        tokens, logprobs, lengths = self._decode(work)
        row = 0
        for i, rollouts in jobs:
            for _ in rollouts:
                n = int(lengths[row])
                yield i, self._completion(tokens[row, :n], logprobs[row, :n])
                row += 1

    def _completion(self, tokens: np.ndarray, logprobs: np.ndarray) -> Completion:
        stopped = int(tokens[-1]) in self.policy.eos
        text = self.policy.processor.tokenizer.decode(
            tokens[:-1] if stopped else tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Completion(tokens=tokens, logprobs=logprobs, loss_mask=np.ones(len(tokens), dtype=bool), text=text,
                          finish_reason="stop" if stopped else "length", turns=(Turn(start=0, end=len(tokens)),))

    def _decode(self, work: Sequence[tuple[Request, list[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and log-probabilities [rows, longest] and lengths [rows] of all rollouts of a batch."""
        device, model = self.policy.device, self.policy.model
        sampling = [request.sampling for request, rows in work for _ in rows]
        limit = torch.tensor([s.max_new_tokens for s in sampling], device=device)
        heat = torch.tensor([s.temperature for s in sampling], device=device)
        longest = int(limit.max())
        draws = torch.from_numpy(np.stack([self._draws(r, i, longest) for r, rows in work for i in rows])).to(device)
        logits, cache, mask, position = self._prefill([r.prompt for r, _ in work])
        owner = torch.tensor([p for p, (_, rows) in enumerate(work) for _ in rows], device=device)
        held = spread(cache, mask, owner, self._text_config, self.policy.family.shared)
        logits, position = logits[owner], position[owner]
        n = len(owner)
        tokens = torch.zeros(n, longest, dtype=torch.long, device=device)
        logprobs = torch.zeros(n, longest, device=device)
        length = torch.zeros(n, dtype=torch.long, device=device)
        rows = torch.arange(n, device=device)
        live = torch.ones(n, dtype=torch.bool, device=device)
        for t in range(longest):
            token, logprob = pick(logits, heat[rows], draws[rows, t], self.policy.banned)
            tokens[rows[live], t], logprobs[rows[live], t] = token[live], logprob[live]
            length[rows[live]] = t + 1
            live = live & ~torch.isin(token, self._eos) & (limit[rows] > t + 1)
            alive = int(live.sum())
            if not alive:
                break
            if alive <= _COMPACT * len(rows):
                keep = live.nonzero()[:, 0]
                rows, position, token, live = (x[keep] for x in (rows, position, token, live))
                held.select(keep)
            logits = model(input_ids=token[:, None], position_ids=self._at(position), use_cache=True,
                           logits_to_keep=1, **held.inputs()).logits[:, -1]
            position = position + 1
        width = int(length.max())
        return tokens[:, :width].cpu().numpy(), logprobs[:, :width].float().cpu().numpy(), length.cpu().numpy()

    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """Last logits [P, V], cache, attention mask [P, L] and next position [P] of left-padded prompts."""
        device, width = self.policy.device, max(map(len, prompts))
        ids, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        positions = np.ones((len(prompts[0].positions), len(prompts), width), dtype=np.int64)
        for b, prompt in enumerate(prompts):
            ids[b, width - len(prompt):] = prompt.ids
            mask[b, width - len(prompt):] = 1
            positions[:, b, width - len(prompt):] = prompt.positions
        inputs = self.policy.family.encode(self.policy.base, to_device(
            {"input_ids": torch.from_numpy(ids), **aligned_inputs(prompts, width, right=True), **media_inputs(prompts)},
            device))
        attention = torch.from_numpy(mask).to(device)
        at = torch.from_numpy(positions if len(positions) > 1 else positions[0]).to(device)
        cache = roomy_cache(self._text_config)
        out = self.policy.model(**inputs, attention_mask=attention, position_ids=at, past_key_values=cache,
                                use_cache=True, logits_to_keep=1)
        following = torch.tensor([p.next_position for p in prompts], device=device)
        return out.logits[:, -1], cache, attention, following

    @property
    def _text_config(self) -> Any:
        return self.policy.base.config.get_text_config(decoder=True)

    def _at(self, position: torch.Tensor) -> torch.Tensor:
        """Position ids of one new token per row, as the model takes them."""
        return position[None, :, None].expand(3, -1, -1) if self.policy.family.mrope else position[:, None]

    def _draws(self, request: Request, index: int, count: int) -> np.ndarray:
        """[count] uniform numbers of one rollout's own stream; a longer call begins with those of a shorter one."""
        stream = np.random.SeedSequence([self.seed, *request.key, index])
        return np.random.Generator(np.random.Philox(stream)).random(count, dtype=np.float32)


def pick(logits: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor,
         banned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [n] and their log-probabilities [n] from logits [n, V], by inversion of the distribution function.

    temperature [n], 0 = greedy (its log-probability is the one at temperature 1); draw [n] uniform in [0, 1); a banned
    id is never picked.
    """
    greedy = temperature == 0
    scores = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    scores = scores.index_fill(1, banned, -torch.inf) if banned.numel() else scores
    logp = torch.log_softmax(scores, -1)
    chosen = int(greedy.sum())
    token = logp.argmax(-1) if chosen else torch.zeros_like(greedy, dtype=torch.long)
    if chosen < len(greedy):
        below = logp.exp().cumsum(-1)
        reach = torch.minimum(draw * below[:, -1], below[:, -1].nextafter(torch.zeros_like(draw)))
        token = torch.where(greedy, token, (below <= reach[:, None]).sum(-1))
    return token, logp.gather(1, token[:, None])[:, 0]


def _batches(requests: Sequence[Request], most: int) -> Iterator[list[_Job]]:
    """Requests in batches of at most `most` rollouts; a larger group is spread over several batches."""
    batch: list[_Job] = []
    room = most
    for i, request in enumerate(requests):
        rest = list(range(request.n))
        while rest:
            part, rest = rest[:room], rest[room:]
            batch.append((i, part))
            room -= len(part)
            if room == 0:
                yield batch
                batch, room = [], most
    if batch:
        yield batch
