"""Sizes of target boxes after the model's processor has resized their images. Imports torch only to query the
processor.

    scale_of(config)((1920, 1080))      # 0.5: the model sees half as many pixels in each direction"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlrl.checks.rule import default_refusal
from vlrl.config.schema import Config
from vlrl.errors import VlrlError
from vlrl.models.image_sizes import image_refusal
from vlrl.models.model_config import family_convention
from vlrl.rewards.boxes import is_number

Size = tuple[float, float]
Scale = Callable[[Size], float | None]
"""Function of an image's (width, height) that returns the factor by which the image is resized; None if unknown."""
FEW = 8.0  # A target box is too small if its shorter side has fewer pixels than this, a quarter of a visual token
_STEP = 32  # image sides are rounded to this for processors that need an actual image


@dataclass(frozen=True)
class PixelBudget:
    """Statistics of the sizes of target boxes after resizing. The size of a box is the length of its shorter side, in
    the pixels that the model sees."""

    targets: int
    smallest: float
    median: float
    few: int  # number of targets that have fewer than FEW pixels
    needed: int
    """The smallest model.max_pixels with which the size of every target is at least FEW pixels; 0 if no change is
    needed."""


def pixel_budget(rows: Sequence[Mapping[str, Any]], scale: Scale | None) -> PixelBudget | None:
    """Statistics of the target boxes in canonical rows after resizing by `scale`. None without `scale`, or if no row
    has both a box and a known image size."""
    sides: list[float] = []
    needed = 0.0
    for row in rows if scale else ():
        size: Any = (row.get("width"), row.get("height"))
        shorts = [side for b in _boxes(row) if (side := min(b[2] - b[0], b[3] - b[1])) > 0]
        if not shorts or not all(is_number(side) and side > 0 for side in size):
            continue
        try:
            factor = scale(size)  # pyright: ignore[reportOptionalCall]
        except ValueError:  # the processor rejects the image, e.g. for an extreme aspect ratio
            continue
        if factor is None:
            return None
        sides += [side * factor for side in shorts]
        if min(shorts) * factor < FEW:
            needed = max(needed, size[0] * size[1] * (FEW / min(shorts)) ** 2)
    if not sides:
        return None
    sides.sort()
    return PixelBudget(len(sides), sides[0], sides[len(sides) // 2], sum(side < FEW for side in sides), round(needed))


def scale_of(config: Config) -> Scale:
    """Returns a function that computes the scale at which the processor of the config's model resizes an image.

    The processor is loaded at the first call if the model is on this machine; otherwise `model.max_pixels` and
    `model.min_pixels` are used."""
    ask = cache(lambda: _processor_scale(config))

    @cache
    def scale(size: Size) -> float | None:
        if not 1 <= size[0] * size[1] <= config.limits.image_pixels:
            raise ValueError(f"an image of {size[0]}x{size[1]} pixels is not within limits.image_pixels")
        return ask()(size)

    return scale


def refusal_of(config: Config) -> Callable[[tuple[int, int]], str]:
    """Returns a function that maps an image size to the reason why the config's model rejects it ("" if the model
    accepts it). The function asks the processor if the model is on this machine."""
    try:
        family_convention(config.model.name)  # raises when the model is not here, and no network is asked
    except (VlrlError, OSError, ValueError, ImportError):
        return default_refusal
    return image_refusal(config.model, default_refusal)


def _processor_scale(config: Config) -> Scale:
    try:
        family_convention(config.model.name)
        return _of_processor(config)
    except (VlrlError, OSError, ValueError, ImportError):
        return lambda size: _of_limits(config, size)


def _of_limits(config: Config, size: Size) -> float | None:
    """The factor by which an image is resized to meet model.max_pixels and model.min_pixels; None if neither is set."""
    low, high = config.model.min_pixels, config.model.max_pixels
    if low is None and high is None:
        return None
    area = size[0] * size[1]
    return (min(max(area, low or 0), high or float("inf")) / area) ** 0.5


def _of_processor(config: Config) -> Scale:
    from transformers import AutoConfig

    from vlrl.models.families import family_of
    from vlrl.models.loading import load_processor, resolve

    family = family_of(AutoConfig.from_pretrained(resolve(config.model.name), trust_remote_code=False))
    unit = load_processor(config.model, family).image_processor
    count = getattr(unit, "get_number_of_image_patches", None)
    if family.grids and count:
        return lambda size: _length(count(max(1, round(size[1])), max(1, round(size[0]))) * unit.patch_size**2, size)
    tiled = cache(lambda width, height: _tiled_area(unit, width, height))
    return lambda size: _length(tiled(*(max(_STEP, round(side / _STEP) * _STEP) for side in size)), size)


def _tiled_area(image_processor: Any, width: int, height: int) -> float:
    """Number of pixels in the tiles that the image processor cuts an image into, without those of the thumbnail."""
    from PIL import Image

    shape = image_processor(images=[Image.new("RGB", (width, height))], return_tensors="np")["pixel_values"].shape
    tiles = int(shape[0] if len(shape) == 4 else shape[-4])
    return max(1, tiles - 1) * shape[-1] * shape[-2]


def _length(area: float, size: Size) -> float:
    return (area / (size[0] * size[1])) ** 0.5


def _boxes(row: Mapping[str, Any]) -> list[list[float]]:
    listed = row.get("boxes")
    boxes = [entry.get("box") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return [b for b in (*boxes, row.get("box")) if isinstance(b, list) and len(b) == 4 and all(map(is_number, b))]
