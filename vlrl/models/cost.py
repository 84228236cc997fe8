"""Work shared out evenly by its cost: pieces over micro-batches, groups over processes.

A step of several processes takes as long as the slowest one. Groups are drawn before anything is known of their
answers, so after scoring a few of them move from processes with much work to processes with little (`share_out`).
"""

from __future__ import annotations

import itertools
import logging
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.types import Group, Prompt

Cost = Callable[[Prompt, Sequence[int]], float]
"""(prompt, tokens of each of its answers) -> the work of training on them in one piece, in any unit."""

WORTH_MOVING = 1.05
"""Largest load / mean load of the processes from which on groups move."""
EVEN = 1.01
"""Largest load / mean load at which no further group moves."""
_log = logging.getLogger(__name__)


def tokens(prompt: Prompt, answers: Sequence[int]) -> float:
    """Returns the Cost that counts tokens."""
    return float(len(prompt) + sum(answers))


def group_cost(group: Group, cost: Cost) -> float:
    """Returns the work of training on a group; answers of one prompt share it."""
    by_prompt: dict[int, tuple[Prompt, list[int]]] = {}
    for rollout in (*group.rollouts, *group.beside):
        prompt = rollout.train_prompt or group.prompt
        by_prompt.setdefault(id(prompt), (prompt, []))[1].extend(rollout.completion.lengths)
    return sum(cost(prompt, answers) for prompt, answers in by_prompt.values())


# --- micro-batches ---------------------------------------------------------------------------------------------------


def bins(sizes: Sequence[int], costs: Sequence[float], limit: int) -> list[list[int]]:
    """Returns numbers of the items in each bin: as few bins of at most `limit` as first-fit needs, and of similar cost.

    An item above the limit has a bin of its own. Longest processing time first (Graham 1969): the costliest item
    goes into the cheapest bin with room. Where that runs out of room, or is no better, items stay where first-fit by
    falling size puts them. Equal items keep their order.
    """
    fitted = _first_fit(sizes, limit)
    evened = _cheapest_fit(sizes, costs, limit, len(fitted))

    def worst(filled: list[list[int]]) -> float:
        return max((sum(costs[i] for i in members) for members in filled), default=0.0)

    return evened if evened and worst(evened) <= worst(fitted) else fitted


def _first_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    used: list[int] = []
    filled: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((b for b, size in enumerate(used) if size + sizes[i] <= limit), None)
        if place is None:
            used.append(sizes[i])
            filled.append([i])
        else:
            used[place] += sizes[i]
            filled[place].append(i)
    return filled


def _cheapest_fit(sizes: Sequence[int], costs: Sequence[float], limit: int, count: int) -> list[list[int]] | None:
    """Returns `count` bins; None when an item finds no room."""
    used, loads = [0] * count, [0.0] * count
    filled: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        room = [b for b in range(count) if not filled[b] or used[b] + sizes[i] <= limit]
        if not room:
            return None
        place = min(room, key=lambda b: loads[b])
        used[place], loads[place] = used[place] + sizes[i], loads[place] + costs[i]
        filled[place].append(i)
    return [members for members in filled if members]


# --- processes -------------------------------------------------------------------------------------------------------


def optimizer_steps(ids: Sequence[str], count: int) -> list[int]:
    """Returns the optimizer step 0..count-1 of each of this process's groups.

    The groups of all processes, by id, are cut into `count` equal runs, so a step holds the same groups whatever the
    number of processes and whoever has them.
    """
    if count == 1:
        return [0] * len(ids)
    everyone = sorted(i for part in comm.gather(list(ids)) for i in part)
    edges = [round(n * len(everyone) / count) for n in range(1, count)]
    return [bisect_right(edges, bisect_left(everyone, i)) for i in ids]


@dataclass(frozen=True)
class _Entry:
    id: str
    step: int
    cost: float
    owner: int


def share_out(groups: Sequence[Group], cost: Cost, config: Config) -> tuple[list[Group], dict[str, float]]:
    """Returns the groups that this process trains on, and the metric `balance/imbalance`; called on every process.

    Within each optimizer step groups move until the loads are even, as few as possible; only they travel. The metric
    is the largest load over the mean one, after moving. For one process, and with train.balance=false, there is none.
    A group that cannot be pickled, for what its task put into it, stays.
    """
    if comm.world() == 1 or not config.train.balance:
        return list(groups), {}
    steps = config.rollout.minibatches
    numbers = optimizer_steps([g.id for g in groups], steps)
    mine = [_Entry(g.id, n, group_cost(g, cost), comm.rank()) for g, n in zip(groups, numbers, strict=True)]
    entries = sorted(itertools.chain(*comm.gather(mine)), key=lambda e: (e.step, e.id, e.owner))
    owners = [e.owner for e in entries]
    for step in range(steps):
        places = [i for i, e in enumerate(entries) if e.step == step]
        assigned = assign([entries[i].cost for i in places], [owners[i] for i in places], comm.world())
        for i, owner in zip(places, assigned, strict=True):
            owners[i] = owner
    own = {g.id: g for g in groups}
    leaving = {e.id: to for e, to in zip(entries, owners, strict=True) if e.owner == comm.rank() != to}
    packed = {i: data for i in leaving if (data := _pickled(own[i])) is not None}
    return _exchange(groups, entries, owners, packed, steps)


def _exchange(groups: Sequence[Group], entries: Sequence[_Entry], owners: list[int], packed: dict[str, bytes],
              steps: int) -> tuple[list[Group], dict[str, float]]:
    """Sends the packed groups to their owners; what could not be packed goes back to where it was."""
    moves = [(e, to) for e, to in zip(entries, owners, strict=True) if e.owner != to]
    sendable = {i for part in comm.gather(sorted(packed)) for i in part} if moves else set()
    owners = [to if e.id in sendable else e.owner for e, to in zip(entries, owners, strict=True)]
    metrics = {"balance/imbalance": _imbalance(entries, owners, steps)}
    moves = [(e, to) for e, to in moves if e.id in sendable]
    if not moves:
        return list(groups), metrics
    routes: dict[tuple[int, int], list[bytes]] = {}
    for e, to in moves:
        routes.setdefault((e.owner, to), []).append(packed.get(e.id, b""))
    arrived = [pickle.loads(data) for data in comm.exchange(routes)]  # of this run's own processes
    staying = [g for g in groups if g.id not in packed]
    return sorted([*staying, *arrived], key=lambda g: g.id), metrics


def _pickled(group: Group) -> bytes | None:
    try:
        return pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a task's own objects raise
        _log.warning("group %s of task %s stays on its process: what the task put into it cannot be sent (%s: %s). "
                     "train.balance=false leaves all groups where they are", group.id, group.task,
                     type(error).__name__, error)
        return None


def _loads(costs: Sequence[float], owners: Sequence[int], world: int) -> list[float]:
    loads = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def _imbalance(entries: Sequence[_Entry], owners: Sequence[int], steps: int) -> float:
    """Returns the largest over mean load; processes wait for each other at every optimizer step."""
    largest = mean = 0.0
    for step in range(steps):
        part = [(e.cost, owner) for e, owner in zip(entries, owners, strict=True) if e.step == step]
        loads = _loads([c for c, _ in part], [o for _, o in part], comm.world())
        largest, mean = largest + max(loads), mean + sum(loads) / len(loads)
    return largest / mean if mean else 1.0


def assign(costs: Sequence[float], owners: Sequence[int], world: int) -> list[int]:
    """Returns the process 0..world-1 of each group, from `owners` on; unchanged below WORTH_MOVING.

    Each round a group moves from the process with the most work to the one with the least, or two change places,
    whichever leaves the two most even; until all are EVEN or no change helps.
    """
    owners = list(owners)
    loads, mean = _loads(costs, owners, world), sum(costs) / world
    if max(loads) <= WORTH_MOVING * mean:
        return owners
    while max(loads) > EVEN * mean:
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        here = [i for i, owner in enumerate(owners) if owner == heavy]
        there = [None, *(i for i, owner in enumerate(owners) if owner == light)]
        away, back = min(itertools.product(here, there), key=lambda pair: abs(gap - 2 * _moved(costs, *pair)))
        moved = _moved(costs, away, back)
        if abs(gap - 2 * moved) >= gap * (1 - 1e-6):
            break
        owners[away] = light
        if back is not None:
            owners[back] = heavy
        loads = _loads(costs, owners, world)
    return owners


def _moved(costs: Sequence[float], away: int, back: int | None) -> float:
    return costs[away] - (0.0 if back is None else costs[back])
