"""How a completion ends besides end tokens and the length limit: stop strings and the thinking budget.

Both are rules about text, evaluated on tokens during decoding. Without them nothing here runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlrl.engine.base import Sampling
from vlrl.models.token_text import TokenTexts

CLOSING = "</think>"


class StopRules:
    """The rules of one batch of R rows; `tokens` [R, N] hold the first `begun` [R] tokens of each row."""

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
        """[R, N] ids that are not sampled; -1 elsewhere."""
        self._end = torch.zeros_like(self._budget)
        """[R] position after the last forced id; 0 if none is forced."""
        for row in (self._budget < begun).nonzero()[:, 0].tolist():
            self._close(row, tokens)

    def next(self, t: torch.Tensor, rows: torch.Tensor, live: torch.Tensor, tokens: torch.Tensor
             ) -> torch.Tensor | None:
        """[rows] ids forced as the t-th tokens [rows], -1 where the row samples; None if all rows sample. tokens: [R,
        N]."""
        if not self._budgets:
            return None
        for row in rows[live & (self._budget[rows] == t)].tolist():
            self._close(row, tokens)
        return self.forced[rows, t] if bool((t < self._end[rows]).any()) else None

    def _close(self, row: int, tokens: torch.Tensor) -> None:
        """Forces the end of thinking on a row that has reached its budget without it."""
        t = int(self._budget[row])
        if CLOSING not in self._texts.decode(tokens[row, :t].tolist()):
            room = self.forced[row, t:]
            ids = self._texts.ids(self._sampling[row].thinking_end)[:len(room)]
            room[:len(ids)] = ids
            self._end[row] = t + len(ids)

    def stopped(self, t: torch.Tensor, rows: torch.Tensor, live: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[rows] bool: whether the t-th token of the row completed a stop string."""
        out = torch.zeros_like(live)
        if self._may_end is not None:
            maybe = (live & self._may_end[tokens[rows, t]]).nonzero()[:, 0]
            for place, row, last in zip(maybe.tolist(), rows[maybe].tolist(), t[maybe].tolist(), strict=True):
                text = self._texts.decode(tokens[row, max(0, last + 1 - self._tail):last + 1].tolist())
                out[place] = any(stop in text for stop in self._sampling[row].stop)
        return out
