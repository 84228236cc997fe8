"""Describes the trainable parameters in words, for the first lines of a run's log and for the dry run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vlrl.models.families import Family


def parameters_by_part(named: Iterable[tuple[str, Any]], family: Family) -> str:
    """The number of trainable parameters of each part of the model, as text such as "language 1,200 and merger 30".
    With an adapter, its parameters are counted."""
    counts: dict[str, int] = {}
    for name, parameter in named:
        part = family.part_of(name)
        counts[part] = counts.get(part, 0) + getattr(parameter, "ds_numel", parameter.numel())
    return " and ".join(f"{part} {count:,}" for part, count in sorted(counts.items()))


def unused_layers(named: Iterable[tuple[str, Any]], family: Family, config: Any) -> str:
    """A notice about vision layers whose trainable tensors never change, because the model reads the features of an
    earlier layer (LLaVA 1.5: the last but one); "" if there are none."""
    chosen, tower = getattr(config, "vision_feature_layer", None), getattr(config, "vision_config", None)
    layers = getattr(tower, "num_hidden_layers", None)
    if chosen is None or layers is None:
        return ""
    each = [chosen] if isinstance(chosen, int) else list(chosen)
    read = max(layer if layer >= 0 else layers + 1 + layer for layer in each)
    inside = [name for name, _ in named if family.part_of(name) == "vision"]
    numbers = ((name, re.search(r"\.layers\.(\d+)\.", name)) for name in inside)
    idle = [name for name, found in numbers if (int(found[1]) >= read if found else "post_layernorm" in name)]
    if read >= layers or not idle:
        return ""
    return (f"{len(idle)} of {len(inside)} trained tensors of the vision tower come after layer {read} of {layers}, "
            f"whose output this model uses (vision_feature_layer={chosen}): they count as trained but never change")
