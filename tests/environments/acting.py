"""A task whose model acts over several turns: each shows one picture more; faults on demand."""

import contextlib
import dataclasses
import os
import pathlib
import time

from PIL import Image

from vlrl import Environment, Media, Observation, Sample, Step, Task
from vlrl.algo.algorithm import Algorithm
from vlrl.curriculum import Draw
from vlrl.engine.base import reset_sample
from vlrl.engine.hf import HFEngine
from vlrl.environments.episodes import EpisodeEngine
from vlrl.environments.host import Environments
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import AcceptedDraw, RolloutGenerator
from vlrl.types import Variant


class Lamps(Environment):
    """Shows a lamp, then after each action another; the third action ends it. The second touches the file `mark`."""

    faulty = "train-1"
    """The sample whose second action has the fault."""

    def __init__(self, sample, fault, mark="", said=""):
        self.sample, self.fault, self.mark, self.said, self.turn = sample, fault, mark, said, 0

    def picture(self):
        colour = 40 * self.turn % 256, int(self.sample.id.split("-")[1]), self.seed % 256
        return Media(source=Image.new("RGB", (64, 64 + 28 * self.turn), colour))

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        if self.fault == "away" and self.sample.id.endswith("-1"):
            raise ConnectionError("no server answers")
        if self.fault == "unlike":
            self.seed += time.monotonic_ns()
        return Observation("A lamp." + self.said, [self.picture()])

    def step(self, action):
        self.turn += 1
        if self.mark and self.turn == 2:
            pathlib.Path(self.mark).touch()
        faulty = self.fault and self.sample.id == self.faulty and self.turn == 2
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
    mark: str = ""

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"id": i}) for i in range(6)]

    def environment(self, sample):
        return Lamps(sample, self.fault, self.mark)


@contextlib.contextmanager
def engine_of(policy, encode, config, task=None):
    """The engine of episodes over the policy, and the task."""
    task = task or Acting(rewards={"vowels": 1.0})
    environments = Environments(lambda convention: task, config.environment)
    engine = EpisodeEngine(HFEngine(policy, config.seed, 16), encode, environments, config, Clock())
    try:
        yield engine, task
    finally:
        engine.close()


def played(policy, encode, config, count=2, task=None):
    """Scored groups of real episodes, one for each of the first samples."""
    with engine_of(policy, encode, config, task) as (engine, task):
        samples = [reset_sample(engine, task, sample, i) for i, sample in enumerate(task.samples("train")[:count])]
        asked = [AcceptedDraw(i, Draw(i, 0), sample, encode(task, sample)) for i, sample in enumerate(samples)]
        return RolloutGenerator(config, task, engine, Clock(), Algorithm(config)).groups(asked, 0)


class Varied(Acting):
    """Half of a group sees a noisy picture, in front of an environment that says more at its reset."""

    def samples(self, split):
        picture = Media(source=Image.linear_gradient("L").convert("RGB").resize((64, 64)))
        return [Sample(id=s.id, row=s.row, media=(picture,)) for s in super().samples(split)]

    def variants(self, sample, n, step):
        noisy = dataclasses.replace(sample.media[0], edits=(("noise", 500, 17),))
        return [Variant(name="noisy", media=(noisy,), n=n // 2, trained=True)]

    def environment(self, sample):
        return Lamps(sample, self.fault, said=" It flickers." if sample.media[0].edits else "")


class Silent(Acting):
    """No sample has an environment: single answers."""

    def environment(self, sample):
        return None

    def score(self, sample, answer):
        return {"vowels": sum(c in "aeiou" for c in answer.text) / 8}


class Plain(Task):
    """The same, of a task that knows no environments."""

    prompt, rewards, samples, score = Acting.prompt, Acting.rewards, Acting.samples, Silent.score


class Told(Acting):
    """The same with what to do in it."""

    actions: tuple[str, ...] = ("a", "eio", "out")

    def oracle_actions(self, sample):
        return self.actions
