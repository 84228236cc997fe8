"""What differs between model families. Nothing else in vlrl names one.

A Family says how the model writes coordinates, which token strings stand for visual input, how its parts are called,
and how it numbers positions. `family_of(config)` picks one by the `model_type` of the model's own config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vlrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from vlrl.config import ModelSettings

Part = Literal["language", "merger", "vision"]


@dataclass(frozen=True)
class Family:
    """Facts about one family of vision-language models."""

    model_type: str
    coordinates: str
    """How the model was taught to write boxes; see coordinates.py."""
    vision_tokens: tuple[str, ...]
    """Tokens that stand for visual input; an answer may not contain one."""
    vision: str = "visual."
    """Module path fragment of the vision tower ..."""
    mergers: tuple[str, ...] = ("visual.merger.", "visual.deepstack_merger_list.")
    """... and of what projects its features into the language model."""
    mrope: bool = True
    """Positions have three rows (time, height, width)."""
    video_area: Literal["frame", "video"] = "frame"
    """What the video processor's area limits are of: one frame, or all frames together."""

    def part_of(self, name: str) -> Part:
        """The part of the model that a parameter or module belongs to, by its name."""
        name = f"{name}."
        if any(m in name for m in self.mergers):
            return "merger"
        return "vision" if self.vision in name else "language"

    def vision_ids(self, tokenizer: Any) -> list[int]:
        """Ids of the family's vision tokens that this tokenizer knows."""
        known = tokenizer.get_vocab()
        return sorted(known[t] for t in self.vision_tokens if t in known)

    def positions(self, model: Any, ids: torch.Tensor, types: torch.Tensor | None,
                  mm: Mapping[str, torch.Tensor]) -> np.ndarray:
        """[R, T] int64 positions of one sequence by the model's own rope index; R = 3 with M-RoPE, else 1.

        `ids`, `types` are [1, T]; types mark image (1) and video (2) tokens. Media may stand anywhere in the sequence.
        """
        rows = 3 if self.mrope else 1
        grids = {k: v for k, v in mm.items() if k.endswith("grid_thw") or k == "second_per_grid_ts"}
        if not self.mrope or not grids:
            return np.broadcast_to(np.arange(ids.shape[1], dtype=np.int64), (rows, ids.shape[1])).copy()
        inner = getattr(model, "model", model)
        positions, _ = inner.get_rope_index(ids, mm_token_type_ids=types, **grids)
        return positions[:, 0].numpy().astype(np.int64)

    def processed_sizes(self, processor: Any, mm: Mapping[str, torch.Tensor], kinds: list[str]):
        """((width, height), visual tokens) of each media in order, read from the processor's own grids."""
        grids = {kind: iter(mm[key].tolist()) for kind, key in
                 (("image", "image_grid_thw"), ("video", "video_grid_thw")) if key in mm}
        out = []
        for kind in kinds:
            unit = processor.image_processor if kind == "image" else processor.video_processor
            t, h, w = next(grids[kind])
            out.append(((w * unit.patch_size, h * unit.patch_size), t * h * w // unit.merge_size**2))
        return out


_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
FAMILIES = {f.model_type: f for f in (
    Family("qwen2_5_vl", coordinates="processed", vision_tokens=_VISION),
    Family("qwen3_vl", coordinates="norm1000", vision_tokens=_VISION, video_area="video"),
)}


def family_of(config: Any) -> Family:
    """The Family of a transformers model config. Raises ConfigError for one that vlrl does not know."""
    kind = getattr(config, "model_type", "?")
    if kind not in FAMILIES:
        raise ConfigError(f"model.name: a model of type '{kind}' is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def set_pixel_limits(processor: Any, family: Family, settings: ModelSettings) -> None:
    """Sets the area limits of an image or one video frame after resizing, in pixels.

    None keeps the processor's own, as far as the other limit allows. Where the video processor knows only the area of
    all frames together, min_pixels is that of the whole video.
    """
    low, high = settings.min_pixels, settings.max_pixels
    for unit in (processor.image_processor, processor.video_processor):
        size = dict(unit.size)
        if low is not None:
            size |= {"shortest_edge": low, "longest_edge": max(low, size["longest_edge"])}
        if high is not None:
            size |= {"shortest_edge": min(high, size["shortest_edge"]), "longest_edge": high}
        unit.size = size
    if family.video_area == "video" and high is not None:
        _limit_frames(processor.video_processor, high, settings.video_max_frames)


def _limit_frames(unit: Any, high: int, frames: int) -> None:
    """At most `high` pixels a frame, by a video processor that shares one limit out among the frames.

    The limit is for the most `frames`; the cap keeps a short video from spending all of it on large frames. The
    processor lifts the cap to 1.05 times its lower limit.
    """
    size = dict(unit.size)
    unit.size = size | {"shortest_edge": min(size["shortest_edge"], int(high / 1.05)), "longest_edge": high * frames}
    unit.cap_pixels_per_frame = True
    unit.max_video_tokens = max(1, high // (unit.patch_size * unit.merge_size) ** 2)
