"""Statistics of the full distribution at each token, by name: "entropy", "nucleus_entropy:0.8", "top:5".

A function of the objective requests a statistic with `requires("stat:<name>")`. Statistics are computed on the logits
of a chunk of tokens (logprobs.token_stats), and are differentiable. Below, n is the number of tokens, and the shape at
the end of a docstring is that of the statistic."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from vlrl.errors import ConfigError, did_you_mean
from vlrl.models.logprobs import Statistic


def entropy() -> Statistic:
    """Entropy -sum_v p log p over the full vocabulary, in nats. -> [n]."""
    return lambda logits, targets: _entropy(logits.log_softmax(-1))


def nucleus_entropy(p: float) -> Statistic:
    """Entropy in nats of the distribution restricted to its nucleus and renormalized. -> [n]. The nucleus is the
    smallest set of most probable tokens whose total probability is at least p. The entropy is 0 if one token alone
    reaches p. SIREN (arXiv 2509.25133)."""
    if not 0 < p <= 1:
        raise ValueError(f"the probability of a nucleus must be above 0 and at most 1, not {p:g}")

    def statistic(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            ordered, places = logprobs.exp().sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= p  # what comes before it suffices already
            outside = torch.zeros_like(beyond).scatter(-1, places, beyond)
        return _entropy(logprobs.masked_fill(outside, -torch.inf).log_softmax(-1))
    return statistic


def mean_logprob() -> Statistic:
    """Mean of the log-probabilities of all tokens in the vocabulary that can be sampled. -> [n]."""
    def statistic(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        none = logprobs == -torch.inf
        return logprobs.masked_fill(none, 0).sum(-1) / (~none).sum(-1)
    return statistic


def top(k: float) -> Statistic:
    """Log-probabilities of the k most probable tokens, in descending order. -> [n, k]."""
    return lambda logits, targets: logits.log_softmax(-1).gather(-1, _most(logits, k))


def top_ids(k: float) -> Statistic:
    """Ids of the k most probable tokens, most probable first; int64, without gradient. -> [n, k]."""
    return lambda logits, targets: _most(logits, k)


STATISTICS: dict[str, Callable[..., Statistic]] = {
    "entropy": entropy, "nucleus_entropy": nucleus_entropy, "mean_logprob": mean_logprob, "top": top,
    "top_ids": top_ids}


def statistics(required: Iterable[str], kind: str = "stat:") -> dict[str, Statistic]:
    """Returns {name: statistic} for the `required` inputs that begin with `kind` ("stat:" or "old_stat:"). The keys are
    the names without this prefix. Raises ConfigError for an unknown name."""
    return {name: _statistic(name) for name in sorted(r.removeprefix(kind) for r in required if r.startswith(kind))}


def alternatives(k: int) -> dict[str, Statistic]:
    """The statistics "top_ids" and "top_logprobs" (column names of the rollout store) of the k most probable tokens, by
    name. Computed without gradient; {} for k = 0."""
    ids, logprobs = top_ids(k), top(k)
    return {"top_ids": ids, "top_logprobs": lambda logits, targets: logprobs(logits.detach(), targets)} if k else {}


def _statistic(name: str) -> Statistic:
    word, colon, number = name.partition(":")
    if word not in STATISTICS:
        raise ConfigError(f"there is no statistic {word!r} (required as 'stat:{name}').{did_you_mean(word, STATISTICS)}"
                          f" Known: {', '.join(STATISTICS)}.")
    try:
        return STATISTICS[word](float(number)) if colon else STATISTICS[word]()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the statistic 'stat:{name}' is invalid: {error}") from None


def _most(logits: torch.Tensor, k: float) -> torch.Tensor:
    return logits.detach().topk(min(int(k), logits.shape[-1]), -1).indices


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropy [n] of log-probabilities [n, V], which are -inf for tokens that cannot be sampled."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)
