"""Several servers of one kind: an episode goes to a responding one, the least loaded first.

    servers = pool(("http://a:8000", "http://b:8000"), healthy)
    for address in servers.tried(): ...             # until one accepts the episode
    servers.took(address); servers.gave_back(address); servers.lost(address)
    until = Deadline(45.0)                          # of an answer and all that it takes

Each process counts its own sessions. A server that does not respond is left out for a while, then checked and reused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PAUSE_S, MOST_PAUSE_S = 2.0, 60.0
"""For how long a server is left out at first, and at most: the pause doubles while it does not respond."""
_log = logging.getLogger(__name__)
_pools: dict[tuple[str, ...], ServerPool] = {}


class Deadline:
    """The time limit of a call with all its parts."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """The deadline of a part, which does not exceed this one."""
        return Deadline(min(seconds, self.left))

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s"


@dataclass
class _Server:
    address: str
    place: int
    """Rank among equally loaded servers; each process starts with another one."""
    sessions: int = 0
    pause: float = 0.0
    """Seconds; 0 = it responds."""
    until: float = 0.0


class ServerPool:
    """The servers known to a process; `healthy` checks one."""

    def __init__(self, addresses: Sequence[str], healthy: Callable[[str], bool],
                 clock: Callable[[], float] = time.monotonic):
        self._healthy, self._clock = healthy, clock
        first = os.getpid() % len(addresses)
        self._servers = {address: _Server(address, (i - first) % len(addresses)) for i, address in enumerate(addresses)}

    def tried(self) -> Iterator[str]:
        """The servers to try, the best first. Servers that were left out come last, once their pause is over and they
        are healthy; if no other is left, without waiting for the pause."""
        servers = sorted(self._servers.values(), key=lambda s: (s.sessions, s.place))
        yield from (s.address for s in servers if not s.pause)
        out = [s for s in servers if s.pause]
        alone = len(out) == len(servers)
        for server in out:
            if alone or self._clock() >= server.until:
                if self._healthy(server.address):
                    yield server.address
                else:
                    self.lost(server.address)

    def took(self, address: str) -> None:
        """A session was started: the server responds."""
        server = self._servers[address]
        if server.pause and len(self._servers) > 1:
            _log.warning("%s answers again", address)
        server.sessions, server.pause = server.sessions + 1, 0.0

    def gave_back(self, address: str) -> None:
        """A session was closed."""
        self._servers[address].sessions -= 1

    def lost(self, address: str) -> None:
        """The server did not respond: it is left out for a while."""
        server = self._servers[address]
        if not server.pause and len(self._servers) > 1:
            _log.warning("%s does not respond and is left out for a while", address)
        server.pause = min(MOST_PAUSE_S, max(PAUSE_S, 2 * server.pause))
        server.until = self._clock() + server.pause


def pool(addresses: Sequence[str], healthy: Callable[[str], bool]) -> ServerPool:
    """The servers of these addresses, shared within the process."""
    return _pools.setdefault(tuple(addresses), ServerPool(addresses, healthy))
