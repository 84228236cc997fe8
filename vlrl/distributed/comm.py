"""Rank, world size and collectives. With a single process, every function does nothing or returns its argument.

After `watch`, a collective that fails or takes longer than limits.collective_s raises RankError. The error says which
rank waited in which collective, and for which ranks (rank_monitor.py). Every later collective raises the same error,
because the process group is broken."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vlrl.distributed.position import RankPosition
from vlrl.errors import RankError, VlrlError

if TYPE_CHECKING:
    from vlrl.distributed.rank_monitor import RankMonitor

here = RankPosition()  # position of this process: its current step, phase and collective
_monitor: RankMonitor | None = None
_lost: RankError | None = None


def watch(limit: float) -> None:
    """Starts the rank monitor. A rank that has waited for `limit` seconds can then name the ranks it waits for."""
    global _monitor
    if world() > 1 and _monitor is None:
        from vlrl.distributed.rank_monitor import RankMonitor  # needed only with several processes

        _monitor = RankMonitor(here, rank(), world(), limit)


def describe_wait() -> str:
    """Returns a text with the collective in which this process waits and the ranks for which it waits; "" if this
    process does not wait. Thread-safe. Takes several seconds."""
    return _monitor.describe_wait(time.monotonic() - here.since) if _monitor is not None and here.doing else ""


@atexit.register
def leave() -> None:
    """Destroys the process group at exit. Otherwise threads of its transport may abort the process."""
    global _monitor, _lost
    if _monitor is not None:
        _monitor.close()
    if active() and not (_lost and "nccl" in dist.get_backend_config()):  # ending NCCL would wait for the other ranks
        gloo = "gloo" in dist.get_backend_config()
        dist.destroy_process_group()
        if gloo:
            _await_gloo()
    _monitor = _lost = None


def _await_gloo(seconds: float = 5.0) -> None:
    """Waits, at most `seconds`, until gloo's threads have released the tensors of their last collective. A thread needs
    the Python interpreter to release a tensor, and a release during the interpreter's shutdown would abort the
    process. If FSDP's meshes still refer to the process group, the threads stay alive but sleep."""
    end, quiet = time.monotonic() + seconds, 0
    while quiet < 2 and time.monotonic() < end:  # twice: a thread may just be waiting for the interpreter
        time.sleep(0.01)
        quiet = 0 if "R" in _thread_states("pt_gloo") else quiet + 1


def _thread_states(prefix: str) -> str:
    states = ""
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            name, _, state = file.read_text().partition("(")[2].rpartition(") ")
            states += state[0] if name.startswith(prefix) else ""
    return states


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """Context manager that names this rank's current phase, for messages of ranks that wait for this rank. After an
    error the name remains until the next step begins. Main thread only, because other threads call no collectives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    here.phases.append(phase)
    yield
    here.phases.pop()


@contextlib.contextmanager
def transport_errors() -> Iterator[None]:
    """Context manager that turns errors of collectives that are not called through this module (FSDP's) into RankError.
    Also records any error of this rank in the rank monitor, so that the other ranks learn about the error."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        if _monitor is not None and _lost is None:
            if not isinstance(error, VlrlError) and _is_transport_error(error):
                raise _broken(error, min(time.monotonic() - began, time.monotonic() - here.since)) from error
            _monitor.end(error)
        raise


@contextlib.contextmanager
def _collective(doing: str) -> Iterator[None]:
    if _lost is not None:
        raise _lost
    here.enter(doing)
    try:
        yield
    except RuntimeError as error:
        if _monitor is None or isinstance(error, (VlrlError, torch.OutOfMemoryError)):
            raise
        raise _broken(error, time.monotonic() - here.since) from error
    finally:
        here.leave()


def _broken(error: Exception, waited: float) -> RankError:
    global _lost
    assert _monitor is not None
    _lost = _monitor.error(waited, f"{dist.get_backend()}: {str(error).splitlines()[0][:200]}")
    _monitor.end(_lost)
    return _lost


def _is_transport_error(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "closed by peer", "reset by peer")))


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if active() else 0


def world() -> int:
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """Returns the Python values of all ranks, in rank order, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    with _collective("gathering values"):
        dist.all_gather_object(values, value)
    return values


def total(*values: float) -> list[float]:
    """Returns the sum over all ranks of each of the given numbers."""
    return [sum(column) for column in zip(*gather(values), strict=True)]


def broadcast(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if world() == 1:
        return value
    box = [value]
    with _collective("receiving the value of rank 0"):
        dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(call: Callable[[], Any], doing: str = "") -> Any:
    """Runs `call` on rank 0 only. Every rank returns the result of `call` or raises its error. `doing` names work that
    may take long, such as saving. The other ranks then wait without a timeout as long as rank 0 is alive."""
    result, error = None, None
    if is_main():
        try:
            with within(doing) if doing else contextlib.nullcontext():
                result = call()
        except Exception as caught:  # raised again below, on every rank
            error = caught
    if doing and _monitor is not None:
        _wait_patiently(_monitor, doing)
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def end_by_error(error: BaseException, last: Callable[[], Any]) -> None:
    """Records that this rank ends with an error, then calls `last` for final work such as saving. If rank 0 also ends
    with an error, the other ranks wait until `last` has returned on rank 0."""
    if _monitor is not None:
        _monitor.end(error)
    try:
        last()
    finally:
        if _monitor is not None and is_main():
            _monitor.leave()
    if _monitor is not None and _lost is None and not is_main():
        _monitor.await_left()


def all_ended_alike(value: str) -> bool:
    """Whether every rank ends with an error and the same `value`, after the same number of collectives (including those
    not called through this module). If so, further collectives are possible. Called inside `last` of `end_by_error`."""
    if _monitor is None or _lost is not None:
        return False
    group: Any = dist.distributed_c10d._get_default_group()
    sequence_number = group._get_sequence_number_for_group()
    return _monitor.all_ended(f"{value} {sequence_number}")


def _wait_patiently(calls: RankMonitor, doing: str) -> None:
    global _lost
    if is_main():
        here.count += 1  # counts the collective that the other ranks enter
        calls.done()
        return
    with _collective(f"waiting for rank 0: {doing}"):
        here.patient = True
        try:
            calls.await_main()
        except RankError as error:
            _lost = error
            calls.end(error)
            raise


def on_main_alone(call: Callable[[], Any], doing: str = "") -> Any:
    """Like `on_main`, but only rank 0 returns the result; other ranks return None."""
    results: list[Any] = []
    on_main(lambda: results.append(call()), doing)
    return results[0] if results else None


def together(call: Callable[[], Any]) -> Any:
    """Runs `call` on every rank and returns its result. A VlrlError on any rank is raised on all ranks."""
    if world() == 1:
        return call()
    result, error = None, None
    try:
        result = call()
    except RankError:  # gathering the error below would fail too
        raise
    except VlrlError as caught:
        error = caught
    for raised in gather(error):
        if raised is not None:
            raise raised
    return result


def exchange(routes: Mapping[tuple[int, int], list[bytes]]) -> list[bytes]:
    """Sends bytes between pairs of ranks. `routes` maps (sender, receiver) to the bytes to send. The keys must be the
    same on every rank; a value is used only on its sender. Returns the bytes that this rank received, ordered by
    sender. All ranks process the keys in the same order, which avoids deadlocks."""
    arrived: list[bytes] = []
    if not routes:
        return arrived
    with _collective("exchanging groups"):
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
        with _collective("waiting at a barrier"):
            dist.barrier()


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gathers the full tensor of a DTensor, and returns any other tensor unchanged. Called on every rank."""
    if not isinstance(value, DTensor):
        return value
    with _collective("gathering shards"):
        return value.full_tensor()


def copy_into_shard(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a full tensor into `target`. If `target` is a DTensor sharded along one dimension (FSDP), copies this
    rank's part."""
    if isinstance(target, DTensor):
        (placement,) = target.placements
        dim = getattr(placement, "dim", 0)
        pieces = value.chunk(world(), dim)
        value = pieces[rank()] if rank() < len(pieces) else value.narrow(dim, 0, 0)
        target = target.to_local()
    with torch.no_grad():
        target.copy_(value)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], bucket: int = 2**25) -> None:
    """Sums `.grad` over all ranks in place. A rank that has no gradient for a parameter contributes zeros.

    If no rank has a gradient for a parameter, its `.grad` stays None. Gradients are reduced once per optimizer step, in
    buckets of `bucket` numbers. So ranks may run different numbers of micro-batches and leave parameters unused
    (text-only data on one rank) without a deadlock. Gradients of DTensors are skipped: FSDP has summed them."""
    if world() == 1:
        return
    learning = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not learning:
        return
    used = torch.tensor([p.grad is not None for p in learning], dtype=torch.int32, device=learning[0].device)
    with _collective("comparing which parameters have gradients"):
        dist.all_reduce(used, dist.ReduceOp.MAX)  # AdamW skips parameters whose gradient is None
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
    with _collective("adding up gradients"):
        dist.all_reduce(flat)
    for p, grad in zip(group, flat.split([p.numel() for p in group]), strict=True):
        p.grad = grad.view_as(p)
