"""Connections of httpcore that go to addresses chosen before, and end at one moment whatever the server does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore


class TooSlow(Exception):
    """The deadline has passed."""


class Pinned(httpcore.NetworkBackend):
    """Connects to the first of `addresses` that answers, whatever name it is asked for; all ends at `deadline`, a time
    of time.monotonic. httpcore still checks the certificate against the name."""

    def __init__(self, addresses: Sequence[str], deadline: float):
        self._addresses, self._deadline, self._plain = addresses, deadline, httpcore.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
                    socket_options: Iterable[Any] | None = None) -> httpcore.NetworkStream:
        for left, address in zip(range(len(self._addresses), 0, -1), self._addresses, strict=True):
            try:
                stream = self._plain.connect_tcp(address, port, _left(self._deadline) / left, local_address,
                                                 socket_options)
                return _Timed(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if left == 1:
                    raise
        raise httpcore.ConnectError("no address")


class _Timed(httpcore.NetworkStream):
    """A stream whose every wait ends at the deadline, so that many short ones do too."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float):
        self._inner, self._deadline = inner, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None,
                  timeout: float | None = None) -> httpcore.NetworkStream:
        return _Timed(self._inner.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooSlow
    return left
