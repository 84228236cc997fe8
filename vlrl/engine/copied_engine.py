"""Generation with a copy of the training model, so that completions can be sampled during the update (async.*)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch

from vlrl.distributed import comm
from vlrl.engine.base import Done, PartialTexts, Request, Watch
from vlrl.engine.hf import HFEngine
from vlrl.errors import VlrlError
from vlrl.models.policy import Policy
from vlrl.types import Completion

GIVEN_UP = "the run is ending, so the generation was stopped"


class Abandoned(VlrlError, RuntimeError):
    """Raised in the generating thread, to stop it, when the run is ending."""


class CopiedEngine(HFEngine):
    """An HFEngine with its own copy of the model, processor and feature cache. `sync` copies the trainable parameters.
    The completions equal those of an HFEngine up to the last bits of the logits, and are bitwise reproducible. One
    thread may generate while another trains the policy, except during `sync`."""

    def __init__(self, policy: Policy, seed: int, batch_rollouts: int | Literal["auto"] = "auto",
                 prefill_tokens: int = 16384):
        own: Any = with_own_processor(policy)
        own.model = copy.deepcopy(policy.model).requires_grad_(False)
        own.features = policy.features and policy.features.empty_copy()
        super().__init__(own, seed, batch_rollouts, prefill_tokens)
        self._abandoned = threading.Event()

    def sync(self, policy: Policy, step: int) -> None:
        """Copies the policy's trainable parameters into the engine's model. Collective: called on all ranks."""
        self.step = step
        self.turn_caches.clear()
        own = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, weight in policy.trainable():
                own[name].copy_(comm.full_tensor(weight))

    def generate(self, requests: Sequence[Request], done: Done | None = None,
                 watch: Watch | None = None) -> list[list[Completion]]:
        """Returns the completions of each request, as HFEngine.generate. Raises Abandoned once `abandon` was called."""
        def watching(so_far: PartialTexts) -> None:
            if self._abandoned.is_set():
                raise Abandoned(GIVEN_UP)
            if watch:
                watch(so_far)

        return super().generate(requests, done, watching)

    def abandon(self) -> None:
        """Called from another thread: the running generation raises Abandoned after its next token."""
        self._abandoned.set()


def with_own_processor(policy: Policy) -> Policy:
    """A shallow copy of the policy with its own processor, for another thread: tokenizers are not thread-safe."""
    other: Any = copy.copy(policy)
    other.processor = copy.deepcopy(policy.processor)
    return other
