"""Update and generation of a Qwen2.5-VL-3B or 7B on one GPU, padded and packed; for gpu_parts.py.

The model has the shape of the 3B or 7B and random weights. Four prompts of 800 visual and 200 text tokens with 8
answers of 400 tokens; bfloat16, gradient checkpointing, vision tower frozen. Every side trains on the same answers at
its own fastest micro-batch size; the sides take turns. MFU counts useful operations (vlrl/models/flops.py: each prompt
and image once, nothing recomputed). Generation is compared with the time to read weights and KV cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from PIL import Image

from vlrl import config
from vlrl.config.schema import Config
from vlrl.engine.base import Request, Sampling
from vlrl.models.attention import DEVICES
from vlrl.models.flops import Cost, cost_model, patches_of
from vlrl.monitoring.metrics import watching
from vlrl.task import Task
from vlrl.tools.machine.profiler import Peak, Recorder, peak_of
from vlrl.tools.tiny import models as tiny_models
from vlrl.tools.tiny.families import CHAT_TEMPLATE, QWEN
from vlrl.training import build as assemble
from vlrl.training.update import update
from vlrl.types import Completion, Group, Media, Rollout, Sample

GIB = 2**30
ROOT = Path(__file__).resolve().parents[1]
SIDE = 28
"""Side of the square of pixels that becomes one visual token."""
PATIENCE = 40.0
"""Seconds after which a side tries no further micro-batch size."""


@dataclass(frozen=True)
class Size:
    """Of the model and of a step."""

    text: dict[str, Any]
    vision: dict[str, Any]
    grid: tuple[int, int]
    """Visual tokens of the image, across and down."""
    words: int
    """Tokens of text."""
    answer: int
    group: int = 8
    prompts: int = 4
    packed: tuple[int, ...] = (1, 2, 4)
    """Groups in a micro-batch to choose from ..."""
    padded: tuple[int, ...] = (8, 16)
    """... and rows."""
    decode: tuple[int, ...] = (8, 64)
    """Answers per prompt that are written side by side."""
    tied: bool = True
    """Whether the output layer is the table of input embeddings."""


_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def _size(name: str, **more: Any) -> Size:
    """A step with a model of the repository's shapes (vlrl/assets/models/shapes.json)."""
    shape = json.loads((ROOT / "vlrl" / "assets" / "models" / "shapes.json").read_text())[name]
    text = {**shape["text_config"], "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}}
    vision = {**shape["vision_config"], "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
              "tokens_per_second": 2}
    return Size(text, vision, (40, 20), words=200, answer=400, tied=shape["tie_word_embeddings"], **more)


FULL = _size("Qwen/Qwen2.5-VL-3B-Instruct")
SEVEN = _size("Qwen/Qwen2.5-VL-7B-Instruct", packed=(1, 2), padded=(4, 8))
TINY = Size(
    text={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 1024, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    vision={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    grid=(4, 2), words=30, answer=6, group=3, prompts=2, packed=(1, 2), padded=(3,), decode=(3,))
SIZES = {"3b": FULL, "7b": SEVEN, "tiny": TINY}
MODES: dict[str, dict[str, Any]] = {"lora": {"lora": {"rank": 32, "target": "language"}},
                                    "full": {"train": ["language"]},
                                    "qlora": {"lora": {"rank": 32, "target": "language", "quantize": "nf4"}}}


# --- the model -------------------------------------------------------------------------------------------------------


def build(folder: Path, size: Size, device: torch.device) -> None:
    """Saves a model with random bfloat16 weights, and a processor with the tiny models' tokenizer."""
    from transformers import (
        AutoModelForImageTextToText,
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokens = tiny_models.make_tokenizer(QWEN)
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start",
             "vision_end_token_id": "vision_end"}
    ids = {key: tokens.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    ends = {"bos_token_id": tokens.pad_token_id, "pad_token_id": tokens.pad_token_id,
            "eos_token_id": tokens.eos_token_id}
    shape = Qwen2_5_VLConfig(text_config={**size.text, **ends, "tie_word_embeddings": size.tied},
                             vision_config=size.vision, tie_word_embeddings=size.tied, **ids)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(shape, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = tokens.eos_token_id
    model.generation_config.pad_token_id = tokens.pad_token_id
    model.save_pretrained(folder)
    area = {"shortest_edge": 4 * SIDE**2, "longest_edge": size.grid[0] * size.grid[1] * SIDE**2}
    Qwen2_5_VLProcessor(Qwen2VLImageProcessor(size=area), tokens, Qwen2VLVideoProcessor(size=area),
                        chat_template=CHAT_TEMPLATE).save_pretrained(folder)


class Pictures(Task):
    """A picture of random pixels with a question of the wanted length."""

    prompt = "{question}"
    rewards: ClassVar = {"none": 1.0}
    question: str = "Where?"

    def samples(self, split: str) -> list[Sample]:
        return [Sample(id="0", row={"question": self.question})]

    def score(self, sample: Sample, answer: Any) -> dict[str, float | None]:
        return {"none": 0.0}


def given_groups(parts: Any, size: Size) -> list[Group]:
    """Prompts with random answers and advantages."""
    rng, policy = np.random.default_rng(0), parts.policy
    allowed = np.setdiff1d(np.arange(len(policy.processor.tokenizer)), policy.banned.cpu().numpy())
    width, height = (n * SIDE for n in size.grid)

    def prompt(number: int, words: int) -> Any:
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        question = " ".join(["red", "box", "car", "sign"][i % 4] for i in range(words))
        sample = Sample(id=str(number), media=(Media(source=Image.fromarray(pixels)),), row={"question": question})
        return sample, parts.encode(parts.task, sample)

    words, wanted = 1, size.words + size.grid[0] * size.grid[1]
    words += max(0, wanted - len(prompt(0, 1)[1]))  # a word of these is one token
    out = []
    for number in range(size.prompts):
        sample, made = prompt(number, words)
        rollouts = tuple(Rollout(
            group_id=str(number), index=i, policy_step=0, reward=0.0, advantage=float(rng.normal()),
            completion=Completion(tokens=rng.choice(allowed, size.answer), text="", finish_reason="length",
                                  logprobs=np.full(size.answer, -12, np.float32),
                                  loss_mask=np.ones(size.answer, bool))) for i in range(size.group))
        out.append(Group(id=str(number), task="pictures", split="train", sample=sample, prompt=made,
                         rollouts=rollouts))
    return out


# --- updates ---------------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One way to run the same update."""

    name: str
    configs: list[Config]
    """One per micro-batch size to choose from."""
    config: Config | None = None
    """That of the fastest; None where none ran."""
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    grad_norm: float = float("nan")
    logprobs: Any = None
    error: str = ""


class Bench:
    """A loaded model, its answers, and the clock of its device."""

    def __init__(self, settings: Config, size: Size):
        self.config, self.size = settings, size
        self.parts = assemble.assemble(settings, assemble.make_accelerator(settings))
        policy = self.parts.policy
        policy.banned = torch.tensor(sorted({*policy.banned.tolist(), *policy.eos}), device=policy.device)
        self.device, self.groups = policy.device, given_groups(self.parts, size)
        self.cost: Cost = cost_model(policy.model, policy.family)
        self.peak: Peak = peak_of(self.device, policy.dtype)
        self.resident = self._allocated()

    def sides(self) -> list[Side]:
        """Padded rows, and packed ones with every attention that this device has."""
        prompt, answer = len(self.groups[0].prompt), self.size.answer
        group = prompt + self.size.group * answer

        def side(name: str, limits: Sequence[int], **more: str) -> Side:
            return Side(name, [self.config.model_copy(update={"train": self.config.train.model_copy(
                update={"tokens_per_batch": limit, **more})}) for limit in limits])

        kinds = [kind for kind, devices in DEVICES.items() if self.device.type in devices]
        return [side("padded", [n * (prompt + answer) for n in self.size.padded], packing="padded"),
                *(side(f"packed, {kind}", [n * group for n in self.size.packed], attention=kind)
                  for kind in sorted(kinds, key=lambda kind: kind != "masked"))]

    def useful(self) -> float:
        """Operations of an update, with each prompt counted once per group."""
        total = 0.0
        for group in self.groups:
            patches = patches_of(group.prompt.mm, self.parts.policy.base.config)
            total += self.cost.of(len(group.prompt), patches, [len(r.completion.tokens) for r in group.rollouts])
        return total

    def update(self, settings: Config) -> tuple[float, dict[str, float], Any]:
        """Seconds, metrics and per-token arrays of an update."""
        start = self._now()
        stats, per_token = update(self.parts.policy, self.parts.optimizer, self.groups, settings, 0)
        return self._now() - start, stats, per_token

    def choose(self, side: Side) -> None:
        """The fastest micro-batch size, by the second of two updates; keeps what the first one found."""
        began, best = time.perf_counter(), float("inf")
        for settings in side.configs:
            failure = ""
            try:
                _, stats, per_token = self.update(settings)
                seconds, _, _ = self.update(settings)
                if seconds < best:
                    best, side.config = seconds, settings
                    side.grad_norm, side.logprobs = stats["grad_norm"], np.concatenate(per_token["trainer_logprobs"])
            except Exception as error:  # out of memory, or a kernel that this card or build does not have
                failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            if failure:  # outside of the handler, which keeps the tensors of the failed update alive
                side.error = failure
                self.parts.optimizer.zero_grad(set_to_none=True)
                self._empty()
                print(f"  {side.name:16} {settings.train.tokens_per_batch} tokens: {failure}", flush=True)
            if time.perf_counter() - began > PATIENCE:
                break
        if side.config:
            print(f"  {side.name:16} {side.config.train.tokens_per_batch} tokens: {best:.3f} s", flush=True)

    def measure(self, sides: Sequence[Side], rounds: int) -> None:
        """Timed rounds, the sides in turns; a side's peak memory is above the loaded model."""
        for _ in range(rounds):
            for side in sides:
                assert side.config is not None
                self._empty()
                seconds, _, _ = self.update(side.config)
                side.seconds.append(seconds)
                side.peak = max(side.peak, self._allocated(peak=True) - self.resident)

    def decode(self, count: int) -> tuple[float, float]:
        """Tokens per second of decoding with `count` answers per prompt, prefill left out, and the most that reading
        weights, keys and values allows."""
        def run(tokens: int) -> None:
            sampling = Sampling(max_new_tokens=tokens)
            self.parts.engine.generate([Request(prompt=g.prompt, n=count, sampling=sampling, key=(0, i))
                                        for i, g in enumerate(self.groups)])

        run(2)
        record = Recorder(self.device)
        with watching(record):
            run(self.size.answer)
        seconds = record.seconds["generate"] - record.seconds["generate/prefill"]
        text, rows = self.parts.policy.base.config.get_text_config(), count * len(self.groups)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        held = 2 * 2 * width * text.num_key_value_heads * text.num_hidden_layers  # bytes of a token's keys and values
        read = 2 * (self.cost.language.weights + self.cost.head.weights)
        read += held * (sum(len(g.prompt) for g in self.groups) + rows * self.size.answer / 2)
        return rows * self.size.answer / seconds, rows * bandwidth(self.device) / read

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _allocated(self, peak: bool = False) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def _empty(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target, record, rounds = torch.empty_like(source), Recorder(device), 10
    target.copy_(source)
    with record("copy"):
        for _ in range(rounds):
            target.copy_(source)
    return 2 * len(source) * rounds / record.seconds["copy"]


def settings(mode: str, size: Size, folder: Path, **more: Any) -> Config:
    """lr is so small that no weight changes. more: sections in place of these."""
    return config.validate({
        "task": {"name": f"{__file__}:Pictures"}, "steps": 10**6,
        "model": {"name": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True, **MODES[mode]},
        "rollout": {"prompts_per_step": size.prompts, "group_size": size.group, "max_new_tokens": size.answer},
        "engine": {"batch_rollouts": max(size.decode) * size.prompts},
        "train": {"lr": 1e-12, "weight_decay": 0.0}, "algo": {"kl_coef": 0.0}, "limits": {"score_s": 0}, **more})
