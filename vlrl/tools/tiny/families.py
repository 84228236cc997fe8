"""Architectures of the tiny models: special tokens, chat template, model and processor of each family.

Config and processor classes are those of the family; only the sizes are small. `FAMILIES[name](tokenizer, max_pixels)`
returns a random model and its processor. `TOKENS[name]` are the special tokens that the family's tokenizer needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Special tokens of a family's tokenizer, in the order of the family's own tokenizer."""

    special: tuple[str, ...]  # the special tokens; <|endoftext|>, <|im_start|> and <|im_end|> come first
    eos: str = "<|im_end|>"
    pad: str = "<|endoftext|>"
    bos: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    """Attribute of the tokenizer -> special token; the processor reads its special tokens from these attributes."""


_TURN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NAMES = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end "
    "vision_start vision_end vision_pad image_pad video_pad"
)
QWEN = Tokens(special=tuple(f"<|{name}|>" for name in _NAMES.split()))
SMOLVLM = Tokens(
    special=(*_TURN, "<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
             "<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    bos="<|im_start|>",
    eos="<end_of_utterance>",
    pad="<|im_end|>",
)
LLAVA_ONEVISION = Tokens(special=(*_TURN, "<image>", "<video>"))
INTERNVL = Tokens(
    special=(*_TURN, *"<img> </img> <IMG_CONTEXT> <quad> </quad> <ref> </ref> <box> </box> <video>".split()),
    named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
           "video_token": "<video>"},
)

# Qwen's turns; a system turn only where the messages have one, so that prompts stay short.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTERNVL_TEMPLATE = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>\n"
)
# LLaVA-OneVision puts all images first, then all videos, then the text, whatever their order in the message.
LLAVA_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ '\n' + message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}<video>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

HIDDEN, LAYERS, HEADS = 96, 4, 4
INIT_RANGE = 0.06  # with 0.02 nothing is learned in minutes, and a random model's log-probabilities are flat
POSITION_STD = 0.7
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": HIDDEN}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": INIT_RANGE}
SIGHT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGHT |= {"initializer_range": INIT_RANGE}  # vision towers that see tiles of one fixed size
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _text(tokenizer: Any, **extra: Any) -> dict[str, Any]:
    """The config of the language model, which is the same in all families except for the entries `extra`."""
    return {"vocab_size": math.ceil(len(tokenizer) / 64) * 64, "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
            "max_position_embeddings": 4096, "initializer_range": INIT_RANGE, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id if tokenizer.bos_token else tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id, **extra}


# --- Qwen: pictures in their own shape, an area limit --------------------------------------------------------------


def _pixels(factor: int, max_pixels: int, frames: int = 1) -> dict[str, int]:
    """The ``size`` of a Qwen-VL processor: each image or frame has at least two by two merged patches of ``factor``
    pixels a side, and all ``frames`` frames together have at most ``max_pixels * frames`` pixels."""
    return {"shortest_edge": 4 * factor * factor, "longest_edge": max_pixels * frames}


def _qwen_top(tokenizer: Any) -> dict[str, Any]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    return {**ids, "tie_word_embeddings": True, "initializer_range": INIT_RANGE}


def qwen3_vl(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random Qwen3-VL and its processor. Patches of 8x8 pixels: a 64x64 image (default limit) has 16 visual tokens.
    """
    import torch
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    rope = {**ROPE, "mrope_interleaved": True, "mrope_section": [4, 4, 4]}
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, head_dim=HIDDEN // HEADS, rope_parameters=rope),
        vision_config={**VISION, "patch_size": 8, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        **_qwen_top(tokenizer),
    )
    limit = max_pixels or 64 * 64
    look = {"patch_size": 8, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(size=_pixels(16, limit), **look)
    videos = Qwen3VLVideoProcessor(size=_pixels(16, limit, 16), cap_pixels_per_frame=False, **look)
    processor = Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    model = Qwen3VLForConditionalGeneration(config)
    # A patch embedding starts twenty times larger than its position; at equal size, locating is learned much sooner.
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=POSITION_STD)
    return model, processor


def qwen2_5_vl(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random Qwen2.5-VL and its processor. Patches of 14x14 pixels, window attention in the first block: a 112x112
    image has 16 visual tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer, rope_parameters={**ROPE, "mrope_section": [4, 4, 4]}),
        vision_config={**VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **_qwen_top(tokenizer),
    )
    images, videos = _qwen2_processors(max_pixels)
    processor = Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    return Qwen2_5_VLForConditionalGeneration(config), processor


def qwen2_vl(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random Qwen2-VL and its processor. Patches of 14x14 pixels: a 112x112 image has 16 visual tokens."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

    sizes = {"depth": 2, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "hidden_size": HIDDEN, "patch_size": 14}
    config = Qwen2VLConfig(text_config=_text(tokenizer, rope_parameters={**ROPE, "mrope_section": [4, 4, 4]}),
                           vision_config={**sizes, "initializer_range": INIT_RANGE}, **_qwen_top(tokenizer))
    images, videos = _qwen2_processors(max_pixels)
    processor = Qwen2VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    return Qwen2VLForConditionalGeneration(config), processor


def _qwen2_processors(max_pixels: int | None) -> tuple[Any, Any]:
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = _pixels(28, max_pixels or 112 * 112)
    return Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False)


# --- the others: pictures cut into square tiles of one size -----------------------------------------------------------


def smolvlm(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random SmolVLM and its processor. Tiles of 64x64 have 16 visual tokens each; if there are several tiles, a
    thumbnail is added; a video frame is one tile.

    All tiles together have at most ``max_pixels`` (default: one tile). The chat template is the one that the processor
    falls back to if a message has a video."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    look = _smol_look(max_pixels)
    videos = SmolVLMVideoProcessor(**look, num_frames=64, fps=1)
    images = SmolVLMImageProcessor(**look, do_image_splitting=True)
    processor = SmolVLMProcessor(images, tokenizer, videos, image_seq_len=16, chat_template=DEFAULT_CHAT_TEMPLATE)
    return SmolVLMForConditionalGeneration(SmolVLMConfig(**_smol_config(tokenizer))), processor


def idefics3(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random Idefics3 (as the first SmolVLMs) and its processor. Tiles are as in ``smolvlm``; no video."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessor, Idefics3Processor
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    images = Idefics3ImageProcessor(**_smol_look(max_pixels), do_image_splitting=True)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=DEFAULT_CHAT_TEMPLATE)
    return Idefics3ForConditionalGeneration(Idefics3Config(**_smol_config(tokenizer))), processor


def _smol_look(max_pixels: int | None, tile: int = 64) -> dict[str, Any]:
    side = tile * max(1, math.isqrt(max_pixels or 0) // tile)
    return {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": tile}}


def _smol_config(tokenizer: Any) -> dict[str, Any]:
    return {"text_config": _text(tokenizer, model_type="llama", rope_parameters=ROPE),
            "vision_config": {**SIGHT, "image_size": 64, "patch_size": 8}, "scale_factor": 2,
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "pad_token_id": tokenizer.pad_token_id}


def llava_onevision(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random LLaVA-OneVision and its processor. Tiles of 48x48 have 9 visual tokens each, the full image has 9 more,
    and a video frame has 4. Each line of patches ends with one more token. All tiles together have at most
    ``max_pixels`` (default: two tiles)."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    tile, most = 48, max(1, (max_pixels or 2 * 48 * 48) // (48 * 48))
    grids = [[h * tile, w * tile] for h, w in itertools.product(range(1, most + 1), repeat=2) if h * w <= most]
    config = LlavaOnevisionConfig(
        text_config=_text(tokenizer, model_type="qwen2", rope_parameters=ROPE, tie_word_embeddings=True),
        vision_config={**SIGHT, "model_type": "siglip_vision_model", "image_size": tile, "patch_size": 16,
                       "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grids,
        tie_word_embeddings=True,
    )
    size = {"height": tile, "width": tile}
    processor = LlavaOnevisionProcessor(LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids), tokenizer,
                                        LlavaOnevisionVideoProcessor(size=size), num_image_tokens=9,
                                        vision_feature_select_strategy="full", chat_template=LLAVA_TEMPLATE)
    return LlavaOnevisionForConditionalGeneration(config), processor


def internvl(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """A random InternVL3.5 and its processor. Tiles of 64x64 have 16 visual tokens each; if there are several tiles, a
    thumbnail is added; a video frame is one tile.

    All tiles together have at most ``max_pixels`` (default: two tiles)."""
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    tile = 64
    config = InternVLConfig(
        text_config=_text(tokenizer, model_type="qwen3", head_dim=HIDDEN // HEADS, rope_parameters=ROPE),
        vision_config={**SIGHT, "image_size": tile, "patch_size": 8, "attention_bias": True},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16,
        tie_word_embeddings=True,
    )
    size = {"height": tile, "width": tile}
    most = max(1, (max_pixels or 2 * tile * tile) // (tile * tile))
    images = GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=most)
    processor = InternVLProcessor(
        images, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=16, chat_template=INTERNVL_TEMPLATE
    )
    return InternVLForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl,
                                                       "qwen2_vl": qwen2_vl, "smolvlm": smolvlm, "idefics3": idefics3,
                                                       "llava_onevision": llava_onevision, "internvl": internvl}
DEFAULT = next(iter(FAMILIES))
TOKENS: dict[str, Tokens] = {"qwen3_vl": QWEN, "qwen2_5_vl": QWEN, "qwen2_vl": QWEN, "smolvlm": SMOLVLM,
                             "idefics3": SMOLVLM, "llava_onevision": LLAVA_ONEVISION, "internvl": INTERNVL}
