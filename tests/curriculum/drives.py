"""A sampler by itself: what became of its draws is told it, as the group source does."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlrl.curriculum import Draw, Outcome, Prompts
from vlrl.store import checkpoint


def outcome(draw: Draw, pass_rate: float | None, reward: float | None = None) -> Outcome:
    """Of 20 answers that earn `reward` each (None = as many 1 as passed); a rejected draw where pass_rate is None."""
    if pass_rate is None:
        return Outcome(draw, ())
    passed = tuple(i < round(20 * pass_rate) for i in range(20))
    return Outcome(draw, tuple(map(float, passed)) if reward is None else (reward,) * 20, passed)


def told(sampler: Any, prompts: Prompts, rates: Mapping[Draw, float | None], step: int) -> None:
    """Tells the history and the sampler how draws went: their pass rates."""
    outcomes = [outcome(draw, rate) for draw, rate in rates.items()]
    prompts.history.note(outcomes, step)
    sampler.observe(outcomes, step)


def skill(draw: Draw, step: int) -> float | None:
    """The pass rate of a prompt, which grows with the steps; now and then a prompt is rejected."""
    chance = np.random.default_rng([draw.index, draw.visit, step])
    return None if chance.random() < 0.1 else float(chance.integers(0, 21)) / 20


def steps(sampler: Any, prompts: Prompts, some: range, count: int) -> list[list[Draw]]:
    """The draws of each step, probes first; every second step is refilled."""
    out = []
    for step in some:
        draws = getattr(sampler, "probes", lambda step: [])(step)
        told(sampler, prompts, {d: skill(d, step) for d in draws}, step)
        for wanted in (count, 2) if step % 2 else (count,):
            more = sampler.next(wanted, step)
            told(sampler, prompts, {d: skill(d, step) for d in more}, step)
            draws = [*draws, *more]
        out.append(draws)
    return out


def drive(kind: Any, prompts: Any, options: Mapping[str, Any], number: int, count: int) -> list[list[Draw]]:
    """The draws of a run of `number` steps."""
    of = prompts()
    return steps(kind(of, **options), of, range(number), count)


def resumed(kind: Any, prompts: Any, options: Mapping[str, Any], number: int, count: int, folder: Any,
            at: int) -> list[list[Draw]]:
    """The same, of a run that ends before step `at` and goes on from its checkpoint."""
    of = prompts()
    sampler = kind(of, **options)
    first = steps(sampler, of, range(at), count)
    state = {"sampler": sampler.state_dict(), "history": of.history.state_dict()}
    found = checkpoint.load_state(checkpoint.save(folder, at, lambda path: None, state, 1))
    again = prompts()
    sampler = kind(again, **options)
    sampler.load_state_dict(found["sampler"])  # before the history, as the group source does
    again.history.load_state_dict(found["history"])
    return [*first, *steps(sampler, again, range(at, number), count)]
