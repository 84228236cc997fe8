# pyright: reportMissingImports=false
"""What vlrl adds to each worker process of a vLLM server: `--worker-extension-cls vlrl.engine.vllm.worker.Extension`.

vLLM mixes the class into its own worker, whose methods and `model_runner` it uses. Each worker process imports this
module before it creates the model, wherever it runs, and `prepare` is called then.
"""

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
"""The load format of weights that come later. vLLM's "dummy" would also fill buffers that no checkpoint holds, such as
the means by which pixels are normalized."""


class Extension:
    """Methods for `collective_rpc`; their names must differ from the worker's own."""

    def vlrl_reload(self, path: str) -> list[str]:
        """Loads a folder of safetensors; returns the modules whose packed copies were rebuilt.

        On CPUs the head has a packed copy, which would keep the old weights if head and embedding are tied.
        """
        from vllm.platforms import current_platform

        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(Path(path)))
        return repack_heads(worker.model_runner.get_model()) if current_platform.is_cpu() else []

    def vlrl_choices(self, temperature: float, banned: Sequence[int]) -> None:
        """From now on logits are divided by a temperature, and -inf for `banned` ids. vLLM applies neither to the
        log-probabilities of a prompt, whatever a request says, so servers that score given completions use this."""
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
        """How many tensors are compared, and (name, largest difference, largest number) of those that differ from the
        folders, worst first: weights, a tied head, the matrices of an `adapter` ("" for none).

        Nothing is compared with several workers, which hold slices.
        """
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
    """Pairs of an adapter in PEFT's format: base_model.model.LAYER.SIDE.weight, with the scaling of B in the config."""
    from vlrl.engine.vllm.weights import SIDES

    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, tensor in read_weights(folder):
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = weights.matrix(layer, side, tensor.shape) if side in SIDES else None
        if theirs is not None:
            yield name, tensor.float() * (scaling if side == "lora_B" else 1.0), theirs


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of all weights in the folder of a model or checkpoint, on the CPU."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)


def repack_heads(model: Any) -> list[str]:
    """Rebuilds what vLLM derives from the weights of heads and embeddings; returns their names."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    heads = [(name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)]
    for _, module in heads:
        module.quant_method.process_weights_after_loading(module)
    return [name for name, _ in heads]


def prepare() -> None:
    """Prepares a worker process for a server's model; further calls have no effect."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from vlrl.engine.vllm.cpu_patches import widen_heads

    widen_heads()
    with contextlib.suppress(ValueError):
        get_model_loader(LoadConfig(load_format=EMPTY))
        return
    register_loader(EMPTY, lambda model: [parameter.data.zero_() for parameter in model.parameters()])


def register_loader(name: str, load: Callable[[Any], Any]) -> None:
    """Registers a load format of vLLM in which `load(model)` sets the weights, without reading files.

    vLLM's "dummy" would also fill buffers that no checkpoint holds.
    """
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
