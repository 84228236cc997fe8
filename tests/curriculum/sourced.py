"""A group source with a scripted engine, over rows that every sampler can use."""

import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import Accelerator

from tests.engine.scripted import ScriptedEngine
from vlrl import curriculum
from vlrl.config import validate
from vlrl.curriculum import Prompts
from vlrl.distributed import comm
from vlrl.errors import DataError
from vlrl.models.processing import PromptTooLong
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.task.mixture import Mixture
from vlrl.types import Prompt, Sample

OPTIONS: dict[str, dict[str, Any]] = {
    "adcl": {"probe_size": 2}, "alp_gmm": {"fit_every": 6, "components": 2}, "easy_to_hard": {},
    "gvm": {"probe": 2, "least": 1}, "hard_focus": {"after": 3, "share": 0.4, "group_size": 4},
    "lifecycle": {"rest": 2, "patience": 1}, "limr": {"epochs": 1}, "recap": {"by": "category"}, "rlcs": {"tiers": 3},
    "staged": {"stages": [{"where": {"category": "a"}, "steps": 3, "group_size": 2, "max_new_tokens": 6},
                          {"where": {"category": ["b", "c"]}, "carry": 0.5}]}}
"""Of samplers whose defaults would do nothing in a short run."""
FILTERS = {"keep": "mixed", "oversample": {"name": "ema", "decay": 0.5}, "select": "nearest_half", "max_refills": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "filters": {"curriculum": FILTERS},
    "partial": {"curriculum": FILTERS, "rollout": {"step_tokens": 4}},
    "shares": {"curriculum": {**FILTERS, "keep": "all"}, "shares": True},
    "partial shares": {"curriculum": {"keep": "mixed"}, "rollout": {"step_tokens": 4}, "shares": True}}
SHARED, STEPS = ("filters", "partial", "shares"), 4
"""The cases that are run with two processes, and how long."""
BROKEN, LONG = 5, 9
"""Places of samples that are rejected."""


class Levels(Task):
    """Row n has a level; the answers are right or wrong by the prompt's text alone."""

    prompts = ("{n}", "again {n}", "and again {n}")
    rewards = {"right": 1.0, "length": 0.1}
    knobs = {"size": (0.0, 2.0), "count": (1.0, 3.0)}
    size: int = 14

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row=_row(n, n % 4 / 4)) for n in range(self.size)]

    def generate(self, index, knobs):
        return Sample(id=f"made-{index}", row=_row(f"{index} at {sorted(knobs.items())}", knobs["size"] / 3))

    def score(self, sample, answer):
        return {"right": float(answer.text.startswith("y")), "length": len(answer.text) / 16}


def _row(name, difficulty):
    return {"n": name, "level": difficulty, "difficulty": difficulty, "pass_at_k": 1 - difficulty,
            "category": "abc"[int(3 * difficulty)]}


def answer(prompt: Prompt, index: int) -> str:
    """1 to 14 letters; the first says whether it is right."""
    name, level = prompt.text.rsplit(" ", 1)
    number = zlib.crc32(f"{name}/{index}".encode())
    return ("y" if number % 100 > 90 * float(level) + 5 else "n") + "x" * (number // 100 % 14)


def encode(task, sample):
    text = f"{task.messages(sample)[0]['content'][0]['text']} {sample['level']}"
    if sample["n"] == BROKEN:
        raise DataError(f"sample {sample.id}: broken.png cannot be read")
    if sample["n"] == LONG:
        raise PromptTooLong(f"sample {sample.id}: prompt of 99 tokens")
    ids = np.arange(len(text))
    return Prompt(sample_id=sample.id, text=text, ids=ids, raw_ids=ids, positions=ids[None])


def source(name: str, case: str) -> GroupSource:
    """That of a run with a sampler under one of CASES."""
    settings = {**CASES[case]}
    shares = {"levels": 3.0, "others": 1.0} if settings.pop("shares", False) else None
    rollout = {"group_size": 3, "prompts_per_step": 4, "max_new_tokens": 12, **settings.pop("rollout", {})}
    own = {"name": name, **OPTIONS.get(name, {}), **settings.pop("curriculum", {})}
    config = validate({"task": "x", "model": {"name": "x"}, "rollout": rollout, "curriculum": own,
                       "data": {"quarantine": True}, "limits": {"rejected": 1.0}})
    task = Mixture({"levels": Levels(), "others": Levels(size=11)}) if shares else Levels()
    samples = task.samples("train")
    prompts = Prompts.of(samples, 3, "", config.rollout, task.knobs)
    sampler = comm.on_main_alone(lambda: curriculum.make(config.curriculum, prompts, shares))
    def angle(samples, places, progress):
        return np.array([np.nan if samples[i]["n"] in (BROKEN, LONG) else np.cos(i) for i in places], np.float32)

    return GroupSource(RolloutGenerator(config, task, ScriptedEngine(answer), Clock()), cast(Any, encode), sampler,
                       samples,
                       prompts=prompts, measures={"angle": angle})


def step_of(source: GroupSource, step: int) -> dict[str, Any]:
    """What a step draws and says, over all processes."""
    groups = source.next_groups(4, step)
    trained, dropped = (sorted(itertools.chain(*comm.gather([_told(g) for g in some])))
                        for some in (groups, source.dropped))
    return {"trained": trained, "dropped": dropped, "held": [*source.carried_over],
            "reasons": sorted(source.rejected.take()), "metrics": source.metrics()}


def _told(group) -> list[Any]:
    return [group.id, group.sample.id, group.prompt.text, group.rewards,
            [[r.completion.text, r.policy_step, r.completion.loss_mask.tolist()] for r in group.rollouts]]


def run(name: str, case: str, steps: int, folder: Path | None = None) -> Iterator[str]:
    """What each step draws and says, as JSON; with `folder` each step is a resumed run's."""
    now = source(name, case)
    for step in range(steps):
        yield json.dumps(step_of(now, step))
        if folder is not None:
            path = checkpoint.save(folder, step, lambda path: None, {"source": now.state_dict()}, 1)
            now = source(name, case)
            now.load_state_dict(checkpoint.load_state(path)["source"])


def main(out: Path) -> None:
    """What SHARED draw and say, over all processes; the main one writes it."""
    Accelerator(cpu=True)
    found = {f"{name}, {case}": [*run(name, case, STEPS)] for name in curriculum.SAMPLERS for case in SHARED}
    if comm.is_main():
        out.write_text(json.dumps(found))
