"""Several servers of one kind: episodes go to those that answer, the one with the fewest first.

    servers = pool(("http://a:8000", "http://b:8000"), healthy)
    for address in servers.tried(): ...             # until one takes the episode
    servers.took(address); servers.gave_back(address); servers.lost(address)
    until = Deadline(45.0)                          # of an answer and all that it takes

A process has its own counts. One that does not answer is left out for a while, then asked how it is, and taken back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PAUSE_S, MOST_PAUSE_S = 2.0, 60.0
"""For how long a server is left out at first, and at most: the pause doubles while it does not answer."""
_log = logging.getLogger(__name__)
_pools: dict[tuple[str, ...], ServerPool] = {}


class Deadline:
    """The seconds that a call may take, whatever it consists of."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 = none."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Returns that of a part, which may not take longer either."""
        return Deadline(min(seconds, self.left))

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s"


@dataclass
class _Server:
    address: str
    place: int
    """Its turn among equals; other processes begin with another one."""
    sessions: int = 0
    pause: float = 0.0
    """Seconds; 0 = it answers."""
    until: float = 0.0


class ServerPool:
    """The servers that a process knows; `healthy` asks one how it is."""

    def __init__(self, addresses: Sequence[str], healthy: Callable[[str], bool],
                 clock: Callable[[], float] = time.monotonic):
        self._healthy, self._clock = healthy, clock
        first = os.getpid() % len(addresses)
        self._servers = {address: _Server(address, (i - first) % len(addresses)) for i, address in enumerate(addresses)}

    def tried(self) -> Iterator[str]:
        """Yields the servers to try, the best first; those that were left out and are due again only where they say
        that they are well. All are yielded where no other is left."""
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
        """It has a session more, so it answers."""
        server = self._servers[address]
        if server.pause and len(self._servers) > 1:
            _log.warning("%s answers again", address)
        server.sessions, server.pause = server.sessions + 1, 0.0

    def gave_back(self, address: str) -> None:
        """It has a session less."""
        self._servers[address].sessions -= 1

    def lost(self, address: str) -> None:
        """It did not answer: it is left out for a while."""
        server = self._servers[address]
        if not server.pause and len(self._servers) > 1:
            _log.warning("%s does not answer, and is left out for a while", address)
        server.pause = min(MOST_PAUSE_S, max(PAUSE_S, 2 * server.pause))
        server.until = self._clock() + server.pause


def pool(addresses: Sequence[str], healthy: Callable[[str], bool]) -> ServerPool:
    """Returns the servers of these addresses, the same ones for the whole process."""
    return _pools.setdefault(tuple(addresses), ServerPool(addresses, healthy))
