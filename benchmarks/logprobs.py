"""The log-probability step in chunks against the plain way: all logits at once, log-softmax by autograd.

    python benchmarks/logprobs.py                                      # about 10 minutes on one core, 4 GiB
    python benchmarks/logprobs.py --tokens 512 --hidden 64 --rounds 1

From hidden states and an output layer to log-probabilities, entropies and gradients, float32, one thread. Peak
memory is PyTorch's, above hidden states and weight; time is the process's own CPU time, both ways in turns, as median
and spread. The plain way runs up to --plain-tokens; its peak is a straight line in the tokens and is carried on beyond
by one (marked ~); there the chunked way runs once. A frozen output layer is that of LoRA.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vlrl.models.logprobs import Head, token_stats

MIB = 2**20
SMALL = (512, 1024)
"""Vocabulary and answer tokens of a tiny model's micro-batch: one chunk."""
Way = Callable[[torch.Tensor, torch.Tensor, torch.nn.Linear], None]
BANNED = torch.arange(5)


def plain(hidden: torch.Tensor, targets: torch.Tensor, layer: torch.nn.Linear) -> None:
    logits = layer(hidden).float() / 0.9
    every = torch.log_softmax(logits.index_fill(1, BANNED, -torch.inf), -1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        torch.special.entr(every.exp()).sum(-1)
    logprobs.sum().backward()


def chunked(hidden: torch.Tensor, targets: torch.Tensor, layer: torch.nn.Linear) -> None:
    stats = token_stats(hidden, Head(layer.out_features, layer), targets, BANNED, 0.9)
    stats.logprobs.sum().backward()


def peak(work: Callable[[], object]) -> int:
    """Most bytes that `work` has allocated at once, by PyTorch's profiler, which sees inside the operators."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    profiler: Any = seen.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]")
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    return most


class Case:
    """An output layer and the hidden states of answer tokens."""

    def __init__(self, vocabulary: int, hidden: int, tokens: int, learns: bool):
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(hidden, vocabulary, bias=False).requires_grad_(learns)
        self.hidden = torch.randn(tokens, hidden, requires_grad=True)
        self.targets = torch.randint(len(BANNED), vocabulary, (tokens,))

    def work(self, way: Way, tokens: int | None = None) -> Callable[[], None]:
        def run() -> None:
            way(self.hidden[:tokens], self.targets[:tokens], self.layer)
            self.hidden.grad = self.layer.weight.grad = None
        return run


def seconds(works: list[Callable[[], None]], rounds: int, times: int = 1) -> list[list[float]]:
    """CPU seconds of each work by round, in turns, after one round to warm up."""
    out: list[list[float]] = [[] for _ in works]
    for round_ in range(rounds + 1):
        for work, kept in zip(works, out, strict=True):
            start = time.process_time()
            for _ in range(times):
                work()
            if round_:
                kept.append((time.process_time() - start) / times)
    return out


def line(name: str, memory: str, times: list[float]) -> str:
    spread = f" ({min(times):.3g} .. {max(times):.3g})" if len(times) > 1 else ""
    return f"| {name} | {memory} | {statistics.median(times):.3g}{spread} |"


def compare(vocabulary: int, hidden: int, tokens: int, learns: bool, rounds: int, most: int) -> list[str]:
    """Rows of the table: both ways at a number of tokens that the plain way can take, then the chunked one at all."""
    case = Case(vocabulary, hidden, tokens, learns)
    first, small = min(most, tokens), vocabulary * min(most, tokens) < 10**7
    ways = {"plain": plain, "chunked": chunked}
    times = seconds([case.work(way, first) for way in ways.values()], rounds, 20 if small else 1)
    peaks = {name: peak(case.work(way, first)) for name, way in ways.items()}
    layer = "learns" if learns else "frozen"
    head = f"{vocabulary:,} x {hidden}, {layer} | {first:,}"
    rows = [line(f"{head} | {name}", f"{peaks[name] / MIB:,.0f}", spent)
            for name, spent in zip(ways, times, strict=True)]
    if tokens > first:
        half = peak(case.work(plain, first // 2))
        line_on = half + (peaks["plain"] - half) * (tokens - first // 2) / (first - first // 2)
        head = f"{vocabulary:,} x {hidden}, {layer} | {tokens:,}"
        start = time.process_time()
        reached = peak(case.work(chunked))
        rows += [f"| {head} | plain | ~{line_on / MIB:,.0f} | |",
                 line(f"{head} | chunked", f"{reached / MIB:,.0f}", [time.process_time() - start])]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--plain-tokens", type=int, default=1024, help="most tokens that the plain way is run with")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| output layer | answer tokens | way | peak MiB | CPU seconds |\n|---|---|---|---|---|")
    for learns in (True, False):
        small = compare(SMALL[0], 64, SMALL[1], learns, options.rounds, SMALL[1])
        large = compare(options.vocabulary, options.hidden, options.tokens, learns, options.rounds,
                        options.plain_tokens)
        print("\n".join([*small, *large]), flush=True)


if __name__ == "__main__":
    main()
