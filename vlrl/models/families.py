"""The differences between model families. No other module depends on the name of a family.

A Family describes a model's box convention, vision tokens, module names and rotary positions. `family_of(config)`
selects a Family by the `model_type` of the model's config. For an unknown type the Family is derived from the config,
and the model is trained in padded rows instead of prefix-shared rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vlrl.config.registry import Table
from vlrl.errors import ConfigError
from vlrl.models.chat_template import ChatTemplate

if TYPE_CHECKING:
    import torch

Part = Literal["language", "merger", "vision", "audio"]
"""A part of a model. The part "audio" is never trained, because no prompt contains sound."""
_FORMS = Table({name: f"vlrl.models.media_forms:{name}" for name in ("clips_of_any_length", "unknown_family_inputs")})
"""Functions that prepare media for a model's forward. clips_of_any_length is for LLaVA-OneVision. unknown_family_inputs
is for unknown families such as GLM-4V (one token for images and videos) and Gemma 4 (which counts frames)."""
_INSIDE = re.compile(r"merger|projector|connector")
"""Matches the names of modules inside a vision tower that project the tower's features into the language model."""


@dataclass(frozen=True)
class Family:
    """Properties of one family of vision-language models."""

    model_type: str
    coordinates: str  # the convention for bounding boxes that the model was trained on; see data/coordinates.py
    vision_tokens: tuple[str, ...] = ()
    """Tokens that represent or enclose visual input. A completion may not contain them."""
    vision: tuple[str, ...] = ("vision_tower.", "vision_model.", "visual.", "vision_encoder.")
    """Fragments of module paths that identify the vision tower."""
    mergers: tuple[str, ...] = ("multi_modal_projector.", "connector.", "merger.", "image_newline.", "projector.")
    """Fragments of module paths that identify the projection of vision features into the language model."""
    mrope: bool = False  # whether rotary positions have three rows (time, height, width), as in Qwen2-VL
    grids: bool = False
    """Whether the processor returns the number of patches (time, height, width) of every image and video."""
    videos: bool = True  # whether the model accepts videos, if its processor does
    shared: bool = True
    """Whether the completions of a group can share one copy of the prompt (packing.py). Otherwise rows are padded."""
    nested: tuple[str, ...] = ()  # processor inputs that must be a list per prompt: "images", "videos"
    exclusive_media: bool = False
    """Whether images and videos use the same input tensor, so that a prompt cannot contain both."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for the processor's apply_chat_template."""
    forms: str = ""
    """Name of the function in media_forms that prepares media for the model's forward; "" if none is needed."""
    answer_types: Mapping[str, int] = field(default_factory=dict)
    """Token types of completions in the model's inputs: {name of the input: type}. An input that is not listed has type
    0. See Prompt.aligned_answer."""
    other_ids: tuple[int, ...] = ()  # ids of vision tokens whose text is unknown

    module_parts: tuple[tuple[str, Part], ...] = ()
    """(prefix of module names, part of the model), longest prefix first. Only for models of unknown type."""

    def part_of(self, name: str) -> Part:
        """The part of the model that contains the parameter or module `name`."""
        name = f"{name}."
        if self.module_parts:
            return self._place_of(name.removeprefix("base_model.model."))
        if any(m in name for m in self.mergers):
            return "merger"
        return "vision" if any(v in name for v in self.vision) else "language"

    def _place_of(self, name: str) -> Part:
        place, part = next((found for found in self.module_parts if name.startswith(found[0])), ("", "merger"))
        if part == "vision":
            return "merger" if _INSIDE.search(name, len(place)) else part
        if part == "merger":
            return "audio" if "audio" in name else "vision" if any(v in name for v in self.vision) else part
        return part

    @property
    def known(self) -> bool:
        """Whether the family is in the table FAMILIES. Otherwise it was derived from a model's config."""
        return self.model_type in FAMILIES

    def vision_ids(self, processor: Any) -> list[int]:
        """Sorted ids of the vision tokens in the processor's tokenizer."""
        vocabulary = processor.tokenizer.get_vocab()
        ids = {*self.other_ids, *(vocabulary[t] for t in self.vision_tokens if t in vocabulary)}
        if not self.known:
            ids |= {*getattr(processor, "image_token_ids", ()), *getattr(processor, "video_token_ids", ())} - {None}
        return sorted(ids)

    def end_id(self, processor: Any) -> int:
        """Id of the token with which the chat template ends a turn, and which ends a completion. This is the
        tokenizer's EOS token if the template writes no such token. The two differ in some models (Gemma 3)."""
        tokenizer, answer = processor.tokenizer, "There it is."
        turns = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": answer}]
        try:
            text = ChatTemplate(processor, self.template)(turns)
        except Exception:  # whatever a template's code raises; some refuse a given answer
            return tokenizer.eos_token_id
        rest = text.rpartition(answer)[2].lstrip() if answer in text else ""
        closing = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        longest = max((token for token in closing if rest.startswith(token)), key=len, default=tokenizer.eos_token)
        return closing.get(longest, tokenizer.eos_token_id)

    def encode(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the model's forward, with media in a form that the forward accepts."""
        return _FORMS[self.forms](model, inputs) if self.forms else inputs

    def positions(self, model: Any, ids: torch.Tensor, types: torch.Tensor | None,
                  mm: Mapping[str, torch.Tensor]) -> np.ndarray:
        """[R, T] int64 rotary positions of one sequence, R = 3 with M-RoPE, else 1. They come from the model's own rope
        index, with a correction for text after a video. `ids` and `types` are [1, T]; a type of 1 marks an image token,
        2 a video token. Media may be anywhere in the sequence."""
        rows = 3 if self.mrope else 1
        grids = {k: v for k, v in mm.items() if k.endswith("grid_thw") or k == "second_per_grid_ts"}
        if not self.mrope or not grids:
            return np.broadcast_to(np.arange(ids.shape[1], dtype=np.int64), (rows, ids.shape[1])).copy()
        inner = getattr(model, "model", model)
        positions, _ = inner.get_rope_index(ids, mm_token_type_ids=types, **grids)
        return _text_after_media(positions[:, 0].numpy().astype(np.int64), types)

    def processed_sizes(self, processor: Any, mm: Mapping[str, torch.Tensor],
                        kinds: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """(width, height) in pixels of each resized image and video, in the prompt's order, from the processor's patch
        grids. () if the processor returns no patch grids. `kinds`: for each medium "image" or "video"."""
        units = [getattr(processor, f"{kind}_processor", None) for kind in {*kinds}]
        if not self.grids and (self.known or not all(hasattr(unit, "patch_size") for unit in units)
                               or len({"image_grid_thw", "video_grid_thw"} & mm.keys()) < len(units)):
            return ()
        grids = {kind: iter(mm[key].tolist()) for kind, key in
                 (("image", "image_grid_thw"), ("video", "video_grid_thw")) if key in mm}
        out = []
        for kind in kinds:
            unit = processor.image_processor if kind == "image" else processor.video_processor
            _, h, w = next(grids[kind])
            out.append((w * unit.patch_size, h * unit.patch_size))
        return tuple(out)


def _text_after_media(positions: np.ndarray, types: torch.Tensor | None) -> np.ndarray:
    """Changes positions [3, T] so that the token after a video follows the video's last frame, as in the training of
    Qwen2-VL. transformers 5.19 starts text after the largest side of a frame, so text after a long video would
    overlap the video."""
    if types is None:
        return positions
    kinds, out = types[0].numpy(), positions.copy()
    for end in np.flatnonzero((kinds[1:] == 0) & (kinds[:-1] != 0)) + 1:
        begin = int(np.flatnonzero(kinds[:end] == 0)[-1]) + 1 if (kinds[:end] == 0).any() else 0
        out[:, end:] += max(0, int(out[:, begin:end].max()) + 1 - int(out[:, end].min()))
    return out


def sync_tilings(model: Any, processor: Any) -> None:
    """Copies the processor's list of image tilings, which pixel limits may have changed, to the model's config."""
    pinpoints = getattr(processor.image_processor, "image_grid_pinpoints", None)
    if pinpoints and hasattr(model.config, "image_grid_pinpoints"):
        model.config.image_grid_pinpoints = [list(p) for p in pinpoints]


# --- the table -------------------------------------------------------------------------------------------------------

_QWEN: dict[str, Any] = {
    "vision_tokens": ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    "vision": ("visual.",), "mergers": ("visual.merger.", "visual.deepstack_merger_list."), "mrope": True,
    "grids": True}
_QWEN3 = Family("qwen3_vl", coordinates="norm1000", **_QWEN)
_TILES = tuple(f"<row_{row}_col_{col}>" for row in range(1, 9) for col in range(1, 9))
_SMOLVLM = Family("smolvlm", coordinates="norm1000", vision=("vision_model.",), mergers=("connector.",),
                  vision_tokens=("<image>", "<video>", "<fake_token_around_image>", "<global-img>", *_TILES),
                  nested=("images", "videos"), exclusive_media=True,
                  template={"processor_kwargs": {"num_frames": 64}})  # not used; without it every call warns
FAMILIES = {f.model_type: f for f in (
    Family("qwen2_vl", coordinates="norm1000", **_QWEN),
    Family("qwen2_5_vl", coordinates="processed", **_QWEN),
    _QWEN3,
    replace(_QWEN3, model_type="qwen3_vl_moe"),
    _SMOLVLM,  # no convention for boxes is documented
    replace(_SMOLVLM, model_type="idefics3", nested=("images",), template={}, videos=False),  # the first SmolVLMs too
    Family("llava_onevision", coordinates="norm1", vision=("vision_tower.",),  # fractions, as in LLaVA's data
           mergers=("multi_modal_projector.", "image_newline."), vision_tokens=("<image>", "<video>"),
           nested=("images",), forms="clips_of_any_length"),
    Family("internvl", coordinates="norm1000", vision=("vision_tower.",), mergers=("multi_modal_projector.",),
           vision_tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<image>")),
)}


_MOST_LAYERS = 1000
_PREFIX_MODELS = ("paligemma",)
"""Types of models with bidirectional attention within the prompt (token type 0); completions have token type 1."""


def family_of(config: Any) -> Family:
    """The Family of a transformers model config, derived from the config for an unknown model type. Raises ConfigError
    for a model without image input, and for one that does not decode text and images in one sequence."""
    kind = getattr(config, "model_type", "?")
    if kind in FAMILIES:
        _check_depth(config, config.get_text_config())
        return FAMILIES[kind]
    others = f"Known families: {', '.join(FAMILIES)}; other image-text models of transformers work with padded rows."
    if getattr(config, "vision_config", None) is None:
        raise ConfigError(f"model.name: a model of type '{kind}' does not accept images. {others}")
    text = config.get_text_config()
    _check_depth(config, text)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "cross_attention_layers", None):
        raise ConfigError(f"model.name: a model of type '{kind}' reads images by cross-attention; vlrl only "
                          f"trains models that take images as tokens of the prompt. {others}")
    rope = getattr(text, "rope_parameters", None) or {}
    tokens = _vision_tokens(config)
    return Family(kind, coordinates="norm1000", mrope="mrope_section" in rope, shared=False,
                  videos=any("video" in name for name in tokens), forms="unknown_family_inputs",
                  answer_types={"token_type_ids": 1} if kind in _PREFIX_MODELS else {},
                  other_ids=tuple(sorted({*tokens.values()})))


def _check_depth(config: Any, text: Any) -> None:
    parts = {"": config, "text_config.": text, "vision_config.": getattr(config, "vision_config", None)}
    for where, part in parts.items():
        for name in ("num_hidden_layers", "num_layers", "depth"):
            count = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if isinstance(count, int) and count > _MOST_LAYERS:
                raise ConfigError(f"model.name: the config.json says {where}{name}={count}, but no model has more than "
                                  f"{_MOST_LAYERS:,} layers. Copy config.json again from the original model")


def family_in(model: Any) -> Family:
    """The Family of a transformers model. For a model of unknown type, the Family also lists the modules of each part
    (Family.module_parts)."""
    family = family_of(model.config)
    if family.known:
        return family
    names = {id(module): name for name, module in model.named_modules()}
    own: dict[str, Part] = {}
    modules: dict[Part, tuple[Any, ...]] = {
        "language": (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()),
        "audio": (model.get_encoder(modality="audio"),),
        "vision": (model.get_encoder(modality="video"), model.get_encoder(modality="image"))}
    for part, found in modules.items():
        own |= {f"{name}.": part for module in found if (name := names.get(id(module)))}
    if not {"language", "vision"} <= {*own.values()}:
        return family
    return replace(family, module_parts=tuple(sorted(own.items(), key=lambda found: -len(found[0]))))


def _vision_tokens(config: Any) -> dict[str, int]:
    return {key: value for part in (config, *(v for v in vars(config).values() if hasattr(v, "model_type")))
            for key, value in vars(part).items() if isinstance(value, int)
            and re.fullmatch(r"(boi|eoi|.*(image|video|vision|img).*)_token_(id|index)", key)}


def unknown_family_notice(family: Family) -> str:
    """A notice to the user that vlrl does not know the model's type; "" for a known family."""
    if family.known:
        return ""
    return (f"model type '{family.model_type}' is unknown to vlrl: rows are padded (no prefix sharing) and boxes "
            f"are requested as {family.coordinates} (task.coordinates); the loss is not affected")


# --- trainable parameters in words ------------------------------------------------------------------------------------


def parameters_by_part(named: Iterable[tuple[str, Any]], family: Family) -> str:
    """Describes how many trainable parameters each part of the model has, e.g. "language 1,200 and merger 30". `named`
    yields (name, parameter). With an adapter, the adapter's parameters are counted."""
    counts: dict[str, int] = {}
    for name, parameter in named:
        part = family.part_of(name)
        counts[part] = counts.get(part, 0) + getattr(parameter, "ds_numel", parameter.numel())
    return " and ".join(f"{part} {count:,}" for part, count in sorted(counts.items()))


def unused_layers(named: Iterable[tuple[str, Any]], family: Family, config: Any) -> str:
    """A notice about vision layers whose trainable tensors never change, because the model uses the output of an
    earlier layer (LLaVA 1.5: the last but one); "" if there are none. `named` yields (name, trainable tensor)."""
    chosen, tower = getattr(config, "vision_feature_layer", None), getattr(config, "vision_config", None)
    layers = getattr(tower, "num_hidden_layers", None)
    if chosen is None or layers is None:
        return ""
    each = [chosen] if isinstance(chosen, int) else list(chosen)
    read = max(layer if layer >= 0 else layers + 1 + layer for layer in each)
    inside = [name for name, _ in named if family.part_of(name) == "vision"]
    numbers = ((name, re.search(r"\.layers\.(\d+)\.", name)) for name in inside)
    idle = [name for name, found in numbers if (int(found[1]) >= read if found else "post_layernorm" in name)]
    if read >= layers or not idle:
        return ""
    return (f"{len(idle)} of {len(inside)} trained tensors of the vision tower come after layer {read} of {layers}, "
            f"whose output this model uses (vision_feature_layer={chosen}): they count as trained but never change")


HUB_NAMES = (
    *(f"Qwen/Qwen2-VL-{size}-Instruct" for size in ("2B", "7B", "72B")),
    *(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "32B", "72B")),
    *(f"Qwen/Qwen3-VL-{size}-{kind}" for size in ("2B", "4B", "8B", "32B") for kind in ("Instruct", "Thinking")),
    *(f"HuggingFaceTB/SmolVLM-{size}Instruct" for size in ("256M-", "500M-", "")),
    *(f"HuggingFaceTB/SmolVLM2-{size}-Instruct" for size in ("256M-Video", "500M-Video", "2.2B")),
    "HuggingFaceM4/Idefics3-8B-Llama3",
    *(f"llava-hf/llava-onevision-qwen2-{size}-ov-hf" for size in ("0.5b", "7b", "72b")),
    *(f"OpenGVLab/InternVL3-{size}-hf" for size in ("1B", "2B", "8B", "14B")),
)
"""Names of models on the Hub that are suggested for a misspelt name."""
