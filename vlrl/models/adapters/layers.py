"""Selects the linear layers of a model that get a LoRA adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from vlrl.errors import ConfigError, did_you_mean
from vlrl.models.families import Family, Part

_PARTS: dict[str, tuple[Part, ...]] = {"language": ("language",), "all_linear": ("language", "merger"),
                                       "vision_language": ("language", "merger", "vision")}


def adapted_layers(model: Any, family: Family, target: str | Sequence[str]) -> list[str]:
    """Names of the linear layers that model.lora.target selects; lm_head is never among them. The target lists parts of
    the model, module names (or their endings), or regular expressions of full names. Raises ConfigError if one of them
    selects no layer."""
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    if isinstance(target, str) and target in _PARTS:
        chosen = {n for n in layers if family.part_of(n) in _PARTS[target]}
    else:
        chosen = set().union(*(_named(layers, word) for word in ([target] if isinstance(target, str) else target)))
    if not chosen:
        raise ConfigError(f"model.lora.target={target}: this model ({family.model_type}) has no linear layer in "
                          "these parts. Choose others, or module names")
    return [n for n in layers if n in chosen]


def _named(layers: Sequence[str], word: str) -> set[str]:
    found = {n for n in layers if f".{n}".endswith(f".{word}") and word}
    try:
        found = found or {n for n in layers if re.fullmatch(word, n)}
    except re.error as error:
        raise ConfigError(f"model.lora.target={word!r} is neither a module name nor a valid regular expression: "
                          f"{error}") from None
    if not found:
        ends = sorted({n.rpartition(".")[2] for n in layers if not n.rpartition(".")[2].isdigit()})
        raise ConfigError(f"model.lora.target={word!r}: no linear layer of the model has that name."
                          f"{did_you_mean(word, [*_PARTS, *ends])} Parts: {', '.join(_PARTS)}. Layers: "
                          f"{', '.join(ends)} (lm_head takes no adapter)")
    return found
