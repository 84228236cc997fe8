"""A policy's tokenizer, with cached properties of its tokens such as their texts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from vlrl.errors import ConfigError
from vlrl.models.policy import Policy


class TokenTexts:
    """A policy's tokenizer, with cached properties of its tokens."""

    def __init__(self, policy: Policy):
        self.tokenizer, self.device, self.banned = policy.processor.tokenizer, policy.device, policy.banned
        self.eos = torch.tensor(sorted(policy.eos), device=policy.device)
        self._vocabulary = policy.base.config.get_text_config().vocab_size
        self._pieces: list[str] = []
        self._ending: dict[tuple[str, ...], torch.Tensor] = {}
        self._ids: dict[str, torch.Tensor] = {}

    def decode(self, ids: Any) -> str:
        """The text of token ids, with control tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def ending(self, stops: tuple[str, ...]) -> torch.Tensor:
        """[V] bool, True for tokens that may complete one of the stop strings, including all tokens that hold only some
        bytes of a character."""
        if stops not in self._ending:
            pieces = self._texts()
            may = [i for i, piece in enumerate(pieces) if "\ufffd" in piece or any(_completes(piece, s) for s in stops)]
            self._ending[stops] = torch.zeros(self._vocabulary, dtype=torch.bool)
            self._ending[stops][may] = True
            self._ending[stops] = self._ending[stops].to(self.device)
        return self._ending[stops]

    def ids(self, text: str) -> torch.Tensor:
        """Token ids of `text` (rollout.thinking_end). Raises ConfigError if it contains ids that cannot be sampled."""
        if text not in self._ids:
            ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"], device=self.device)
            if torch.isin(ids, self.banned).any():
                raise ConfigError(f"rollout.thinking_end={text!r} contains a vision token, which an answer must not "
                                  "contain: remove this token")
            self._ids[text] = ids
        return self._ids[text]

    def _texts(self) -> list[str]:
        if not self._pieces:
            anchor = self.tokenizer("a", add_special_tokens=False)["input_ids"]
            before = len(self.decode(anchor))
            count = min(len(self.tokenizer), self._vocabulary)
            self._pieces = [self.decode([*anchor, i])[before:] for i in range(count)]
        return self._pieces


def tokenizer_file(tokenizer: Any) -> str | None:
    """The content of a tokenizer.json for this tokenizer; None if the tokenizer is slow or has custom code."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    with contextlib.suppress(Exception):  # custom code raises a plain Exception
        return fast.to_str() if fast is not None else None
    return None


def _completes(piece: str, stop: str) -> bool:
    """Whether `stop` may end within `piece`, the text of a token, whatever text precedes the token."""
    return stop in piece or any(piece.startswith(stop[i:]) for i in range(len(stop)))
