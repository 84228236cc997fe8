"""Sets the pixel limits of image and video processors, depending on the processor's class.

The class decides, not the model family: several families share a class, and an unknown family may use a known class."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vlrl.errors import ConfigError
from vlrl.models.families import Family

if TYPE_CHECKING:
    from vlrl.config.schema import ModelSettings

_log = logging.getLogger(__name__)


def set_pixel_limits(processor: Any, family: Family, settings: ModelSettings) -> None:
    """Limits the area in pixels to which images, video frames and videos are resized, as the settings ask. A setting of
    None keeps the processor's default, as far as the other limits allow. Raises ConfigError if a limit is set that vlrl
    does not support for the processor's class."""
    images: Any = processor.image_processor
    videos: Any = getattr(processor, "video_processor", None)
    limit_images, limit_frames = _IMAGE_LIMITS.get(_class_of(images)), _FRAME_LIMITS.get(_class_of(videos))
    for name in ("video_min_pixels", "video_max_pixels", "video_total_pixels"):
        value = getattr(settings, name)
        if value is not None and limit_frames is None:
            raise ConfigError(f"model.{name}={value}: this model ({family.model_type}) does not resize video frames by "
                              "their area. Remove the setting.")
    if {settings.min_pixels, settings.max_pixels} != {None}:
        if limit_images is None:
            raise ConfigError(f"model.{_given(settings)}: vlrl cannot set the image size of "
                              f"{type(images).__name__}. Remove the setting, and set the size in "
                              "preprocessor_config.json of the model's folder.")
        limit_images(images, settings)
        if videos is not None and limit_frames is None and "longest_edge" in dict(videos.size):
            _log.warning("model.%s only limits images: for videos of this model, %s keeps its default size.",
                         _given(settings), type(videos).__name__)
    if limit_frames:
        limit_frames(videos, settings)
    # as qwen-vl-utils does and transformers 5.22 will
    if videos is not None and getattr(videos, "cap_pixels_per_frame", False) is None:
        videos.cap_pixels_per_frame = True


# --- how each class of processors is told the size of an image, and of a frame ----------------------------------------


def _limit_area(processor: Any, settings: ModelSettings) -> None:
    _set_area(processor, settings.min_pixels, settings.max_pixels, "max_pixels")


def _limit_area_of_two(processor: Any, settings: ModelSettings) -> None:
    """Sets the limits for GLM-4V images. Each limit is doubled, because the processor counts an image as two equal
    frames."""
    frames = processor.temporal_patch_size
    low, high = (value and value * frames for value in (settings.min_pixels, settings.max_pixels))
    _set_area(processor, low, high, "max_pixels", frames)


def _limit_frames(processor: Any, settings: ModelSettings) -> None:
    _set_frame_area(processor, settings)
    if settings.video_total_pixels is not None:
        processor.cap_pixels_per_frame = True
        processor.max_video_tokens = (settings.video_total_pixels + 0.5) / (0.9 * _side(processor) ** 2)  # it uses 0.9
        _below_its_cap(processor, settings.frame_pixels[1])


def _limit_all_frames(processor: Any, settings: ModelSettings) -> None:
    """Sets the limits for Qwen3-VL videos. The processor limits only the total area of all frames, so the lower limit
    of the settings applies to the whole video. The processor divides its upper limit among the frames, so the upper
    limit is set for the largest number of frames. A cap per frame keeps the few frames of a short video from
    becoming larger than the setting allows."""
    _set_frame_area(processor, settings)
    high, total = settings.frame_pixels[1], settings.video_total_pixels
    if high is not None:
        processor.max_video_tokens = max(1, high // _side(processor) ** 2)
        processor.size = dict(processor.size) | {"longest_edge": high * settings.video_max_frames}
        _below_its_cap(processor, high)
    if total is not None:
        processor.size = dict(processor.size) | {"longest_edge": 2 * total}  # both of two merged frames count
    if high is not None or total is not None:
        processor.cap_pixels_per_frame = True


def _set_frame_area(processor: Any, settings: ModelSettings) -> None:
    low, high = settings.frame_pixels
    _set_area(processor, low, high, "max_pixels" if settings.video_max_pixels is None else "video_max_pixels")


def _set_area(processor: Any, low: int | None, high: int | None, name: str, frames: int = 1) -> None:
    side, size = _side(processor), dict(processor.size)
    least = frames * side**2
    _refuse(high // frames if high is not None and high < least else None, name,
            f"one of its visual tokens is {side}x{side} pixels; allow at least {side**2}")
    if low is not None:
        size |= {"shortest_edge": low, "longest_edge": max(low, size["longest_edge"])}
    if high is not None:
        size |= {"shortest_edge": min(high, size["shortest_edge"]), "longest_edge": high}
    processor.size = size


def _side(processor: Any) -> int:
    return processor.patch_size * processor.merge_size


def _below_its_cap(processor: Any, high: int | None) -> None:
    """Lowers the processor's lower limit to at most high / 1.05, where `high` is the upper limit of a frame. The
    processor raises its cap per frame to 1.05 times the lower limit, so the cap could otherwise exceed `high`."""
    size = dict(processor.size)
    if high is not None:
        processor.size = size | {"shortest_edge": min(size["shortest_edge"], int(high / 1.05))}


def _limit_longest_edge(processor: Any, settings: ModelSettings) -> None:
    tile = processor.max_image_size["longest_edge"]
    _refuse(settings.min_pixels, "min_pixels", "its images are always resized to the same longest edge")
    tiles = int(((settings.max_pixels or 0) / tile**2) ** 0.5)
    _refuse(settings.max_pixels if tiles == 0 else None, "max_pixels", f"its tiles are {tile}x{tile}; allow at least "
            f"{tile**2}")
    processor.size = {"longest_edge": min(tiles * tile, processor.size["longest_edge"])}
    processor.do_image_splitting = processor.do_image_splitting and tiles > 1


def _limit_tilings(processor: Any, settings: ModelSettings) -> None:
    low, high = settings.min_pixels or 0, settings.max_pixels or float("inf")
    allowed = [list(p) for p in processor.image_grid_pinpoints if low <= p[0] * p[1] <= high]
    areas = sorted(h * w for h, w in processor.image_grid_pinpoints)
    _refuse(None if allowed else settings.max_pixels or settings.min_pixels, _given(settings).partition("=")[0],
            f"none of its tilings has such an area; the areas are {areas[0]} to {areas[-1]} pixels")
    processor.image_grid_pinpoints = allowed


def _limit_tiles(processor: Any, settings: ModelSettings) -> None:
    tile = processor.size["height"] * processor.size["width"]
    if settings.max_pixels is not None:
        _refuse(settings.max_pixels if settings.max_pixels < tile else None, "max_pixels",
                f"one of its tiles has {tile} pixels; allow at least {tile}")
        processor.max_patches = settings.max_pixels // tile
        processor.min_patches = min(processor.min_patches, processor.max_patches)
    if settings.min_pixels is not None:
        processor.min_patches = max(1, -(-settings.min_pixels // tile))
        processor.max_patches = max(processor.max_patches, processor.min_patches)


def _refuse(value: int | None, name: str, why: str) -> None:
    if value is not None:
        raise ConfigError(f"model.{name}={value} does not fit this model: {why}. Change or remove the setting.")


def _given(settings: ModelSettings) -> str:
    name = "min_pixels" if settings.max_pixels is None else "max_pixels"
    return f"{name}={getattr(settings, name)}"


def _class_of(processor: Any) -> str:
    return re.sub("(Pil|Fast)$", "", type(processor).__name__)


_IMAGE_LIMITS: dict[str, Callable[[Any, ModelSettings], None]] = {
    "Qwen2VLImageProcessor": _limit_area, "Glm4vImageProcessor": _limit_area_of_two,
    "Glm46VImageProcessor": _limit_area_of_two, "SmolVLMImageProcessor": _limit_longest_edge,
    "Idefics3ImageProcessor": _limit_longest_edge, "LlavaOnevisionImageProcessor": _limit_tilings,
    "LlavaNextImageProcessor": _limit_tilings, "GotOcr2ImageProcessor": _limit_tiles}
_FRAME_LIMITS: dict[str, Callable[[Any, ModelSettings], None]] = {
    "Qwen2VLVideoProcessor": _limit_frames, "Qwen3VLVideoProcessor": _limit_all_frames}
