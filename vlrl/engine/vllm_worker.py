# pyright: reportMissingImports=false
"""What vlrl adds to each worker process of a vLLM server: `--worker-extension-cls vlrl.engine.vllm_worker.Extension`.

vLLM mixes the class into its own worker, whose methods and `model_runner` are those used here. Each worker imports this
module before it makes the model, wherever it runs: `prepare` is called then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

EMPTY = "vlrl_empty"
"""The load format of weights that are still to come. vLLM's "dummy" would also fill buffers that no checkpoint holds,
such as the means that pixels are normalised by."""


class Extension:
    """Methods that `collective_rpc` may call; their names must be none of the worker's own."""

    def vlrl_reload(self, path: str) -> list[str]:
        """Takes over the weights of a folder of safetensors; returns the modules of which packed copies were made anew.

        On CPUs the head has a packed copy, which stays that of the old weights when head and embedding are tied.
        """
        from vllm.platforms import current_platform

        worker: Any = self
        worker.reload_weights(weights_iterator=_saved(Path(path)))
        return repack_heads(worker.model_runner.get_model()) if current_platform.is_cpu() else []

    def vlrl_differing(self, path: str) -> list[tuple[str, float, float]]:
        """(name, largest difference, largest number) of weights that are not those of a folder, worst first.

        Nothing with several workers, which hold slices.
        """
        from vlrl.engine.proof import differing
        from vlrl.engine.vllm_held import Held

        worker: Any = self
        if worker.vllm_config.parallel_config.world_size > 1:
            return []
        held = Held(_Engine(worker.model_runner.get_model()))
        found = ((name, tensor, held.of(name, tensor.shape)) for name, tensor in _saved(Path(path)))
        return differing((name, ours, theirs) for name, ours, theirs in found if theirs is not None)


class _Engine:
    """As much of an LLM as Held asks for."""

    def __init__(self, model: Any):
        self._model = model

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self._model)]


def _saved(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights in a folder, on the CPU."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)


def repack_heads(model: Any) -> list[str]:
    """Makes anew what vLLM derives from the weights of heads and embeddings; returns their names."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found = [(name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)]
    for _, module in found:
        module.quant_method.process_weights_after_loading(module)
    return [name for name, _ in found]


def prepare() -> None:
    """What a process must know before it makes a server's model; once is enough."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from vlrl.engine.vllm_heads import widen

    widen()
    with contextlib.suppress(ValueError):
        get_model_loader(LoadConfig(load_format=EMPTY))
        return

    @register_model_loader(EMPTY)
    class Empty(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            for parameter in model.parameters():
                parameter.data.zero_()


if "vllm.v1.worker.worker_base" in sys.modules:  # else this is a trainer, which need not have vLLM
    prepare()
