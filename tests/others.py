"""Tiny models of types that are in no table of vlrl: real configs and processors, `OTHERS[type](tokenizer)`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import public_templates as templates
from vlrl.tools.tiny import families as tiny_families
from vlrl.tools.tiny import models as tiny_models
from vlrl.tools.tiny.families import CHAT_TEMPLATE, HEADS, HIDDEN, INIT_RANGE, QWEN, ROPE, SIGHT, VISION, Tokens, _text

_TURN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>",
        "<|video|>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_QUESTION = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
"""PaliGemma has no chat template; it was taught questions of one turn."""
_GEMMA_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}

_GEMMA_4_NAMES = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
                  "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}


def _id(tokenizer: Any, token: str) -> int:
    return tokenizer.convert_tokens_to_ids(token)


def glm4v(tokenizer: Any, kind: str = "Glm4v", **experts: int) -> tuple[Any, Any]:
    """GLM-4.1V: M-RoPE, patch grids, videos as timed frames that use the token of images."""
    import transformers
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor
    ids: dict[str, Any] = {
        f"{kind}_{end}_token_id": _id(tokenizer, f"<|{word}_of_{kind}|>")
        for kind in ("image", "video") for end, word in (("start", "begin"), ("end", "end"))}
    sight = {**VISION, "patch_size": 14, "image_size": 112}
    rope = {**ROPE, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}
    config = getattr(transformers, f"{kind}Config")(
        text_config=_text(tokenizer, rope_parameters=rope, **experts),
        vision_config=sight, image_token_id=_id(tokenizer, "<|image|>"), video_token_id=_id(tokenizer, "<|video|>"),
        tie_word_embeddings=True, **ids)
    size: Any = {"shortest_edge": 4 * 28 * 28, "longest_edge": 8 * 112 * 112}
    processor = Glm4vProcessor(Glm4vImageProcessor(size=size), tokenizer, Glm4vVideoProcessor(size=size),
                               chat_template=templates.GLM_4V)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


def gemma3(tokenizer: Any) -> tuple[Any, Any]:
    """Gemma 3: token types make an image see all of itself; one layer of four sees further than a window."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor
    ids: dict[str, Any] = {f"{name}_index": _id(tokenizer, token) for name, token in _GEMMA_NAMES.items()}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3Config(
        text_config=_text(tokenizer, head_dim=HIDDEN // HEADS, query_pre_attn_scalar=HIDDEN // HEADS,
                          sliding_window=20, layer_types=kinds, num_key_value_heads=2),
        vision_config={**SIGHT, "image_size": 64, "patch_size": 8, "vision_use_head": False}, mm_tokens_per_image=16,
        initializer_range=INIT_RANGE, **ids)
    processor = Gemma3Processor(Gemma3ImageProcessor(size={"height": 64, "width": 64}), tokenizer, image_seq_length=16,
                                chat_template=templates.GEMMA_3)
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=INIT_RANGE)  # else zero
    return model, processor


def gemma4(tokenizer: Any) -> tuple[Any, Any]:
    """Gemma 4: pictures in their own shape, clips as timed frames; a projector that is named as an embedding."""
    import transformers as hf
    ids: dict[str, Any] = {f"{name}_id": _id(tokenizer, token) for name, token in _GEMMA_4_NAMES.items()
                           if name in ("boi_token", "eoi_token", "image_token")}
    config = hf.Gemma4Config(
        text_config=_text(tokenizer, head_dim=HIDDEN // HEADS, num_key_value_heads=2, sliding_window=20,
                          layer_types=["sliding_attention", "full_attention"] * 2,
                          hidden_size_per_layer_input=8, vocab_size_per_layer_input=len(tokenizer) + 64),
        vision_config={**SIGHT, "num_key_value_heads": 4, "head_dim": 16, "patch_size": 8,
                       "position_embedding_size": 64, "pooling_kernel_size": 2},
        video_token_id=_id(tokenizer, "<|video|>"), **ids)
    sizes = {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2}
    processor = hf.Gemma4Processor(hf.Gemma4AudioFeatureExtractor(), hf.Gemma4ImageProcessor(**sizes), tokenizer,
                                hf.Gemma4VideoProcessor(**sizes), chat_template=templates.GEMMA_4, image_seq_length=70)
    return hf.Gemma4ForConditionalGeneration(config), processor


def llava(tokenizer: Any) -> tuple[Any, Any]:
    """LLaVA 1.5: the last but one layer of CLIP."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    config = LlavaConfig(
        text_config=_text(tokenizer, model_type="llama", rope_parameters=ROPE),
        vision_config={**SIGHT, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        image_token_index=_id(tokenizer, "<image>"), image_seq_length=16)
    side: Any = {"height": 56, "width": 56}
    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side)
    processor = LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
                               num_additional_image_tokens=1, chat_template=templates.LLAVA_1_5)
    return LlavaForConditionalGeneration(config), processor


def mistral3(tokenizer: Any) -> tuple[Any, Any]:
    """Mistral Small 3.1: pictures in their own shape, filled up with zeros side by side; a token ends each line."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor
    config = Mistral3Config(
        text_config=_text(tokenizer, model_type="mistral", head_dim=HIDDEN // HEADS, rope_parameters=ROPE),
        vision_config={**SIGHT, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16},
        image_token_index=_id(tokenizer, "[IMG]"), tie_word_embeddings=True)
    images = PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14)
    processor = PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2,
                                 chat_template=templates.MISTRAL_3)
    return Mistral3ForConditionalGeneration(config), processor


def paligemma(tokenizer: Any) -> tuple[Any, Any]:
    """PaliGemma: the whole prompt sees all of itself; there is none without an image."""
    import transformers as hf
    images: Any = hf.SiglipImageProcessor(size={"height": 56, "width": 56})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, tokenizer, chat_template=_QUESTION)
    text = _text(tokenizer, model_type="gemma", head_dim=HIDDEN // HEADS, rope_parameters={**ROPE})
    config = hf.PaliGemmaConfig(
        text_config=text, projection_dim=HIDDEN, image_token_index=_id(tokenizer, "<image>"), tie_word_embeddings=True,
        vision_config={**SIGHT, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14,
                       "vision_use_head": False, "projection_dim": HIDDEN})
    return hf.PaliGemmaForConditionalGeneration(config), processor


def qwen3_5(tokenizer: Any, kind: str = "Qwen3_5", **experts: int) -> tuple[Any, Any]:
    """Qwen3.5: M-RoPE, and linear attention in three of four layers."""
    import transformers
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
    rope = {**ROPE, "mrope_interleaved": True, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}
    linear: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
              "linear_num_value_heads": 4}
    ids: dict[str, Any] = {f"{name}_token_id": _id(tokenizer, f"<|{token}|>") for name, token in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}
    config = getattr(transformers, f"{kind}Config")(
        text_config=_text(tokenizer, head_dim=HIDDEN // HEADS, rope_parameters=rope, **linear, **experts),
        vision_config={**VISION, "patch_size": 8, "num_position_embeddings": 64}, tie_word_embeddings=True, **ids)
    size: Any = {"shortest_edge": 1024, "longest_edge": 64 * 64}
    images = Qwen2VLImageProcessor(size=size, patch_size=8)
    videos = Qwen3VLVideoProcessor(size={**size, "longest_edge": 16 * 64 * 64}, patch_size=8)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model, Qwen3VLProcessor(images, tokenizer, videos, chat_template=templates.QWEN_3_5)


def qwen3_5_moe(tokenizer: Any) -> tuple[Any, Any]:
    """Qwen3.5 with experts, one of which every token asks."""
    return qwen3_5(tokenizer, "Qwen3_5Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                   shared_expert_intermediate_size=32)


def glm4v_moe(tokenizer: Any) -> tuple[Any, Any]:
    """GLM-4.5V: GLM-4.1V with experts from the second layer on."""
    return glm4v(tokenizer, "Glm4vMoe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                 n_shared_experts=1, first_k_dense_replace=1)


def qwen3_vl_moe(tokenizer: Any) -> tuple[Any, Any]:
    """Qwen3-VL with experts; its processor and positions are those of Qwen3-VL."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
    model, processor = tiny_families.qwen3_vl(tokenizer)
    dense = model.config.to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {k: v for k, v in dense.pop("text_config").items() if k != "model_type"} | experts
    sight = {k: v for k, v in dense.pop("vision_config").items() if k != "model_type"}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=sight, image_token_id=dense["image_token_id"],
                              video_token_id=dense["video_token_id"], tie_word_embeddings=True,
                              vision_start_token_id=dense["vision_start_token_id"],
                              vision_end_token_id=dense["vision_end_token_id"])
    return Qwen3VLMoeForConditionalGeneration(config), processor


RELATIVES: dict[str, tuple[Tokens, Callable[[Any], tuple[Any, Any]]]] = {"qwen3_vl_moe": (QWEN, qwen3_vl_moe)}
"""Types of the table that vlrl.tools.tiny.models does not build."""
OTHERS: dict[str, tuple[Tokens, Callable[[Any], tuple[Any, Any]]]] = {
    "glm4v": (Tokens(special=(*_TURN, *_GLM)), glm4v),
    "gemma3": (Tokens(special=(*_TURN, *_GEMMA), bos="<bos>", named=_GEMMA_NAMES), gemma3),
    "gemma4": (Tokens(special=(*_TURN, "<bos>", "<|turn>", "<turn|>", "<|video|>", *_GEMMA_4_NAMES.values()),
                      bos="<bos>", named=_GEMMA_4_NAMES), gemma4),
    "glm4v_moe": (Tokens(special=(*_TURN, *_GLM)), glm4v_moe),
    "llava": (Tokens(special=(*_TURN, "<image>")), llava),
    "mistral3": (Tokens(special=(*_TURN, "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]",
                                "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")), mistral3),
    "paligemma": (Tokens(special=(*_TURN, "<bos>", "<image>"), bos="<bos>"), paligemma),
    "qwen3_5": (QWEN, qwen3_5),
    "qwen3_5_moe": (QWEN, qwen3_5_moe),
}


def build(name: str, out: Path) -> Path:
    """Saves a random model and its processor to a folder."""
    import torch
    tokens, make = (OTHERS | RELATIVES)[name]
    tokenizer = tiny_models.make_tokenizer(tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, processor = make(tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.float().save_pretrained(out)
    processor.save_pretrained(out)
    return out
