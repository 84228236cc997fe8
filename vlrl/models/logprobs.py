"""Log-probabilities of completion tokens without holding the logits of all of them.

The model runs up to its output layer (`answer_states`); the layer is then applied to one chunk of tokens at a time
(`token_stats`), and the logits of a chunk are freed before the next one. A backward pass does not hold them all either:

- **output layer frozen** (LoRA): a row's gradient is its own weight times a direction that does not depend on it, so
  the directions [N, H] are computed in the forward pass, and no logit is computed twice;
- **output layer trained**: a chunk's logits are recomputed.

Anything that fits into one chunk uses plain autograd. A fused kernel would replace `_chunk`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**29
"""Most bytes of float32 logits in a chunk: 883 tokens at a vocabulary of 152,000."""

Statistic = Callable[..., torch.Tensor]
"""(logits [n, V] float32 at the sampled temperature, banned ids -inf; targets [n]) -> [n, ...], each row its own. With
another model beside, its logits [n, V] of the same tokens come third, without gradient."""


@dataclass(frozen=True, eq=False)
class TokenStats:
    """Statistics of each completion token of a Batch."""

    logprobs: torch.Tensor
    """[N] float32 at the sampled temperature, banned ids removed."""
    entropy: torch.Tensor
    """[N] float32 nats, without gradient."""
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N, ...] by name, of the requested Statistics; with gradient."""
    states: torch.Tensor | None = None
    """[N, H] inputs of the output layer, if requested: the state before each token; with gradient."""

    def at(self, index: torch.Tensor) -> TokenStats:
        """The statistics of tokens [M] by index; an index may repeat."""
        logprobs, entropy = (x.index_select(0, index) for x in (self.logprobs, self.entropy))
        return TokenStats(logprobs, entropy, {k: v.index_select(0, index) for k, v in self.more.items()},
                          None if self.states is None else self.states.index_select(0, index))


def zero_stats(count: int, vocabulary: int, device: torch.device,
               more: Mapping[str, Statistic] | None = None) -> TokenStats:
    """Placeholder TokenStats of `count` tokens: zeros, in the shape and type of each statistic."""
    zeros = torch.zeros(count, device=device)
    logits, target = zeros.new_zeros(1, vocabulary), torch.zeros(1, dtype=torch.long, device=device)
    shapes = {name: statistic(logits, target) for name, statistic in (more or {}).items()}
    return TokenStats(zeros, zeros, {name: value.new_zeros(count, *value.shape[1:]) for name, value in shapes.items()})


@dataclass(frozen=True, eq=False)
class Head:
    """The part of a model that turns hidden states into logits."""

    vocabulary: int
    layer: Any = None
    """The output layer, perhaps wrapped by PEFT; None: the "hidden states" are logits already."""
    cap: float | None = None
    """The model squashes its logits smoothly into (-cap, cap)."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V], as the model computes it."""
        return hidden if self.layer is None else _capped(self.layer(hidden), self.cap)

    @property
    def learns(self) -> bool:
        """Whether the layer has trainable parameters."""
        return self.layer is not None and any(p.requires_grad for p in self.layer.parameters())


_RUN_WHOLE: set[type] = set()
"""Model classes that transform their logits in an unknown way."""


def answer_states(model: Any, base: Any, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Head]:
    """Runs a model up to its output layer: (inputs of the layer [B, C, H], the rest of the model).

    `base` is `model` without PEFT's wrapper. One row does pass through the layer, and the model's logits for it must
    equal those of Head. Where they differ, or the layer is not found, the model runs completely and its logits are
    returned, with a Head that leaves them unchanged."""
    layer = base.get_output_embeddings()
    if layer is not None and type(base) not in _RUN_WHOLE:
        states: list[torch.Tensor] = []
        passed: list[torch.Tensor] = []

        def enter(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
            states.append(args[0])
            return args[0][:1, :1]

        def leave(_: Any, __: Any, output: torch.Tensor) -> None:
            passed.append(output.detach().clone())  # some models write into it

        with layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave):
            logits = model(**inputs).logits.detach()
        if len(states) == 1:
            cap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
            for known in (None, cap):
                if _same(_capped(passed[0], known), logits):
                    return states[0], Head(logits.shape[-1], layer, known)
        _RUN_WHOLE.add(type(base))
    logits = model(**inputs).logits
    return logits, Head(logits.shape[-1])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num().to(b.dtype), b.nan_to_num())


def _capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else torch.tanh(logits / cap) * cap


def chunk_rows(vocabulary: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens in a chunk."""
    return max(1, chunk_bytes // (4 * vocabulary))


def token_stats(hidden: torch.Tensor, head: Head, targets: torch.Tensor, banned: torch.Tensor, temperature: float,
                more: Mapping[str, Statistic] | None = None, chunk_bytes: int = CHUNK_BYTES, *,
                beside: tuple[torch.Tensor, Head] | None = None) -> TokenStats:
    """TokenStats of the completion tokens with these hidden states [N, H]; targets [N]; banned ids; `beside`: hidden
    states of the same tokens in another model and its Head, for statistics that compare both.

    Called under the model's autocast. Besides [N, H] it needs memory for a few times chunk_bytes and, when the output
    layer is trained, for two gradients of its weight (three in float32), whatever N is."""
    rest = (head, banned, temperature, more or {})
    count = math.ceil(len(hidden) / chunk_rows(head.vocabulary, chunk_bytes))
    if count <= 1:
        return _stats(_chunk(hidden, targets, *rest, beside), rest[-1])
    rows = math.ceil(len(hidden) / count)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or head.learns)):
        run: Callable[..., Any] = _chunk
    else:
        run = _recomputed if head.learns or more else _Directions.apply
    others = [()] * count if beside is None else [((h, beside[1]),) for h in beside[0].split(rows)]
    parts = [run(h, t, *rest, *o) for h, t, o in zip(hidden.split(rows), targets.split(rows), others, strict=True)]
    return _stats([torch.cat(values) for values in zip(*parts, strict=True)], rest[-1])


def _stats(values: Any, more: Mapping[str, Statistic]) -> TokenStats:
    return TokenStats(values[0], values[1], dict(zip(more, values[2:], strict=True)))


def _chunk(hidden: torch.Tensor, targets: torch.Tensor, head: Head, banned: torch.Tensor, temperature: float,
           more: Mapping[str, Statistic], beside: tuple[torch.Tensor, Head] | None = None) -> tuple[torch.Tensor, ...]:
    """Log-probability, entropy and further statistics of a chunk of tokens."""
    logits = _logits(hidden, head, banned, temperature, head.vocabulary)
    given: tuple[torch.Tensor, ...] = (logits, targets)
    if beside is not None:
        with torch.no_grad():
            given = (*given, _logits(*beside, banned, temperature, head.vocabulary))
    return *_TargetLogprobs.apply(logits, targets, banned), *(statistic(*given) for statistic in more.values())


def _logits(hidden: torch.Tensor, head: Head, banned: torch.Tensor, temperature: float,
            vocabulary: int) -> torch.Tensor:
    """[n, vocabulary] float32 at a temperature, -inf for banned ids; further rows of the layer are no tokens."""
    logits = head(hidden).float()
    if temperature != 1 or head.layer is None:  # a copy as large as the logits; they are written to below
        logits = logits / temperature
    if head.vocabulary != vocabulary:
        logits = torch.nn.functional.pad(logits, (0, vocabulary - head.vocabulary), value=-torch.inf)
    return logits.index_fill_(1, banned, -torch.inf)


def _recomputed(hidden: torch.Tensor, *args: Any) -> Any:
    kind = hidden.device.type
    # chunks that shared one cast of the weight would add up its gradient in the smaller type
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        return checkpoint(_chunk, hidden, *args, use_reentrant=False)


class _Directions(torch.autograd.Function):
    """`_chunk` that also computes d logprob / d hidden of every row; the output layer gets no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *args: Any) -> Any:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logprobs, entropy = _chunk(leaf, *args)
            (directions,) = torch.autograd.grad(logprobs, leaf, torch.ones_like(logprobs))
        ctx.save_for_backward(directions)
        ctx.mark_non_differentiable(entropy)
        return logprobs.detach(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (directions,) = ctx.saved_tensors
        return (grads[0][:, None] * directions).to(directions.dtype), *(None,) * 5


class _TargetLogprobs(torch.autograd.Function):
    """(float32 logits [n, V], targets [n], banned ids) -> log-probabilities of the targets and entropies.

    The exponentials are computed once and in place, and nothing of the size of the logits is kept but themselves."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, banned: torch.Tensor) -> Any:
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        total = weights.sum(-1, keepdim=True)
        norm = top + total.log()
        mean = weights.mul_(logits).index_fill_(1, banned, 0).sum(-1) / total[:, 0]  # banned: 0 times -inf
        entropy = norm[:, 0] - mean
        ctx.save_for_backward(logits, norm, targets)
        ctx.mark_non_differentiable(entropy)
        return (logits.gather(1, targets[:, None]) - norm)[:, 0], entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, norm, targets = ctx.saved_tensors
        grad = grads[0][:, None]
        out = (logits - norm).exp_().mul_(-grad)
        return out.scatter_add_(1, targets[:, None], grad), None, None
