"""Tasks of equal_bytes.py, which any model solves now and then: what counts is the sum of the bytes that it writes."""

from __future__ import annotations

from PIL import Image

from vlrl import Environment, Observation, Step
from vlrl.task import Task
from vlrl.types import Media, Parts, Sample


class Sums(Task):
    """Right where the sum is 2 modulo 3; a perfect answer has reasoning, of which a hint is the beginning."""

    prompt = "Locate the {colour} circle. Answer with its box as [x1, y1, x2, y2]."
    rewards = {"sum": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"colour": ("red", "blue", "green")[i % 3]},
                       media=(Media(source=Image.new("RGB", (64, 64), (7 * i % 256, 80, 120))),)) for i in range(40)]

    def score(self, sample, answer) -> Parts:
        return {"sum": sum(answer.text.encode()) % 3 / 2}

    def oracle(self, sample):
        return "<think>It is on the left, and large.</think> [10, 10, 420, 680]"

    def guidance(self, sample, answers):
        return "It is on the left."


class Walk(Sums):
    """Ends with the first action of which the sum is even."""

    rewards = {"arrived": 1.0}
    score = Task.score

    def environment(self, sample):
        return World()


class World(Environment):
    def reset(self, seed):
        return Observation("Go on.")

    def step(self, action):
        done = sum(action.encode()) % 2 == 0
        return Step(Observation("Go on."), {"arrived": float(done)}, done=done)
