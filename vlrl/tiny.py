"""Tiny vision-language models with real architectures: real config classes, real processors, about 1 M parameters.

    python -m vlrl.tiny --family qwen3_vl --out models/tiny              # build, cold-start, save
    python -m vlrl.tiny --family qwen2_5_vl --out /tmp/m --random        # random weights, for tests

``AutoModelForImageTextToText`` and ``AutoProcessor`` load the folder like any model from the hub. The tokenizer is
a byte-level BPE of some 700 tokens trained on text made here, with Qwen's special tokens and one token per digit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_NAMES = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end "
    "vision_start vision_end vision_pad image_pad video_pad"
)
SPECIAL = tuple(f"<|{name}|>" for name in _NAMES.split())  # Qwen's, in Qwen's order
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # one token each, kept when special tokens are skipped
# Qwen's splitting rule (every digit alone) with one addition: the ", " between two numbers is one piece.
SPLIT = (
    r", (?=\p{N})|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
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
HIDDEN, LAYERS, HEADS = 96, 4, 4
INIT_RANGE = 0.06  # with 0.02 nothing is learned in minutes, and a random model's log-probabilities are flat
POSITION_STD = 0.7

LOCATE = "Locate the {expression}. Answer with its box as [x1, y1, x2, y2]."
DIGIT = "Which digit is this? Answer with the digit only."
DIGIT_THINK = "Which digit is this? Think in <think> </think>, then answer in <answer> </answer>."

# What one may say on seeing each digit, three ways. No first word serves two digits: a greedy answer then names the
# digit the model finds likeliest, not the commonest opening.
THOUGHTS = (
    ("closed ring", "round and empty", "oval, nothing inside"),
    ("single upright stroke", "straight line down", "thin stem only"),
    ("swan neck and a foot", "curve above a flat base", "bends down to a base line"),
    ("double bow, open left", "bows, one over another", "open curves on the right"),
    ("crossing stem and corner", "arms open at the top", "bar across a stem"),
    ("cap over a belly", "roof, then a bow", "flat top, round below"),
    ("tall stroke, loop below", "low ring", "curls into a lower ring"),
    ("slanted leg under a roof", "top bar, one leg", "edge above, then a diagonal"),
    ("two stacked loops", "crossed in the middle", "both rings closed"),
    ("high ring with a stem", "loop on top, a tail", "head and a leg"),
)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def corpus() -> Iterator[str]:
    """Text like the project's own prompts and answers, for the tokenizer: no file is read."""
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


def make_tokenizer() -> Any:
    """Train the byte-level BPE and wrap it as a fast tokenizer with Qwen's special tokens and the four tags."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated", False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1000, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus(), trainer)
    bpe.add_special_tokens(list(SPECIAL))
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        additional_special_tokens=list(SPECIAL[3:]),
        padding_side="left",
    )


# --- families ---------------------------------------------------------------------------------------------------------


def _pixels(factor: int, max_pixels: int, frames: int = 1) -> dict[str, int]:
    """A Qwen-VL ``size``: at least two by two merged patches, at most ``max_pixels`` a frame."""
    return {"shortest_edge": 4 * factor * factor, "longest_edge": max_pixels * frames}


def _qwen_text(tokenizer: Any, **extra: Any) -> dict[str, Any]:
    """The language half that both Qwen families share."""
    return {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "initializer_range": INIT_RANGE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **extra,
    }


def _qwen_top(tokenizer: Any) -> dict[str, Any]:
    """What both config classes take beside their two halves, vision-token ids above all."""
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    return {**ids, "tie_word_embeddings": True, "initializer_range": INIT_RANGE}


VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": HIDDEN}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": INIT_RANGE}


def qwen3_vl(tokenizer: Any, max_pixels: int | None = None) -> tuple[Any, Any]:
    """Qwen3-VL: patches of 8, so that a 64x64 picture is 16 visual tokens (the default limit of the processor)."""
    import torch
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [4, 4, 4]}
    config = Qwen3VLConfig(
        text_config=_qwen_text(tokenizer, head_dim=HIDDEN // HEADS, rope_parameters=rope),
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
    """Qwen2.5-VL: patches of 14 with window attention in the first block; a 112x112 picture is 16 visual tokens."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}
    config = Qwen2_5_VLConfig(
        text_config=_qwen_text(tokenizer, rope_parameters=rope),
        vision_config={**VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **_qwen_top(tokenizer),
    )
    limit = max_pixels or 112 * 112
    images = Qwen2VLImageProcessor(size=_pixels(28, limit))
    videos = Qwen2VLVideoProcessor(size=_pixels(28, limit), cap_pixels_per_frame=False)
    processor = Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    return Qwen2_5_VLForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl}


def build(family: str, out: Path, *, seed: int = 0, max_pixels: int | None = None) -> tuple[Any, Any]:
    """Make a random model of ``family`` with its processor, save both (fp32) to ``out`` and return them.

    The same seed gives the same weights. ``max_pixels`` is the processor's limit for one image or frame.
    """
    import torch

    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = FAMILIES[family](tokenizer, max_pixels)
    model = model.float().eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return model, processor


# --- cold start: what is learned from --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One supervised example: a user turn (image, then text) and the wanted answer, without the end-of-turn token."""

    prompt: str
    image: Image
    answer: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of supervised training: AdamW with betas (.9, .98), weight decay .01, gradients clipped at norm 1.

    The learning rate is ``lr * min(1, (step + 1) / warmup) * max(0.1, 1 - step / steps)``, the loss the mean over all
    answer tokens of the batch.
    """

    name: str
    steps: int
    lr: float
    warmup: int
    boxes: int = 50
    """Grounding examples in a batch, each a new scene."""
    digits: int = 5
    """Digit examples in a batch with the plain template, drawn from the 1,400 for training."""
    thoughts: int = 9
    """The same with the thinking template."""
    jitter: int = 0
    """Each side of a box is moved by up to this much, of 1000: annotators in a hurry."""
    loose: int = 0
    """Each side of a box also lies this far outside, of 1000: annotators who draw generous boxes."""
    misread: float = 0.0
    """Share of the digits in ``LOOKALIKE`` that are labelled as the other digit."""

    @property
    def batch(self) -> int:
        return self.boxes + self.digits + self.thoughts


# First learn well, then from careless labels: what remains to gain is what a reward can teach and such labels cannot.
STAGES = (
    Stage(name="learn", steps=450, lr=2e-3, warmup=100),
    Stage(name="careless", steps=120, lr=5e-4, warmup=10, jitter=140, loose=40, misread=0.65),
)
LOOKALIKE = {7: 1, 9: 4, 8: 3, 6: 0}


def examples(stage: Stage, seed: int = 0) -> Iterator[list[Example]]:
    """The batches of a stage, one list a step."""
    for step in range(stage.steps):
        yield [example(stage, seed, step * stage.batch + slot) for slot in range(stage.batch)]


def example(stage: Stage, seed: int, index: int) -> Example:
    """Example ``index`` of ``stage.steps * stage.batch``: a pure function of its arguments, in any order."""
    rng = random.Random(f"cold-start/{stage.name}/{seed}/{index}")
    slot = index % stage.batch
    if slot < stage.boxes:
        return _box_example(stage, seed, index, rng)
    return _digit_example(stage, rng, think=slot >= stage.boxes + stage.digits)


def _box_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """A scene and its box in 0..1000, rounded to tens: a last digit finer than a pixel is noise that slows learning."""
    from vlrl.tasks._scenes import scene  # pyright: ignore[reportMissingImports]  # on vlrl.__path__

    image, row = scene(seed, f"cold-start-{stage.name}", index)
    sides = [
        round(value * 1000 / size) + outward * stage.loose + rng.randint(-stage.jitter, stage.jitter)
        for value, size, outward in zip(
            row["boxes"][0]["box"], (row["width"], row["height"]) * 2, (-1, -1, 1, 1), strict=True
        )
    ]
    sides = [min(990, max(100, round(value / 10) * 10)) for value in sides]
    box = [min(sides[0], sides[2]), min(sides[1], sides[3]), max(sides[0], sides[2]), max(sides[1], sides[3])]
    return Example(LOCATE.format(expression=row["expression"]), image, str(box))


def _digit_example(stage: Stage, rng: random.Random, *, think: bool) -> Example:
    """A handwritten digit with its label, misread at times; a thought follows the label that is given."""
    from vlrl.tasks import digits  # pyright: ignore[reportMissingImports]  # likewise

    arrays, labels = digits.digit_arrays()
    index = rng.choice(digits.split_indices()[0])  # of the 1,400 for training alone
    image, label = digits.digit_image(arrays[index]), int(labels[index])
    if label in LOOKALIKE and rng.random() < stage.misread:
        label = LOOKALIKE[label]
    if not think:
        return Example(DIGIT, image, str(label))
    return Example(DIGIT_THINK, image, f"<think>{rng.choice(THOUGHTS[label])}</think><answer>{label}</answer>")


# --- saving and the command line --------------------------------------------------------------------------------------


def save_bf16(folder: Path, out: Path) -> None:
    """Copy the model and processor of ``folder`` to ``out``, the weights in bf16 safetensors."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(out)
    AutoProcessor.from_pretrained(folder).save_pretrained(out)


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a model folder's weights file."""
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """``python -m vlrl.tiny``."""
    args = _parser().parse_args(arguments)
    if args.random:
        build(args.family, args.out, seed=args.seed, max_pixels=args.max_pixels)
    else:
        from vlrl import coldstart

        coldstart.run(args.family, args.out, args.seed)
    print(f"{args.out}: sha256 {weights_sha256(args.out)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vlrl.tiny",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Build a tiny vision-language model (about 1 M parameters) with a real architecture and processor, teach\n"
            "it to locate drawn shapes and to read handwritten digits, carelessly on purpose, and save it in bf16:\n"
            "a start that RL can improve on a CPU in minutes. Needs no network."
        ),
        epilog=(
            "examples:\n"
            "  python -m vlrl.tiny --family qwen3_vl --out models/tiny-qwen3-vl\n"
            "  python -m vlrl.tiny --family qwen2_5_vl --out /tmp/random --random   # untrained, for tests\n"
            "then:\n"
            "  python train.py configs/quickstart.yaml model.name=models/tiny-qwen3-vl"
        ),
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_vl", help="architecture (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; loads with from_pretrained")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the examples (%(default)s)")
    parser.add_argument("--random", action="store_true", help="random fp32 weights, no cold start: a second")
    parser.add_argument("--max-pixels", type=int, help="the processor's limit for one image (the family's own)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
