"""Rules that end a completion, other than end tokens and the length limit: stop strings and the thinking budget.

Both rules refer to text, and are evaluated on the tokens during decoding. This module is not used if no request of a
batch sets either rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlrl.engine.base import Sampling
from vlrl.models.token_text import TokenTexts

CLOSING = "</think>"


class StopRules:
    """Stop strings and thinking budgets of a batch of R rows. `tokens` [R, N] starts with the prefix of each row, which
    has `begun` [R] tokens."""

    def __init__(self, sampling: Sequence[Sampling], tokens: torch.Tensor, begun: torch.Tensor, texts: TokenTexts):
        self._sampling, self._texts = sampling, texts
        stops = tuple(dict.fromkeys(stop for s in sampling for stop in s.stop))
        self._may_end = texts.ending(stops) if stops else None
        self._tail = max((len(stop.encode()) for stop in stops), default=0) + 4  # a token has at least one byte
        never = tokens.shape[1]
        self._budgets = any(s.thinking_budget is not None for s in sampling)
        self._budget = torch.tensor([never if s.thinking_budget is None else s.thinking_budget for s in sampling],
                                    device=texts.device)
        self.forced = torch.full(tokens.shape, -1, device=texts.device)
        """[R, N] forced token ids; -1 where the token is sampled."""
        self._end = torch.zeros_like(self._budget)  # [R] position after the last forced token; 0 if no token is forced
        for row in (self._budget < begun).nonzero()[:, 0].tolist():
            self._close(row, tokens)

    def next(self, t: torch.Tensor, rows: torch.Tensor, live: torch.Tensor, tokens: torch.Tensor
             ) -> torch.Tensor | None:
        """Returns the ids that are forced as the next tokens of the n rows with the indices `rows`: [n], with -1 for a
        token that is sampled; None if all tokens are sampled. `t`: [n] positions of the next tokens. `live`: [n]
        bool, rows that have not ended. `tokens`: [R, N] all tokens so far."""
        if not self._budgets:
            return None
        for row in rows[live & (self._budget[rows] == t)].tolist():
            self._close(row, tokens)
        return self.forced[rows, t] if bool((t < self._end[rows]).any()) else None

    def _close(self, row: int, tokens: torch.Tensor) -> None:
        t = int(self._budget[row])
        if CLOSING not in self._texts.decode(tokens[row, :t].tolist()):
            room = self.forced[row, t:]
            ids = self._texts.ids(self._sampling[row].thinking_end)[:len(room)]
            room[:len(ids)] = ids
            self._end[row] = t + len(ids)

    def stopped(self, t: torch.Tensor, rows: torch.Tensor, live: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns [n] bool: whether the token at position `t` of each of the n `rows` completed a stop string. For the
        arguments see `next`."""
        out = torch.zeros_like(live)
        if self._may_end is not None:
            maybe = (live & self._may_end[tokens[rows, t]]).nonzero()[:, 0]
            for place, row, last in zip(maybe.tolist(), rows[maybe].tolist(), t[maybe].tolist(), strict=True):
                text = self._texts.decode(tokens[row, max(0, last + 1 - self._tail):last + 1].tolist())
                out[place] = any(stop in text for stop in self._sampling[row].stop)
        return out
