"""Computes, before the forward pass, features of media that a model's forward cannot take directly (Family.forms)."""

from __future__ import annotations

from typing import Any

import torch


def clips_of_any_length(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs for a model whose forward only takes videos of equal length. If the videos have different
    lengths (a tuple of tensors), all videos and images of the batch are replaced by their features."""
    clips = inputs.get("pixel_values_videos")
    if not isinstance(clips, tuple):
        return inputs
    features = [model.get_video_features(clip, return_dict=True).pooler_output.flatten(0, 1) for clip in clips]
    encoded = {"video": _features(torch.cat(features)[None])}
    images = {k: inputs[k] for k in ("pixel_values", "image_sizes", "batch_num_images") if k in inputs}
    if images:
        encoded["image"] = model.get_image_features(**images, return_dict=True)
    rest = {k: v for k, v in inputs.items() if k not in images and k != "pixel_values_videos"}
    return {**rest, "mm_encoder_outputs": encoded}


def _media_of_one_token(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs for a model that uses one token for images and videos, and whose forward takes only images or
    only videos. If a batch has both, all media are replaced by their features, in the order of the text. The token
    types distinguish images (1) and videos (2)."""
    types = inputs.get("mm_token_type_ids")
    if types is None or not {"pixel_values", "pixel_values_videos"} <= inputs.keys():
        return inputs
    if (inputs["input_ids"][types == 2] != model.config.image_token_id).any():
        return inputs
    images = {k: inputs[k] for k in ("pixel_values", "image_grid_thw")}
    videos = {k: inputs[k] for k in ("pixel_values_videos", "video_grid_thw")}
    kinds = types[types > 0]
    places = torch.cat([(kinds == 1).nonzero(), (kinds == 2).nonzero()])[:, 0]
    features = torch.cat([*model.get_image_features(**images, return_dict=True).pooler_output,
                          *model.get_video_features(**videos, return_dict=True).pooler_output])
    encoded = {"image": _features((features[places.argsort()],))}
    rest = {k: v for k, v in inputs.items() if k not in images and k not in videos}
    return {**rest, "mm_encoder_outputs": encoded}


def _clips_with_counted_frames(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs in which features replace the videos that come with their number of frames, and the images in
    the same batch. In transformers 5.19 the forward of such a model loses the numbers of frames."""
    if "num_frames_per_video" not in inputs:
        return inputs
    reading = model if hasattr(model, "get_video_features") else model.model
    clips = {k: v for k, v in inputs.items() if k in ("pixel_values_videos", "video_position_ids",
                                                      "num_frames_per_video")}
    images = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_position_ids")}
    encoded = {"video": reading.get_video_features(**clips, return_dict=True)}
    if images:
        encoded["image"] = reading.get_image_features(**images, return_dict=True)
    rest = {k: v for k, v in inputs.items() if k not in clips and k not in images}
    return {**rest, "mm_encoder_outputs": encoded}


def unknown_family_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs for a model of unknown family (families.family_of). Media are replaced by their features if
    the model's forward cannot take them."""
    return _clips_with_counted_frames(model, _media_of_one_token(model, inputs))


def _features(pooled: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(pooler_output=pooled)
