"""Converts samples to chat messages in OpenAI's format, with images as data URLs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.data import media
from vlrl.data.clip_cache import ClipCache
from vlrl.data.media import VideoSampling
from vlrl.environments.tools import schemas
from vlrl.errors import DataError
from vlrl.services.chat import data_urls
from vlrl.task import Task, task_messages
from vlrl.types import Prompt, Sample


class ChatEncoder:
    """Converts samples to prompts that hold chat messages (`Prompt.mm["messages"]`), for servers. For local models,
    models.processing.Encoder converts samples to token ids instead. A video becomes a sequence of images."""

    def __init__(self, config: Config):
        self.config = config
        self._video = VideoSampling(config.model.video_fps, config.model.video_max_frames,
                                    config.model.video_min_frames)
        self._clips = ClipCache(config.data.clip_cache_mib)

    def copy(self) -> ChatEncoder:
        """Returns the encoder itself: another thread can use it too, because it has no mutable state."""
        return self

    def __call__(self, task: Task, sample: Sample) -> Prompt:
        return self.prompt(sample, task_messages(task, sample), schemas(task, sample))

    def prompt(self, sample: Sample, messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The prompt with these chat messages and the sample's media. Raises DataError if `tools` or the tools of the
        sample are not empty, because endpoints get no tools."""
        if tools or sample.get("tools"):
            raise DataError(f"sample '{sample.id}' has tools, which an endpoint does not support. Evaluate the "
                            "model with engine=hf or engine=vllm")
        loaded = [media.load(m, self.config.limits, self._video, self._clips) for m in sample.media]
        places = iter(loaded)
        shown = [{**message, "content": _content(message["content"], places)} for message in messages]
        if next(places, None) is not None:
            raise DataError(f"sample '{sample.id}': its messages refer to fewer images and videos than the sample has")
        none = np.zeros(0, np.int64)
        text = json.dumps(list(messages), ensure_ascii=False, sort_keys=True)
        return Prompt(sample_id=sample.id, text=text, ids=none, raw_ids=none, positions=none[None],
                      mm={"messages": shown}, media=tuple(loaded))


def _content(content: Any, places: Any) -> Any:
    if isinstance(content, str):
        return content
    out: list[dict[str, Any]] = []
    for part in content:
        if part.get("type") not in ("image", "video"):
            out.append(part)
            continue
        media = next(places, None)
        if media is None:
            raise DataError("the messages refer to more images and videos than the sample has")
        out += [{"type": "image_url", "image_url": {"url": url}} for url in data_urls(media)]
    return out
