"""The settings `model.*` and `train.*`: the model, its trainable parts, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlrl.config.base import Beta, Count, Fraction, NonNegative, Positive, Rate, Settings


class LoraSettings(Settings):
    """A LoRA adapter, which is trained instead of the full model."""

    rank: Count = Field(default=0, description="Rank of the adapter; 0 = full fine-tuning.")
    alpha: Positive = Field(default=32, description="Scale: the adapter's update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description=(
        "Dropout rate on the adapter's input. 0 (TRL: 0.05), because with dropout the trainer does not compute "
        "the probabilities that the sampler used."))
    target: str | tuple[str, ...] = Field(default="language", description=(
        "Layers with an adapter: a preset, or names of modules. Presets are language (all linear layers of the "
        "language model), all_linear (also those of the merger) and vision_language (also those of the vision "
        "tower). Or a module name or a list of names such as [q_proj, v_proj]; an entry may also be the end of a "
        "full name (language_model.layers.0.self_attn.q_proj) or a regular expression that matches full names. A "
        "name that exists in the language model and in the vision tower adapts both, and the run says so; an "
        "entry that matches no layer is an error that lists the names."))
    quantize: Literal["none", "nf4"] = Field(default="none", description=(
        "nf4: store frozen weights in 4 bits (QLoRA). Only layers with an adapter are stored so; embeddings, "
        "lm_head and layers without an adapter stay in model.dtype. Requires bitsandbytes."))

    @model_validator(mode="after")
    def _needs_adapter(self) -> LoraSettings:
        if self.quantize != "none" and self.rank == 0:
            raise ValueError(f"model.lora.quantize={self.quantize} stores weights in 4 bits, so they cannot be "
                             "trained, but model.lora.rank=0 trains them: add an adapter (model.lora.rank=16), or set "
                             "model.lora.quantize=none")
        return self


class ModelSettings(Settings):
    """The model, its trained parts, and the resolution of images and videos."""

    name: str = Field(default="", description="Hub name or folder of the model. For a run folder, its newest "
                      "checkpoint is used.")
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(default_factory=dict, description=(
        "Options of the chat template, e.g. {enable_thinking: false}. An option that the template does not read "
        "is an error."))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description=(
        "Compute type; auto = bfloat16 on CUDA, else float32. Frozen weights are stored in it; trainable weights "
        "stay in float32. float16 uses loss scaling, for GPUs without bfloat16."))
    train: tuple[Literal["language", "merger", "vision"], ...] = Field(default=("language",), description=(
        "Parts that are trained in full fine-tuning. The vision tower is frozen by default, unlike in TRL and "
        "EasyR1: that saves memory, and images like those of pretraining are seen well already. For medical, "
        "satellite or other unusual images set [language, merger, vision]."))
    lora: LoraSettings = LoraSettings()
    max_pixels: Positive | None = Field(default=None, description=(
        "Maximum pixels of an image after resizing; null = the processor's. The default is the processor's, as in "
        "TRL, because a limit changes what the model sees. Qwen processors allow 16,384 visual tokens for an "
        "image: the files in configs/models set 1280 (1003520 pixels for Qwen2.5-VL, 1310720 for Qwen3-VL), and "
        "SmolVLM one tile."))
    min_pixels: Positive | None = Field(
        default=None, description="Minimum pixels of an image after resizing; null = the processor's.")
    video_fps: float = Field(default=2.0, gt=0, description="Frames per second sampled from a video.")
    video_min_frames: Annotated[int, Field(ge=2)] = Field(
        default=4, description=(
            "Minimum number of frames sampled from a video. A video with fewer frames shows all of them."))
    video_max_frames: Annotated[int, Field(ge=2)] = Field(default=64, description="Maximum number of frames sampled "
                                           "from a video.")
    video_max_pixels: Positive | None = Field(
        default=None, description="Maximum pixels of a video frame; null = model.max_pixels.")
    video_min_pixels: Positive | None = Field(
        default=None, description="Minimum pixels of a video frame; null = model.min_pixels.")
    video_total_pixels: Positive | None = Field(default=None, description=(
        "Maximum pixels of all frames of a video together. Two merged frames count as one: the more frames, the "
        "smaller each. The minimum per frame takes precedence, as in qwen-vl-utils."))
    gradient_checkpointing: bool | Literal["auto"] = Field(default="auto", description=(
        "Recompute activations in the backward pass; auto = on CUDA. It saves most of the memory of activations for "
        "about a third more computation in the update, and gives the same gradients. TRL and EasyR1 have it on; on a "
        "CPU memory is rarely short."))
    feature_cache_mib: Count = Field(default=0, description=(
        "Host memory (MiB) for vision features; 0 = off. Each image or video is encoded once; the least recently "
        "used are dropped first. Requires a frozen vision tower and merger."))

    @property
    def frame_pixels(self) -> tuple[int | None, int | None]:
        """(smallest, largest) number of pixels of a video frame; None for no bound."""
        low, high = self.video_min_pixels, self.video_max_pixels
        return self.min_pixels if low is None else low, self.max_pixels if high is None else high

    def recomputes(self, device: str) -> bool:
        """Whether activations are recomputed in the backward pass on a device of this type (cuda, cpu or mps)."""
        return device == "cuda" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @model_validator(mode="after")
    def _learns(self) -> ModelSettings:
        if not self.train and self.lora.rank == 0:
            raise ValueError("model.train=[] trains nothing: name at least one of language, merger and vision, "
                             "or train an adapter with model.lora.rank=16")
        return self

    @model_validator(mode="after")
    def _limits_leave_room(self) -> ModelSettings:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"model.min_pixels={self.min_pixels} is more than model.max_pixels={self.max_pixels}: "
                             "lower model.min_pixels or raise model.max_pixels")
        if self.video_min_frames > self.video_max_frames:
            raise ValueError(f"model.video_min_frames={self.video_min_frames} is more than "
                             f"model.video_max_frames={self.video_max_frames}: lower model.video_min_frames or raise "
                             "model.video_max_frames")
        low, high = self.frame_pixels
        if low and high and low > high and (self.video_min_pixels or self.video_max_pixels):
            raise ValueError(f"a video frame cannot have at least {low} and at most {high} pixels: change "
                             f"model.video_min_pixels={self.video_min_pixels} or model.video_max_pixels="
                             f"{self.video_max_pixels}")
        return self

    @model_validator(mode="after")
    def _cached_features_stay_true(self) -> ModelSettings:
        adapter = self.lora.rank > 0
        given = f"model.lora.target={self.lora.target}" if adapter else f"model.train=[{', '.join(self.train)}]"
        fits = self.lora.target == "language" if adapter else not {"merger", "vision"} & {*self.train}
        if self.feature_cache_mib and not fits:
            raise ValueError(f"model.feature_cache_mib={self.feature_cache_mib} caches the features of vision tower "
                             f"and merger, which must be frozen, but {given} trains one or both. Set "
                             f"{'model.lora.target=language' if adapter else 'model.train=[language]'}, or "
                             "model.feature_cache_mib=0")
        return self


class TrainSettings(Settings):
    """The optimizer, micro-batches, and the distribution of training over processes."""

    lr: float = Field(default=1e-6, gt=0, description=(
        "Peak learning rate. The default suits full fine-tuning, as in TRL and EasyR1; an adapter takes 1e-5, a "
        "tiny model 1e-4."))
    part_lr: dict[Literal["language", "merger", "vision"], Rate] = Field(
        default_factory=dict, description=(
        "Peak learning rate of single parts of the model. It takes the place of train.lr for that part."))
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description=(
        "Schedule of the learning rate after the warm-up. With constant (TRL: linear) a run can be lengthened "
        "later."))
    warmup: Fraction = Field(default=0.0, description="Share of steps over which the rate rises from 0.")
    min_lr_ratio: Fraction = Field(
        default=0.0, description="Final learning rate, as a share of the peak. For the linear and cosine schedules.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Betas of AdamW.")
    weight_decay: NonNegative = Field(default=0.0, description=(
        "Weight decay of AdamW, on matrices only. 0 (EasyR1: 0.01): at the learning rates of RL it would hardly "
        "act."))
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    tokens_per_batch: Positive = Field(default=8192, description="Packed tokens of a micro-batch, per process.")
    packing: Literal["shared", "padded"] = Field(default="shared", description=(
        "shared (prompt computed once per group) or padded. shared: a group's prompt, and any common beginning of "
        "its completions of at least 32 tokens, are computed once; padded: one padded row per completion, the "
        "reference implementation."))
    attention: Literal["auto", "merged", "masked", "varlen", "flex"] = Field(default="auto", description=(
        "Attention kernel of shared rows. All give the same result up to rounding. merged (CPU), varlen (CUDA, "
        "flash attention, 16 bits), flex (CUDA, FlexAttention) or masked (anywhere). auto = merged on a CPU, else "
        "masked."))
    sharding: Literal["auto", "none", "fsdp2", "zero2", "zero3"] = Field(default="auto", description=(
        "Sharding over processes: none, fsdp2, zero2 or zero3 (docs/scaling.md). none = each holds the complete "
        "model; fsdp2 = weights, gradients and optimizer state are sharded; zero3 = the same by DeepSpeed; zero2 "
        "= DeepSpeed without sharded weights. auto = as chosen by accelerate launch with --use_fsdp or "
        "--use_deepspeed, else none."))
    cpu_offload: bool = Field(default=False, description=(
        "Keep shards and optimizer state in main memory. The optimizer runs on the CPU; requires "
        "train.sharding=fsdp2."))
    gather: Literal["stored", "compute"] = Field(default="stored", description=(
        "Data type in which sharded weights are gathered. stored: the type in which they are stored, which gives the "
        "same numbers as an unsharded run; compute: model.dtype, which halves traffic and memory."))
    balance: bool = Field(default=True, description=(
        "Redistribute groups over processes for equal computation. This happens after scoring, with several "
        "processes."))
