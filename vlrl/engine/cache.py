"""A key-value cache with room for tokens to come.

transformers' dynamic cache copies all it holds for every new token; with images most of that is the prompt. Here a
token is written into space that is already there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

_ROOM = 64
"""Tokens of free space whenever a layer has to grow."""


class RoomyLayer(DynamicLayer):
    """One layer; `keys` and `values` [rows, heads, tokens, d] are views of larger buffers."""

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        length = used + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < length:
            self._buffers = (self._grown(self.keys, key_states, used, length),
                             self._grown(self.values, value_states, used, length))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., used:length, :] = new
        keys, values = (buffer[..., :length, :] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    @staticmethod
    def _grown(old: torch.Tensor | None, new: torch.Tensor, used: int, length: int) -> torch.Tensor:
        buffer = new.new_empty(*new.shape[:-2], length + _ROOM, new.shape[-1])
        if used and old is not None:
            buffer[..., :used, :] = old
        return buffer

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps (or repeats) rows, with their room."""
        if self._buffers is not None:
            length = self.get_seq_length()
            self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
            self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a text config; layers of special kinds (sliding windows) stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def select_rows(cache: DynamicCache, indices: torch.Tensor) -> None:
    """Keeps (or repeats) rows of every layer, in place."""
    for layer in cache.layers:
        kept: Any = layer  # a state instead of keys, or beside them, knows only the other name
        select = kept.reorder_cache if isinstance(layer, LinearAttentionCacheLayerMixin) else kept.batch_select_indices
        select(indices)
