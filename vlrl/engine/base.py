"""What every engine offers the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vlrl.types import Completion, Request


class Engine(Protocol):
    """Draws answers from the policy."""

    def sync(self, policy: Any, step: int) -> None:
        """Takes over the policy's weights; answers drawn from now on carry `step` as their policy_step."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`request.n` completions for each request, in order."""
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...
