"""Episodes: environments that wait, environments that hang or crash, and the KV cache between turns.

    python benchmarks/episodes.py arrival cache             # some minutes
    python benchmarks/episodes.py faults                    # 10,000 episodes
    python benchmarks/episodes.py faults --episodes 200

`arrival`: 64 episodes of 6 turns, whose environments wait log-normal seconds (coefficient of variation 1), with
environment.order=arrival and with a barrier after every turn (fixed). `faults`: groups of 8 episodes, 1 % of which hang
and 1 % of which end their process at a random turn; actions come from a script, everything else is real. `cache`:
generation with the KV cache kept between turns, and without it. Tiny random Qwen3-VL, float32, one thread. Each part
prints its section of benchmarks/results/episodes.md."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import psutil
import torch
import transformers
from PIL import Image

from vlrl import Environment, Media, Observation, Sample, Step, Task, config
from vlrl.engine.base import Done, Request, Sampling, reset_sample
from vlrl.environments.episodes import EpisodeEngine
from vlrl.rollout.generate import make_group
from vlrl.tools.tiny import models as tiny_models
from vlrl.training import build
from vlrl.types import Completion, Group, Turn

GROUP, TURNS = 8, 6
PLANTED = ("hang", "crash")
Lines = Iterator[str]


class Waiting(Environment):
    """Waits at every step, and hangs or ends its process where the action says so; shows a picture at the reset and
    after the turns in `pictures`."""

    def __init__(self, sample: Sample, task: Doors):
        self.turn, self.task = 0, task
        self.rng = np.random.default_rng(zlib.crc32(sample.id.encode()))

    def shown(self, text: str) -> Observation:
        pixels = np.random.default_rng(self.turn).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        return Observation(text, [Media(source=Image.fromarray(pixels))] if self.turn in self.task.pictures else [])

    def reset(self, seed: int) -> Observation:
        return self.shown("A door.")

    def step(self, action: str) -> Step:
        if "hang" in action:
            time.sleep(3600)
        if "crash" in action:
            os._exit(1)
        if self.task.wait_s:
            time.sleep(self.task.wait_s * self.rng.lognormal(-math.log(2) / 2, math.log(2) ** 0.5))
        self.turn += 1
        return Step(self.shown(f"Door {self.turn}." + " red" * self.task.words), {"doors": 1.0},
                    done=self.turn == self.task.turns, state=self.turn)


class Doors(Task):
    """Opens doors."""

    prompt = "Open door {id}."
    rewards: ClassVar = {"doors": 1.0}
    wait_s: float = 0.0
    turns: int = TURNS
    pictures: tuple[int, ...] = ()
    words: int = 0

    def samples(self, split: str) -> list[Sample]:
        return [Sample(id=f"{split}-{i}", row={"id": i}) for i in range(8)]

    def environment(self, sample: Sample) -> Environment:
        return Waiting(sample, self)


def assembled(folder: str, task: Mapping[str, Any], **more: Any) -> build.Parts:
    """Returns a run of the tiny model in `folder`, which is made where it is missing."""
    torch.set_num_threads(1)
    if not Path(folder, "model").exists():
        tiny_models.build("qwen3_vl", Path(folder, "model"))
    settings = config.validate({
        "task": {"name": f"{__file__}:Doors", **task}, "steps": 10**6, "algo": {"kl_coef": 0.0},
        "model": {"name": f"{folder}/model", "dtype": "float32", "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": 1, "max_new_tokens": 4096}, "train": {"sharding": "none"},
        "limits": {"score_s": 0, "environment_errors": 1.0}, "run": {"checks": "warn", "dir": f"{folder}/run"}, **more})
    return build.assemble(settings, build.make_accelerator(settings))


def requests_for(parts: build.Parts, groups: range, n: int, tokens: int) -> list[Request]:
    """A request for each group, whose environment was opened."""
    asked = []
    for number in groups:
        row = Sample(id=f"door-{number}", row={"id": str(number)})
        sample = reset_sample(parts.engine, parts.task, row, number)
        asked.append(Request(prompt=parts.encode(parts.task, sample), n=n, key=(0, number), sample=sample,
                             sampling=Sampling(max_new_tokens=tokens)))
    return asked


def groups_of(parts: build.Parts, asked: Sequence[Request]) -> list[Group]:
    """Returns the scored episodes of requests."""
    return [make_group(parts.task, r.sample, r.prompt, made, group_id=str(r.key[1]), split="train", step=0)
            for r, made in zip(asked, parts.engine.generate(asked), strict=True) if r.sample]


class Script:
    """An engine whose actions are `write(group, rollout, turn) -> (text, tokens)`."""

    def __init__(self, write: Callable[[int, int, int], tuple[str, np.ndarray]]):
        self.write = write

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        first = [(r, i) for r in requests for i in range(r.n)]  # a later key is (7, 0, group, rollout, turn)
        places = [r.key[2:] if r.n == 1 and len(r.key) == 5 else (r.key[1], i, 0) for r, i in first]
        made = iter([self._action(group, rollout, turn) for group, rollout, turn in places])
        return [[next(made) for _ in range(r.n)] for r in requests]

    def _action(self, group: int, rollout: int, turn: int) -> Completion:
        text, tokens = self.write(group, rollout, turn)
        return Completion(tokens=tokens, logprobs=np.full(len(tokens), -5, np.float32), text=text, finish_reason="stop",
                          loss_mask=np.ones(len(tokens), bool), turns=(Turn(start=0, end=len(tokens)),))

    def sync(self, policy: Any, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def scripted(parts: build.Parts, write: Callable[[int, int, int], tuple[str, np.ndarray]]) -> EpisodeEngine:
    """Has actions come from a script; returns the engine of the run."""
    assert isinstance(parts.engine, EpisodeEngine)
    parts.engine.engine = Script(write)
    return parts.engine


# --- environments that wait -------------------------------------------------------------------------------------------


def arrival(options: argparse.Namespace) -> Lines:
    """Seconds of the same episodes in both orders."""
    count, seconds = options.waiting, {}
    yield (f"{count} episodes of {TURNS} turns of 8 tokens at most, {count} processes of environments that wait "
           f"{options.wait_s:g} s on average. What the waits alone give is the sum over "
           "turns of the longest wait, by the longest sum of an episode.\n")
    yield from ("| order | seconds | seconds in which nothing was generated | episodes a minute |", "|---|---|---|---|")
    for order in ("fixed", "arrival"):
        parts = assembled(options.folder, {"wait_s": options.wait_s}, environment={"workers": count, "order": order},
                          episode={"max_turns": TURNS})
        asked = requests_for(parts, range(count), 1, 8)
        parts.clock.take()
        begun = time.perf_counter()
        made = [c for (c,) in parts.engine.generate(asked)]
        seconds[order] = time.perf_counter() - begun
        parts.engine.close()
        waits = np.array([[t.seconds for t in c.turns if t.role == "assistant"] for c in made], float)
        assert waits.shape == (count, TURNS) and all(c.error is None for c in made)
        bound = waits.max(0).sum() / waits.sum(1).max()
        yield (f"| {order} | {seconds[order]:.1f} | {parts.clock.take()['time/waiting_s']:.1f} | "
               f"{60 * count / seconds[order]:.0f} |")
    ratio = seconds["fixed"] / seconds["arrival"]
    yield f"\nArrival has {ratio:.2f} times the throughput; the waits alone give {bound:.2f}."


# --- environments that hang and crash ---------------------------------------------------------------------------------


def planted(episodes: int, seed: int = 0) -> dict[tuple[int, int], tuple[int, str]]:
    """Returns where 1 % of the episodes hang and 1 % crash."""
    rng, faulty = np.random.default_rng(seed), max(1, episodes // 100)
    chosen = rng.choice(episodes, 2 * faulty, replace=False).tolist()
    return {divmod(e, GROUP): (int(rng.integers(TURNS)), PLANTED[i // faulty]) for i, e in enumerate(chosen)}


def faults(options: argparse.Namespace) -> Lines:
    """What was planted and what came back."""
    count, before = options.episodes // GROUP, {p.pid for p in psutil.Process().children(recursive=True)}
    parts = assembled(options.folder, {}, environment={"workers": 8, "order": "arrival", "step_s": options.step_s},
                      episode={"max_turns": TURNS})
    plan = planted(count * GROUP)

    def write(group: int, rollout: int, turn: int) -> tuple[str, np.ndarray]:
        at, word = plan.get((group, rollout), (-1, ""))
        text = word if at == turn else "open"
        return text, parts.encode.answer_ids(text)

    engine = scripted(parts, write)
    begun, groups = time.perf_counter(), []
    for first in range(0, count, 32):
        groups += groups_of(parts, requests_for(parts, range(first, min(first + 32, count)), GROUP, 8))
    seconds, restarts = time.perf_counter() - begun, engine.environments.restarts
    ours = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert len(ours) > 8  # those of environments, and what starts them
    engine.close()
    left = [p for p in psutil.wait_procs(ours, timeout=30)[1] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    found = {"hang": 0, "crash": 0, "whole": 0, "otherwise": 0}
    for group in groups:
        for rollout in group.rollouts:
            found[outcome(rollout, plan.get((int(group.id), rollout.index)))] += 1
    yield (f"{len(groups):,} groups of {GROUP}, up to {TURNS} turns, 8 processes of environments, environment.step_s="
           f"{options.step_s:g}, environment.order=arrival, seed 0.\n")
    yield from ("| | planted | found |", "|---|---|---|", f"| groups | {count:,} | {len(groups):,} |")
    for word, reason in zip(PLANTED, ("no result within the limit", "its process ended"), strict=True):
        yield f"| {word}: no reward, \"{reason}\" | {sum(w == word for _, w in plan.values())} | {found[word]} |"
    yield f"| whole episodes, reward {TURNS} | {count * GROUP - len(plan):,} | {found['whole']:,} |"
    yield f"| anything else | 0 | {found['otherwise']} |"
    yield f"| processes started again | {len(plan)} | {restarts} |"
    yield f"| processes left at the end | 0 | {len(left)} |"
    yield f"\n{seconds:.0f} seconds."


def outcome(rollout: Any, fault: tuple[int, str] | None) -> str:
    """Returns the fault of an episode that ended at it and was not paid, whole for one without, otherwise."""
    acted = sum(t.role == "assistant" for t in rollout.completion.turns)
    if fault is None:
        return "whole" if rollout.error is None and rollout.reward == acted == TURNS else "otherwise"
    turn, word = fault
    reason = "no result within" if word == "hang" else "its process ended"
    right = rollout.reward is None and reason in str(rollout.error) and acted == turn + 1
    return word if right else "otherwise"


# --- the KV cache between turns ---------------------------------------------------------------------------------------


def cache(options: argparse.Namespace) -> Lines:
    """Seconds of generation with caches that stay alive and without."""
    yield (f"4 groups of {GROUP} episodes of {TURNS} turns of 16 tokens at most, a picture and "
           f"{options.words} words in each observation; the process's own CPU seconds in the engine, after one call "
           "to warm up. Log-probabilities are compared over episodes that both wrote alike.\n")
    yield from ("| KV cache | CPU seconds of generation | tokens read in prompts |", "|---|---|---|")
    parts = assembled(options.folder, {"pictures": [*range(TURNS)], "words": options.words},
                      episode={"max_turns": TURNS}, environment={"workers": 2})
    assert isinstance(parts.engine, EpisodeEngine)
    meter, asked = Metered(parts.engine.engine), requests_for(parts, range(4), GROUP, 16)
    parts.engine.engine = meter
    room, made = meter.engine.turn_caches.most, {}
    for kept in (None, False, True):
        meter.seconds, meter.read, meter.engine.turn_caches.most = 0.0, 0, room if kept else 0
        found = [c for group in parts.engine.generate(asked) for c in group]
        if kept is not None:
            made[kept] = meter.seconds, found
            yield f"| {'alive' if kept else 'anew in every turn'} | {meter.seconds:.2f} | {meter.read:,} |"
    parts.engine.close()
    same = [(a, b) for a, b in zip(*(found for _, found in made.values()), strict=True)
            if np.array_equal(a.tokens, b.tokens)]
    gap = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in same)
    yield (f"\nGeneration is {made[False][0] / made[True][0]:.2f} times as fast; {len(same)} of {len(made[True][1])} "
           f"episodes are alike, their log-probabilities within {gap:.1e}.")


class Metered:
    """The engine, with the CPU seconds spent in it and the tokens that it read in prompts."""

    def __init__(self, engine: Any):
        self.engine, self.seconds, self.read = engine, 0.0, 0
        engine.policy.base.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, given: Any, more: Mapping[str, Any]) -> None:
        ids = more["input_ids"]
        self.read += ids.numel() if ids.shape[1] > 1 else 0

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        begun = time.process_time()
        out = self.engine.generate(requests, done)
        self.seconds += time.process_time() - begun
        return out

    def sync(self, policy: Any, step: int) -> None:
        self.engine.sync(policy, step)

    def close(self) -> None:
        self.engine.close()


# --- the page ---------------------------------------------------------------------------------------------------------

PARTS = {"arrival": arrival, "faults": faults, "cache": cache}
TITLES = {"arrival": "Environments that wait", "faults": "Environments that hang and crash",
          "cache": "The KV cache between turns"}


def section(name: str, lines: Lines, command: str) -> str:
    versions = (f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
                f"{transformers.__version__}, {platform.machine()} with {os.cpu_count()} cores, one thread.")
    return f"## {TITLES[name]}\n\n`{command}`\n\n{versions} " + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--episodes", type=int, default=10_000, help="of faults (default: 10,000)")
    parser.add_argument("--step-s", type=float, default=1.0, help="environment.step_s of faults (default: 1)")
    parser.add_argument("--waiting", type=int, default=64, help="episodes of arrival (default: 64)")
    parser.add_argument("--wait-s", type=float, default=1.0, help="mean wait of arrival in seconds (default: 1)")
    parser.add_argument("--words", type=int, default=64, help="of an observation of cache (default: 64)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="episodes-") as options.folder:
        for name in options.parts:
            print(section(name, PARTS[name](options), f"python {' '.join(sys.argv)}"), flush=True)


if __name__ == "__main__":
    main()
