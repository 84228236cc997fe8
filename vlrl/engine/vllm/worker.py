# pyright: reportMissingImports=false
"""The code that vlrl adds to each worker process of a vLLM server: `--worker-extension-cls
vlrl.engine.vllm.worker.Extension`.

vLLM adds the class as a base class of its worker; the methods use the worker's `model_runner` and methods. Each worker
process, on any host, imports this module before it creates the model, and `prepare` is called at this import."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vlrl.engine.vllm.weights import EngineWeights, Pairs

EMPTY = "vlrl_empty"
"""The load format for weights that are transferred later. vLLM's "dummy" would also overwrite buffers that are not in
checkpoints, such as the means for normalizing pixels."""


class Extension:
    """Methods that vLLM's `collective_rpc` can call. Their names must not be names of the worker's own methods."""

    def vlrl_reload(self, path: str) -> list[str]:
        """Loads the safetensors in a folder. Returns the names of the modules whose packed copies were rebuilt. On CPUs
        the output layer has a packed copy, which would keep the old weights if the layer is tied to the embedding."""
        from vllm.platforms import current_platform

        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(Path(path)))
        return repack_heads(worker.model_runner.get_model()) if current_platform.is_cpu() else []

    def vlrl_choices(self, temperature: float, banned: Sequence[int]) -> None:
        """Makes the model divide logits by `temperature` and set the logits of `banned` ids to -inf. vLLM does neither
        for the log-probabilities of prompt tokens, so servers that score given completions need this."""
        worker: Any = self
        model = worker.model_runner.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature == 1 and not banned:
            return
        whole = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = whole(*args, **kwargs)
            return None if logits is None else (logits.float() / temperature).index_fill_(
                -1, torch.tensor(banned, dtype=torch.long, device=logits.device), -torch.inf)
        model.compute_logits = compute_logits

    def vlrl_differing(self, base: str, adapter: str) -> tuple[int, list[tuple[str, float, float]]]:
        """Compares the loaded weights, including a tied output layer, with the files in the folders `base` and
        `adapter` ("" = none). Returns the number of compared tensors, and (name, largest absolute difference,
        largest absolute value) of each tensor that differs, worst first. With several workers nothing is compared,
        because each worker holds only slices."""
        from vlrl.engine.vllm.sync_check import counted_differences
        from vlrl.engine.vllm.weights import EngineWeights

        worker: Any = self
        if worker.vllm_config.parallel_config.world_size > 1:
            return 0, []
        loaded = EngineWeights(worker.model_runner.get_model())
        return counted_differences(itertools.chain(
            _of_weights(loaded, Path(base)), _of_adapter(loaded, Path(adapter)) if adapter else ()))


def _of_weights(weights: EngineWeights, folder: Path) -> Pairs:
    from vlrl.engine.vllm.weights import HEAD

    embedding, has_head = None, False
    for name, tensor in read_weights(folder):
        theirs = weights.of(name, tensor.shape)
        if theirs is not None:
            yield name, tensor, theirs
        has_head |= name == HEAD
        embedding = tensor if weights.embeds(name) else embedding
    if embedding is not None and not has_head:
        yield from weights.tied_head(embedding)


def _of_adapter(weights: EngineWeights, folder: Path) -> Pairs:
    from vlrl.engine.vllm.weights import SIDES

    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, tensor in read_weights(folder):
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = weights.matrix(layer, side, tensor.shape) if side in SIDES else None
        if theirs is not None:
            yield name, tensor.float() * (scaling if side == "lora_B" else 1.0), theirs


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of all weights in the safetensors files of a model or adapter folder, on the CPU."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)


def repack_heads(model: Any) -> list[str]:
    """Rebuilds the packed copies that vLLM derives from the weights of output layers and embeddings. Returns the names
    of these modules."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    heads = [(name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)]
    for _, module in heads:
        module.quant_method.process_weights_after_loading(module)
    return [name for name, _ in heads]


def prepare() -> None:
    """Prepares a worker process of a server: pads attention heads on a CPU, and registers the load format EMPTY.
    Repeated calls have no effect."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from vlrl.engine.vllm.cpu_patches import widen_heads

    widen_heads()
    with contextlib.suppress(ValueError):
        get_model_loader(LoadConfig(load_format=EMPTY))
        return
    register_loader(EMPTY, lambda model: [parameter.data.zero_() for parameter in model.parameters()])


def register_loader(name: str, load: Callable[[Any], Any]) -> None:
    """Registers a load format with vLLM in which `load(model)` sets the weights, without reading files. vLLM's "dummy"
    would also overwrite buffers that are not in checkpoints."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(name)
    class _Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            load(model)


if "vllm.v1.worker.worker_base" in sys.modules:  # else this is a trainer, where vLLM may be missing
    prepare()
