"""Counts the floating-point operations of a model's forward and backward passes, from its layers.

    cost = cost_model(model, family)              # the weights may be on the meta device
    cost.of(prompt=1000, patches=[3200], answers=[400] * 8)

Only useful operations are counted, as if each prompt and image were computed once: no recomputation under gradient
checkpointing, no padding, no repeated prompts. Per token, a matrix product takes 2 operations per weight in the forward
pass, 2 for the gradient of its input and 2 for the gradient of its weight. So full fine-tuning takes 6, and a frozen
layer under an adapter takes 4 (Kaplan et al., arXiv 2001.08361). Attention takes 4 operations per pair of positions,
layer and channel in the forward pass, and 8 in the backward pass. The output layer is counted only for completion
tokens.

Not counted: norms, activations, rotary embeddings, softmax, expert routing, the optimizer. Every decoder layer counts
as full causal attention, and the first layer as if its input had a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.models.families import Family


@dataclass(frozen=True)
class Products:
    """Sizes of the matrix products of a part of the model, counted as weights per token or image patch."""

    weights: float = 0.0
    trained: float = 0.0  # how many of the weights are trainable
    first: float = 0.0  # how many of the weights are applied to pixels, which need no gradient

    def operations(self, training: bool, flows: bool) -> float:
        """Operations per token: of the forward pass, or with `training` of forward and backward pass. `flows`: whether
        the gradient with respect to this part's inputs is needed."""
        forward = 2 * self.weights
        return forward + 2 * self.trained + 2 * (self.weights - self.first) * flows if training else forward


@dataclass(frozen=True)
class Cost:
    """Counts the operations of a model's passes over a group: one prompt with its media, and its completions.

    Arguments of all methods: `prompt` is the number of prompt tokens, visual tokens included. `answers` has the number
    of tokens of each completion. `patches` has the number of patches of each image, image tile, or video time step,
    because attention in the vision tower is limited to these units (see `patches_of`)."""

    language: Products
    head: Products
    merger: Products
    vision: Products
    attention: int  # attention channels (number of heads times head size), summed over the decoder layers
    sight: tuple[int, int]
    """Sums of attention channels over the vision layers with global attention, and over those with window attention."""
    window: float  # number of patches in a window of window attention
    merge: int  # number of patches per visual token

    def of(self, prompt: int, patches: Sequence[int] = (), answers: Sequence[int] = ()) -> float:
        """Operations of a forward and backward pass. Parts below all trainable parameters have no backward pass."""
        return self._sum(prompt, patches, answers, training=True)

    def forward(self, prompt: int, patches: Sequence[int] = (), answers: Sequence[int] = ()) -> float:
        """Operations of a forward pass, as for reference log-probabilities or, without `answers`, for prefill."""
        return self._sum(prompt, patches, answers, training=False)

    def decode(self, prompt: int, answers: Sequence[int]) -> float:
        """Operations of generating the completions once the KV cache of the prompt exists."""
        return self.forward(prompt, (), answers) - self.forward(prompt)

    def tower(self, patches: Sequence[int]) -> float:
        """Operations of a forward pass of the vision tower and merger."""
        return self.forward(0, patches)

    def _sum(self, prompt: int, patches: Sequence[int], answers: Sequence[int], training: bool) -> float:
        written, visual = sum(answers), sum(patches)
        pairs = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in answers)
        whole, windowed = sum(n * n for n in patches), sum(n * min(n, self.window) for n in patches)
        sees = visual > 0 and self.vision.trained > 0
        merges = sees or (visual > 0 and self.merger.trained > 0)
        learns = merges or self.language.trained + self.head.trained > 0
        return (self.language.operations(training, learns) * (prompt + written)
                + self.head.operations(training, learns) * written
                + self.merger.operations(training, merges) * visual / self.merge
                + self.vision.operations(training, sees) * visual
                + _attention(training and learns) * self.attention * pairs
                + _attention(training and sees) * (self.sight[0] * whole + self.sight[1] * windowed))


def _attention(backward: bool) -> int:
    """Operations per pair of positions and channel: two products in the forward pass, four in the backward pass."""
    return 12 if backward else 4


def cost_model(model: Any, family: Family) -> Cost:
    """The Cost of a transformers model, with or without PEFT's wrapper. Parameters that require a gradient count as
    trainable. No weight is read, so `model` may be on the meta device."""
    counted = _count(model, family)
    config = model.config
    text, vision = config.get_text_config(), config.vision_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", 0)
    channels = getattr(vision, "embed_dim", None) or vision.hidden_size
    whole = getattr(vision, "fullatt_block_indexes", None)
    full = depth if whole is None else len(whole)
    return Cost(**{part: counted.get(part, Products()) for part in ("language", "head", "merger", "vision")},
                attention=text.num_hidden_layers * text.num_attention_heads * width,
                sight=(channels * full, channels * (depth - full)),
                window=math.inf if whole is None else (vision.window_size // patch_side(vision)) ** 2,
                merge=merge_side(config) ** 2)


def _count(model: Any, family: Family) -> dict[str, Products]:
    import torch

    layer = model.get_output_embeddings()
    inside = {id(m) for m in layer.modules()} if layer is not None else set()
    text = model.config.get_text_config()
    sums: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        part = "head" if id(module) in inside else family.part_of(name)
        total = sums.setdefault(part, [0.0, 0.0, 0.0])
        first = isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d))
        for size, learns in _weights(module, first, getattr(text, "num_experts_per_tok", 0)):
            total[0] += size
            total[1] += size * learns
            total[2] += size * first
    return {part: Products(*values) for part, values in sums.items()}


def _weights(module: Any, patches: bool, experts: int) -> list[tuple[float, bool]]:
    """The matrix products of a module without its submodules, as (number of weights per token, whether trainable).
    patches: whether the module embeds patches. experts: number of experts per token; 0 if the module has none."""
    import torch

    if isinstance(module, torch.nn.Linear):  # a 4-bit weight has another shape than its layer
        return [(module.in_features * module.out_features, module.weight.requires_grad)]
    if patches:
        return [(module.weight.numel(), module.weight.requires_grad)]
    own = module.parameters(recurse=False) if experts else ()
    return [(p.numel() * experts / len(p), p.requires_grad) for p in own if p.ndim == 3]  # all experts in one tensor


def patches_of(mm: Mapping[str, Any], config: Any) -> tuple[int, ...]:
    """Number of patches of each image, image tile, or video time step in the media tensors `mm` of a Prompt; () without
    media."""
    grids = [row for name in ("image_grid_thw", "video_grid_thw") if name in mm for row in mm[name].tolist()]
    if grids:
        return tuple(h * w for t, h, w in grids for _ in range(t))
    out: list[int] = []
    for name in ("pixel_values", "pixel_values_videos"):
        if name in mm:
            *tiles, height, width = mm[name].shape
            side = patch_side(config.vision_config)
            out += [(height // side) * (width // side)] * math.prod(tiles[:-1])  # [..., tiles, channels, H, W]
    return tuple(out)


def patch_side(vision: Any) -> int:
    """Side length of a patch in pixels."""
    return vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]


def merge_side(config: Any) -> int:
    """Number of patches along each side of the square that is merged into one visual token."""
    shrinks = 1 / getattr(config, "downsample_ratio", 1)
    along = getattr(config.vision_config, "spatial_merge_size", None) or getattr(config, "scale_factor", shrinks)
    return round(along)
