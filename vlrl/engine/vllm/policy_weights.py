"""Exports a policy's weights for other programs: under the names that save_pretrained uses, with adapters merged.

The policy's tensors are never modified. Under FSDP all processes iterate in the same order, and each tensor is gathered
when it is reached."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlrl.models.policy import Policy

SHARD = 4 * 2**30  # maximum size of a weights file in bytes
_LAYER = re.compile(r"(.*?\.\d+\.)?")
Named = Iterator[tuple[str, torch.Tensor]]


def adapted_layers(policy: Policy) -> dict[str, Any]:
    """The layers that have a LoRA adapter, by their module names in the transformers model; {} without adapters."""
    if not policy.lora:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in policy.base.named_modules() if isinstance(module, LoraLayer)}


def saved_tensors(policy: Policy, merge: bool = True) -> Named:
    """Yields (name, tensor) of every weight, without gradient. With `merge`, adapters are merged into the weights.
    Unchanged tensors are the policy's own memory: never write to them. Tied weights are yielded once, and 4-bit weights
    are dequantized. Tensors of the same layer are yielded consecutively, which keeps memory low."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, part in itertools.groupby(_tensors(policy, merge), key=lambda pair: _LAYER.findall(pair[0])[0]):
        yield from revert_weight_conversion(policy.base, dict(part)).items()


@torch.no_grad()
def _tensors(policy: Policy, merge: bool) -> Named:
    base, layers = policy.base, adapted_layers(policy)
    for name, tensor in itertools.chain(base.named_parameters(), _persistent_buffers(base)):
        prefixes = itertools.accumulate(name.split("."), "{}.{}".format)
        owner = next((layers[prefix] for prefix in prefixes if prefix in layers), None)
        if owner is None:
            yield name, _plain(tensor, policy)
        elif ".base_layer." in name:
            plain = _plain(tensor, policy)
            is_weight = merge and name.endswith(".base_layer.weight")
            yield name.replace(".base_layer.", "."), merged_weight(owner, plain) if is_weight else plain


@torch.no_grad()
def merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The layer's weight with its active adapters merged, as a new float32 tensor."""
    total = weight.float()
    if layer.merged or layer.disable_adapters:
        return total
    for name in layer.active_adapters:
        variant = layer.lora_variant.get(name)
        if variant is not None:  # such as DoRA
            total = variant.merge_safe(layer, name, total)
            layer._caches.pop(f"{name}-weight_norm", None)
        elif name in layer.lora_A:
            a, b = (gathered(side[name].weight).float() for side in (layer.lora_A, layer.lora_B))
            delta = layer.scaling[name] * (b @ a)
            total = total + (delta.T if getattr(layer, "fan_in_fan_out", False) else delta)
    return total


def gathered(tensor: Any) -> torch.Tensor:
    """The full tensor, without gradient. A tensor that FSDP has sharded is gathered, which is a collective call."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def write_model(policy: Policy, folder: Path, merge: bool = True) -> None:
    """Writes config, processor and weights to a folder that vLLM or from_pretrained can load. Files of an earlier call
    are replaced. With merge=False, the weights are those of the base model, without the adapter."""
    write_config(policy, folder)
    if policy.base.can_generate():
        policy.base.generation_config.save_pretrained(folder)
    write_weights(policy, folder, merge)


def write_config(policy: Policy, folder: Path) -> None:
    """Writes the model's config and processor to a folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.base.config)
    config.architectures = config.architectures or [type(policy.base).__name__.removeprefix("FSDP")]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are written dequantized
    config.save_pretrained(folder)
    policy.processor.save_pretrained(folder)


def write_weights(policy: Policy, folder: Path, merge: bool = True, dtype: torch.dtype | None = None) -> list[Path]:
    """Writes the weights as safetensors files of at most SHARD bytes, with an index. Returns the paths of the files.
    merge: whether adapters are merged into the weights. dtype: dtype of floating-point weights; None = float32 for
    trainable weights, the policy's dtype for frozen weights."""
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    files: list[Path] = []

    def flush() -> None:
        if not shard:
            return
        path = folder / f"model-{len(files) + 1:05d}.safetensors"
        temporary = path.with_suffix(".part")
        save_file(shard, temporary, metadata={"format": "pt"})
        temporary.replace(path)
        files.append(path)
        where.update(dict.fromkeys(shard, path.name))
        shard.clear()

    size = 0
    for name, tensor in saved_tensors(policy, merge):
        stored = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        size += stored.nbytes
        if size > SHARD:
            flush()
            size = stored.nbytes
        stored = stored.cpu().contiguous()
        alone = stored.untyped_storage().nbytes() == stored.nbytes
        shard[name] = stored if alone else stored.clone()  # safetensors refuses views of one memory
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def write_adapter(policy: Policy, folder: Path) -> None:
    """Writes the adapter to a folder in PEFT's format. Also works under FSDP."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: gathered(p).cpu() for name, p in policy.model.named_parameters() if ".lora_" in name}
    state = get_peft_model_state_dict(policy.model, state_dict=state, save_embedding_layers=False)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "adapter_model.safetensors")
    policy.model.peft_config[policy.model.active_adapter].save_pretrained(str(folder))


def _plain(tensor: Any, policy: Policy) -> torch.Tensor:
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor.data, state).to(policy.dtype)
    return gathered(tensor)


def _persistent_buffers(base: Any) -> Named:
    for path, module in base.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
