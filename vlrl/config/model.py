"""The settings `model.*` and `train.*`: what learns, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlrl.config.base import Beta, Count, Fraction, NonNegative, Positive, Rate, Settings


class LoraSettings(Settings):
    """A LoRA adapter instead of a full fine-tune."""

    rank: Count = Field(default=0, description="0 = full fine-tuning.")
    alpha: Positive = Field(default=32, description="Scale; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target: str | tuple[str, ...] = Field(
        default="language", description="language: the language model's linear layers; all_linear: these and the "
        "merger's; vision_language: these and the vision tower's. Or names of linear layers, as in [q_proj, v_proj], "
        "and regular expressions of whole names; those that are of no layer are refused.")
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4: the frozen weights under the adapter are kept in 4 bits (QLoRA); needs "
        "bitsandbytes. Embeddings, lm_head and layers without an adapter stay in model.dtype.")

    @model_validator(mode="after")
    def _needs_adapter(self) -> LoraSettings:
        if self.quantize != "none" and self.rank == 0:
            raise ValueError(f"model.lora.quantize={self.quantize} keeps frozen weights in 4 bits, but with "
                             "model.lora.rank=0 they are to be trained: add an adapter (model.lora.rank=16), or set "
                             "model.lora.quantize=none")
        return self


class ModelSettings(Settings):
    """The model, what of it learns, and how large it sees images and videos."""

    name: str = Field(default="", description="Hub name or folder of the model; of a run folder, its newest "
                      "checkpoint.")
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(
        default_factory=dict, description="Options that the model's chat template reads, e.g. {enable_thinking: "
        "false}; one that it does not read is refused.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute type and type of frozen weights; trained weights stay in float32. "
        "auto = bfloat16 on CUDA, else float32. float16, with loss scaling, is for GPUs without bfloat16.")
    train: tuple[Literal["language", "merger", "vision"], ...] = Field(
        default=("language",), description="Parts of a full fine-tune that learn.")
    lora: LoraSettings = LoraSettings()
    max_pixels: Positive | None = Field(default=None, description="Upper limit of an image after resizing, in pixels.")
    min_pixels: Positive | None = Field(default=None, description="Lower limit of an image after resizing, in pixels.")
    video_fps: float = Field(default=2.0, gt=0, description="Frames per second sampled from a video.")
    video_min_frames: Annotated[int, Field(ge=2)] = Field(
        default=4, description="Fewest frames sampled from a video that has so many.")
    video_max_frames: Annotated[int, Field(ge=2)] = Field(default=64, description="Most frames sampled from a video.")
    video_max_pixels: Positive | None = Field(
        default=None, description="Upper limit of a video frame after resizing, in pixels; null = model.max_pixels.")
    video_min_pixels: Positive | None = Field(
        default=None, description="Lower limit of a video frame after resizing, in pixels; null = model.min_pixels.")
    video_total_pixels: Positive | None = Field(
        default=None, description="Upper limit of all frames of a video together, in pixels, two merged frames counted "
        "as one: the more frames, the smaller each. Lower limits of a frame come first, as in qwen-vl-utils.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    feature_cache_mib: Count = Field(
        default=0, description="Host memory for the features of images and videos, in MiB: each is encoded once, and "
        "the least recently used leave first. Needs a vision tower and merger that do not learn; 0 = off.")

    @property
    def frame_pixels(self) -> tuple[int | None, int | None]:
        """Lower and upper limit of a video frame in pixels."""
        low, high = self.video_min_pixels, self.video_max_pixels
        return self.min_pixels if low is None else low, self.max_pixels if high is None else high

    @model_validator(mode="after")
    def _learns(self) -> ModelSettings:
        if not self.train and self.lora.rank == 0:
            raise ValueError("model.train=[]: nothing would learn; name at least one of language, merger and vision, "
                             "or train an adapter with model.lora.rank=16")
        return self

    @model_validator(mode="after")
    def _limits_leave_room(self) -> ModelSettings:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"model.min_pixels={self.min_pixels} is more than model.max_pixels={self.max_pixels}: "
                             "lower the one or raise the other")
        if self.video_min_frames > self.video_max_frames:
            raise ValueError(f"model.video_min_frames={self.video_min_frames} is more than model.video_max_frames="
                             f"{self.video_max_frames}: lower the one or raise the other")
        low, high = self.frame_pixels
        if low and high and low > high and (self.video_min_pixels or self.video_max_pixels):
            raise ValueError(f"a video frame has at least {low} and at most {high} pixels: change "
                             f"model.video_min_pixels={self.video_min_pixels} or model.video_max_pixels="
                             f"{self.video_max_pixels}")
        return self

    @model_validator(mode="after")
    def _cached_features_stay_true(self) -> ModelSettings:
        adapter = self.lora.rank > 0
        given = f"model.lora.target={self.lora.target}" if adapter else f"model.train=[{', '.join(self.train)}]"
        fits = self.lora.target == "language" if adapter else not {"merger", "vision"} & {*self.train}
        if self.feature_cache_mib and not fits:
            raise ValueError(f"model.feature_cache_mib={self.feature_cache_mib} keeps what the vision tower and the "
                             f"merger make of an image, but with {given} they learn. Set "
                             f"{'model.lora.target=language' if adapter else 'model.train=[language]'}, or "
                             "model.feature_cache_mib=0")
        return self


class TrainSettings(Settings):
    """The optimizer, and how much it takes at a time."""

    lr: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    part_lr: dict[Literal["language", "merger", "vision"], Rate] = Field(
        default_factory=dict, description="Learning rate of a part, instead of train.lr.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="After the warm-up.")
    warmup: Fraction = Field(default=0.0, description="Share of all steps over which the rate rises from 0.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Where linear and cosine end, as a share of the peak.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW, on matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    tokens_per_batch: Positive = Field(default=8192, description="Packed tokens per process and micro-batch.")
    packing: Literal["shared", "padded"] = Field(
        default="shared", description="shared: a group's prompt is computed once, and what its answers begin with in "
        "common, from 32 tokens on; padded: one row per answer (the oracle).")
    attention: Literal["auto", "merged", "masked", "varlen", "flex"] = Field(
        default="auto", description="Attention of shared rows, all equal up to rounding: merged (CPU), varlen (CUDA, "
        "flash attention, 16 bits), flex (CUDA, FlexAttention) or masked (anywhere). auto = merged on a CPU, else "
        "masked.")
    sharding: Literal["auto", "none", "fsdp2", "zero2", "zero3"] = Field(
        default="auto", description="With several processes: none = each holds the whole model; fsdp2 = weights, "
        "gradients and optimizer state are sharded over them (docs/scaling.md); zero3 = the same by DeepSpeed, "
        "zero2 without the weights. auto = what accelerate launch asks for by --use_fsdp or --use_deepspeed, else "
        "none.")
    cpu_offload: bool = Field(default=False, description="Shards and what the optimizer keeps of them stay in main "
                              "memory, where it steps; with train.sharding=fsdp2.")
    gather: Literal["stored", "compute"] = Field(
        default="stored", description="Type in which sharded weights are gathered. stored: as they are kept, with the "
        "numbers of a run without sharding; compute: model.dtype, half the traffic and memory of float32.")
    balance: bool = Field(
        default=True, description="With several processes: after scoring, groups move between them until each has as "
        "much to compute.")
