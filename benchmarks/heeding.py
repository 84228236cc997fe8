"""Tasks whose prompts hold what a second attempt is told: supervised steps on them teach a small model to heed it.

A released model follows "this is how a correct solution begins"; the embedded one knows no such words, and no rule
that asks again could act on it. The pictures are blank here, so that nothing is learned of what they show.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from vlrl.data import Drawn
from vlrl.methods.second_attempts.guidance import WORDS, Tried
from vlrl.task import Task, load_class
from vlrl.task.asked import with_guidance
from vlrl.tools.tiny.models import THOUGHTS
from vlrl.types import Answer, Media, Sample

_Digits: Any = load_class("digits")
_Grounding: type[Task] = load_class("grounding")


class _Told(Task):
    """Behind each question stands one of `kinds`, drawn by the sample's id; the answer is the given one. The picture is
    blank."""

    kinds: tuple[str, ...]

    def wrong(self, sample: Sample, stream: random.Random) -> str:
        """Returns an answer that is wrong."""
        raise NotImplementedError

    def samples(self, split: str) -> Sequence[Sample]:
        seen = super().samples(split)
        return Drawn(len(seen), lambda i: _blank(seen[i]))

    def messages(self, sample: Sample) -> Any:
        stream = random.Random(f"told/{sample.id}")
        wrong = Answer(text=self.wrong(sample, stream))
        tried = Tried(self, sample, (wrong,), (False,))
        if (kind := stream.choice(self.kinds)) == "hint":
            text = WORDS[kind](tried, (stream.choice((0.25, 0.5, 0.75)),))
        else:
            text = WORDS[kind](tried)
        return with_guidance(super().messages(sample), text or "")


def _blank(sample: Sample) -> Sample:
    size = sample["width"], sample["height"]
    return replace(sample, media=(Media(source=Image.new("RGB", size, "grey")),))


class ReasonedDigits(_Digits):
    """Digits whose given answers have reasoning, in the words that the embedded model thinks in."""

    thinking: str = "thinking"

    def oracle(self, sample: Sample) -> str:
        if not self.thinks(sample):
            return super().oracle(sample)
        label = int(sample["label"])
        thought = random.Random(f"thought/{sample.id}").choice(THOUGHTS[label])
        return f"<think>{thought}</think><answer>{label}</answer>"


class ToldDigits(_Told, ReasonedDigits):
    kinds = ("hint", "answer", "solution", "critique")

    def wrong(self, sample: Sample, stream: random.Random) -> str:
        label = stream.choice([d for d in range(10) if d != int(sample["label"])])
        return f"<think>{stream.choice(THOUGHTS[label])}</think><answer>{label}</answer>"


class ToldGrounding(_Told, _Grounding):
    kinds = ("task", "answer", "solution", "critique")

    def wrong(self, sample: Sample, stream: random.Random) -> str:
        x, y = stream.randrange(0, 700), stream.randrange(0, 700)
        return f"[{x}, {y}, {x + stream.randrange(100, 300)}, {y + stream.randrange(100, 300)}]"
