"""Converts groups in memory to views for the pages, without a run folder and with inlined images. No torch."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlrl.store import plain
from vlrl.types import Group, LoadedMedia, Rollout

from .asking import SamplePreview
from .details import GroupView, MediaView, RolloutView
from .queries import GroupKey, RolloutKey

_SHARP = 640
"""Images with sides of at most this many pixels are encoded losslessly."""
_STILL = 320


class InlineImages:
    """Implements draw.Addresses for media in memory: `data:` URLs, looked up by hash. Videos show their sampled frames
    and have no player."""

    def __init__(self, media: Sequence[LoadedMedia]):
        self._media = {one.sha256: one for one in media}

    def picture(self, run: str, name: str, size: int | None) -> str | None:
        one = self._media.get(name)
        return one and _data(one.frames[0], size)

    def video(self, run: str, name: str) -> str | None:
        return None

    def frames(self, run: str, name: str, seconds: Sequence[float]) -> Sequence[str | None]:
        one = self._media.get(name)
        if one is None or not one.timestamps:
            return [None] * len(seconds)
        places = [int(np.abs(np.asarray(one.timestamps) - s).argmin()) for s in seconds]
        return [_data(one.frames[place], _STILL) for place in places]


def _data(image: Any, size: int | None) -> str:
    if size and max(image.size) > size:
        image = image.copy()
        image.thumbnail((size, size))
    buffer = io.BytesIO()
    form = "PNG" if max(image.size) <= _SHARP and size is None else "JPEG"
    image.save(buffer, format=form, **({"quality": 88} if form == "JPEG" else {}))
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def group_view(group: Group, label: str, notes: tuple[str, ...] = ()) -> GroupView:
    """Converts a scored group to a GroupView as `details.group` would read it from a run folder; `label` replaces the
    run id."""
    prompt, sample, step = group.prompt, group.sample, group.rollouts[0].policy_step
    rewards = np.array([r.reward for r in group.rollouts if r.reward is not None], float)
    media = [_media(one, prompt.processed_sizes[i] if i < len(prompt.processed_sizes) else None,
                    prompt.visual_tokens[i] if i < len(prompt.visual_tokens) else None)
             for i, one in enumerate(prompt.media)]
    key = GroupKey(label, "train", group.split, step, group.id)
    known = len(rewards) > 0
    return GroupView(
        key=key, task=group.task, sample_id=sample.id, category=None if sample.category is None else
        str(sample.category), difficulty=sample.difficulty, prompt=prompt.text, weights=dict(group.weights),
        target=plain(group.target), sample=plain(dict(sample.row)), media=tuple(media),
        rollouts=tuple(_rollout(r, key, group) for r in group.rollouts), mean=float(rewards.mean()) if known else None,
        std=float(rewards.std(ddof=min(1, len(rewards) - 1))) if known else None,
        best=float(rewards.max()) if known else None, worst=float(rewards.min()) if known else None,
        zero_variance=known and group.zero_variance, notes=notes)


def sample_view(shown: SamplePreview, task: str, split: str) -> GroupView:
    """Converts the preview of a sample to a GroupView without answers, to show the sample before generation."""
    sample = shown.sample
    return GroupView(
        key=GroupKey("", "eval", split, 0, sample.id), task=task, sample_id=sample.id, category=None, difficulty=None,
        prompt=shown.question, weights={}, target=plain(shown.target), sample=plain(dict(sample.row)),
        media=tuple(_media(one) for one in shown.media), rollouts=(), mean=None, std=None, best=None, worst=None,
        zero_variance=False, marks=shown.marks)


def _media(one: LoadedMedia, processed: tuple[int, int] | None = None, tokens: int | None = None) -> MediaView:
    return MediaView(name=one.sha256, hash=one.sha256, kind=one.kind, size=one.size, processed_size=processed,
                     visual_tokens=tokens, timestamps=one.timestamps)


def _rollout(rollout: Rollout, key: GroupKey, group: Group) -> RolloutView:
    done = rollout.completion
    return RolloutView(
        key=RolloutKey(*key, rollout.index), schema=None, policy_step=rollout.policy_step, completion=done.text,
        token_ids=np.asarray(done.tokens, np.int32), loss_mask=np.asarray(done.loss_mask, bool),
        logprobs=np.asarray(done.logprobs, np.float32), trainer_logprobs=None, entropies=None, ratio=None, clipped=None,
        top_ids=None, top_logprobs=None, parts=dict(rollout.parts), weights=dict(group.weights),
        metrics=dict(rollout.metrics), reward=rollout.reward, correct=rollout.correct, advantage=None,
        parsed=plain(rollout.parsed), error=rollout.error, finish_reason=done.finish_reason, truncated=done.truncated,
        turns=(), episode_id=None, variant=rollout.variant or None, opened=group.prompt.opened,
        marks=None if rollout.marks is None else tuple(plain(m) for m in rollout.marks))
