"""Balances the training cost of micro-batches. For the balance of ranks see balance.py."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.types import Group, Prompt

Cost = Callable[[Prompt, Sequence[int]], float]
"""Cost of training on a prompt and its completions: (prompt, tokens of each completion) -> cost in any unit."""
_BALANCE = Table({"share_out": "vlrl.models.balance:share_out"})


def tokens(prompt: Prompt, answers: Sequence[int]) -> float:
    """The number of tokens of a prompt and its completions, as a Cost."""
    return float(len(prompt) + sum(answers))


def group_cost(group: Group, cost: Cost) -> float:
    """Cost of training on a group, in the unit of `cost`. A prompt is counted once for all its completions."""
    by_prompt: dict[int, tuple[Prompt, list[int]]] = {}
    for rollout in (*group.rollouts, *group.beside):
        prompt = rollout.train_prompt or group.prompt
        by_prompt.setdefault(id(prompt), (prompt, []))[1].extend(rollout.completion.lengths)
    return sum(cost(prompt, answers) for prompt, answers in by_prompt.values())


# --- micro-batches ---------------------------------------------------------------------------------------------------


def bins(sizes: Sequence[int], costs: Sequence[float], limit: int) -> list[list[int]]:
    """Packs items into bins of total size at most `limit`, so that the bins have similar costs. Returns the item
    indices of each bin.

    Uses as few bins as first-fit by decreasing size. The most expensive item goes first, into the cheapest bin with
    room for it (longest processing time first, Graham 1969). If an item does not fit in this way, or if the most
    expensive bin of first-fit is cheaper, the bins of first-fit are returned. An item above the limit gets a bin of its
    own. Equal items keep their order."""
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
    """Returns the optimizer step (0 to count - 1, within the update) to which each of this rank's groups belongs. `ids`
    are the groups' ids. The groups of all ranks are sorted by id and cut into `count` equal slices. So a step holds
    the same groups for any number of ranks."""
    if count == 1:
        return [0] * len(ids)
    everyone = sorted(i for part in comm.gather(list(ids)) for i in part)
    edges = [round(n * len(everyone) / count) for n in range(1, count)]
    return [bisect_right(edges, bisect_left(everyone, i)) for i in ids]


def share_out(groups: Sequence[Group], cost: Cost, config: Config) -> tuple[list[Group], dict[str, float]]:
    """The groups that this rank trains on after balancing, and the metrics of balancing; called on every rank. On a
    single rank, or with train.balance=false, no group moves. See balance.share_out."""
    if comm.world() == 1 or not config.train.balance:
        return list(groups), {}
    return _BALANCE["share_out"](groups, cost, config)
