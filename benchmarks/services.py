"""What rewards that ask a model cost: scoring in batches against one by one, and what a slow judge adds to a step.

    python benchmarks/services.py [--rounds 5] [--seconds 1.0] [--out benchmarks/results/services_cpu.md]

The models are tiny ones that are shipped with vlrl, on one thread. Reward model and log-probabilities: CPU seconds of
this process for the same answers, both ways in turns. Judge: steps of the quickstart beside a server of this machine
that answers each question after between half and the whole of --seconds, against the same steps beside one that
answers at once; what is left is time spent waiting. All in one run, as ratios: seconds of other machines, or of this
one when it is busy, say little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import torch
from judge_calls import Server
from PIL import Image

from vlrl import config as configs
from vlrl.models import policy as policies
from vlrl.models.processing import Encoder
from vlrl.models.reference import Reference
from vlrl.rollout.generate import Visit
from vlrl.services.likelihoods import Likelihoods
from vlrl.services.reward_model import RewardModel
from vlrl.task import Task
from vlrl.training import build, build_task, sft
from vlrl.training.loop import train
from vlrl.types import Completion, Media, Sample

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
PAIRS = QUICKSTART.parent / "preference" / "reward_model.yaml"
MODEL = "embedded/tiny-qwen3-vl"
WORDS = "the red circle stands left of a small blue square and above two green lines".split()
SMALL = ("rollout.prompts_per_step=8", "rollout.group_size=8", "engine.batch_rollouts=16", "eval.samples=0",
         "save.every=0", "log.samples_every=0", "store.media=none", "data.workers=0")
Way = Callable[[], Any]


def texts(count: int, words: int = 24) -> list[str]:
    """Different answers of random words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def in_turns(ways: Sequence[Way], rounds: int) -> list[list[float]]:
    """Returns the CPU seconds of each way by round, after one to warm up."""
    out: list[list[float]] = [[] for _ in ways]
    for round_ in range(rounds + 1):
        for way, kept in zip(ways, out, strict=True):
            start = time.process_time()
            way()
            if round_:
                kept.append(time.process_time() - start)
    return out


# --- reward model and log-probabilities -------------------------------------------------------------------------------


def reward_model(folder: Path) -> RewardModel:
    """One step of `vlrl sft` on made pairs gives a model with a head; what it scores does not matter here."""
    rows = [{"id": str(i), "question": "What is it?", "answer": 1 + i % 2, "responses": [f"{i} cats", "a dog"]}
            for i in range(8)]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    sft.train(configs.load(PAIRS, [
        f"model.name={MODEL}", "model.train=[language]", "model.lora.rank=0", "steps=1", f"run.dir={folder}/scores",
        "rollout.prompts_per_step=4", "eval.samples=0", "log.samples_every=0", f"data.train={folder}/train.jsonl",
        f"data.heldout={folder}/heldout.jsonl"]))
    return RewardModel(configs.load(QUICKSTART, [f"services.reward_model.name={folder}/scores"]))


def of_scores(folder: Path, group: int, rounds: int) -> list[tuple[str, int, list[list[float]]]]:
    """Returns (what, answers, CPU seconds in one call and in one call each) of the reward model."""
    scorer, answers, out = reward_model(folder), texts(group), []
    pixels = np.random.default_rng(0).integers(0, 255, (160, 160, 3), dtype=np.uint8)
    for what, media in (("reward model, question", ()), ("reward model, question and picture",
                                                         (Media(source=Image.fromarray(pixels)),))):
        found = in_turns([lambda m=media: scorer("What do you see?", m, answers),
                          lambda m=media: [scorer("What do you see?", m, [a]) for a in answers]], rounds)
        out.append((what, group, found))
    return out


class Reads(Task):
    """Asks how likely its answers are."""

    prompt = "What do you see?"
    needs: ClassVar = {"policy_logprobs": ()}


def of_logprobs(groups: int, group: int, rounds: int) -> tuple[str, int, list[list[float]]]:
    """The same of policy_logprobs: a step's answers in one pass, and one answer at a time."""
    config = configs.load(QUICKSTART, [f"rollout.group_size={group}"])
    task = Reads()
    policy = policies.load(config, build.make_accelerator(config))
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    read = Likelihoods(Reference(policy, config), encode, task)
    samples: list[Sample] = [*build_task.make_task(config).samples("train")[:groups]]
    answers = [_completion(encode.answer_ids(f"<think>{text}</think><answer>{text[:20]}</answer>"))
               for text in texts(group)]
    visits = [Visit(sample, encode(task, sample), [("", c) for c in answers]) for sample in samples]
    alone = [Visit(v.sample, v.prompt, [one]) for v in visits for one in v.members]
    found = in_turns([lambda: read(visits, "train", 0), lambda: [read([v], "train", 0) for v in alone]], rounds)
    return f"policy log-probabilities, {groups} prompts with a picture", groups * group, found


def _completion(tokens: np.ndarray) -> Completion:
    return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), bool),
                      text="", finish_reason="stop")


# --- a slow judge -----------------------------------------------------------------------------------------------------

CASES = {
    "one question at a time, after generation": ("services.judge.concurrency=1", "rollout.score_ahead=false"),
    "64 at a time, after generation": ("rollout.score_ahead=false",),
    "64 at a time, beside generation": (),
    "64 at a time, a step ahead beside the update": ("async.max_staleness=1", "algo.correction=token_truncate")}


Steps = tuple[list[float], float]
"""Of all steps but the first the seconds of each, and the median of the questions that were asked."""


def steps_beside(seconds: float, steps: int, folder: Path, *words: str) -> Steps:
    """Returns what steps take beside a judge that takes so long."""
    server = Server(seconds, '{"verdict": "yes"}')
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        run = train(configs.load(QUICKSTART, [
            *SMALL, f"steps={steps}", f"run.dir={folder}", "task.parts=[judge]", *words, "services.judge.model=m",
            f"services.judge.url=http://127.0.0.1:{server.server_address[1]}/v1"]))
        lines = run.folder.metrics()[1:]
        return ([line["time/total_s"] for line in lines], statistics.median(line["judge/calls"] for line in lines))
    finally:
        server.shutdown()
        server.server_close()


def of_judge(seconds: float, steps: int, root: Path) -> list[tuple[str, Steps, Steps]]:
    """Returns (case, steps beside a judge that answers at once, and beside the slow one)."""
    out = []
    for i, (name, words) in enumerate(CASES.items()):
        fast, slow = (steps_beside(s, steps, root / f"{i}-{s:g}", *words) for s in (0.0, seconds))
        out.append((name, fast, slow))
        print(f"{name}: {_spread(fast[0])} s, {_spread(slow[0])} s", flush=True)
    return out


# --- the report -------------------------------------------------------------------------------------------------------


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f})"


def report(scored: Sequence[tuple[str, int, list[list[float]]]], judged: Sequence[tuple[str, Steps, Steps]],
           given: argparse.Namespace) -> str:
    lines = ["# Rewards that ask a model", "",
             f"`python benchmarks/services.py --rounds {given.rounds} --group {given.group} "
             f"--seconds {given.seconds:g} --steps {given.steps}`, Python {platform.python_version()}, "
             f"PyTorch {torch.__version__}, {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.0f} at the end, "
             f"{MODEL}, one thread.", "",
             "## In batches and one by one", "",
             "| what | answers | CPU s together | CPU s one by one | times as fast (least, most over the rounds) |",
             "|---|---|---|---|---|"]
    for what, count, (together, single) in scored:
        ratios = [b / a for a, b in zip(together, single, strict=True)]
        lines.append(f"| {what} | {count} | {statistics.median(together):.2f} | {statistics.median(single):.2f} | "
                     f"{statistics.median(ratios):.1f} ({min(ratios):.1f}, {max(ratios):.1f}) |")
    lines += ["", "## Waiting for a slow judge", "",
              f"64 answers a step; a server takes {given.seconds / 2:g} to {given.seconds:g} s for each question that "
              "it was not asked before. Waiting: what a step takes more than beside a judge that answers at once, by "
              "the medians over steps (least, most), whose spread is that of the machine.", "",
              "| questions | asked in a step | s of a step, judge at once | s, slow judge | share spent waiting |",
              "|---|---|---|---|---|"]
    for name, (fast, _), (slow, calls) in judged:
        share = 1 - statistics.median(fast) / statistics.median(slow)
        lines.append(f"| {name} | {calls:.0f} | {_spread(fast)} | {_spread(slow)} | {share:.0%} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--group", type=int, default=16, help="answers to a prompt")
    parser.add_argument("--seconds", type=float, default=1.0, help="most that the judge takes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "services_cpu.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        scored = [*of_scores(root, given.group, given.rounds), of_logprobs(4, given.group, given.rounds)]
        text = report(scored, of_judge(given.seconds, given.steps, root), given)
    given.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
