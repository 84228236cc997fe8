"""A whole GRPO step of vlrl against one of TRL's GRPOTrainer, side by side on this CPU.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/vs_trl.py                               # Qwen3-VL, both settings, about 12 minutes on 2 cores
    python benchmarks/vs_trl.py --model qwen2_5_vl

Equal on both sides: weights (a tiny random model), image files, prompts, group size, answer length (the end token is
banned), reward, AdamW over all parameters, float32, one thread, beta 0, one optimizer step per batch of answers. A step
is everything from reading the images to the new weights; nothing is logged or saved. Each side runs at its own fastest
micro-batch size, found before the timing. Packed and padded updates are compared in memory at equal rows.

Each side is a process; the sides take turns. Reported are medians, their ratio, and the spread of the ratio over the
rounds. Two further sides measure the update alone, on given answers: packed (a group's prompt once) and padded (one row
per answer). Only the ratios carry over to other machines, and a GPU with a large model has other ratios."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import psutil

import vlrl  # prepares OpenMP and torchvision, here and in every process started from here
from vlrl.task import Task
from vlrl.types import Answer, Completion, Group, Media, Parts, Rollout, Sample

PROMPTS, GROUP, SAMPLES = 8, 8, 64
ROWS = (8, 16, 64)
"""Answers per micro-batch that TRL and the padded update may choose from."""
PIXELS = {"qwen3_vl": 16, "qwen2_5_vl": 28}
"""Side of the square of image pixels that becomes one visual token in the tiny models."""
WORDS = "the red circle green square blue triangle yellow box car person sign in image left right up down".split()


@dataclass(frozen=True)
class Setting:
    """Tokens of a prompt and of an answer."""

    name: str
    visual: int
    text: int
    answer: int


SETTINGS = (Setting("image_heavy", visual=256, text=90, answer=48),
            Setting("text_light", visual=16, text=90, answer=32))


@dataclass(frozen=True)
class Job:
    """What one side runs, in words that travel to its process."""

    side: str
    """trl, vlrl (whole steps), packed or padded (updates on given answers)."""
    folder: str
    """Holds model/, samples.json and the images."""
    setting: Setting
    tokens: int
    """Length of the longest prompt."""
    rows: int = 64
    """Answers per micro-batch."""

    @property
    def tokens_per_batch(self) -> int:
        """vlrl's limit for a micro-batch of `rows` answers."""
        if self.side == "padded":
            return self.rows * (self.tokens + self.setting.answer)
        return self.rows // GROUP * self.tokens + self.rows * self.setting.answer


@dataclass
class Result:
    """Seconds of every timed turn, and peak memory above the loaded model."""

    job: Job
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# --- the sides: each loads, calls turn() when ready, and again after every step ------------------------------------


def reward(text: str) -> float:
    """A rule that costs nothing and gives random answers different rewards."""
    return len(set(text)) / max(len(text), 1)


def trl_side(job: Job, turn: Callable[[], None]) -> None:
    """TRL on this CPU, all parameters in float32."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(f"{job.folder}/model", dtype="float32")
    trl_train(Path(job.folder), Path(job.folder, "model"), model, turn, use_cpu=True, bf16=False,
              gradient_checkpointing=False, per_device_train_batch_size=job.rows, num_generations=GROUP,
              gradient_accumulation_steps=PROMPTS * GROUP // job.rows, max_completion_length=job.setting.answer)


def trl_train(folder: Path, name: Path, model: Any, turn: Callable[[], None], peft: Any = None,
              **settings: Any) -> None:
    """TRL's GRPOTrainer as its documentation sets it up; `turn` is called by its own training loop. `name` is the
    folder with the processor, `folder` that with samples.json."""
    from datasets import Dataset, Image  # pyright: ignore[reportMissingImports]
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Turns(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turn()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turn()

    def rewards(completions: list[Any], **columns: Any) -> list[float | None]:
        return [reward(c[0]["content"]) for c in completions]

    processor = AutoProcessor.from_pretrained(name)
    config = GRPOConfig(
        output_dir=f"{folder}/trl", max_steps=1_000_000, beta=0.0, temperature=1.0, learning_rate=1e-6,
        generation_kwargs={"suppress_tokens": banned_ids(processor)}, report_to="none", logging_strategy="no",
        save_strategy="no", disable_tqdm=True, **settings)
    samples = json.loads(Path(folder, "samples.json").read_text(encoding="utf-8"))
    rows = [{"prompt": [{"role": "user", "content": s["question"]}], "image": s["image"]} for s in samples]
    GRPOTrainer(model=model, reward_funcs=rewards, args=config, processing_class=processor, callbacks=[Turns()],
                train_dataset=Dataset.from_list(rows).cast_column("image", Image()), peft_config=peft).train()


def vlrl_side(job: Job, turn: Callable[[], None]) -> None:
    vlrl_train(vlrl_parts(job), turn)


def vlrl_train(parts: Any, turn: Callable[[], None]) -> None:
    """vlrl's loop without logging and saving."""
    from vlrl.algo.advantage import grpo
    from vlrl.monitoring.metrics import phase
    from vlrl.training.advantages import credit
    from vlrl.training.update import update

    for step in range(1_000_000):
        turn()
        with phase("rollout"):
            parts.engine.sync(parts.policy, step)
            groups = parts.source.next_groups(parts.config.rollout.prompts_per_step, step)
        with phase("update"):
            update(parts.policy, parts.optimizer, credit(groups, grpo), parts.config, step)


def update_side(job: Job, turn: Callable[[], None]) -> None:
    """Only vlrl's update, again and again on the same answers; nothing is generated."""
    from vlrl.training.update import update

    parts = vlrl_parts(job)
    groups = given_groups(parts, job.setting.answer)
    for step in range(1_000_000):
        turn()
        update(parts.policy, parts.optimizer, groups, parts.config, step)


SIDES = {"trl": trl_side, "vlrl": vlrl_side, "packed": update_side, "padded": update_side}


def vlrl_parts(job: Job) -> Any:
    """What a run of this config works with, its end token banned."""
    from vlrl import config
    from vlrl.training import build

    settings = config.validate({
        "task": {"name": f"{__file__}:Benchmark", "rows": f"{job.folder}/samples.json"},
        "data": {"workers": 0}, "limits": {"score_s": 0},  # one thread a side
        "model": {"name": f"{job.folder}/model", "dtype": "float32", "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": job.setting.answer},
        "train": {"lr": 1e-6, "tokens_per_batch": job.tokens_per_batch,
                  "packing": "padded" if job.side == "padded" else "shared"}})
    parts = build.assemble(settings, build.make_accelerator(settings))
    ban_the_end(parts.policy)
    return parts


def ban_the_end(policy: Any) -> None:
    """Lets every answer run to the full length."""
    import torch

    policy.banned = torch.tensor(sorted({*policy.banned.tolist(), *policy.eos}), device=policy.device)


class Benchmark(Task):
    """The prompts and the reward as a vlrl task."""

    rows: str = ""
    prompt = "{question}"
    rewards: ClassVar = {"distinct": 1.0}

    def samples(self, split: str) -> Sequence[Sample]:
        rows = json.loads(Path(self.rows).read_text(encoding="utf-8"))
        return [Sample(id=r["id"], row=r, media=(Media(source=Path(r["image"])),)) for r in rows]

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"distinct": reward(answer.text)}


def given_groups(parts: Any, length: int) -> list[Group]:
    """One step's groups with random answers and advantages."""
    rng = np.random.default_rng(0)
    vocabulary = sorted(set(range(200)) - set(parts.policy.banned.tolist()))

    def rollout(group: str, index: int) -> Rollout:
        answer = Completion(tokens=rng.choice(vocabulary, length), logprobs=np.full(length, -5, np.float32),
                            loss_mask=np.ones(length, bool), text="", finish_reason="length")
        return Rollout(group_id=group, index=index, completion=answer, policy_step=0, reward=0.0,
                       advantage=float(rng.normal()))

    return [Group(id=s.id, task=parts.task.name, split="train", sample=s, prompt=parts.encode(parts.task, s),
                  rollouts=tuple(rollout(s.id, i) for i in range(GROUP)))
            for s in parts.task.samples("train")[:PROMPTS]]


def banned_ids(processor: Any) -> list[int]:
    """Vision tokens and the end token, which neither side may write."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    return sorted({*processor.tokenizer.convert_tokens_to_ids(names), processor.tokenizer.eos_token_id})


def prepare(job: Job, family: str, reply: Callable[[Any], None]) -> None:
    """Writes model, images and questions, and replies with [longest prompt in tokens, million parameters]."""
    from PIL import Image, ImageDraw

    from vlrl.tools.tiny import models as tiny_models

    side = PIXELS[family] * int(job.setting.visual**0.5)
    model, processor = tiny_models.build(family, Path(job.folder, "model"), max_pixels=side * side)
    rows, rng, longest = [], random.Random(0), 0
    for i in range(SAMPLES):
        image = Image.new("RGB", (side, side), (245, 245, 245))
        for colour in ("red", "green", "blue"):
            x, y = rng.randrange(side // 2), rng.randrange(side // 2)
            ImageDraw.Draw(image).rectangle((x, y, x + side // 3, y + side // 3), fill=colour)
        image.save(Path(job.folder, f"{i}.png"))
        question, tokens = "Locate", 0
        while tokens < job.setting.visual + job.setting.text:
            question += f" {rng.choice(WORDS)}"
            message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            text = processor.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            tokens = len(processor.tokenizer(text)["input_ids"]) - 1 + job.setting.visual
        longest = max(longest, tokens)
        rows.append({"id": f"s{i}", "image": str(Path(job.folder, f"{i}.png")), "question": question})
    Path(job.folder, "samples.json").write_text(json.dumps(rows), encoding="utf-8")
    reply([longest, sum(p.numel() for p in model.parameters()) / 1e6])


# --- processes that take turns -------------------------------------------------------------------------------------


class Worker:
    """One side in a process of its own. `step()` lets it run one step, times it and watches its memory."""

    def __init__(self, job: Job):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.result, self.log = Result(job), Path(job.folder, f"{job.side}-{job.rows}.log")
        self.process = context.Process(target=_serve, args=(job, theirs, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()
        self.memory = psutil.Process(self.process.pid)
        self._wait(watch=False)
        self.loaded = self.memory.memory_info().rss

    def step(self, timed: bool = True) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.pipe.send("go")
        self._wait(watch=True)
        seconds = time.perf_counter() - start
        if timed:
            self.result.seconds.append(seconds)
        return seconds

    def close(self) -> Result:
        """Ends the process and returns what was measured."""
        self.pipe.close()
        self.process.join()
        return self.result

    def _wait(self, watch: bool) -> None:
        while not self.pipe.poll(0.004):
            if watch:
                self.result.peak = max(self.result.peak, self.memory.memory_info().rss - self.loaded)
        try:
            self.pipe.recv()
        except EOFError:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
            _fail(f"{tail}\nthe side '{self.result.job.side}' ended early; its last words are above")


def _serve(job: Job, pipe: Connection, log: str) -> None:
    """Body of a side's process: reports after every step and waits for its turn; ends when the parent hangs up."""
    _quiet(log)

    def turn() -> None:
        pipe.send("done")
        try:
            pipe.recv()
        except EOFError:
            raise SystemExit(0) from None  # the measurement is over

    import torch

    torch.set_num_threads(1)
    SIDES[job.side](job, turn)


def _prepare(job: Job, family: str, pipe: Connection, log: str) -> None:
    _quiet(log)
    prepare(job, family, pipe.send)


def _quiet(log: str) -> None:
    """Sends what this process prints to a file."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def prepared(job: Job, family: str) -> tuple[Job, float]:
    """The job with its prompt length after the files are written, and the model's million parameters."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log = str(Path(job.folder, "prepare.log"))
    process = context.Process(target=_prepare, args=(job, family, theirs, log), daemon=True)
    process.start()
    theirs.close()
    try:
        tokens, parameters = ours.recv()
    except EOFError:
        _fail(Path(log).read_text(encoding="utf-8", errors="replace")[-3000:])
    process.join()
    return replace(job, tokens=tokens), parameters


# --- measuring -----------------------------------------------------------------------------------------------------


def fastest(job: Job) -> Job:
    """The job at its fastest micro-batch size, by the shortest of three steps."""
    seconds = {}
    for rows in ROWS:
        worker = Worker(replace(job, rows=rows))
        seconds[rows] = min(worker.step() for _ in range(3))
        worker.close()
    best = min(seconds, key=lambda rows: seconds[rows])
    tried = ", ".join(f"{rows}: {s:.2f} s" for rows, s in seconds.items())
    print(f"  {job.side:7} answers per micro-batch {best:3}   ({tried})", flush=True)
    return replace(job, rows=best)


def measure(jobs: Sequence[Job], rounds: int) -> dict[str, Result]:
    """Every side's steps, taking turns: one round to warm up, then `rounds` timed ones."""
    workers = [Worker(job) for job in jobs]
    for turn in range(rounds + 1):
        for worker in workers:
            worker.step(timed=turn > 0)
    return {worker.result.job.side: worker.close() for worker in workers}


def peak_at(job: Job, rows: int) -> int:
    """Highest memory above the loaded model in three steps at another micro-batch size."""
    worker = Worker(replace(job, rows=rows))
    for _ in range(3):
        worker.step()
    return worker.close().peak


def ratio(above: Result, below: Result) -> tuple[float, float, float]:
    """Ratio of the medians, and the lowest and highest ratio of any round."""
    each = [a / b for a, b in zip(above.seconds, below.seconds, strict=True)]
    return above.median / below.median, min(each), max(each)


def compare(setting: Setting, family: str, rounds: int) -> None:
    """Runs one setting and prints its table."""
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as folder:
        job, parameters = prepared(Job("", folder, setting, tokens=0), family)
        print(f"\n{setting.name}: {family} of {parameters:.2f} M parameters; {PROMPTS} prompts of {job.tokens} tokens "
              f"({setting.visual} visual) x {GROUP} answers of {setting.answer}", flush=True)
        jobs = [fastest(replace(job, side=side)) for side in SIDES]
        results = measure(jobs, rounds)
        padded = results["padded"]
        packed_peak = peak_at(results["packed"].job, padded.job.rows)
    for result in results.values():
        print(f"  {_NAMES[result.job.side]:28} {result.median:8.3f} s   ({min(result.seconds):.3f} .. "
              f"{max(result.seconds):.3f})   peak {result.peak / 2**20:7.0f} MiB above the loaded model")
    step, update = ratio(results["trl"], results["vlrl"]), ratio(padded, results["packed"])
    memory = results["vlrl"].peak / results["trl"].peak
    packed_memory = packed_peak / padded.peak
    print(f"  whole step  TRL / vlrl       {step[0]:8.2f} x   (rounds: {step[1]:.2f} .. {step[2]:.2f})   "
          f"memory vlrl / TRL      {memory:.2f}")
    print(f"  update      padded / packed  {update[0]:8.2f} x   (rounds: {update[1]:.2f} .. {update[2]:.2f})   "
          f"memory packed / padded {packed_memory:.2f} at {padded.job.rows} answers a micro-batch", flush=True)


_NAMES = {"trl": "TRL 1.16 whole step", "vlrl": "vlrl whole step", "packed": "vlrl update, packed",
          "padded": "vlrl update, padded"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PIXELS), default="qwen3_vl", help="family of the tiny model")
    parser.add_argument("--setting", choices=[s.name for s in SETTINGS], help="only this one (default: both)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the warm-up comes on top (default: 5)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one round is needed")
    return args


def main() -> None:
    args = arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    print(f"vlrl {vlrl.__version__} against TRL 1.16: float32, one thread each, in turns, {args.rounds} rounds")
    for setting in (s for s in SETTINGS if args.setting in (None, s.name)):
        compare(setting, args.model, args.rounds)


if __name__ == "__main__":
    main()
