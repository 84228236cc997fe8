"""Tiny vision-language models with the architecture and processor of real model families, about 1 M parameters.

    vlrl tiny --family qwen3_vl --out models/tiny              # build, cold-start, save
    vlrl tiny --family qwen2_5_vl --out /tmp/m --random        # random weights, for tests

``AutoModelForImageTextToText`` and ``AutoProcessor`` load the folder like any model from the hub. The tokenizer is a
byte-level BPE of some 700 tokens, trained on text made by `corpus`, with the family's special tokens and one token per
digit."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlrl.tools.tiny.families import FAMILIES, QWEN, TOKENS, Tokens

TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # one token each, kept when special tokens are skipped
# Qwen's splitting rule (every digit alone) with one addition: the ", " between two numbers is one piece.
SPLIT = (
    r", (?=\p{N})|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LOCATE = "Locate the {expression}. Answer with its box as [x1, y1, x2, y2]."
DIGIT = "Which digit is this? Answer with the digit only."
DIGIT_THINK = "Which digit is this? Think in <think> </think>, then answer in <answer> </answer>."

# What one may say on seeing each digit, three ways. No first word serves two digits: a greedy answer then names the
# digit the model finds likeliest, not the commonest opening.
THOUGHTS = (("closed ring", "round and empty", "oval, nothing inside"),
            ("single upright stroke", "straight line down", "thin stem only"),
            ("swan neck and a foot", "curve above a flat base", "bends down to a base line"),
            ("double bow, open left", "bows, one over another", "open curves on the right"),
            ("crossing stem and corner", "arms open at the top", "bar across a stem"),
            ("cap over a belly", "roof, then a bow", "flat top, round below"),
            ("tall stroke, loop below", "low ring", "curls into a lower ring"),
            ("slanted leg under a roof", "top bar, one leg", "edge above, then a diagonal"),
            ("two stacked loops", "crossed in the middle", "both rings closed"),
            ("high ring with a stem", "loop on top, a tail", "head and a leg"))


# --- tokenizer --------------------------------------------------------------------------------------------------------


def corpus() -> Iterator[str]:
    """Yields the texts on which the tokenizer is trained, similar to the project's prompts and answers."""
    colours = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
    shapes = ("circle", "square", "triangle", "box", "button", "car", "person", "dog", "sign", "line", "object")
    for colour, shape in itertools.product(colours, shapes):
        yield LOCATE.format(expression=f"{colour} {shape}")
        yield f"How many {colour} {shape}s are there in the image? Answer with a number."
        yield f"Is the {shape} {colour}? Answer with yes or no."
        yield f"The {shape} is {colour}. It moves left to right, up and down, in the video, before or after it"
        yield f"Click on the {colour} {shape}. Which of these is shown? A. {colour} B. {shape} C. both D. none of them"
    yield from [DIGIT, DIGIT_THINK, "You are a helpful assistant.", "user", "assistant", "system"] * 20
    yield from ["Describe this picture. What happens between the first and the last frame?", "seconds"] * 20
    yield from ['{"bbox_2d": [1, 2, 3, 4], "label": "object"}', '```json\n[{"point_2d": [5, 6]}]\n```'] * 20
    for phrases in THOUGHTS:
        yield from phrases * 20  # first words must be one token each


def make_tokenizer(tokens: Tokens = QWEN) -> Any:
    """A byte-level BPE tokenizer with a family's special tokens and the think and answer tags, trained on `corpus`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated", False),
                                                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1000, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus(), trainer)
    bpe.add_special_tokens(list(tokens.special))
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    more: dict[str, Any] = {"bos_token": tokens.bos} if tokens.bos else {}
    if tokens.named:
        more["model_specific_special_tokens"] = tokens.named
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=tokens.eos, pad_token=tokens.pad,
                                   model_max_length=4096, additional_special_tokens=list(tokens.special[3:]),
                                   padding_side="left", **more)


# --- models -----------------------------------------------------------------------------------------------------------


def build(family: str, out: Path, *, seed: int = 0, max_pixels: int | None = None) -> tuple[Any, Any]:
    """Builds a random model of ``family`` with its processor, and saves both (fp32) to ``out``. Returns (model,
    processor).

    The same seed gives the same weights. ``max_pixels`` is the processor's limit for one image or frame."""
    import torch

    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    tokenizer = make_tokenizer(TOKENS[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = FAMILIES[family](tokenizer, max_pixels)
    model = model.float().eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return model, processor


# --- saving --------------------------------------------------------------------------------------


def save_bf16(folder: Path, out: Path) -> None:
    """Copies the model and processor of ``folder`` to ``out``, with the weights as bf16 safetensors."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(out)
    AutoProcessor.from_pretrained(folder).save_pretrained(out)


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a model folder's weights file."""
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
