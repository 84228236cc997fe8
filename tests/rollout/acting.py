"""A task whose model acts over several turns: each shows one picture more; faults on demand."""

import os
import time

from PIL import Image

from vlrl import Environment, Media, Observation, Sample, Step, Task


class Lamps(Environment):
    """Shows a lamp, then after each action another; the third action ends it."""

    def __init__(self, sample, fault):
        self.sample, self.fault, self.turn = sample, fault, 0

    def picture(self):
        colour = 40 * self.turn % 256, int(self.sample.id.split("-")[1]), self.seed % 256
        return Media(source=Image.new("RGB", (64, 64 + 28 * self.turn), colour))

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        if self.fault == "unlike":
            self.seed += time.monotonic_ns()
        return Observation("A lamp.", [self.picture()])

    def step(self, action):
        self.turn += 1
        faulty = self.fault and self.sample.id == "train-1" and self.turn == 2
        if faulty and self.fault == "hang":
            time.sleep(600)
        if faulty and self.fault == "die":
            os._exit(3)
        if faulty and self.fault == "raise":
            raise KeyError("lost")
        text = "x" * 200_000 if faulty and self.fault == "long" else f"Lamp {self.turn}."
        parts = {"vowels": float("nan") if faulty and self.fault == "nan" else sum(c in "aeiou" for c in action) / 8}
        media = [Media(source="no/such.png")] if faulty and self.fault == "broken" else [self.picture()]
        return Step(Observation(text, media if self.turn != 1 or self.sample.id != "train-0" else []), parts,
                    done=self.turn == 3, state=self.turn, info={"turn": self.turn})


class Acting(Task):
    prompt = "Switch {id}."
    rewards = {"vowels": 1.0}
    fault: str = ""

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"id": i}) for i in range(6)]

    def environment(self, sample):
        return Lamps(sample, self.fault)
