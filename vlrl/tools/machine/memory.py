r"""Estimates the memory that a training process needs, before any weight is loaded.

    memory = estimate(config, AutoConfig.from_pretrained(config.model.name))
    print("\n".join(table(memory)))

Weights, gradients and optimizer state are exact: the model is built on the meta device and its parameters are counted.
Activations, logits and generation are estimated by formulas, for batches in which every answer is as long as
`rollout.max_new_tokens` allows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlrl.config.schema import Config, ModelSettings
from vlrl.engine.cache import ROOM
from vlrl.engine.capacity import MOST_ROWS, head_width, logit_bytes, token_bytes
from vlrl.models import loading
from vlrl.models.adapters import adapted_layers
from vlrl.models.families import Family, Part, family_in, family_of
from vlrl.models.flops import merge_side, patch_side
from vlrl.models.logprobs import chunk_rows
from vlrl.tools.play.episode_lengths import EpisodeLength, as_answers

GIB = 2**30
BAND = (0.7, 1.2)
"""Smallest and largest measured ratio of the actual peak of training memory to its estimate; see `estimate`."""
TEXT_TOKENS = 256  # number of text tokens that a prompt is assumed to have: a question with its instructions
IMAGE_PIXELS = 1_003_520
"""Assumed number of pixels in an image if `model.max_pixels` is not set: 1280 visual tokens of 28 x 28 pixels."""
SAVED = {4: 1.3, 2: 1.7}
"""Bytes per number in the compute type -> how many numbers a block keeps for the backward pass, per number that enters
or leaves its linear layers. Measured 1.2 to 1.4 for 4 bytes and 1.2 to 1.75 for 2 bytes, where the norms compute in
float32."""
RUNNING = 0.6
"""The largest share of the numbers counted by SAVED that are in memory at one time, if nothing is kept for the backward
pass."""
LOGIT_COPIES = 2
"""Number of float32 copies of a chunk's logits that are alive in logprobs.token_stats, in the forward and in the
backward pass together."""
NF4 = 0.5 + 1 / 64  # bytes per 4-bit weight: half a byte, and a scale of one byte per 64 weights
EVAL_ROWS = 64  # largest number of prompts that evaluation/evaluate.py answers in one batch


@dataclass(frozen=True)
class Memory:
    """The memory of one process in bytes, by purpose. The memory in `resident` is always allocated. Only one of
    `generation`, `training` and `step` is allocated at a time, unless generation runs during the update
    (async.max_staleness)."""

    trained: int  # trainable parameters, in float32
    frozen: int  # frozen parameters, in the compute type or in 4 bits
    optimizer: int  # AdamW's two moving averages, in float32
    reference: int
    """Frozen copy of the model for the KL penalty of full fine-tuning. 0 with algo.kl_coef=0, and with LoRA, because
    disabling the adapter gives the reference model. A copy for a task that uses the service reference_logprobs is
    not counted."""
    casts: int  # copies of trained float32 weights in the compute type, which autocast caches
    gradients: int  # gradients of the trained weights, in float32
    activations: int  # values of a micro-batch that are kept for the backward pass
    block: int  # intermediate values and gradients of the block that is being computed
    logits: int
    """Logits of a chunk of answer tokens, the copies of these logits, and the gradient of a trained output layer."""
    step: int  # temporary float32 copy of the trained weights inside AdamW, on CUDA
    cache: int  # KV cache of the completions being generated
    prefill: int
    """KV cache of all prompts in a generation batch, and the intermediate values of the prompts that are prefilled at
    once."""
    token: int
    """Memory for decoding the next token of every answer: either the KV cache of one layer repeated over the query
    heads, or the logits, whichever is larger."""
    copy: int = 0  # the hf engine's separate copy of the weights with async.max_staleness

    @property
    def resident(self) -> int:
        """Bytes that are allocated at all times."""
        return self._sum(_RESIDENT)

    @property
    def generation(self) -> int:
        """Bytes that generation needs in addition to `resident`. All prompts are prefilled before the first answer is
        decoded."""
        return self.casts + max(self.prefill, self.cache + self.token)

    @property
    def training(self) -> int:
        """Bytes that a micro-batch needs in addition to `resident`."""
        return self.casts + self.gradients + self.activations + max(self.logits, self.block)

    @property
    def total(self) -> int:
        """Bytes allocated at the peak."""
        learning = max(self.training, self._sum(_STEP))
        return self.resident + (self.generation + learning if self.copy else max(self.generation, learning))

    @property
    def largest(self) -> str:
        """Name of the item that takes the most memory at the peak."""
        peak = max((self.training, _TRAINING), (self.generation, _GENERATION), (self._sum(_STEP), _STEP))[1]
        return max((*_RESIDENT, *peak), key=lambda name: getattr(self, name))

    def _sum(self, names: Sequence[str]) -> int:
        return sum(getattr(self, name) for name in names)


_RESIDENT = ("trained", "frozen", "optimizer", "reference", "copy")
_GENERATION = ("casts", "prefill", "cache", "token")
_TRAINING = ("casts", "gradients", "activations", "block", "logits")
_STEP = ("gradients", "step")


@dataclass(frozen=True)
class _Block:
    """One repeated block of the model: a decoder layer, or a layer of the vision tower."""

    part: Part
    learns: bool
    width: int  # number of input values of the block, per token or patch
    values: int  # number of values that enter or leave the block's linear layers, per token or patch


@dataclass(frozen=True)
class _MicroBatch:
    """The sizes of the largest micro-batch of an update."""

    prompts: int
    answer_tokens: int
    tokens: int
    keys: int  # number of key positions, summed over all attention calls
    pairs: int  # number of entries in the attention masks
    shared: bool
    """Whether the answers to a prompt share the tokens of the prompt. Without sharing, rows are padded, and the logits
    of the answers are copied out of the padded rows."""


def estimate(config: Config, model_config: Any, prompt_tokens: int | None = None, visual_tokens: int | None = None,
             device: str | None = None, episode: EpisodeLength | None = None) -> Memory:
    """The memory of one process that trains `config` on a model with this transformers config. No weights are loaded.

    prompt_tokens: tokens of one prompt, visual tokens included (None: the visual tokens and 256). visual_tokens: tokens
    of the prompt's image or video (None: an image with model.max_pixels). device: cuda or cpu (None: the device of this
    machine). episode: size of the longest episode; an episode is packed like an answer, and each turn is assumed to
    prefill the prompt and all earlier turns again.

    The estimates were compared with PyTorch's memory profiler on a CPU, around real updates and generation, with the
    loaded weights subtracted. On a Qwen3-VL of 42 M parameters (hidden 512, 8 layers, vocabulary 32,000; LoRA and full,
    with and without gradient checkpointing, logits in one chunk or several) the training peak was 0.84 to 0.98 times
    the estimate. On models of 1 M parameters from four families (with images, padded rows and bfloat16) it was 0.7 to
    1.2 times (BAND), except once 1.6, for a peak of 4 MB. Generation took 0.6 to 0.9 times the estimate, because not
    every batch repeats its keys over the heads. Nothing was measured on CUDA.

    Not counted: the CUDA context (0.5 to 1 GiB), gaps between the allocator's blocks, experts that are not linear
    layers, and main memory of Python and the media. Raises ConfigError for a model that takes no images."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    family_of(model_config)  # refuses models that take no images
    size, model = _dtype(config, device).itemsize, _built(type(model_config),
                                                          model_config.to_json_string(use_diff=False))
    family = family_in(model)
    blocks = _blocks(model, family, config.model)
    trained, frozen, largest = _weights(model, family, config, size)
    visual = max_visual_tokens(config, model_config) if visual_tokens is None else visual_tokens
    prompt = visual + TEXT_TOKENS if prompt_tokens is None else prompt_tokens
    config = as_answers(config, episode) if episode else config
    side = merge_side(model_config) ** 2
    patches, shown = visual * side, episode.visual * side if episode else 0
    batch = _micro_batch(config, prompt, family.shared, device)
    answers = batch.answer_tokens // config.rollout.max_new_tokens
    activations, block = _activations(config, model_config, blocks, batch, batch.prompts * patches + answers * shown,
                                      size, config.model.recomputes(device))
    text = model_config.get_text_config()
    rows, prompts = generation_rows(config)
    read, patches_read = prompt, patches  # for one prompt
    if episode:
        prompts, read, patches_read = rows, prompt + episode.tokens, patches + shown
    at_once = min(prompts, max(1, config.engine.prefill_tokens // read))
    cache, spread = _cache(config, text, rows, prompts if family.shared else rows, prompt, size)
    of_prompts = prompts * read * token_bytes(text, size, config.model.lora.rank > 0)
    full = config.model.lora.rank == 0
    apart = config.asynchronous.max_staleness > 0 and config.engine.name == "hf"
    return Memory(
        trained=trained, frozen=frozen, optimizer=2 * trained,
        reference=trained + frozen if full and config.algo.kl_coef else 0,
        casts=trained * size // 4 if size < 4 else 0, gradients=trained,
        activations=activations, block=block + largest,
        logits=_logits(config, model_config, batch.answer_tokens, size),
        step=0 if _dtype(config, device) != torch.float16 else trained if device == "cuda" else largest,
        cache=cache, prefill=of_prompts + _prefill(blocks, at_once * read, at_once * patches_read, size),
        token=max(spread, rows * logit_bytes(text, size)), copy=trained + frozen if apart else 0)


def table(memory: Memory) -> list[str]:
    """The items of an estimate in GiB with their sums, as lines of text."""
    parts = (("always", memory.resident, _RESIDENT), ("generation", memory.generation, _GENERATION),
             ("training", memory.training, _TRAINING))
    lines = []
    for title, total, names in parts:
        lines.append(f"{title:<14}{total / GIB:>9.2f} GiB")
        lines += [f"  {name:<12}{getattr(memory, name) / GIB:>9.2f}" for name in names if getattr(memory, name)]
    return [*lines, f"{'peak':<14}{memory.total / GIB:>9.2f} GiB   (largest: {memory.largest})"]


# --- weights ---------------------------------------------------------------------------------------------------------


def _dtype(config: Config, device: str) -> torch.dtype:
    """The data type in which the model computes on `device`. This machine need not have such a device."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return loading.compute_dtype(config.model)


@functools.lru_cache(maxsize=4)
def _built(kind: Any, text: str) -> Any:
    """Builds the model of a transformers config without weights. `kind` is the class of the config, and `text` its
    content as JSON. The model is cached, because several estimates are often made for the same model."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(kind.from_dict(json.loads(text)))


def _blocks(model: Any, family: Family, settings: ModelSettings) -> list[_Block]:
    """The blocks of the model that gradient checkpointing recomputes, in order."""
    adapted = adapted_layers(model, family, settings.lora.target) if settings.lora.rank else []
    learning = {family.part_of(name) for name in adapted} if adapted else {*settings.train}
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = []
    for name, module in model.named_modules():
        linear = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
        if isinstance(module, GradientCheckpointingLayer) and linear:
            part = family.part_of(name)
            blocks.append(_Block(part, part in learning, linear[0].in_features,
                                 sum(m.in_features + m.out_features for m in linear)))
    return blocks


def _weights(model: Any, family: Family, config: Config, size: int) -> tuple[int, int, int]:
    """Returns three numbers of bytes: of all trainable parameters, of all frozen parameters (`size` bytes per
    parameter), and of the largest trainable parameter."""
    lora = config.model.lora
    learns, frozen = [0], 0
    for name, parameter in model.named_parameters():
        if lora.rank == 0 and family.part_of(name) in config.model.train:
            learns.append(4 * parameter.numel())
        else:
            frozen += size * parameter.numel()
    for name in adapted_layers(model, family, lora.target) if lora.rank else ():
        layer = model.get_submodule(name)
        learns += [4 * lora.rank * layer.in_features, 4 * lora.rank * layer.out_features]
        if lora.quantize == "nf4":
            frozen -= math.floor(layer.weight.numel() * (size - NF4))
    return sum(learns), frozen, max(learns)


# --- training --------------------------------------------------------------------------------------------------------


def _micro_batch(config: Config, prompt: int, shared: bool, device: str) -> _MicroBatch:
    """The largest micro-batch if all answers are as long as allowed. `prompt`: tokens of a prompt. `shared`: whether
    the model family is trained with answers that share the tokens of their prompt."""
    limit, answer = config.train.tokens_per_batch, config.rollout.max_new_tokens
    groups = math.ceil(config.rollout.prompts_per_step / config.rollout.minibatches)
    size = config.rollout.group_size
    if not (shared and config.train.packing == "shared"):
        rows = min(max(limit // (prompt + answer), 1), groups * size)
        length = prompt + answer
        return _MicroBatch(rows, rows * answer, rows * length, rows * length, rows * length**2, False)
    whole = min(limit // (prompt + size * answer), groups)
    prompts, answers = (whole, whole * size) if whole else (1, min(max((limit - prompt) // answer, 1), size))
    tokens = prompts * prompt + answers * answer
    if device == "cpu":  # the merged attention copies no keys and has no mask
        return _MicroBatch(prompts, answers * answer, tokens, 0, 0, True)
    return _MicroBatch(prompts, answers * answer, tokens, prompts * prompt + answers * (prompt + answer),
                       answers * answer * (prompt + answer), True)


def _logits(config: Config, model_config: Any, answer_tokens: int, size: int) -> int:
    """Bytes that the logits of a chunk of answer tokens need at the peak. `answer_tokens` is the number of answer
    tokens in the micro-batch, and `size` the bytes per number in the compute type. If the output layer is trained
    and its gradient is larger than a copy of the logits, the gradient takes the place of one of the LOGIT_COPIES
    copies.

    With several chunks, the sum of the chunks' gradients is counted too. In float32 the addition to this sum is not in
    place, so it needs a further copy."""
    text, rows = model_config.get_text_config(), chunk_rows(model_config.get_text_config().vocab_size)
    copy, gradient, total = 4 * min(answer_tokens, rows), 0, 0
    if config.model.lora.rank == 0 and "language" in config.model.train:
        gradient = text.hidden_size * (4 + size % 4)
        if answer_tokens > rows:
            total = 4 * text.hidden_size
            gradient += total if size < 4 else 2 * total
    return text.vocab_size * ((LOGIT_COPIES - 1) * copy + max(copy + total, gradient))


def _activations(config: Config, model_config: Any, blocks: Sequence[_Block], batch: _MicroBatch, patches: int,
                 size: int, recomputes: bool) -> tuple[int, int]:
    """Returns (bytes kept for the backward pass, bytes of one block while it is computed) for a micro-batch with
    `patches` image patches. `size` is the number of bytes per number in the compute type.

    A block keeps SAVED numbers for each number that enters or leaves its linear layers. A decoder layer also keeps the
    attention mask, and the keys and values that it repeats over heads and answers. With gradient checkpointing
    (`recomputes`) a block keeps only its input. A frozen vision tower keeps nothing."""
    lora = config.model.lora
    stream = size if lora.rank else 4  # residual stream: the type of the embeddings
    sees = any(block.part == "vision" and block.learns for block in blocks)
    counts = {"language": batch.tokens, "vision": patches}
    text = model_config.get_text_config()
    attention = size * (2 * text.num_attention_heads * head_width(text) * batch.keys + batch.pairs)
    saved = batch.tokens * text.hidden_size * 2 * (4 + stream)  # embeddings and the last norm
    vision = model_config.vision_config
    saved += patches * 3 * getattr(vision, "temporal_patch_size", 1) * patch_side(vision) ** 2 * 4  # the pixels
    work = 0
    for block in blocks:
        count = counts.get(block.part, 0)
        full = int(count * size * SAVED[size] * block.values) + (attention if block.part == "language" else 0)
        if block.part == "language" or sees:
            saved += count * block.width * stream if recomputes else full
            work = max(work, full)
        else:
            work = max(work, int(RUNNING * full))
    return saved, work


# --- generation ------------------------------------------------------------------------------------------------------


def generation_rows(config: Config) -> tuple[int, int]:
    """Returns (largest number of answers generated at once, largest number of prompts to which they belong). For
    engine.batch_rollouts=auto, a device with enough memory is assumed."""
    most, size = config.engine.batch_rollouts, config.rollout.group_size
    most = MOST_ROWS if most == "auto" else most
    rows = min(most, max(config.rollout.prompts_per_step * size, min(config.eval.samples, EVAL_ROWS)))
    groups = min(math.ceil(most / size), config.rollout.prompts_per_step)
    return rows, max(groups, min(most, config.eval.samples, EVAL_ROWS))


def _cache(config: Config, text: Any, rows: int, copies: int, prompt: int, size: int) -> tuple[int, int]:
    """Returns (bytes of the KV cache of `rows` answers and of `copies` prompts with `prompt` tokens each, bytes of one
    layer's cache repeated over the query heads). The second value is 0 if this cache is not repeated. `text` is the
    config of the language model, and `size` the number of bytes per number."""
    heads, kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    tokens = rows * (config.rollout.max_new_tokens + ROOM) + copies * prompt
    tokens += copies * ROOM if copies < rows else 0
    spread = tokens * head_width(text) * heads * 2 * size if kv < heads and copies == rows else 0
    return tokens * token_bytes(text, size, config.model.lora.rank > 0), spread


def _prefill(blocks: Sequence[_Block], tokens: int, patches: int, size: int) -> int:
    """Bytes of the intermediate values of the largest block while it computes prompts with `tokens` tokens and
    `patches` image patches in total. `size` is the number of bytes per number."""
    counts = {"language": tokens, "vision": patches}
    return int(max((counts.get(b.part, 0) * b.values for b in blocks), default=0) * size * SAVED[size] * RUNNING)


# --- sizes in a transformers config ---------------------------------------------------------------------------------


def max_visual_tokens(config: Config, model_config: Any) -> int:
    """Number of visual tokens of the largest image that the settings allow (model.max_pixels)."""
    side = patch_side(model_config.vision_config) * merge_side(model_config)
    return max(1, (config.model.max_pixels or IMAGE_PIXELS) // side**2)
