"""Balances the training cost of groups over ranks.

A step on several ranks takes as long as the slowest rank. The lengths of completions are unknown when prompts are
assigned to ranks, so after scoring a few groups move from busy ranks to idle ranks."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.models.cost import Cost, group_cost, optimizer_steps
from vlrl.types import Group

WORTH_MOVING = 1.05  # groups move only if the largest load of a rank exceeds the mean load by this factor
EVEN = 1.01  # moving ends once the largest load of a rank is at most the mean load times this factor
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    id: str
    step: int
    cost: float
    owner: int


def share_out(groups: Sequence[Group], cost: Cost, config: Config) -> tuple[list[Group], dict[str, float]]:
    """Returns the groups that this rank trains on after balancing, and {"balance/imbalance": the largest load of a rank
    divided by the mean load, after balancing}. Called on every rank, if there are several. Within each optimizer
    step as few groups as possible move. A group that contains objects that cannot be pickled stays on its rank."""
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
    arrived = [pickle.loads(data) for data in comm.exchange(routes)]  # sent by processes of this run
    staying = [g for g in groups if g.id not in packed]
    return sorted([*staying, *arrived], key=lambda g: g.id), metrics


def _pickled(group: Group) -> bytes | None:
    try:
        return pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a task's own objects raise
        _log.warning("group %s of task %s stays on its rank: it contains objects that cannot be pickled (%s: %s). "
                     "With train.balance=false all groups stay on their ranks", group.id, group.task,
                     type(error).__name__, error)
        return None


def _loads(costs: Sequence[float], owners: Sequence[int], world: int) -> list[float]:
    loads = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def _imbalance(entries: Sequence[_Entry], owners: Sequence[int], steps: int) -> float:
    largest = mean = 0.0
    for step in range(steps):
        part = [(e.cost, owner) for e, owner in zip(entries, owners, strict=True) if e.step == step]
        loads = _loads([c for c, _ in part], [o for _, o in part], comm.world())
        largest, mean = largest + max(loads), mean + sum(loads) / len(loads)
    return largest / mean if mean else 1.0


def assign(costs: Sequence[float], owners: Sequence[int], world: int) -> list[int]:
    """Returns the new rank of each group, given the costs and present ranks (`owners`) of all groups, and the number of
    ranks `world`.

    Nothing changes if the largest load is at most WORTH_MOVING times the mean load. Otherwise each round moves one
    group from the busiest to the least busy rank, or swaps two groups between these ranks, whichever leaves their loads
    most equal. The rounds end when no load exceeds EVEN times the mean load, or when no change helps."""
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
