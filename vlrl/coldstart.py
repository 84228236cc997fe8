"""The cold start of the embedded model: supervised stages over vlrl's own SFT path, then a bf16 copy to ship.

`run(family, out, seed)` trains a random tiny model through STAGES, evaluates it on the held-out samples of the
quickstart and of digits, and writes model, processor, `log.jsonl` and `made_by.json` to `out`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl import sft, tiny
from vlrl.config import load, validate
from vlrl.data import Drawn
from vlrl.loop import train
from vlrl.settings import Config
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tiny import DIGIT, DIGIT_THINK, LOCATE, THOUGHTS
from vlrl.types import Answer, Media, Parts, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

_EVALUATED = ("configs/quickstart.yaml", "configs/classification/digits.yaml")


@dataclass(frozen=True)
class Example:
    """One supervised example: a user turn (image, then text) and the wanted answer, without the end-of-turn token."""

    prompt: str
    image: Image
    answer: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of supervised training: AdamW with betas (.9, .98), weight decay .01, gradients clipped at norm 1.

    The learning rate is ``lr * min(1, (step + 1) / warmup) * max(0.1, 1 - step / steps)``, the loss the mean over all
    answer tokens of the batch.
    """

    name: str
    steps: int
    lr: float
    warmup: int
    boxes: int = 50
    """Grounding examples in a batch, each a new scene."""
    digits: int = 5
    """Digit examples in a batch with the plain template, drawn from the 1,400 for training."""
    thoughts: int = 9
    """The same with the thinking template."""
    jitter: int = 0
    """Each side of a box is moved by up to this much, of 1000: annotators in a hurry."""
    loose: int = 0
    """Each side of a box also lies this far outside, of 1000: annotators who draw generous boxes."""
    misread: float = 0.0
    """Share of the digits in ``LOOKALIKE`` that are labelled as the other digit."""

    @property
    def batch(self) -> int:
        return self.boxes + self.digits + self.thoughts


# First learn well, then from careless labels: what remains to gain is what a reward can teach and such labels cannot.
STAGES = (
    Stage(name="learn", steps=450, lr=2e-3, warmup=100),
    Stage(name="careless", steps=120, lr=5e-4, warmup=10, jitter=140, loose=40, misread=0.65),
)
LOOKALIKE = {7: 1, 9: 4, 8: 3, 6: 0}


def examples(stage: Stage, seed: int = 0) -> Iterator[list[Example]]:
    """The batches of a stage, one list a step."""
    for step in range(stage.steps):
        yield [example(stage, seed, step * stage.batch + slot) for slot in range(stage.batch)]


def example(stage: Stage, seed: int, index: int) -> Example:
    """Example ``index`` of ``stage.steps * stage.batch``: a pure function of its arguments, in any order."""
    rng = random.Random(f"cold-start/{stage.name}/{seed}/{index}")
    slot = index % stage.batch
    if slot < stage.boxes:
        return _box_example(stage, seed, index, rng)
    return _digit_example(stage, rng, think=slot >= stage.boxes + stage.digits)


def _box_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """A scene and its box in 0..1000, rounded to tens: a last digit finer than a pixel is noise that slows learning."""
    from vlrl.tasks._scenes import scene  # pyright: ignore[reportMissingImports]  # on vlrl.__path__

    image, row = scene(seed, f"cold-start-{stage.name}", index)
    sides = [
        round(value * 1000 / size) + outward * stage.loose + rng.randint(-stage.jitter, stage.jitter)
        for value, size, outward in zip(
            row["boxes"][0]["box"], (row["width"], row["height"]) * 2, (-1, -1, 1, 1), strict=True
        )
    ]
    sides = [min(990, max(100, round(value / 10) * 10)) for value in sides]
    box = [min(sides[0], sides[2]), min(sides[1], sides[3]), max(sides[0], sides[2]), max(sides[1], sides[3])]
    return Example(LOCATE.format(expression=row["expression"]), image, str(box))


def _digit_example(stage: Stage, rng: random.Random, *, think: bool) -> Example:
    """A handwritten digit with its label, misread at times; a thought follows the label that is given."""
    from vlrl.tasks import digits  # pyright: ignore[reportMissingImports]  # likewise

    arrays, labels = digits.digit_arrays()
    index = rng.choice(digits.split_indices()[0])  # of the 1,400 for training alone
    image, label = digits.digit_image(arrays[index]), int(labels[index])
    if label in LOOKALIKE and rng.random() < stage.misread:
        label = LOOKALIKE[label]
    if not think:
        return Example(DIGIT, image, str(label))
    return Example(DIGIT_THINK, image, f"<think>{rng.choice(THOUGHTS[label])}</think><answer>{label}</answer>")


class ColdStart(Task):
    """The supervised examples of one stage, in order."""

    stage: str = STAGES[0].name
    prompt = "{question}"
    rewards = {"match": 1.0}

    def samples(self, split: str) -> Sequence[Sample]:
        stage = next(s for s in STAGES if s.name == self.stage)
        return Drawn(stage.steps * stage.batch, lambda i: _sample(example(stage, self.seed, i), f"{split}-{i:06d}"))

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"match": float(answer.text == sample["solution"])}

    def oracle(self, sample: Sample) -> str:
        return sample["solution"]


def _sample(made: Example, name: str) -> Sample:
    return Sample(id=name, media=(Media(source=made.image),), row={"question": made.prompt, "solution": made.answer})


def run(family: str, out: Path, seed: int) -> None:
    """Builds and teaches a tiny model; everything it needs is drawn by code or comes with scikit-learn."""
    started, log = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        tiny.build(family, model, seed=seed)
        for stage in STAGES:
            session = sft.train(_settings(stage, model, Path(scratch) / stage.name, seed))
            model = session.folder.checkpoints / f"step-{stage.steps:06d}"
            log += [{"stage": stage.name, **line} for line in session.folder.metrics()]
        tiny.save_bf16(model, out)
        scores = [line for config in _EVALUATED for line in _evaluate(config, out, Path(scratch))]
    made = {"command": f"vlrl tiny --family {family} --seed {seed}", "stages": [asdict(s) for s in STAGES],
            "sha256": tiny.weights_sha256(out), "heldout": scores, "seconds": round(time.perf_counter() - started),
            "versions": {name: version(name) for name in ("torch", "transformers")}}
    (out / "made_by.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    _write_log(out / "log.jsonl", log)


def _settings(stage: Stage, model: Path, folder: Path, seed: int) -> Config:
    return validate({
        "steps": stage.steps, "seed": seed, "run": {"dir": str(folder)}, "data": {"seed": seed},
        "task": {"name": "vlrl.coldstart:ColdStart", "stage": stage.name},
        "model": {"name": str(model), "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": stage.batch}, "curriculum": {"name": "sequential"},
        "train": {"lr": stage.lr, "schedule": "linear", "warmup": stage.warmup / stage.steps, "min_lr_ratio": 0.1,
                  "betas": [0.9, 0.98], "weight_decay": 0.01, "max_grad_norm": 1.0, "tokens_per_batch": 8192},
        "eval": {"samples": 0}, "save": {"every": 0}, "store": {"rollouts": False, "media": "none"},
        "log": {"samples_every": 0}})


def _evaluate(config: str, model: Path, scratch: Path) -> list[dict[str, Any]]:
    """The held-out evaluation of a run of no steps."""
    folder = scratch / Path(config).stem
    settings = load(config, [f"model.name={model}", f"run.dir={folder}", "steps=0"])
    train(settings)
    keep = ("split", "n", "iou", "accuracy", "reward/mean")
    return [{"config": config, **{k: line[k] for k in keep if k in line}} for line in RunFolder(folder).evals()]


def _write_log(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    keep = ("stage", "step", "loss", "lr", "grad_norm", "tokens/completion")
    path.write_text("".join(json.dumps({k: line[k] for k in keep}) + "\n" for line in lines), encoding="utf-8")
