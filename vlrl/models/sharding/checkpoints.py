"""What shards of either kind give to checkpoints: tensors gathered one at a time, kept by the main process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vlrl.models.policy import Policy


class Checkpointed:
    """Shards by how one tensor of theirs is made whole."""

    def scatter(self) -> None:
        """As Shards.scatter."""
        raise NotImplementedError

    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Returns a weight in main memory, on the main process; None elsewhere. A call of all processes."""
        raise NotImplementedError

    def leaf(self, value: Any) -> Any:
        """Returns a value of the optimizer's or another state: whole as a weight is, where it is sharded."""
        raise NotImplementedError

    def state(self, tree: Any) -> Any:
        """As Shards.state."""
        if isinstance(tree, Mapping):
            return {key: self.state(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.state(value) for value in tree])
        return self.leaf(tree)

    def weights(self, policy: Policy) -> dict[str, torch.Tensor]:
        """As Shards.weights."""
        self.scatter()
        named = dict(policy.trainable()) if policy.lora else policy.model.state_dict(keep_vars=True)
        by_id: dict[int, Any] = {}
        for tensor in named.values():
            if id(tensor) not in by_id:  # tied weights stay one
                by_id[id(tensor)] = self.whole(tensor)
        return {name: by_id[id(tensor)] for name, tensor in named.items()}
