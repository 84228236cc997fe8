"""Publishes the position of every rank, so that a rank that waits too long can name the ranks it waits for.

Each rank writes its position to the launcher's store every BEAT seconds. The store is not read, and collectives carry
no extra data, until a collective fails or takes longer than limits.collective_s. Only then does the waiting rank read
the records of the other ranks. The store may have vanished with its host, and a read can hang forever, so reads run in
threads for which nothing waits longer than ANSWER seconds."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from vlrl.distributed import launcher_guard
from vlrl.distributed.position import GRACE, RankPosition
from vlrl.errors import RankError
from vlrl.store import lock
from vlrl.types import Record

BEAT = 2.0  # interval in seconds at which a rank writes its record
CONNECT = 10.0  # timeout in seconds for connecting to the store
ANSWER = 15.0
"""Timeout of a read in seconds. It is longer than CONNECT, so that a thread that cannot connect has ended before the
read times out: a thread that fails during shutdown would abort the process."""
_GIVEN_UP = ("timed out", *map(os.strerror, (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)))
"""TCP's error messages for an unreachable host. For a host on the local network, "no route to host" comes first."""
_NAMED = 8  # maximum number of ranks that a message names

T = TypeVar("T")


class RankMonitor:
    """Writes this rank's record to the launcher's store, and reads the records of the other ranks when needed. A record
    contains a rank's position, a counter as sign of life, and how the rank ended. `limit` is limits.collective_s.
    Needs the variables MASTER_ADDR and MASTER_PORT, which every launcher sets."""

    def __init__(self, here: RankPosition, rank: int, world: int, limit: float):
        self.here, self.rank, self.world, self.limit = here, rank, world, limit
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._prefix = f"vlrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # the store outlives a restart
        owner = lock.this_process()
        self._owner = {key: owner[key] for key in ("pid", "host", "system", "process")}
        self._beat, self._ended = 0, None
        self._cut = False
        """Whether TCP has given up the connection to the store's host. torchrun kills its ranks soon after."""
        self._writing, self._asking = self._connect(), None
        self._patience = 0
        self._launcher = launcher_guard.find()
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._live, name="roll call", daemon=True)
        self._thread.start()

    # --- own record -----------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Writes this rank's record to the store. The store does not reply, so this takes microseconds."""
        self._beat += 1
        here = self.here
        record = {**self._owner, "beat": self._beat, "count": here.count, "waits": bool(here.doing),
                  "place": str(here), "for_s": time.monotonic() - here.since, "ended": self._ended}
        try:
            self._writing.set(f"{self._prefix}/rank/{self.rank}", json.dumps(record))
        except Exception as error:  # other errors are noticed when the store is read
            self._cut = self._cut or any(text in str(error) for text in _GIVEN_UP)

    def end(self, error: BaseException | None) -> None:
        """Writes the last record of this rank: that the rank ended with `error`, or normally if `error` is None."""
        if self._ended is None:
            text = f"{type(error).__name__}: {error}".split("\n")[0][:300] if error else "it ended normally"
            self._ended = {"why": text, "follows": isinstance(error, RankError)}
            self.publish()

    def leave(self) -> None:
        """On rank 0, after `end`: records that the other ranks need not wait for rank 0 any more."""
        if self._ended is not None:
            self._ended["left"] = True
            self.publish()

    def close(self) -> None:
        """Ends the monitor's thread. This rank's record remains in the store."""
        self.end(None)
        self._closed.set()
        self._thread.join(BEAT)  # a thread inside torch would abort the process at exit

    def _live(self) -> None:
        while not self._closed.wait(BEAT):
            self.publish()
            waited = time.monotonic() - self.here.since
            limit = GRACE if self._cut else math.inf if self.here.patient else self.limit + GRACE
            if self.here.doing and waited > limit:
                self._end_process(waited)

    def _end_process(self, waited: float) -> None:
        count, error = self.here.count, self.error(waited, "the transport raised no error")
        if self.here.doing and self.here.count == count:
            self.end(error)
            os.write(2, f"error: {error}\n".encode())
            os._exit(1)

    # --- the others -----------------------------------------------------------------------------------------------

    def error(self, waited: float, cause: str) -> RankError:
        """Returns a RankError that contains `cause`, and the ranks for which this rank has waited `waited` seconds.
        Takes seconds, because the other ranks are checked for signs of life."""
        return RankError(f"{self.describe_wait(waited)}. The last checkpoint is intact: start the same command again "
                         f"on every host. If a rank is only slow, raise limits.collective_s={self.limit:g}. ({cause})")

    def describe_wait(self, waited: float) -> str:
        """Returns text such as "rank 0 waited 60 s in step 3: gathering values (...) for rank 1 (...)". `waited` is the
        number of seconds. Takes seconds, because the other ranks are checked for signs of life."""
        place, count = str(self.here), self.here.count
        self.publish()
        before = self._records()
        if before is not None:
            time.sleep(2.5 * BEAT)
        after = self._records() if before is not None else None
        if before is None or after is None:
            missing = (f"the other ranks; the launcher's store at {self.address[0]}:{self.address[1]} does not answer "
                       "either, so that host or the network to it is down")
            if self._launcher is not None:
                self._launcher.end_if_it_hangs()
        else:
            missing = describe_missing(self.rank, count, before, after)
        return f"rank {self.rank} waited {waited:.0f} s in {place} for {missing}"

    def done(self) -> None:
        """On rank 0: records that the work for which other ranks wait in `await_main` is done."""
        self._patience += 1
        self._writing.set(f"{self._prefix}/done/{self._patience}", "")

    def await_main(self) -> None:
        """On ranks other than 0: waits until rank 0 calls `done`, without a timeout as long as rank 0 shows signs of
        life. Raises RankError if rank 0 has ended, or shows no sign of life for limits.collective_s."""
        self._patience += 1
        key, began, pause = f"{self._prefix}/done/{self._patience}", time.monotonic(), 0.01
        beat, heard = 0, time.monotonic()
        while True:
            reply = self._ask(lambda store: (store.check([key]), self._record(store, 0)))
            if reply is not None and reply[0]:
                return
            record = reply[1] if reply is not None else None
            if record is not None and record["beat"] != beat and not record["ended"]:
                beat, heard = record["beat"], time.monotonic()
            quiet = time.monotonic() - heard
            if quiet > self.limit or (quiet > 3 * BEAT and record is not None and (
                    record["ended"] or lock.owner_lives(record) is False)):
                raise self.error(time.monotonic() - began, "rank 0 was doing work for which the other ranks wait")
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    def all_ended(self, place: str) -> bool:
        """Whether all ranks have ended with an error and call this method with the same text `place` (see
        comm.all_ended_alike). Called after `end`. Waits some seconds for the other ranks."""
        assert self._ended is not None
        self._ended["at"] = place
        self.publish()
        end = time.monotonic() + 5 * BEAT
        while time.monotonic() < end:
            records = self._records()
            if records is None:
                return False
            places = [((record or {}).get("ended") or {}).get("at") for record in records]
            if all(places):
                return set(places) == {place}
            time.sleep(0.2)
        return False

    def await_left(self) -> None:
        """On ranks other than 0, after `end`: if rank 0 ends with an error too, waits until rank 0 calls `leave`.
        Otherwise the launcher would kill rank 0, since the launcher kills all processes soon after the first one
        ends."""
        began = heard = time.monotonic()
        beat = 0
        while time.monotonic() - heard < 3 * BEAT:
            record = self._ask(lambda store: self._record(store, 0))
            if record is None or (record["ended"] or {}).get("left"):
                return
            if not record["ended"] and time.monotonic() - began > 2 * BEAT:
                return  # rank 0 continues, and learns that this rank has ended
            if record["beat"] != beat:
                beat, heard = record["beat"], time.monotonic()
            time.sleep(0.2)

    def _records(self) -> list[Record | None] | None:
        return self._ask(lambda store: [self._record(store, rank) for rank in range(self.world)])

    def _record(self, store: dist.Store, rank: int) -> Record | None:
        key = f"{self._prefix}/rank/{rank}"
        return json.loads(store.get(key)) if store.check([key]) else None

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """Returns `question(store)`; None if the question fails or times out. The next call then opens a new
        connection."""
        replies: list[T] = []

        def ask() -> None:
            with suppress(Exception):
                store, self._asking = self._asking or self._connect(), None
                replies.append(question(store))
                self._asking = store

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER)
        return replies[0] if replies else None

    def _connect(self) -> dist.Store:
        return dist.TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT))


def describe_missing(rank: int, count: int, before: Sequence[Record | None], after: Sequence[Record | None]) -> str:
    """Returns a text with the missing ranks, for which `rank` waits in its collective number `count`. A missing rank
    has ended with an error of its own, shows no sign of life, or has not reached this collective. If no rank is
    missing, the text lists the ranks that wait in the same collective. `before` and `after` are the records of all
    ranks, read some seconds apart."""
    missing: list[str] = []
    waiting: list[str] = []
    for other, (old, new) in enumerate(zip(before, after, strict=True)):
        if other == rank:
            continue
        if old is None or new is None:
            missing.append(f"rank {other} (has not begun)")
        elif new["ended"]:
            kind = waiting if new["ended"]["follows"] else missing
            kind.append(f"rank {other} (ended in {new['place']}: {new['ended']['why']})")
        elif new["beat"] == old["beat"]:
            missing.append(f"rank {other} (no sign of life from host {new['host']}; last heard of in {new['place']})")
        elif new["count"] < count or not new["waits"]:
            missing.append(f"rank {other} (in {new['place']} for {new['for_s']:.0f} s)")
        else:
            waiting.append(f"rank {other}")
    if missing:
        return _listed(missing)
    return (f"{_listed(waiting)}; these have reached the same point or gone further, so messages between ranks "
            "are lost: check that each host uses the right network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and no firewall blocks it")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more
