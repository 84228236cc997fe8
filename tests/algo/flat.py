"""Flat tokens made by hand or at random, and a function of the objective run on them as the trainer does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from vlrl.algo.inputs import LossInputs
from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.distributed import comm

F64 = torch.float64
PER_ROLLOUT = {"rewards", "outcome", "group", "lengths", "difficulty", "identity"}

_KINDS = {"group": torch.int64, "identity": torch.int64, "outcome": torch.bool}


def flat(logp, old=None, adv=None, rollout=None, mask=None, **more) -> LossInputs:
    """Lists of [N] -> LossInputs in float64; every field by its name, one rollout and all trained by default."""
    n = len(logp)
    rollout = torch.tensor(rollout or [0] * n, dtype=torch.int64)
    mask = torch.ones(n, dtype=F64) if mask is None else torch.tensor(mask, dtype=F64)
    rollouts = int(rollout.max()) + 1 if n else len(more.get("lengths", ()))
    lengths = torch.zeros(rollouts, dtype=F64).index_add(0, rollout, mask)
    base = {"logprobs": logp, "old_logprobs": logp if old is None else old, "weights": [1.0] * n,
            "advantages": [0.0] * n if adv is None else adv}
    base = {k: v if torch.is_tensor(v) else torch.tensor(v, dtype=F64) for k, v in base.items()}
    base["logprobs"] = base["logprobs"].clone().requires_grad_()
    own = {k: torch.tensor(v, dtype=_KINDS.get(k, F64))
           if isinstance(v, list) and k not in ("texts",) else v for k, v in more.items()}
    counts = {"lengths": lengths, "total_tokens": float(mask.sum()), "total_sequences": float((lengths > 0).sum()),
              "max_length": 4}
    return LossInputs(**{**base, "mask": mask, "rollout_id": rollout, **counts, **own})


def bound(table, name, **options):
    return bind("here", Named(name=name, **options), table, skip=1)


def with_prepared(function, x: LossInputs) -> LossInputs:
    """x with what the function prepares of it as a whole optimizer step."""
    with torch.no_grad():
        return replace(x, prepared=function.prepare(x) if function.prepare else {})


def run(function, x: LossInputs):
    """What a function says of x, with what it prepares of the same x."""
    return function(with_prepared(function, x))


def gradient(values: torch.Tensor, x: LossInputs) -> list[float]:
    """d sum of trained tokens / d logprobs."""
    (grad,) = torch.autograd.grad((values * x.mask).sum(), x.logprobs, allow_unused=True, retain_graph=True)
    return [0.0] * len(values) if grad is None else grad.tolist()


def random_step(seed: int, groups: int = 3, size: int = 4, longest: int = 6, gap: float = 0.3) -> LossInputs:
    """Ragged rollouts of several groups, with some untrained tokens, all fields filled in."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (groups * size,), generator=g).tolist()
    n = sum(lengths)

    def normal(scale=1.0, count=n):
        return torch.randn(count, generator=g, dtype=F64) * scale

    logp = -normal().abs() - 0.05
    rollout = [r for r, length in enumerate(lengths) for _ in range(length)]
    rewards = torch.randint(0, 2, (len(lengths),), generator=g).double()
    adv = (rewards - 0.4 + normal(0.1, len(lengths)))[rollout]
    top = torch.stack([logp + 0.1, logp - 0.2, logp - 1], -1).clamp(max=-1e-3)
    turns = torch.tensor([int(i >= length // 2) for length in lengths for i in range(length)])
    return flat(logp, old=logp + normal(gap), adv=adv, rollout=rollout, turns=turns,
                mask=(torch.rand(n, generator=g) > 0.15).double().tolist(), rewards=rewards,
                group=torch.arange(groups).repeat_interleave(size), entropy=normal().abs(),
                identity=torch.arange(len(lengths)) * 7 + 3, difficulty=torch.rand(len(lengths), generator=g).double(),
                sampler_logprobs=logp + normal(gap), reference_logprobs=logp + normal(gap), texts=["a"] * n, step=3,
                seed=11, stats={"mean_logprob": normal(), "top:3": top}, old_stats={"mean_logprob": normal()})


def part(x: LossInputs, rollouts: list[int]) -> LossInputs:
    """The micro-batch of those rollouts, in that order; their numbers and all counts stay."""
    places = torch.cat([torch.zeros(0).long(), *(torch.nonzero(x.rollout_id == r)[:, 0] for r in rollouts)])
    n = len(x.mask)

    def own(value):
        if torch.is_tensor(value):
            return value[places]
        return [value[i] for i in places.tolist()] if value else value

    cut = {k: own(v) for k, v in vars(x).items()
           if k not in PER_ROLLOUT and v is not None and not isinstance(v, (dict, float, int))}
    for name in ("stats", "old_stats", "prepared", "per_token"):
        cut[name] = {k: own(v) if v.dim() and len(v) == n else v for k, v in getattr(x, name).items()}
    return replace(x, **cut)


def process(x: LossInputs, rollouts: list[int]) -> LossInputs:
    """What a process sees that has those rollouts alone, numbered anew; counts are those of all."""
    p = part(x, rollouts)
    new = torch.full((len(x.lengths),), -1).index_put((torch.tensor(rollouts),), torch.arange(len(rollouts)))
    own = {k: getattr(x, k)[rollouts] for k in PER_ROLLOUT if getattr(x, k) is not None}
    own["variants"] = {name: of[rollouts] for name, of in x.variants.items()}
    return replace(p, **own, rollout_id=new[p.rollout_id])


def side_by_side(monkeypatch, calls):
    """Results of the calls, each in a thread that is a process of its own to vlrl.distributed.comm.gather."""
    here, met, values = threading.local(), threading.Barrier(len(calls), timeout=30), [None] * len(calls)

    def gather(value):
        values[here.rank] = value
        met.wait()
        everyone = list(values)
        met.wait()
        return everyone

    def call(rank):
        here.rank = rank
        return calls[rank]()

    monkeypatch.setattr(comm, "gather", gather)
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, range(len(calls))))
