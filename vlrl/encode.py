"""Sample -> Prompt. The only user of the HF processor: a sample meets it once; engine and trainer share the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vlrl import media
from vlrl.config import Config
from vlrl.errors import DataError
from vlrl.families import Family
from vlrl.task import Task
from vlrl.types import LoadedMedia, Prompt, Sample
from vlrl.video import VideoSampling

_NOT_MM = ("input_ids", "attention_mask", "mm_token_type_ids")


class PromptTooLong(DataError):
    """A prompt has more tokens than limits.prompt_tokens; it is rejected, never truncated."""


class Encoder:
    """Turns samples into prompts for one processor and model.

    `positions(ids [1, T], types [1, T], mm) -> [R, T]` is the model's own rope index (see Policy.positions).
    """

    def __init__(self, processor: Any, family: Family, positions: Callable[..., np.ndarray], config: Config):
        self.processor, self.family, self.positions, self.config = processor, family, positions, config
        self._video = VideoSampling(fps=config.model.video_fps, max_frames=config.model.video_max_frames)
        special = set(processor.tokenizer.all_special_tokens) | set(family.vision_tokens)
        self._reserved = sorted((t for t in special if t.startswith("<|")), key=len, reverse=True)

    def __call__(self, task: Task, sample: Sample) -> Prompt:
        """The prompt of one sample. Raises DataError for unreadable media and PromptTooLong past the limit."""
        loaded = [media.load(m, self.config.limits, self._video) for m in sample.media]
        text = self._render(task.messages(sample), loaded, sample.id)
        try:
            batch = self._process(text, loaded)
        except (ValueError, RuntimeError) as error:  # such as an image of extreme aspect ratio
            raise DataError(f"sample '{sample.id}': the processor refuses it: {error}") from None
        ids = batch["input_ids"]
        if ids.shape[1] > self.config.limits.prompt_tokens:
            raise PromptTooLong(f"sample '{sample.id}': prompt of {ids.shape[1]} tokens is longer than "
                                f"limits.prompt_tokens={self.config.limits.prompt_tokens}")
        mm = {k: v for k, v in batch.items() if k not in _NOT_MM and isinstance(v, torch.Tensor)}
        sizes = self.family.processed_sizes(self.processor, mm, [m.kind for m in loaded])
        return Prompt(
            sample_id=sample.id, text=text, ids=ids[0].numpy(), mm=mm, media=tuple(loaded),
            raw_ids=np.asarray(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64),
            positions=self.positions(ids, batch.get("mm_token_type_ids"), mm),
            processed_sizes=tuple(size for size, _ in sizes), visual_tokens=tuple(n for _, n in sizes))

    def answer_ids(self, text: str) -> np.ndarray:
        """[T] token ids of an answer text with the end token, as supervised fine-tuning trains it."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64)

    def _render(self, messages: list[dict[str, Any]], loaded: Sequence[LoadedMedia], sample_id: str) -> str:
        places = sum(isinstance(c, dict) and c.get("type") in ("image", "video")
                     for m in messages for c in m["content"])
        if places != len(loaded):
            raise DataError(f"sample '{sample_id}': its messages place {places} media, the sample has {len(loaded)}")
        safe = [{**m, "content": self._safe(m["content"])} for m in messages]
        return self.processor.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)

    def _safe(self, content: Any) -> Any:
        """Content whose text cannot open a turn or claim an image: control tokens written in data are broken up."""
        if isinstance(content, str):
            for token in self._reserved:
                content = content.replace(token, f"< {token[1:]}")
            return content
        return [{**c, "text": self._safe(c["text"])} if c.get("type") == "text" else c for c in content]

    def _process(self, text: str, loaded: Sequence[LoadedMedia]) -> Any:
        images = [m.frames[0] for m in loaded if m.kind == "image"]
        videos = [m for m in loaded if m.kind == "video"]
        kwargs: dict[str, Any] = {}
        if images:
            kwargs["images"] = images
        if videos:
            frames = [torch.from_numpy(np.stack([np.asarray(f) for f in v.frames])).permute(0, 3, 1, 2) for v in videos]
            kwargs |= {"videos": frames, "video_metadata": [dict(v.metadata) for v in videos],
                       "do_sample_frames": False}
        return self.processor(text=[text], return_tensors="pt", **kwargs)
