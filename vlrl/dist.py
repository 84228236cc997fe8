"""Rank, world size and collectives; every function is a no-op when the process is alone."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vlrl.errors import VlrlError


@atexit.register
def leave() -> None:
    """Ends the process group; a process that exits with one may abort in the threads of its transport."""
    if active():
        dist.destroy_process_group()


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if active() else 0


def world() -> int:
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """The Python value of every rank, in rank order, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def total(*values: float) -> list[float]:
    """The sum over ranks of each number."""
    return [sum(column) for column in zip(*gather(values), strict=True)]


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(call: Callable[[], Any]) -> Any:
    """Runs `call` on rank 0 alone; its result, or the error it raised, on every rank."""
    result, error = None, None
    if is_main():
        try:
            result = call()
        except Exception as caught:  # raised again below, on every rank
            error = caught
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def on_main_alone(call: Callable[[], Any]) -> Any:
    """As `on_main`, but the result stays there; None elsewhere."""
    found: list[Any] = []
    on_main(lambda: found.append(call()))
    return found[0] if found else None


def together(call: Callable[[], Any]) -> Any:
    """Runs `call` on every rank; when it raises a VlrlError on one, the first such error is raised on all."""
    if world() == 1:
        return call()
    result, error = None, None
    try:
        result = call()
    except VlrlError as caught:
        error = caught
    for raised in gather(error):
        if raised is not None:
            raise raised
    return result


def exchange(routes: Mapping[tuple[int, int], list[bytes]]) -> list[bytes]:
    """Sends bytes point to point; returns what reached this rank, by sender.

    `routes` has the same keys (sender, receiver) on every rank, and the sender's values. Every rank walks them in one
    order, so no two wait for each other.
    """
    arrived: list[bytes] = []
    for sender, receiver in sorted(routes):
        if rank() == sender:
            dist.send_object_list([routes[sender, receiver]], dst=receiver)
        elif rank() == receiver:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=sender)
            arrived += box[0]
    return arrived


def barrier() -> None:
    if active():
        dist.barrier()


def whole(value: torch.Tensor) -> torch.Tensor:
    """The tensor of which each rank holds a shard; any other as it is. Called on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole tensor into `target`, of which each rank may hold a shard (of one dimension, as FSDP cuts it)."""
    if isinstance(target, DTensor):
        (placement,) = target.placements
        dim = getattr(placement, "dim", 0)
        pieces = value.chunk(world(), dim)
        value = pieces[rank()] if rank() < len(pieces) else value.narrow(dim, 0, 0)
        target = target.to_local()
    with torch.no_grad():
        target.copy_(value)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], bucket: int = 2**25) -> None:
    """Adds up `.grad` over ranks in place; a rank without a gradient contributes zeros, unless all are without.

    One reduction per optimizer step in buckets of `bucket` numbers. Ranks may run different numbers of micro-batches
    and leave parameters unused (a text-only share beside one with images) without a hang. FSDP has summed the
    gradients of sharded parameters already.
    """
    if world() == 1:
        return
    learning = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not learning:
        return
    used = torch.tensor([p.grad is not None for p in learning], dtype=torch.int32, device=learning[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX)  # AdamW leaves a parameter without gradient alone: so it must here
    group: list[torch.nn.Parameter] = []
    size = 0
    for p in [*(p for p, anyone in zip(learning, used.tolist(), strict=True) if anyone), None]:
        if group and (p is None or size + p.numel() > bucket or p.dtype != group[0].dtype):
            _reduce(group)
            group, size = [], 0
        if p is not None:
            group.append(p)
            size += p.numel()


def _reduce(group: list[torch.nn.Parameter]) -> None:
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in group])
    dist.all_reduce(flat)
    for p, grad in zip(group, flat.split([p.numel() for p in group]), strict=True):
        p.grad = grad.view_as(p)
