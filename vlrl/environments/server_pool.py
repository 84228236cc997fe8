"""Chooses among several equivalent servers: a new episode uses the responding server with the fewest sessions.

    servers = pool(("http://a:8000", "http://b:8000"), healthy)
    for address in servers.candidates(): ...             # in this order, until a server accepts the episode
    servers.started(address); servers.closed(address); servers.failed(address)
    until = Deadline(45.0)                          # a time limit shared by all parts of a call

Each process counts only its own sessions. A server that does not respond is not used for a while, then checked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PAUSE_S, MOST_PAUSE_S = 2.0, 60.0
"""First and longest time in seconds before a server that did not respond is tried again; each failure doubles it."""
_log = logging.getLogger(__name__)
_pools: dict[tuple[str, ...], ServerPool] = {}


class Deadline:
    """A time limit that all parts of a call share."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Returns the deadline of a part of the call: in `seconds`, or this deadline if that is earlier."""
        return Deadline(min(seconds, self.left))

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s"


@dataclass
class _Server:
    address: str
    place: int  # Order among servers with the same number of sessions. Each process begins with a different server.
    sessions: int = 0
    pause: float = 0.0  # duration of the current pause in seconds; 0 if the server responds
    until: float = 0.0


class ServerPool:
    """The servers known to a process. healthy: a function that returns whether the server at an address is healthy."""

    def __init__(self, addresses: Sequence[str], healthy: Callable[[str], bool],
                 clock: Callable[[], float] = time.monotonic):
        self._healthy, self._clock = healthy, clock
        first = os.getpid() % len(addresses)
        self._servers = {address: _Server(address, (i - first) % len(addresses)) for i, address in enumerate(addresses)}

    def candidates(self) -> Iterator[str]:
        """Yields the addresses of the servers in the order in which they should be tried. Servers that did not respond
        come last, and only if their pause is over and they are healthy. If no server responded, pauses are ignored."""
        servers = sorted(self._servers.values(), key=lambda s: (s.sessions, s.place))
        yield from (s.address for s in servers if not s.pause)
        out = [s for s in servers if s.pause]
        alone = len(out) == len(servers)
        for server in out:
            if alone or self._clock() >= server.until:
                if self._healthy(server.address):
                    yield server.address
                else:
                    self.failed(server.address)

    def started(self, address: str) -> None:
        """Records that a session was started on the server at `address`, so the server responds."""
        server = self._servers[address]
        if server.pause and len(self._servers) > 1:
            _log.warning("the server %s responds again", address)
        server.sessions, server.pause = server.sessions + 1, 0.0

    def closed(self, address: str) -> None:
        """Records that a session on the server at `address` was closed."""
        self._servers[address].sessions -= 1

    def failed(self, address: str) -> None:
        """Records that the server at `address` did not respond, so that it is not used for a while."""
        server = self._servers[address]
        if not server.pause and len(self._servers) > 1:
            _log.warning("the server %s does not respond and is not used for a while", address)
        server.pause = min(MOST_PAUSE_S, max(PAUSE_S, 2 * server.pause))
        server.until = self._clock() + server.pause


def pool(addresses: Sequence[str], healthy: Callable[[str], bool]) -> ServerPool:
    """Returns the pool of the servers at these addresses: the same ServerPool for all callers in this process.
    `healthy` returns whether the server at an address is healthy."""
    return _pools.setdefault(tuple(addresses), ServerPool(addresses, healthy))
