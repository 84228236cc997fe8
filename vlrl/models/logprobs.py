"""Log-probabilities of completion tokens, computed without holding the logits of all tokens in memory.

The model runs up to its output layer (`answer_states`). The output layer is then applied to one chunk of tokens at a
time (`token_stats`), and the logits of a chunk are freed before the next chunk. The backward pass does not hold all
logits either:

- **output layer frozen** (LoRA): the gradient of a token's hidden state is the incoming gradient times a direction.
  The directions [N, H] do not depend on the incoming gradient, so the forward pass computes them, and no logit is
  computed twice;
- **output layer trained**: the logits of a chunk are recomputed.

If one chunk is enough, plain autograd is used. A fused kernel would replace `_chunk`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**29  # largest size of a chunk's float32 logits in bytes: 883 tokens at a vocabulary of 152,000

Statistic = Callable[..., torch.Tensor]
"""A statistic of each token's distribution: (logits [n, V], targets [n]) -> values [n, ...]. Each row of values depends
only on its own row of logits. The logits are float32 at the sampling temperature, with banned ids at -inf. If a second
model is compared, the third argument holds the second model's logits [n, V] for the same tokens, without gradient."""


@dataclass(frozen=True, eq=False)
class TokenStats:
    """Statistics of the N completion tokens of a Batch."""

    logprobs: torch.Tensor  # [N] float32 log-probabilities at the sampling temperature; banned ids have probability 0
    entropy: torch.Tensor  # [N] float32 in nats, without gradient
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values [N, ...] of each requested Statistic by name, with gradient."""
    states: torch.Tensor | None = None
    """[N, H] inputs of the output layer (the hidden state before each token), with gradient; None if not requested."""

    def at(self, index: torch.Tensor) -> TokenStats:
        """The statistics of the tokens at the indices `index` [M], which may repeat."""
        logprobs, entropy = (x.index_select(0, index) for x in (self.logprobs, self.entropy))
        return TokenStats(logprobs, entropy, {k: v.index_select(0, index) for k, v in self.more.items()},
                          None if self.states is None else self.states.index_select(0, index))


def zero_stats(count: int, vocabulary: int, device: torch.device,
               more: Mapping[str, Statistic] | None = None) -> TokenStats:
    """TokenStats in which all values of all `count` tokens are zero. `more`: the requested statistics by name; their
    values get the shape and type that the statistic returns."""
    zeros = torch.zeros(count, device=device)
    logits, target = zeros.new_zeros(1, vocabulary), torch.zeros(1, dtype=torch.long, device=device)
    shapes = {name: statistic(logits, target) for name, statistic in (more or {}).items()}
    return TokenStats(zeros, zeros, {name: value.new_zeros(count, *value.shape[1:]) for name, value in shapes.items()})


@dataclass(frozen=True, eq=False)
class Head:
    """The output layer of a model, which turns hidden states into logits, with the model's soft cap on logits."""

    vocabulary: int
    layer: Any = None  # the output layer, perhaps wrapped by PEFT; None if the "hidden states" are already logits
    cap: float | None = None  # if not None, the model caps its logits smoothly to (-cap, cap)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, H], as the model computes them."""
        return hidden if self.layer is None else _capped(self.layer(hidden), self.cap)

    @property
    def learns(self) -> bool:
        """Whether the output layer has trainable parameters."""
        return self.layer is not None and any(p.requires_grad for p in self.layer.parameters())


_RUN_WHOLE: set[type] = set()  # model classes that transform their logits in a way that Head does not reproduce


def answer_states(model: Any, base: Any, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Head]:
    """Runs a model up to its output layer. Returns the inputs of that layer [B, C, H] for C positions, and the Head.

    `base` is `model` without PEFT's wrapper. To verify the Head, one row also passes through the model's own output
    layer. If the logits differ, or if the output layer is not found, the full model runs instead. Then its logits are
    returned, with a Head that leaves them unchanged."""
    layer = base.get_output_embeddings()
    if layer is not None and type(base) not in _RUN_WHOLE:
        states: list[torch.Tensor] = []
        passed: list[torch.Tensor] = []

        def enter(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
            states.append(args[0])
            return args[0][:1, :1]

        def leave(_: Any, __: Any, output: torch.Tensor) -> None:
            passed.append(output.detach().clone())  # some models modify it in place

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
    """Number of tokens in a chunk, such that their logits take about `chunk_bytes`."""
    return max(1, chunk_bytes // (4 * vocabulary))


def token_stats(hidden: torch.Tensor, head: Head, targets: torch.Tensor, banned: torch.Tensor, temperature: float,
                more: Mapping[str, Statistic] | None = None, chunk_bytes: int = CHUNK_BYTES, *,
                second: tuple[torch.Tensor, Head] | None = None) -> TokenStats:
    """TokenStats of completion tokens, from their hidden states [N, H] and ids `targets` [N]; `banned` ids get
    probability 0. `more`: the requested statistics by name.

    `second` = (hidden states of the same tokens in a second model, that model's Head), for statistics that compare two
    models. Called under the model's autocast. Needs memory for [N, H] and a few times chunk_bytes. If the output layer
    is trained, it also needs memory for two gradients of the layer's weight (three in float32)."""
    rest = (head, banned, temperature, more or {})
    count = math.ceil(len(hidden) / chunk_rows(head.vocabulary, chunk_bytes))
    if count <= 1:
        return _stats(_chunk(hidden, targets, *rest, second), rest[-1])
    rows = math.ceil(len(hidden) / count)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or head.learns)):
        run: Callable[..., Any] = _chunk
    else:
        run = _recomputed if head.learns or more else _Directions.apply
    others = [()] * count if second is None else [((h, second[1]),) for h in second[0].split(rows)]
    parts = [run(h, t, *rest, *o) for h, t, o in zip(hidden.split(rows), targets.split(rows), others, strict=True)]
    return _stats([torch.cat(values) for values in zip(*parts, strict=True)], rest[-1])


def _stats(values: Any, more: Mapping[str, Statistic]) -> TokenStats:
    return TokenStats(values[0], values[1], dict(zip(more, values[2:], strict=True)))


def _chunk(hidden: torch.Tensor, targets: torch.Tensor, head: Head, banned: torch.Tensor, temperature: float,
           more: Mapping[str, Statistic], second: tuple[torch.Tensor, Head] | None = None) -> tuple[torch.Tensor, ...]:
    logits = _logits(hidden, head, banned, temperature, head.vocabulary)
    given: tuple[torch.Tensor, ...] = (logits, targets)
    if second is not None:
        with torch.no_grad():
            given = (*given, _logits(*second, banned, temperature, head.vocabulary))
    return *_TargetLogprobs.apply(logits, targets, banned), *(statistic(*given) for statistic in more.values())


def _logits(hidden: torch.Tensor, head: Head, banned: torch.Tensor, temperature: float,
            vocabulary: int) -> torch.Tensor:
    """[n, vocabulary] float32 logits at a temperature; -inf for banned ids and for ids beyond the head's vocabulary."""
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
    """Log-probabilities and entropies of a chunk of tokens for a frozen output layer. The forward pass also computes d
    logprob / d hidden of every token. The backward pass multiplies this direction by the incoming gradient."""

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
    """(float32 logits [n, V], targets [n], banned ids) -> log-probabilities of the targets, and entropies. The
    exponentials are computed once and in place. The logits are the only tensor of their size that is kept."""

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
