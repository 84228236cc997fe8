"""Reads the weights that a vLLM model in this process computes with, so that they can be compared with the policy's.

Weights inside fused layers are read as slices. vLLM's CPU build keeps only packed copies of most weights. A packed copy
is read by applying the layer to an identity matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vlrl.engine.vllm.policy_weights import gathered

HEAD, SIDES = "lm_head.weight", ("lora_A", "lora_B")
Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""Weights to compare: (name, the policy's tensor, the engine's tensor)."""


class EngineWeights:
    """The weights that a vLLM model computes with, looked up by their names in the policy."""

    def __init__(self, model: Any):
        self.model = model
        self._dtype = next((p.dtype for p in self.model.parameters() if p.dim() == 2), torch.float32)
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        self._rename: Callable[[str], str | None] = mapper.get_rename_mapper().map_name if mapper else str
        self._fused = {part: (whole, i) for whole, parts in getattr(self.model, "packed_modules_mapping", {}).items()
                       for i, part in enumerate(parts) if parts != [whole]}
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def of(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Returns vLLM's tensor for a weight of this name and shape in a saved checkpoint; None if not found."""
        path, _, kind = (self._rename(name) or "").rpartition(".")
        module, part = self._module(path)
        if module is None:
            return None
        whole = self._read(path if part is None else f"{path} fused", module, kind)
        if whole is None:
            return None
        if part is not None:
            sizes = list(module.output_sizes)
            whole = whole.split(sizes)[part] if sum(sizes) == len(whole) else whole[:0]
        elif whole.dim() and len(whole) > shape[0]:  # the vocabulary is padded
            whole = whole[:shape[0]]
        if whole.numel() != np.prod(shape):
            return None
        return whole.reshape(tuple(shape)).to(self._dtype)  # some CPU kernels keep a bias wider than it was loaded

    def adapter(self, path: str, layer: Any, name: str) -> Pairs:
        """Yields the pairs of tensors (policy's, vLLM's) of the adapter `name` in one adapted layer: A, and B times the
        scaling, which is how vLLM stores B. path: the layer's module name. layer: PEFT's layer in the policy."""
        for side in SIDES:
            ours = gathered(getattr(layer, side)[name].weight).float()
            theirs = self.matrix(path, side, ours.shape)
            if theirs is not None:
                yield f"{path}.{side}.{name}.weight", ours * (1.0 if side == "lora_A" else layer.scaling[name]), theirs

    def matrix(self, path: str, side: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Returns vLLM's LoRA matrix of the layer at `path`. `side` is "lora_A" or "lora_B"; vLLM stores B times the
        scaling. None if vLLM has no adapter in this layer."""
        module, part = self._module((self._rename(f"{path}.weight") or "").rpartition(".")[0], wrapped=True)
        stacked = getattr(module, f"{side.lower()}_stacked", None)
        return None if stacked is None else stacked[part or 0][0, 0, :shape[0], :shape[1]]

    def tied_head(self, embedding: torch.Tensor) -> Pairs:
        """Yields the pair of tensors (policy's, vLLM's) of an output layer that is tied to the token embedding
        `embedding`. Yields nothing if vLLM's tensor is not found."""
        theirs = self.of(HEAD, embedding.shape)
        if theirs is not None:
            yield f"{HEAD} (tied to the embedding)", embedding, theirs

    def embeds(self, name: str) -> bool:
        """Whether the weight of this name is the token embedding."""
        module, _ = self._module((self._rename(name) or "").rpartition(".")[0])
        return type(module).__name__ == "VocabParallelEmbedding"

    def _module(self, path: str, wrapped: bool = False) -> tuple[Any, int | None]:
        """Returns (the module at `path`, None). If vLLM has fused this module with others, returns (the fused module,
        index of the module at `path` in it). Returns (None, None) if there is no such module. A LoRA wrapper is
        returned only if `wrapped` is true, otherwise the layer inside the wrapper."""
        parent, _, last = path.rpartition(".")
        whole, part = self._fused.get(last, (last, None))
        for candidate, number in ((last, None), (whole, part)):
            with contextlib.suppress(AttributeError):
                module = self.model.get_submodule(f"{parent}.{candidate}" if parent else candidate)
                return (module if wrapped else getattr(module, "base_layer", module)), number
        return None, None

    def _read(self, path: str, module: Any, kind: str) -> torch.Tensor | None:
        """Returns the parameter `kind` ("weight" or "bias") of a module as vLLM computes with it, or None if it does
        not exist. The last unpacked weight is cached, because a fused layer is read once for each of its parts."""
        tensor = getattr(module, kind, None)
        if not isinstance(tensor, torch.Tensor):
            return None
        is_head = type(module).__name__ == "ParallelLMHead"
        packed = kind == "weight" and hasattr(module, "cpu_linear") and (tensor.numel() == 0 or is_head)
        if not packed:
            return tensor.detach()
        key = f"{path} {id(module)}"
        if self._last[0] != key:
            self._last = key, _unpacked(module, tensor.dtype)
        return self._last[1]


def _unpacked(module: Any, dtype: torch.dtype, rows: int = 1024) -> torch.Tensor:
    """Returns the weight [N, K] of a module for which the CPU build of vLLM keeps only a packed copy. The weight is the
    transposed output of the module for an identity matrix, which is passed in chunks of `rows` rows."""
    widths = (getattr(module, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    width = next(filter(None, widths))  # of a layer sharded over devices, of a replicated one, of a head
    out = [module.cpu_linear(torch.eye(width, dtype=dtype)[i:i + rows], module.weight, None)
           for i in range(0, width, rows)]
    return torch.cat(out).T
