"""Every model family, full and LoRA, over every kind of sample: three steps of `vlrl train`, then packed beside padded.

    python benchmarks/families.py > benchmarks/results/families_cpu.md

A cell tells, after three steps of a random tiny model (`vlrl tiny --random`) on samples of that kind:
`parameters changed / trainable, log-probability difference, gradient difference`. Differences are the worst between
prefix-shared and padded rows, relative to the largest log-probability and to the largest gradient of the tensor.
"""

import argparse
import contextlib
import io
import json
import math
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file

from vlrl import config as configs
from vlrl import task as tasks
from vlrl.cli.main import main as vlrl
from vlrl.config.schema import Config
from vlrl.models import families, policy
from vlrl.models.packing import pack, pieces_of
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.task import Task
from vlrl.tools.tiny import families as tiny_families
from vlrl.types import Answer, Media, Parts, Sample

KINDS = ("image", "two images", "video", "text", "mixed")
STEPS = 3
MODES = {"full": {"train": ["language", "merger", "vision"]},
         "LoRA": {"lora": {"rank": 4, "target": "vision_language"}}}


class Kinds(Task):
    """Pictures of random pixels and a reward that random text has to some degree."""

    prompt = "What is in {id}?"
    rewards = {"vowels": 1.0}
    kinds: tuple[str, ...] = ()

    def samples(self, split: str) -> list[Sample]:
        return [_sample(i, self.kinds[i % len(self.kinds)]) for i in range(5 * len(self.kinds))]

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"vowels": sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)}


def _sample(number: int, kind: str) -> Sample:
    rng = np.random.default_rng(number)

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))

    media = {"image": (Media(source=picture(112, 84)),), "text": (),
             "two images": (Media(source=picture(84, 84)), Media(source=picture(112, 56))),
             "video": (Media(kind="video", source=[picture(64, 64) for _ in range(4 + 2 * (number % 2))], fps=2.0),)}
    return Sample(id=f"{kind} {number}", media=media[kind], row={"id": f"{kind} {number}"})


def settings(folder: Path, family: str, mode: str, kind: str) -> Path:
    """The config file of one run."""
    kinds = [k for k in KINDS[:-1] if k != "video" or families.FAMILIES[family].videos] if kind == "mixed" else [kind]
    tree = {"steps": STEPS, "task": {"name": f"{Path(__file__).resolve()}:Kinds", "kinds": kinds},
            "model": {"name": str(folder / family), "dtype": "float32", **MODES[mode]}, "eval": {"samples": 0},
            "rollout": {"prompts_per_step": 2 * len(kinds), "group_size": 4, "max_new_tokens": 12},
            "train": {"lr": 1e-3, "tokens_per_batch": 4096}, "log": {"samples_every": 0}, "save": {"keep": 5},
            "run": {"dir": str(folder / "-".join((family, mode, kind.replace(" ", "-"))))}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(*words: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = vlrl(list(words))
    if code:
        raise SystemExit(f"vlrl {' '.join(words)} failed:\n{said.getvalue()[-3000:]}")


def changed(config: Config) -> tuple[set[str], set[str]]:
    """Names of the trained tensors that differ between the checkpoints of step 0 and the end; names of all."""
    folder = Path(config.run.dir) / "checkpoints"
    start, end = ({name: tensor for file in (folder / f"step-{step:06d}").glob("*model.safetensors")
                   for name, tensor in load_file(file).items()} for step in (0, STEPS))
    return {name for name in start if not torch.equal(start[name], end[name])}, set(start)


def prepared(config: Config) -> tuple[Policy, Encoder]:
    """The trained model."""
    made = policy.load(config, Accelerator(cpu=True), Path(config.run.dir) / f"checkpoints/step-{STEPS:06d}")
    return made, Encoder(made.processor, made.family, made.positions, config)


def differences(made: Policy, encode: Encoder, config: Config) -> tuple[float, float]:
    """Worst relative difference between the layouts, of log-probabilities and of gradients."""
    task = tasks.load(config.task.name, {"kinds": (config.task.model_extra or {})["kinds"]})
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(len(made.processor.tokenizer)), made.banned.numpy())
    prompts = [p for s in task.samples("train")[:6] for p in [encode(task, s)] * 3]
    pieces = pieces_of(prompts, [rng.choice(allowed, rng.integers(1, 12)) for _ in prompts], 10**6)
    (shared, ours), (padded, theirs) = (_pass(made, pieces, layout) for layout in ("shared", "padded"))
    if ours.keys() != theirs.keys():
        raise SystemExit("the layouts give gradients to different parameters")
    # softmax does not see a key's bias where positions are not rotary: its gradient is rounding noise of the weight's
    scales = {name: theirs[name.replace("k_proj.bias", "k_proj.weight")].abs().max() for name in theirs}
    worst = max(float((ours[n] - theirs[n]).abs().max() / scales[n]) for n in theirs if scales[n] > 0)
    return float((shared - padded).abs().max() / padded.abs().max()), worst


def _pass(made: Policy, pieces: list, layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made.model.zero_grad(set_to_none=True)
    (batch,) = pack(pieces, 10**6, layout)
    found = made.logprobs(batch, temperature=0.8).logprobs
    (found * torch.cos(batch.targets.float())).sum().backward()
    order = torch.argsort(batch.rollout_id, stable=True)
    return found.detach()[order], {n: p.grad for n, p in made.trainable() if p.grad is not None}


def cell(folder: Path, family: str, mode: str, kind: str, unmoved: dict[str, set[str]]) -> str:
    if kind == "video" and not families.FAMILIES[family].videos:
        return "takes none"
    path = str(settings(folder, family, mode, kind))
    run("train", path, "steps=0")
    run("train", path)
    config = configs.load(path)
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    if len(lines) != STEPS or not all(math.isfinite(x["loss"]) and x["grad_norm"] > 0 for x in lines):
        raise SystemExit(f"{family} {mode} {kind}: {lines}")
    moved, trained = changed(config)
    made, encode = prepared(config)
    for name in trained - moved:
        if kind != "text" or made.family.part_of(name) == "language":
            unmoved.setdefault(f"{family} {mode}", set()).add(name)
    logprobs, gradients = differences(made, encode, config)
    if max(logprobs, gradients) > 1e-5:
        print(f"{family} {mode} {kind}: more than 1e-5", file=sys.stderr)
    return f"{len(moved)}/{len(trained)}, {logprobs:.0e}, {gradients:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(tiny_families.FAMILIES), choices=tiny_families.FAMILIES)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    args = parser.parse_args()
    unmoved: dict[str, set[str]] = {}
    print("# Three steps of every family\n")
    print(f"| family | trained | {' | '.join(args.kinds)} |\n|---|---|{'---|' * len(args.kinds)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in args.families:
            run("tiny", "--family", family, "--out", str(folder / family), "--random")
            for mode in MODES:
                cells = [cell(folder, family, mode, kind, unmoved) for kind in args.kinds]
                print(f"| {family} | {mode} | {' | '.join(cells)} |", flush=True)
    print("\nA cell: parameters changed / trainable, then the worst difference between prefix-shared and padded rows, "
          "relative to the\nlargest: of log-probabilities, of gradients. Text alone cannot change the vision tower and "
          "the merger. Parameters of\nthe other cells that did not change:\n")
    print("\n".join(f"- {name}: {', '.join(sorted(tensors))}" for name, tensors in unmoved.items()) or "- none")
    print(f"\n- command: `{' '.join(['python benchmarks/families.py', *sys.argv[1:]])}`")
    print(f"- {platform.machine()} CPU, float32; torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
