"""Groups as details.py shows them, made by hand; reading back HTML that the inspector writes."""

import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser

import numpy as np

from vlrl.app.details import GroupView, MediaView, RolloutView
from vlrl.app.index import GroupKey, RolloutKey

KEY = ("run", "train", "train", 3, "g")


def rollout(index=0, marks=None, **more):
    fields = {"schema": 1, "policy_step": 3, "completion": "<think>so</think><answer>7</answer>",
              "token_ids": np.arange(3, dtype=np.int32), "loss_mask": None, "logprobs": None, "trainer_logprobs": None,
              "entropies": None, "ratio": None, "clipped": None, "top_ids": None, "top_logprobs": None,
              "parts": {"iou": 0.5, "format": 1.0}, "weights": {"iou": 1.0, "format": 0.1}, "metrics": {},
              "reward": 0.6, "correct": None, "advantage": 0.25, "parsed": [1, 2], "error": None,
              "finish_reason": "stop", "truncated": False, "turns": (), "episode_id": None, "variant": None}
    return RolloutView(key=RolloutKey(*KEY, index), marks=None if marks is None else tuple(marks), **(fields | more))


def image(**more):
    return MediaView(**({"name": "a.png", "hash": "a", "kind": "image", "size": (200, 100),
                         "processed_size": (196, 112), "visual_tokens": 28} | more))


def clip(*times, **more):
    return image(**({"name": "a.mp4", "kind": "video", "timestamps": times} | more))


def group(*rollouts, media=None, **more):
    fields = {"key": GroupKey(*KEY), "task": "grounding", "sample_id": "s-1", "category": "cats", "difficulty": 0.5,
              "prompt": "Where?", "weights": {}, "target": [1, 2], "sample": {"id": "s-1"}, "mean": 0.6, "std": 0.1,
              "best": 0.7, "worst": 0.5, "zero_variance": False}
    return GroupView(media=(image(),) if media is None else media, rollouts=rollouts or (rollout(),), **(fields | more))


def mark(kind, at, role="answer", **more):
    return {"kind": kind, "at": at, "label": "cat", "role": role, **more}


class Plain:
    """Addresses that only name what was asked for."""

    def picture(self, run, name, size):
        return f"/picture?{run}/{name}/{size}"

    def video(self, run, name):
        return f"/video?{run}/{name}"

    def frames(self, run, name, seconds):
        return [f"/frame?{s:g}" for s in seconds]


@dataclass
class Markup(HTMLParser):
    """Tags, attributes, text and comments of some HTML, and whether every element is closed where it should be."""

    html: str
    tags: list[str] = field(default_factory=list)
    attributes: list[dict[str, str | None]] = field(default_factory=list)
    text: str = ""
    odd: list[str] = field(default_factory=list)
    """Comments, declarations, instructions, and elements that are closed in the wrong place."""

    def __post_init__(self):
        super().__init__()
        self.open: list[str] = []
        self.feed(self.html)
        self.close()
        self.odd += self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.odd.append(f"</{tag}>")

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.odd.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    def all(self, tag):
        return [a for t, a in zip(self.tags, self.attributes, strict=True) if t == tag]


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())
