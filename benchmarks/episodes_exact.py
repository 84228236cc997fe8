"""Engine and trainer on every turn of episodes with an image in each: families, full and LoRA, after every sync.

    python benchmarks/episodes_exact.py > benchmarks/results/episodes_exact.md          # --engine vllm: where vLLM is

A cell tells, of a random tiny model (`vlrl tiny`) whose weights move before each of three syncs: the largest difference
of a log-probability in each turn over all syncs and episodes, and what `episode_check.first_difference` says."""

import argparse
import contextlib
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from vlrl import config as configs
from vlrl.config.schema import Config
from vlrl.engine.base import Request, Sampling, reset_sample
from vlrl.engine.vllm.episode_check import first_difference, turn_gaps
from vlrl.environments.episodes import EpisodeEngine
from vlrl.environments.host import Environments
from vlrl.models import policy as policies
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import Clock
from vlrl.task import Task
from vlrl.task.environment import Environment
from vlrl.tools.tiny import models as tiny_models
from vlrl.training.build_engine import make_engine
from vlrl.types import Completion, Media, Observation, Prompt, Sample, Step

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "smolvlm", "internvl")
MODES = {"full": {"train": ["language", "merger", "vision"]}, "LoRA": {"lora": {"rank": 4}}}
SYNCS, TURNS = 3, 4
ALLOWED = {"hf": 1e-5, "vllm": 1e-4}


class Walk(Environment):
    """Shows another room after each action; no two rooms look alike."""

    def __init__(self, sample: Sample):
        self.sample, self.turn = sample, 0

    def room(self) -> Observation:
        pixels = np.random.default_rng([self.sample["room"], self.turn]).integers(0, 255, (56, 84, 3), np.uint8)
        picture = Image.fromarray(pixels).resize((84 + 28 * self.turn, 84))
        return Observation(f"Room {self.turn}.", [Media(source=picture)])

    def reset(self, seed: int) -> Observation:
        return self.room()

    def step(self, action: str) -> Step:
        self.turn += 1
        return Step(self.room(), {"steps": 1.0}, done=self.turn == TURNS)


class Rooms(Task):
    """An episode of four actions, with an image before each."""

    prompt = "Find the way out."
    rewards = {"steps": 1.0}

    def samples(self, split: str) -> list[Sample]:
        return [Sample(id=f"room-{i}", row={"room": i}) for i in range(2)]

    def environment(self, sample: Sample) -> Walk:
        return Walk(sample)


@dataclass
class Play:
    """A policy, an engine for its episodes, and their samples."""

    policy: Policy
    encode: Encoder
    engine: EpisodeEngine
    task: Task
    syncs: int = 0

    def sync(self) -> None:
        """Moves all trained weights, and brings them to the engine."""
        generator = torch.Generator().manual_seed(self.syncs)
        with torch.no_grad():
            for _, p in self.policy.trainable():
                p += 0.05 * max(float(p.std()), 0.1) * torch.randn(p.shape, generator=generator)
        self.syncs += 1
        self.engine.sync(self.policy, self.syncs)

    def episodes(self, n: int = 2) -> list[tuple[Prompt, Completion]]:
        """Returns `n` episodes of each sample, with the prompts that they begin with."""
        samples = [reset_sample(self.engine, self.task, s, 0) for s in self.task.samples("train")]
        prompts = [self.encode(self.task, s) for s in samples]
        requests = [Request(prompt=p, n=n, sampling=Sampling(max_new_tokens=6), key=(0, i), sample=s)
                    for i, (p, s) in enumerate(zip(prompts, samples, strict=True))]
        made = self.engine.generate(requests)
        return [(p, c) for p, group in zip(prompts, made, strict=True) for c in group]


def settings(folder: Path, mode: str, engine: str = "hf") -> Config:
    """Returns the config of a run over Rooms with the model of a folder."""
    return configs.validate({"task": f"{__file__}:Rooms", "rollout": {"max_new_tokens": 6}, "seed": 3,
                             "episode": {"max_tokens": 1024}, "model": {"name": str(folder), **MODES[mode]},
                             "engine": {"name": engine}})


@contextlib.contextmanager
def playing(config: Config, folder: Path) -> Iterator[Play]:
    """Yields what plays episodes with the engine of the config; its environments end with it."""
    task = Rooms()
    environments = Environments(lambda convention: task, config.environment)  # before the model is loaded
    environments.set_convention("original")
    policy = policies.load(config, Accelerator(cpu=True))
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    inner = make_engine(config, policy, folder / "engine", episodes=True)
    engine = EpisodeEngine(inner, encode, environments, config, Clock())
    try:
        yield Play(policy, encode, engine, task)
    finally:
        engine.close()


def per_turn(play: Play, prompt: Prompt, completion: Completion) -> list[float]:
    """Returns the largest difference of a log-probability in each action."""
    gaps = turn_gaps(play.policy, prompt, completion)
    return [float(gaps[t.start:t.end].max()) for t in completion.turns if t.role == "assistant"]


def cell(family: str, mode: str, engine: str, folder: Path) -> str:
    """Returns what a family does, trained in a mode."""
    model = folder / family
    if not model.exists():
        tiny_models.build(family, model, seed=1)
    worst, said = np.zeros(TURNS), "alike"
    with playing(settings(model, mode, engine), folder) as play:
        for _ in range(SYNCS):
            play.sync()
            for prompt, completion in play.episodes():
                assert completion.error is None and len(completion.observed_media) == TURNS, completion.error
                worst = np.maximum(worst, per_turn(play, prompt, completion))
                found = first_difference(play.policy, play.encode, prompt, completion, ALLOWED[engine])
                said = str(found) if found and said == "alike" else said
    return f"| {engine} | {family} | {mode} | {' | '.join(f'{gap:.1e}' for gap in worst)} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["hf"], choices=sorted(ALLOWED))
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    given = parser.parse_args()
    print("# Every turn of episodes, engine beside trainer\n\n| engine | family | trained | turn 1 | turn 2 | turn 3 | "
          "turn 4 | first difference |\n|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for engine in given.engine:
            for family in given.families:
                for mode in MODES:
                    print(cell(family, mode, engine, Path(folder)), flush=True)
    print(f"\nThe largest difference of a log-probability of an action over {SYNCS} syncs, each after all trained "
          "weights moved; an image before every action.\n"
          f"Allowed: {', '.join(f'{gap:g} with {name}' for name, gap in ALLOWED.items())}.\n\n"
          f"- command: `python benchmarks/episodes_exact.py --engine {' '.join(given.engine)}`\n"
          f"- {platform.machine()} CPU, float32; torch {torch.__version__}, transformers {version('transformers')}")


if __name__ == "__main__":
    main()
