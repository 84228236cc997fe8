"""Recall: colours are shown one per turn, and named in order at the end.

The smallest environment with images: the right answer depends only on earlier turns. A quarter of all sequences are
held out and never used for training."""

import random
from collections.abc import Sequence
from typing import Annotated, Any

from PIL import Image
from pydantic import Field

from vlrl.config.base import Positive
from vlrl.errors import ConfigError
from vlrl.rewards.text import said
from vlrl.task import Task
from vlrl.task.environment import Environment
from vlrl.types import Answer, Media, Observation, Parts, Sample, Step

from ._scenes import COLOURS
from ._shared import drawn

SIZE = 32
"""Side length of an image in pixels."""


class ColourSequence(Environment):
    """Shows one colour per turn; the action after the last colour is the answer."""

    def __init__(self, colours: Sequence[str]):
        self.colours, self.turn = colours, 0

    def reset(self, seed: int) -> Observation:
        self.turn, self.shades = 0, random.Random(seed)
        return self._next()

    def step(self, action: str) -> Step:
        if self.turn < len(self.colours):
            return Step(self._next(), state=self.turn)
        return Step(done=True, state="answered")

    def _next(self) -> Observation:
        red, green, blue = (min(255, max(0, value + self.shades.randint(-30, 30)))
                            for value in COLOURS[self.colours[self.turn]])
        self.turn += 1
        picture = Image.new("RGB", (SIZE, SIZE), (red, green, blue))
        return Observation(f"{self.turn} of {len(self.colours)}.", [Media(source=picture)])


class Recall(Task):
    """Name the colours that were shown, in order. Reward parts: `accuracy`, 0 or 1, and `format`, 0 or 1 (whether as
    many colours are named as were shown)."""

    prompt = "Say next until {length} colours are shown. Then answer with their names in order."
    rewards = {"accuracy": 1.0, "format": 0.1}
    length: Annotated[int, Field(ge=2, le=64)] = 3
    """Number of colours; each turn shows one of them. episode.max_turns must be at least this number."""
    shortest: Annotated[int, Field(ge=2, le=64)] | None = None
    """Smallest number of colours; null = all have `length`. Sequences of all lengths from `shortest` to `length` are
    equally frequent."""
    count: Positive = 4096
    """Number of sequences per split."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        if self.shortest is not None and self.shortest >= self.length:
            raise ConfigError(f"task.shortest={self.shortest} is not below task.length={self.length}, so all sequences "
                              "have the same length: lower task.shortest, or remove this setting")

    def samples(self, split: str) -> Sequence[Sample]:
        return drawn(self, split, self._sample)

    def _sample(self, split: str, index: int) -> Sample:
        rng = random.Random(f"recall/{self.seed}/{split}/{index}")
        names = sorted(COLOURS)
        least = self.shortest or self.length
        length = least + index % (self.length - least + 1)
        while True:
            places = rng.choices(range(len(names)), k=length)
            if (sum(i * place for i, place in enumerate(places, 1)) % 4 == 0) == split.endswith("heldout"):
                break
        colours = [names[place] for place in places]
        return Sample(id=f"{split}-{index:06d}", row={"length": length, "colours": colours})

    def environment(self, sample: Sample) -> Environment:
        return ColourSequence(sample["colours"])

    def score(self, sample: Sample, answer: Answer) -> Parts:
        names = said(answer).split()
        named = len(names) == sample["length"] and all(name in COLOURS for name in names)
        return {"accuracy": float(names == sample["colours"]), "format": float(named)}

    def target(self, sample: Sample) -> str:
        return self.oracle(sample)

    def oracle(self, sample: Sample) -> str:
        return " ".join(sample["colours"])

    def oracle_actions(self, sample: Sample) -> Sequence[str]:
        return ["next"] * (sample["length"] - 1) + [self.oracle(sample)]
