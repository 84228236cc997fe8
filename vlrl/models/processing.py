"""Converts a Sample to a Prompt with the Hugging Face processor, once per sample, for both engine and trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.data import media
from vlrl.data.clip_cache import ClipCache
from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import VideoSampling
from vlrl.errors import ConfigError, DataError
from vlrl.models.chat_template import ChatTemplate, opening_text, parts_of, turn_beginning
from vlrl.models.families import Family
from vlrl.models.loading import template_variables
from vlrl.rewards.text import closing_tag
from vlrl.task import Task, task_messages, tool_schemas, with_guidance
from vlrl.types import LoadedMedia, Media, Observation, Prompt, Sample

_MEDIA = Table({"edited": "vlrl.data.media_edits:apply_edits", "clock": "vlrl.data.video.sampling:clock"})
_VISUALS = Table({name: f"vlrl.models.vision_cache:{name}" for name in ("processor_hash", "visuals_of")})
_TOOLS = Table({name: f"vlrl.models.tool_prompts:{name}"
                for name in ("in_system", "keeps_results", "results", "strips_thinking", "writes_calls")})
_CHARACTERS = 16  # more than the mean length of a token in nearly any text
_MOST_AT_ONCE = 1 << 18  # texts up to this length are tokenized as a whole
_STAND_IN = "vlrl-stands-in-for-an-action"
_BESIDE = ("input_ids", "attention_mask", "text_replacement_offsets", "labels")


class PromptTooLong(DataError):
    """Raised for a prompt with more tokens than limits.prompt_tokens. Such a prompt is rejected, never truncated."""


class Encoder:
    """Converts samples to prompts, with one processor for one model. `positions(ids [1, T], types [1, T], mm) -> [R,
    T]` is the model's own rope index (see Policy.positions)."""

    def __init__(self, processor: Any, family: Family, positions: Callable[..., np.ndarray], config: Config):
        self.processor, self.family, self.positions, self.config = processor, family, positions, config
        self._video = VideoSampling(config.model.video_fps, config.model.video_max_frames,
                                    config.model.video_min_frames)
        self._clips = ClipCache(config.data.clip_cache_mib)  # shared by copies
        self._processed_by = _VISUALS["processor_hash"](processor) if config.model.feature_cache_mib else None
        self._chat = ChatTemplate(processor, {**family.template, **config.model.chat_template_kwargs})
        tokenizer = processor.tokenizer
        self._end = family.end_id(processor)
        ends = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token,
                tokenizer.convert_ids_to_tokens(self._end)} - {None}
        control = {t for t in _special(tokenizer) if t.startswith("<|") or not family.known}
        vision = {*family.vision_tokens, *tokenizer.convert_ids_to_tokens(family.vision_ids(processor))}
        self._vision = sorted(vision, key=len, reverse=True)
        self._reserved = sorted(control | ends | vision, key=len, reverse=True)
        self._marks = [token for token in self._reserved if not closing_tag(token.replace("/", "", 1))]  # not <think>

    def __call__(self, task: Task, sample: Sample, guidance: str = "") -> Prompt:
        """The Prompt of a sample. The text `guidance`, if any, follows the question. Raises DataError for unreadable
        media, and PromptTooLong for more than limits.prompt_tokens tokens."""
        messages = task_messages(task, sample)
        return self.prompt(sample, with_guidance(messages, guidance) if guidance else messages,
                           tool_schemas(task, sample))

    def copy(self) -> Encoder:
        """An encoder with a copy of the processor, for use in another thread."""
        other = copy.copy(self)
        other.processor = copy.deepcopy(self.processor)
        other._chat = self._chat.of(other.processor)
        return other

    def prompt(self, sample: Sample, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The Prompt of a sample from its chat messages. Runs no code of the task. `tools` are the tool schemas of the
        task; () = the sample's field `tools`, if any."""
        opening = sample.opening.media if sample.opening else ()
        loaded = [*(self._loaded(m, sample.id) for m in sample.media), *self._observed(opening, sample.id)]
        if tools and not self._writes_calls:
            messages, tools = _TOOLS["in_system"](messages, tools), ()
        else:
            tools = tools or sample.get("tools") or ()
        text = self._render(self._media_first(messages, sample.opening), loaded, sample, tools)
        begin = text[:max(_MOST_AT_ONCE, _CHARACTERS * self.config.limits.prompt_tokens)]
        if len(begin) < len(text):  # tokenizing megabytes takes a minute
            self._check_length(len(self.processor.tokenizer(begin)["input_ids"]), sample.id, "more than ")
        bos = self.processor.tokenizer.bos_token
        encoded = self._encoded(sample.id, text, loaded, not (bos and text.startswith(bos)))
        self._check_length(len(encoded), sample.id)
        return encoded

    def _check_length(self, tokens: int, sample_id: str, more: str = "") -> None:
        if tokens > self.config.limits.prompt_tokens:
            raise PromptTooLong(f"sample '{sample_id}': the prompt has {more}{tokens} tokens, and the maximum is "
                                f"limits.prompt_tokens={self.config.limits.prompt_tokens}")

    def observation(self, observation: Observation, sample_id: str) -> Prompt:
        """The tokens that follow the end token of an action: the observation as the chat template writes it, and the
        start of the next turn.

        Positions start from 0. The template renders a conversation with a placeholder for the action, so sampled text
        is never rendered. Tool results become turns of role tool if the template has such turns and shows their images.
        Otherwise all tool results become one user turn. Raises DataError for unreadable media, and ConfigError for a
        template that does not end turns with the model's end token."""
        loaded = self._observed(observation.media, sample_id)
        content = [*({"type": m.kind} for m in loaded), {"type": "text", "text": observation.text}]
        turns = (_TOOLS["results"](observation, self._keeps_results, self._reads_order) if observation.results
                 else [{"role": "user", "content": content}])
        probe = [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                 {"role": "assistant", "content": [{"type": "text", "text": _STAND_IN}]}, *turns]
        after = self._render(probe, loaded, Sample(id=sample_id)).rpartition(_STAND_IN)[2]
        end = self.processor.tokenizer.convert_ids_to_tokens(self._end)
        if not after.startswith(end):
            raise ConfigError(f"task with an environment: the chat template of model type '{self.family.model_type}' "
                              f"does not write {end!r} after a turn, so no observation can follow an action. Copy "
                              "chat_template.jinja of the original instruction-tuned model into the model's folder")
        return self._encoded(sample_id, after.removeprefix(end), loaded, special=False)

    @property
    def end(self) -> int:
        """Id of the token that ends a turn."""
        return self._end

    def _observed(self, shown: Sequence[Media], name: str) -> list[LoadedMedia]:
        most, loaded = self.config.episode.max_pixels, [self._loaded(m, name) for m in shown]
        return [_MEDIA["edited"](m, [("shrink", most)]) if most and m.size[0] * m.size[1] > most else m for m in loaded]

    def _loaded(self, one: Media, name: str) -> LoadedMedia:
        try:
            return media.load(one, self.config.limits, self._video, self._clips)
        except DataError as error:
            if isinstance(one.source, (str, os.PathLike, EmbeddedMedia)):
                raise
            raise DataError(f"sample '{name}': {error}") from error

    def _encoded(self, name: str, text: str, loaded: Sequence[LoadedMedia], special: bool) -> Prompt:
        try:
            batch = self._process(text, loaded, special)
        except (ValueError, RuntimeError, IndexError) as error:  # such as an image of extreme aspect ratio
            raise DataError(f"sample '{name}': the processor refuses it: {error}") from None
        ids = batch["input_ids"]
        shown = self._shown(batch, ids, loaded)
        if shown != len(loaded):
            raise DataError(f"sample '{name}': the chat template of {self.config.model.name} shows {shown} of the "
                            f"sample's {len(loaded)} images and videos, so the model would not see all. Copy "
                            "chat_template.jinja of the original model into the model's folder")
        tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and k not in _BESIDE}
        beside = {k: v[0].numpy() for k, v in tensors.items() if v.shape == ids.shape and k.endswith("type_ids")}
        mm = {k: v for k, v in tensors.items() if k not in beside}
        raw = self.processor.tokenizer(text, add_special_tokens=special)["input_ids"]
        return Prompt(
            sample_id=name, text=text, ids=ids[0].numpy(), mm=mm, media=tuple(loaded), opened=self._opened(text),
            raw_ids=np.asarray(raw, dtype=np.int64), aligned={} if self.family.shared else beside,
            aligned_answer=self.family.answer_types,
            positions=self.positions(ids, batch.get("mm_token_type_ids"), mm),
            processed_sizes=self.family.processed_sizes(self.processor, mm, [m.kind for m in loaded]),
            visual_tokens=self._visual_tokens(batch, loaded),
            visuals=_VISUALS["visuals_of"](self.family, self._processed_by, mm, loaded) if self._processed_by else ())

    def answer_ids(self, text: str) -> np.ndarray:
        """[T] token ids of a reference answer and the end token, as supervised fine-tuning trains them. `text` is the
        part of the answer that follows the prompt. Vision tokens in the text are broken up by a space, because a
        model cannot generate them."""
        ids = self.processor.tokenizer(_broken_up(text, self._vision), add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self._end], dtype=np.int64)

    def _render(self, messages: list[dict[str, Any]], loaded: Sequence[LoadedMedia], sample: Sample,
                tools: Sequence[Mapping[str, Any]] = ()) -> str:
        contents = [m["content"] for m in messages]
        places = sum(isinstance(c, dict) and c.get("type") in ("image", "video") for parts in contents for c in parts)
        if places != len(loaded):
            raise DataError(f"sample '{sample.id}': its messages have placeholders for {places} media, but the sample "
                            f"has {len(loaded)}")
        if any(map(_mixed, contents)) and not self._reads_order:
            raise DataError(f"sample '{sample.id}': a message has media inside or after its text, but the chat "
                            f"template of a {self.family.model_type} puts the media of a turn before its text. Move "
                            "the media before the text, or choose a model whose template keeps positions of media")
        if tools and not self._reads_tools:
            raise DataError(f"sample '{sample.id}': it has tools, which the chat template of {self.config.model.name} "
                            "does not show. Remove the tools, or choose a model whose template shows tools")
        for role in dict.fromkeys(m["role"] for m in messages):
            if problem := self._chat.problem(role, self._plain(tools)):
                raise DataError(f"sample '{sample.id}': the chat template of {self.config.model.name} does not show "
                                f"the text of turns with role {role!r} ({problem.rstrip('.')}). Remove such turns, "
                                "or copy a chat_template.jinja that supports them into the model's folder")
        safe = [{**self._plain({k: v for k, v in m.items() if k != "content"}), "content": self._safe(m["content"])}
                for m in messages]
        try:
            return self._template(safe, **({"tools": self._plain(tools)} if tools else {}))
        except Exception as error:  # whatever a template's code raises
            raise DataError(f"sample '{sample.id}': the chat template of {self.config.model.name} refuses its turns "
                            f"({', '.join(m['role'] for m in messages)}): {error}") from None

    def _media_first(self, messages: list[dict[str, Any]], opening: Observation | None) -> list[dict[str, Any]]:
        if opening is None or not opening.media or self._reads_order:
            return messages
        content = messages[-1]["content"]
        if _mixed(content[:-1 - len(opening.media)]):
            return messages
        texts = [part for part in content if part.get("type") == "text"]
        media = [part for part in content if part.get("type") != "text"]
        return [*messages[:-1], {**messages[-1], "content": [*media, *texts]}]

    def _template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._chat(messages, add_generation_prompt=True, **options)

    @property
    def opened(self) -> str:
        """Text with which the chat template starts every completion, such as "<think>". See also Prompt.opened."""
        return self._opened(self._template([{"role": "user", "content": self._safe("x")}]))

    def _opened(self, text: str) -> str:
        return opening_text(text, self._beginning, self._marks)

    @cached_property
    def _beginning(self) -> str:
        return turn_beginning(self._template)

    @cached_property
    def _reads_tools(self) -> bool:
        return "tools" in template_variables(self.processor)

    @cached_property
    def _writes_calls(self) -> bool:
        return self._reads_tools and _TOOLS["writes_calls"](self._template)

    @cached_property
    def _keeps_results(self) -> bool:
        return self._writes_calls and _TOOLS["keeps_results"](self._template)

    @property
    def strips_thinking(self) -> bool:
        """Whether the chat template drops the thinking of earlier turns once another turn follows."""
        return _TOOLS["strips_thinking"](self._template)

    @cached_property
    def _reads_order(self) -> bool:
        parts = [{"type": "text", "text": "before"}, {"type": "image"}, {"type": "text", "text": "after"}]
        between = self._template([{"role": "user", "content": parts}]).partition("before")[2].partition("after")[0]
        return bool(between.strip())

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(inner) for inner in value]
        return _broken_up(value, self._reserved) if isinstance(value, str) else value

    def _safe(self, content: Any) -> Any:
        """Breaks up control tokens in texts, so that data cannot start a turn or pretend to be an image."""
        return [{**c, "text": _broken_up(c["text"], self._reserved)} if c.get("type") == "text" else c
                for c in parts_of(content)]

    def _process(self, text: str, loaded: Sequence[LoadedMedia], special: bool) -> Any:
        images = [m.frames[0] for m in loaded if m.kind == "image"]
        videos = [m for m in loaded if m.kind == "video"]
        kwargs: dict[str, Any] = {"add_special_tokens": special, "return_text_replacement_offsets": True}
        if images:
            kwargs["images"] = images
        if videos:
            if not self.family.videos or getattr(self.processor, "video_processor", None) is None:
                raise ValueError("this model's processor does not accept videos")
            frames = [torch.from_numpy(np.stack([np.asarray(f) for f in v.frames])).permute(0, 3, 1, 2) for v in videos]
            kwargs |= {"videos": frames, "video_metadata": [*map(_MEDIA["clock"], videos)], "do_sample_frames": False}
        if images and videos and self.family.exclusive_media:
            raise ValueError("a prompt of this model may contain images or videos, not both")
        if self.family.mrope:
            kwargs["return_mm_token_type_ids"] = True
        kwargs |= {name: [kwargs[name]] for name in self.family.nested if name in kwargs}
        return self.processor(text=[text], return_tensors="pt", **kwargs)

    def _shown(self, batch: Any, ids: torch.Tensor, loaded: Sequence[LoadedMedia]) -> int:
        """The number of media in `loaded` whose placeholders are in the text. `batch` is the processor's output, `ids`
        are the prompt's token ids. If the processor does not report placeholders, the result is the number of all
        media, or 0 if the ids contain no vision token."""
        offsets = batch.get("text_replacement_offsets")
        if isinstance(offsets, list) and offsets:
            return sum(put["type"] in ("image", "video") for put in offsets[0])
        some = torch.isin(ids, torch.tensor(self.family.vision_ids(self.processor))).any()
        return len(loaded) if some else 0

    def _visual_tokens(self, batch: Any, loaded: Sequence[LoadedMedia]) -> tuple[int, ...]:
        """Number of visual tokens of each image or video, counted in the text that replaces its placeholder. () if the
        processor does not report this text."""
        offsets = batch.get("text_replacement_offsets") if loaded else None
        put = offsets[0] if isinstance(offsets, list) else []
        if len(put) != len(loaded):
            return ()
        names = {self._placeholder("image"), self._placeholder("video")} - {None}
        counts = {kind: iter([sum(p["replacement"].count(n) for n in names) for p in put if p["type"] == kind])
                  for kind in ("image", "video")}
        return tuple(next(counts[m.kind]) for m in loaded)

    def _placeholder(self, kind: str) -> str | None:
        """The token that stands for one visual feature of an image or video (`kind`), in some processors for a complete
        image. None if unknown."""
        name = f"{kind}_token"
        return getattr(self.processor.tokenizer, name, None) or getattr(self.processor, name, None)


def _broken_up(text: str, tokens: Sequence[str]) -> str:
    for token in tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _mixed(content: Any) -> bool:
    ranks = {"image": 0, "video": 1}
    order = [ranks.get(c["type"], 2) for c in content if isinstance(c, dict)]
    return order != sorted(order)


def _special(tokenizer: Any) -> set[str]:
    return {*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)}
