"""Samples the tokens of a batch one step at a time, and determines which completions have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlrl.engine.base import Sampling
from vlrl.errors import NotFiniteError
from vlrl.models.token_text import TokenTexts
from vlrl.types import Completion


@dataclass(frozen=True, eq=False)
class DecodedBatch:
    """The tokens of R completions, padded to the length N of the longest one."""

    tokens: np.ndarray  # [R, N] token ids
    logprobs: np.ndarray  # [R, N] float32 log-probabilities
    sampled: np.ndarray  # [R, N] bool; False where a token was forced
    lengths: np.ndarray  # [R] number of tokens of each completion


class DecodingBatch:
    """The state of R completions while they are decoded, one token per completion and step. draws: [R, N] uniform
    random numbers in [0, 1), one per token. begun: for each completion the prefix that it continues, or None."""

    def __init__(self, sampling: Sequence[Sampling], draws: np.ndarray, texts: TokenTexts,
                 begun: Sequence[Completion | None]):
        self._texts, device = texts, texts.device
        self._limit = torch.tensor([s.max_new_tokens for s in sampling], device=device)
        self._heat = torch.tensor([s.temperature for s in sampling], device=device)
        top_p = [1.0 if s.top_p is None or s.temperature == 0 else s.top_p for s in sampling]
        self._top_p = torch.tensor(top_p, device=device) if min(top_p, default=1.0) < 1 else None
        self._draws = torch.from_numpy(draws).to(device)
        self._tokens = torch.zeros(draws.shape, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(draws.shape, device=device)
        for row, before in enumerate(begun):
            if before is not None:
                n = len(before.tokens)
                self._tokens[row, :n] = torch.from_numpy(before.tokens).to(device)
                self._logprobs[row, :n] = torch.from_numpy(before.logprobs).to(device)
        self._length = torch.tensor([0 if b is None else len(b.tokens) for b in begun], device=device)
        self._last = draws.shape[1] - 1
        self.steps = int((self._limit - self._length).max())
        """Maximum number of steps until every completion has reached its length limit."""
        self._rules = None
        if any(s.stop or s.thinking_budget is not None for s in sampling):
            from vlrl.engine.stop_rules import StopRules  # most batches have none

            self._rules = StopRules(sampling, self._tokens, self._length, texts)

    def write(self, rows: torch.Tensor, live: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples the next token of the n completions with the indices `rows`, from their logits [n, V]. Stores the
        tokens of completions that have not ended (`live`, [n] bool). Returns the sampled tokens [n], and `live`
        after this step."""
        rules, t = self._rules, self._length[rows].clamp(max=self._last)
        forced = rules.next(t, rows, live, self._tokens) if rules else None
        token, logprob = sample_tokens(logits, self._heat[rows], self._draws[rows, t], self._texts.banned, forced,
                                       None if self._top_p is None else self._top_p[rows])
        writers, places = rows[live], t[live]
        self._tokens[writers, places], self._logprobs[writers, places] = token[live], logprob[live]
        self._length[writers] = places + 1
        live = live & ~torch.isin(token, self._texts.eos) & (self._limit[rows] > t + 1)
        return token, live & ~rules.stopped(t, rows, live, self._tokens) if rules else live

    def tokens_of(self, row: int) -> np.ndarray:
        """The token ids [T] that were generated so far for a row."""
        return self._tokens[row, :int(self._length[row])].cpu().numpy()

    def written(self) -> DecodedBatch:
        """A DecodedBatch with everything generated so far, in main memory."""
        width = int(self._length.max())
        tokens, rules = self._tokens[:, :width].cpu().numpy(), self._rules
        sampled = (rules.forced[:, :width] < 0).cpu().numpy() if rules else np.ones(tokens.shape, dtype=bool)
        return DecodedBatch(tokens, self._logprobs[:, :width].float().cpu().numpy(), sampled,
                            self._length.cpu().numpy())


def sample_tokens(logits: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor,
                  banned: torch.Tensor, forced: torch.Tensor | None = None,
                  top_p: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples the next tokens [n] from logits [n, V]. Returns the tokens and their log-probabilities [n].

    Sampling inverts the cumulative distribution at `draw`, [n] uniform random numbers in [0, 1).

    temperature: [n]; 0 = greedy, with log-probabilities at temperature 1. banned: token ids that are never sampled.
    forced: [n] ids to use instead of sampled ids, -1 for tokens that are sampled. top_p: [n] in (0, 1]; only the
    smallest set of most probable tokens whose total probability reaches top_p can be sampled (nucleus sampling, arXiv
    1904.09751), and probabilities are renormalized over this set."""
    greedy = temperature == 0
    scores = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    scores.index_fill_(1, banned, -torch.inf)
    if top_p is not None:
        scores = _nucleus(scores, top_p)
    top = scores.amax(-1)
    if not bool(top.isfinite().all()):
        raise NotFiniteError(f"the logits of {int((~top.isfinite()).sum())} of {len(top)} completions are not finite, "
                             "so no next token can be sampled")
    weights = (scores - top[:, None]).exp_()
    chosen = int(greedy.sum())
    token = scores.argmax(-1) if chosen else torch.zeros_like(greedy, dtype=torch.long)
    if chosen < len(greedy):
        below = weights.cumsum(-1)
        total = below[:, -1]
        reach = torch.minimum(draw * total, total.nextafter(torch.zeros_like(draw)))
        token = torch.where(greedy, token, torch.searchsorted(below, reach[:, None], right=True)[:, 0])
    if forced is not None:
        token = torch.where(forced < 0, token, forced)
    return token, scores.gather(1, token[:, None])[:, 0] - top - weights.sum(-1).log()


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Sets scores [n, V] to -inf outside the smallest set of tokens whose total probability reaches top_p [n]. At least
    one token per row remains."""
    ordered, places = scores.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    outside = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    outside[:, 0] = False
    return scores.masked_fill(torch.zeros_like(outside).scatter(1, places, outside), -torch.inf)
