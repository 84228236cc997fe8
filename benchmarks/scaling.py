"""How the cost of a step grows with the group, the prompt, the image and the answer: straight lines and their slopes.

    python benchmarks/scaling.py --out benchmarks/results/scaling_cpu.md      # about 5 minutes on one core

A step of one group of a tiny random Qwen3-VL, float32, one thread. `update` is packing, forward, backward and AdamW;
`step` is reading the image, generation (the end token is banned, so every answer has its full length), scoring and
the update. The cases take turns, one after another in every round; a case's cost is the median over the rounds of the
process's own CPU seconds, so that what else runs on the machine matters little. Wall seconds stand beside them.

A line `seconds = intercept + slope * tokens` is fitted to each series, through the medians and through the least values
(which other processes disturb least). Where a prompt is computed once per group, its slope is that of one prompt at any
group size, apart from the answers' attention to it; computed once per answer, it would grow with the group. How much of
a slope the useful operations (vlrl/models/flops.py) explain stands beside it. In a step, a longer answer also takes
further forward passes while generating, which cost about the same for any group of such a small model.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import torch
import transformers
from PIL import Image
from scipy.stats import linregress

from vlrl import config
from vlrl.algo.advantage import grpo
from vlrl.engine.base import Request, Sampling
from vlrl.models.flops import cost_model, patches_of
from vlrl.rollout.generate import make_group
from vlrl.task import Task
from vlrl.tools.tiny import models as tiny_models
from vlrl.training import build
from vlrl.training.advantages import credit
from vlrl.training.update import update
from vlrl.types import Answer, Completion, Group, Media, Parts, Sample

SIDE = 16
"""Side of the square of pixels that becomes one visual token of this tiny model."""


@dataclass(frozen=True)
class Case:
    """One group. Counts are tokens; `group` is the number of answers."""

    group: int = 8
    text: int = 64
    visual: int = 64
    answer: int = 32


@dataclass(frozen=True)
class Series:
    """Cases that differ in one thing; `tokens` is what it adds to the group."""

    title: str
    fixed: str
    cases: tuple[Case, ...]
    tokens: Callable[[Case], int]

    @property
    def name(self) -> str:
        return f"{self.title}, {self.fixed}"


def series(groups: Sequence[int], texts: Sequence[int], sides: Sequence[int], answers: Sequence[int]) -> list[Series]:
    """The six series; `sides` are those of the square image, in visual tokens."""
    base = Case()

    def per_group(title: str, cases: Callable[[Case], list[Case]], tokens: Callable[[Case], int]) -> list[Series]:
        return [Series(title, f"G={g}, 8 tokens an answer", tuple(cases(Case(group=g, answer=8))), tokens)
                for g in (4, 16)]

    return [
        Series("group size", "32 tokens an answer", tuple(replace(base, group=g) for g in groups),
               lambda case: case.group * case.answer),
        Series("answer length", "8 answers", tuple(replace(base, answer=n) for n in answers),
               lambda case: case.group * case.answer),
        *per_group("prompt text", lambda case: [replace(case, text=n) for n in texts], lambda case: case.text),
        *per_group("image", lambda case: [replace(case, visual=n * n) for n in sides], lambda case: case.visual)]


SERIES = series((2, 4, 8, 16, 32), (64, 320, 576, 832), (6, 10, 13, 16), (16, 32, 64, 96, 128))


class Pictures(Task):
    """A picture of random pixels and a reward that random text has to some degree."""

    prompt = "{question}"
    rewards: ClassVar = {"vowels": 1.0}

    def samples(self, split: str) -> list[Sample]:
        return [sample_of(Case())]

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"vowels": sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)}


def sample_of(case: Case) -> Sample:
    """Its picture is square and has `visual` visual tokens; its text about `text` tokens."""
    side = SIDE * round(case.visual**0.5)
    pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    question = " ".join(["the", "red", "circle", "left"][i % 4] for i in range(case.text - 10))  # 10 of the template
    return Sample(id=str(case), media=(Media(source=Image.fromarray(pixels)),), row={"question": question})


class Bench:
    """A tiny model, and a step of one group with it."""

    def __init__(self, folder: str, largest: int):
        torch.set_num_threads(1)
        tiny_models.build("qwen3_vl", Path(folder, "model"), max_pixels=largest * SIDE**2)
        settings = config.validate({
            "task": {"name": f"{__file__}:Pictures"}, "steps": 10**6, "algo": {"kl_coef": 0.0},
            "model": {"name": f"{folder}/model", "dtype": "float32", "train": ["language", "merger", "vision"]},
            "rollout": {"prompts_per_step": 1, "max_new_tokens": 4096},
            "train": {"lr": 1e-6, "tokens_per_batch": 10**6}, "limits": {"score_s": 0}})
        self.parts = build.assemble(settings, build.make_accelerator(settings))
        policy = self.parts.policy
        policy.banned = torch.tensor(sorted({*policy.banned.tolist(), *policy.eos}))
        self.cost = cost_model(policy.model, policy.family)
        vocabulary = len(policy.processor.tokenizer)
        self.allowed = sorted(set(range(vocabulary)) - set(policy.banned.tolist()))

    def given(self, case: Case) -> Group:
        """A credited group with random answers."""
        rng = np.random.default_rng(0)
        sample = sample_of(case)
        answers = [Completion(tokens=rng.choice(self.allowed, case.answer), text="aeb"[:1 + i % 3],
                              logprobs=np.full(case.answer, -5, np.float32), loss_mask=np.ones(case.answer, bool),
                              finish_reason="length") for i in range(case.group)]
        return self._credited(sample, self.parts.encode(self.parts.task, sample), answers)

    def operations(self, case: Case) -> float:
        """Useful operations of the update, forward and backward."""
        prompt = self.given(case).prompt
        return self.cost.of(len(prompt), patches_of(prompt.mm, self.parts.policy.base.config),
                            [case.answer] * case.group)

    def update(self, group: Group) -> None:
        update(self.parts.policy, self.parts.optimizer, [group], self.parts.config, 0)

    def step(self, case: Case) -> None:
        """From the picture to new weights."""
        sample = sample_of(case)
        prompt = self.parts.encode(self.parts.task, sample)
        sampling = Sampling(max_new_tokens=case.answer)
        (answers,) = self.parts.engine.generate([Request(prompt=prompt, n=case.group, sampling=sampling)])
        self.update(self._credited(sample, prompt, answers))

    def _credited(self, sample: Sample, prompt: Any, answers: Sequence[Completion]) -> Group:
        return credit([make_group(self.parts.task, sample, prompt, answers, group_id="0", split="train", step=0)],
                      grpo)[0]


@dataclass
class Seconds:
    """Of each round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


def measure(bench: Bench, cases: Sequence[Case], rounds: int) -> dict[str, dict[Case, Seconds]]:
    """Seconds by what was done and case; one round before them warms up."""
    found = {name: {case: Seconds() for case in cases} for name in ("update", "step")}
    groups = {case: bench.given(case) for case in cases}
    for turn in range(rounds + 1):
        kept = found if turn else {name: {case: Seconds() for case in cases} for name in found}
        for case in cases:
            kept["update"][case].measure(lambda case=case: bench.update(groups[case]))
            kept["step"][case].measure(lambda case=case: bench.step(case))
    return found


@dataclass(frozen=True)
class Fit:
    """cost = intercept + slope * tokens."""

    slope: float
    error: float
    """Standard error of the slope."""
    intercept: float
    r2: float


def fit(chosen: Series, cost: Callable[[Case], float]) -> Fit:
    """The line through the costs of a series."""
    line: Any = linregress([chosen.tokens(case) for case in chosen.cases], [cost(case) for case in chosen.cases])
    return Fit(line.slope, line.stderr, line.intercept, line.rvalue**2)


def report(chosen: Sequence[Series], found: dict[str, dict[Case, Seconds]],
           operations: dict[Case, float]) -> Iterator[str]:
    """Lines of Markdown: the fits, what they say, and every median."""
    yield from ("| what | series | tokens | CPU us / token | intercept, ms | R^2 | us / token, least | R^2 |",
                "|---|---|---|---|---|---|---|---|")
    for name, seconds in found.items():
        for s in chosen:
            line = fit(s, lambda case, of=seconds: statistics.median(of[case].cpu))
            least = fit(s, lambda case, of=seconds: min(of[case].cpu))
            yield (f"| {name} | {s.name} | {s.tokens(s.cases[0])} .. {s.tokens(s.cases[-1])} | {1e6 * line.slope:.0f} "
                   f"± {1e6 * line.error:.0f} | {1e3 * line.intercept:.0f} | {line.r2:.4f} | {1e6 * least.slope:.0f} "
                   f"± {1e6 * least.error:.0f} | {least.r2:.4f} |")
    yield ""
    for name, seconds in found.items():
        yield from sayings(name, *([fit(s, cost).slope for s in chosen] for cost in (
            lambda case, of=seconds: statistics.median(of[case].cpu),
            lambda case, of=seconds: min(of[case].cpu), operations.__getitem__)))
    yield from ("", "| series | G | text | visual | answer | update, CPU s | wall s | step, CPU s | wall s |",
                "|---|---|---|---|---|---|---|---|---|")
    for s in chosen:
        for case in s.cases:
            cells = [f"{statistics.median(times):.4f} ({min(times):.4f} .. {max(times):.4f})"
                     for seconds in found.values() for times in (seconds[case].cpu, seconds[case].wall)]
            yield f"| {s.name} | {case.group} | {case.text} | {case.visual} | {case.answer} | {' | '.join(cells)} |"


def sayings(name: str, median: Sequence[float], least: Sequence[float], operations: Sequence[float]) -> Iterator[str]:
    """What slopes of the series say, by median, by least values and by useful operations."""
    group, answer = (1e6 * slope for slope in median[:2])
    yield (f"- {name}: an answer token costs {group:.0f} us when it comes with another answer, {answer:.0f} us when "
           "answers are longer.")
    for what, few, many in (("the prompt's text", 2, 3), ("the image", 4, 5)):
        by_median, by_least, expected = (slopes[many] / slopes[few] for slopes in (median, least, operations))
        yield (f"- {name}: from G=4 to G=16 the slope of {what} becomes {by_median:.2f} x ({by_least:.2f} x by "
               f"least values; {expected:.2f} x by useful operations of the update). Computed once per answer: 4 x.")


def header(rounds: int, command: str) -> str:
    return (f"# Cost of a step by group, prompt, image and answer (CPU)\n\n`{command}`\n\n"
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{platform.machine()} with {os.cpu_count()} cores, one thread, float32; medians of {rounds} rounds, least "
            "and largest in brackets. CPU seconds are the process's own; other processes ran beside it.\n")


def run(chosen: Sequence[Series], rounds: int, out: Path | None) -> None:
    """Measures, prints the report and writes it to `out`."""
    cases = list(dict.fromkeys(case for s in chosen for case in s.cases))
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        bench = Bench(folder, max(case.visual for case in cases))
        found, operations = measure(bench, cases, rounds), {case: bench.operations(case) for case in cases}
    options = f" --rounds {rounds}" + (f" --out {out}" if out else "")
    text = "\n".join([header(rounds, f"python benchmarks/scaling.py{options}"), *report(chosen, found, operations), ""])
    print(text)
    if out:
        out.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; one to warm up comes on top (default: 7)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the report to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least one round is needed")
    run(SERIES, options.rounds, options.out)


if __name__ == "__main__":
    main()
