"""KV caches of the rows (completions) that are being decoded.

transformers' dynamic cache copies all keys and values whenever a token is added. The caches of this module write the
token into space allocated in advance. If the model's attention supports it, the rows of a group also share one copy of
their prompt's cache (`SharedRows`). With images, the prompt is most of the cache. `TurnCaches` keeps caches between the
turns of an episode."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from vlrl.engine.base import CacheSlot
from vlrl.models.attention import PromptCache
from vlrl.types import Prompt

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer
_log = logging.getLogger(__name__)
ROOM = 64  # when the buffers of a layer grow, they get space for this number of additional tokens


class RoomyLayer(DynamicLayer):
    """A cache layer with preallocated space. `keys` and `values` [rows, heads, tokens, d] are views of buffers."""

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the keys and values of new tokens. Returns the keys and values of all tokens."""
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
        buffer = new.new_empty(*new.shape[:-2], length + ROOM, new.shape[-1])
        if used and old is not None:
            buffer[..., :used, :] = old
        return buffer

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the contents of the layer by `keys` and `values` (not copied). The layer then has no free space."""
        self.keys, self.values = keys, values
        self._buffers = (keys, values)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selects rows by index, in place; an index may occur more than once. Keeps the free space."""
        if self._buffers is not None:
            length = self.get_seq_length()
            self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
            self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)


def roomy_cache(config: Any) -> DynamicCache:
    """Creates an empty cache for a language model with this config. Special layers, such as sliding windows, keep
    transformers' types; all other layers are RoomyLayers."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def join_caches(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Concatenates the caches of several prompts in order, padding shorter prompts on the left. Empties `caches`."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        _join(layers)
    return caches[0]


def _join(layers: Sequence[Any]) -> None:
    first: Any = layers[0]
    if isinstance(first, LinearAttentionCacheLayerMixin):
        for states in ("conv_states", "recurrent_states"):
            for i, state in getattr(first, states).items():
                if state is not None:
                    getattr(first, states)[i] = torch.cat([getattr(layer, states)[i] for layer in layers])
    if isinstance(first, DynamicLayer) and first.is_initialized:
        keys, values = (_padded([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
        first.keys, first.values = keys, values
        if isinstance(first, RoomyLayer):
            first.hold(keys, values)
    if isinstance(first, DynamicSlidingWindowLayer):
        first.cumulative_length = max(layer.cumulative_length for layer in layers)
    for layer in layers[1:]:
        vars(layer).clear()  # its memory is free before the next layer is joined


def _padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors to [P, heads, tokens, d] along the first dimension, padding shorter tensors on the left."""
    width = max(t.shape[-2] for t in tensors)
    out = tensors[0].new_zeros(sum(map(len, tensors)), *tensors[0].shape[1:-2], width, tensors[0].shape[-1])
    for rows, tensor in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        rows[..., width - tensor.shape[-2]:, :] = tensor
    return out


@functools.cache
def cache_argument(model: type) -> str:
    """The name of the cache argument of a model's forward: `cache`, or `past_key_values` in older transformers code."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CopiedRows:
    """The KV cache of rows that each have their own copy of their prompt's cache. cache: the cache of P prompts. mask:
    the attention mask [P, L] of the prompts. owner: [R] the index of each row's prompt."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor, owner: torch.Tensor):
        self._cache, self._mask = cache, mask
        self.select(owner)

    def inputs(self, argument: str) -> dict[str, Any]:
        """Keyword arguments of a forward pass that adds one token to every row. Call this method once per token.
        argument: the name from `cache_argument`."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        return {argument: self._cache, "attention_mask": self._mask}

    def select(self, rows: torch.Tensor) -> None:
        self._mask = self._mask[rows]
        _select(self._cache, rows)


class SharedRows:
    """The KV cache of rows that share one copy of their prompt's cache, for models with vlrl's attention
    implementation. `answers`: empty cache for new tokens. Other arguments as in CopiedRows, `owner` ascending."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor, owner: torch.Tensor, answers: DynamicCache):
        cached: list[Any] = cache.layers
        layers = [(layer.keys, layer.values) for layer in cached]
        device = owner.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            layers = [(keys.to(dtype), values.to(dtype)) for keys, values in layers]
        bias = None
        if not mask.all():
            bias = torch.zeros(mask.shape, dtype=layers[0][0].dtype, device=device)
            bias = bias.masked_fill_(mask == 0, -torch.inf)[:, None, None]
        self._prompts, self._answers = PromptCache(layers, bias, owner), answers
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # 4-D: used as given, no mask is built

    def inputs(self, argument: str) -> dict[str, Any]:
        """Keyword arguments of a forward pass that adds a token to every row. argument: the name from `cache_argument`.
        """
        return {argument: self._answers, "attention_mask": self._mask, "prefix_layout": self._prompts}

    def row(self, index: int, own: int) -> list[Pair]:
        """Returns (keys, values) [1, H_kv, n, d] of row `index` for each layer. They belong to the prompt and the first
        `own` tokens after the prompt."""
        prompts, answers = self._prompts, cast(list[Any], self._answers.layers)
        at = prompts.owner[index:index + 1]
        visible = slice(None) if prompts.bias is None else prompts.bias[at][0, 0, 0] == 0
        before = [(keys[at][:, :, visible], values[at][:, :, visible]) for keys, values in prompts.layers]
        if not own:
            return before
        after = [(layer.keys[index:index + 1, :, :own], layer.values[index:index + 1, :, :own]) for layer in answers]
        return [(torch.cat([keys, more.to(keys.dtype)], 2), torch.cat([values, others.to(values.dtype)], 2))
                for (keys, values), (more, others) in zip(before, after, strict=True)]

    def select(self, rows: torch.Tensor) -> None:
        """Drops all rows except `rows` (ascending indices)."""
        self._prompts.select(rows)
        _select(self._answers, rows)


def answer_rows(cache: DynamicCache, mask: torch.Tensor, owner: torch.Tensor, config: Any,
                shared: bool) -> CopiedRows | SharedRows:
    """Creates the rows that will be decoded, from the cache of their prompts. shared: whether the model has vlrl's
    attention implementation, so that rows can share the prompt's cache. For the other arguments see CopiedRows."""
    if shared and all(type(layer) is RoomyLayer for layer in cache.layers):
        return SharedRows(cache, mask, owner, roomy_cache(config))
    return CopiedRows(cache, mask, owner)


def stack_row_caches(cached: Sequence[list[Any]], config: Any) -> DynamicCache:
    """Stacks the stored caches of several rows into one cache, padding shorter rows on the left. Empties `cached`."""
    cache = roomy_cache(config)
    for i, layer in enumerate(cache.layers):
        assert isinstance(layer, RoomyLayer)
        pairs = [row[i] for row in cached]
        layer.lazy_initialization(*pairs[0])
        layer.hold(*(_padded(side) for side in zip(*pairs, strict=True)))
        for row in cached:
            row[i] = None  # its memory is free before the next layer is joined
        del pairs
    return cache


def _select(cache: DynamicCache, indices: torch.Tensor) -> None:
    for layer in cache.layers:
        known: Any = layer  # a state instead of keys, or beside them, knows only the other name
        linear = isinstance(layer, LinearAttentionCacheLayerMixin)
        select = known.reorder_cache if linear else known.batch_select_indices
        select(indices)


@dataclass(frozen=True, eq=False)
class RowCache:
    """The KV cache of one row of n tokens."""

    layers: list[Pair]  # keys and values [1, H_kv, n, d] of each layer
    ids: np.ndarray  # [n] token ids
    media: tuple[str, ...]  # hashes of the media among the tokens

    def rest(self, prompt: Prompt, observed: Prompt | None) -> Prompt | None:
        """The part of `prompt` after the cached tokens, with the media of `observed` (the observation in this part, if
        any). None if the prompt does not begin with the cached tokens and media, or has no new tokens."""
        n, hashes = len(self.ids), _hashes(prompt)
        if not (n < len(prompt) and np.array_equal(prompt.ids[:n], self.ids)
                and hashes == self.media + (_hashes(observed) if observed else ())):
            return None
        return replace(prompt, ids=prompt.ids[n:], raw_ids=prompt.ids[n:], positions=prompt.positions[:, n:],
                       aligned={name: values[n:] for name, values in prompt.aligned.items()},
                       mm=observed.mm if observed else {}, visuals=observed.visuals if observed else (),
                       media=observed.media if observed else ())


class TurnCaches:
    """The KV caches that are kept between the turns of episodes. All caches together hold at most `most` tokens. A
    later request whose prompt extends the cached tokens prefills only the new tokens.

    Each cache is stored in a CacheSlot of the request that created it. `most` depends on the device's total memory, not
    on the memory that happens to be free, because prefilling a prompt again changes the last bits of the logits."""

    def __init__(self, most: float):
        self.most = most
        self._living: weakref.WeakSet[CacheSlot] = weakref.WeakSet()
        self._reported = False

    def take(self, continued: CacheSlot, prompt: Prompt) -> tuple[Prompt, RowCache] | None:
        """Removes the cache from the slot `continued`. Returns (the part of the prompt that must still be prefilled,
        the cache), or None if the complete prompt must be prefilled."""
        cached, continued.cache = continued.cache, None
        rest = cached.rest(prompt, continued.observed) if cached else None
        return (rest, cached) if rest and cached else None

    def keep(self, continued: CacheSlot, prompt: Prompt, written: np.ndarray, layers: Callable[[], list[Pair]]) -> None:
        """If there is room, stores in the slot `continued` the cache of `prompt` followed by the tokens `written`.
        `layers` returns the keys and values of each layer, and is called only if there is room."""
        continued.cache = None
        ids = np.concatenate([prompt.ids, written])
        if sum(len(one.cache.ids) for one in self._living if one.cache) + len(ids) <= self.most:
            continued.cache = RowCache(layers(), ids, _hashes(prompt))
            self._living.add(continued)
        elif not self._reported:
            self._reported = True
            _log.info("the KV caches of all episodes would exceed %d tokens: further episodes prefill their whole "
                      "prompt in every turn", self.most)

    def clear(self) -> None:
        """Drops all caches. Called after the weights have changed."""
        for continued in self._living:
            continued.cache = None


def _hashes(prompt: Prompt) -> tuple[str, ...]:
    return tuple(m.sha256 for m in prompt.media)
