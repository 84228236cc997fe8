"""What every engine offers the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vlrl.types import Completion, Request

Done = Callable[[int, list[Completion]], None]
"""Takes the number of a request and all of its completions."""
SoFar = Callable[[], dict[tuple[int, int], str]]
"""Gives what the answers of a batch hold so far, by (number of the request, number of the answer)."""
Watch = Callable[[SoFar], None]
"""Called after every token of a batch; the texts are decoded only when it asks for them. What it raises ends the
generation."""


class Engine(Protocol):
    """Draws answers from the policy."""

    def sync(self, policy: Any, step: int) -> None:
        """Takes over the policy's weights; answers drawn from now on carry `step` as their policy_step."""
        ...

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions for each request, in order.

        `done(i, completions)` is called from the caller's thread as soon as request `i` is whole and while others are
        still to be written, at most once each; not for those that are written last. It should return at once.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...
