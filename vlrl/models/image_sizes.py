"""Predicts from the size of an image whether a model's processor refuses the image. Imports transformers lazily."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError

Size = tuple[int, int]
_ORDINARY = 20
"""Limit of usual image sizes. Every processor accepts an image whose shorter side has at least this number of pixels,
if the longer side is at most this number of times as long."""


def image_refusal(settings: ModelSettings, usual: Callable[[Size], str]) -> Callable[[Size], str]:
    """A function that maps the (width, height) of an image to the reason why the model's image processor refuses it, or
    "". The processor is loaded at the first unusual size. If it cannot be loaded, the function `usual` decides."""

    @cache
    def unit() -> Any:
        from transformers import AutoImageProcessor

        from vlrl.models.loading import resolve

        try:
            return AutoImageProcessor.from_pretrained(resolve(settings.name), trust_remote_code=False)
        except (ConfigError, OSError, ValueError, ImportError):  # reported when the model is loaded
            return None

    @cache
    def refusal(size: Size) -> str:
        if min(size) >= _ORDINARY and max(size) <= _ORDINARY * min(size):
            return ""
        if unit() is None:
            return usual(size)
        try:
            _ask(unit(), size)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return (f"the image processor of model.name={settings.name!r} refuses an image of {size[0]}x{size[1]} "
                    f"pixels ({error})")
        return ""

    return refusal


def _ask(unit: Any, size: Size) -> None:
    count = getattr(unit, "get_number_of_image_patches", None)
    if count:
        count(size[1], size[0])
    else:
        from PIL import Image

        unit(images=[Image.new("RGB", size)], return_tensors="np")
