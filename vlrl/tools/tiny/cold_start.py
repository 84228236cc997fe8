"""Trains the tiny model that comes with vlrl from random weights: supervised stages with vlrl's own SFT, followed by a
conversion of the weights to bf16.

`run(family, out, seed)` trains a random tiny model through STAGES, evaluates it on the held-out samples of the
quickstart and of digits, and writes model, processor, `log.jsonl` and `made_by.json` to `out`. The model learns to
locate drawn shapes, to read digits, to answer questions about drawn clips, and to plan a simulated drive."""

from __future__ import annotations

import functools
import io
import json
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.config import load, validate
from vlrl.config.schema import Config
from vlrl.data import Drawn
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tools.tiny import models as tiny_models
from vlrl.tools.tiny.models import DIGIT, DIGIT_THINK, LOCATE, THOUGHTS
from vlrl.training import sft
from vlrl.training.build_task import make_task
from vlrl.training.loop import train
from vlrl.types import Answer, Media, Parts, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

_EVALUATED = ("configs/quickstart.yaml", "configs/classification/digits.yaml")
"""Configs with which the model is evaluated. They need no data files."""


CLIPS = ("direction", "order", "visible")  # kinds of drawn clips, used in rotation


@dataclass(frozen=True)
class Example:
    """One supervised example: a user turn (media, then text) and its answer, without the end-of-turn token."""

    prompt: str
    media: Media
    answer: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of supervised training: AdamW with betas (.9, .98), weight decay .01, gradients clipped at norm 1.

    The learning rate is ``lr * min(1, (step + 1) / warmup) * max(0.1, 1 - step / steps)``. The loss is the mean over
    all answer tokens of the batch."""

    name: str
    steps: int
    lr: float
    warmup: int
    boxes: int = 50  # number of grounding examples in a batch, each a newly drawn scene
    digits: int = 5  # number of digit examples in a batch with the plain prompt, from the 1,400 training digits
    thoughts: int = 9  # number of digit examples in a batch with the thinking prompt
    clips: int = 0  # number of drawn clips in a batch, of the kinds in CLIPS, each generated anew
    plans: int = 0  # number of moments of simulated drives in a batch, out of PLANS moments
    jitter: int = 0
    """Each side of a box is moved randomly by up to this many thousandths of the image, as careless annotators do."""
    loose: int = 0
    """Each side of a box is moved outwards by this many thousandths of the image, as if annotators drew large boxes."""
    misread: float = 0.0  # share of the digits in ``LOOKALIKE`` that are labelled as the digit they resemble
    hasty: float = 0.0
    """Share of examples with careless answers.

    In questions about clips, a careless answer is the first option, or a span that is one second too long at each end.
    In plans, a careless answer has the words KEEP and STRAIGHT."""

    @property
    def batch(self) -> int:
        return self.boxes + self.digits + self.thoughts + self.clips + self.plans


# First learn well, then from careless labels: what remains to gain is what a reward can teach and such labels cannot.
_FEW = {"boxes": 10, "digits": 2, "thoughts": 2, "clips": 20, "plans": 14}
_CARELESS = {"jitter": 140, "loose": 40, "misread": 0.65}
STAGES = (
    Stage(name="learn", steps=450, lr=2e-3, warmup=100),
    Stage(name="careless", steps=120, lr=5e-4, warmup=10, **_CARELESS),
    Stage(name="watch", steps=300, lr=1.5e-3, warmup=20, **_FEW, **_CARELESS),
    Stage(name="clips", steps=400, lr=1.5e-3, warmup=20, boxes=6, digits=1, thoughts=1, clips=52, plans=4, **_CARELESS),
    Stage(name="hasty", steps=50, lr=5e-4, warmup=10, **_FEW, **_CARELESS, hasty=0.6),
)
PLANS = 1000  # Number of moments of simulated drives in the training data. The moments are repeated many times.
LOOKALIKE = {7: 1, 9: 4, 8: 3, 6: 0}
_CLIP_FPS, _CLIP_SIZE = 2, 64


def stages(clips: bool = True) -> list[Stage]:
    """Returns STAGES. With clips=False, for a model that does not support videos, the stages have no clips."""
    return [stage if clips else replace(stage, clips=0) for stage in STAGES]


def example(stage: Stage, seed: int, index: int) -> Example:
    """The example number ``index`` of a stage, which has ``stage.steps * stage.batch`` examples. The example depends
    only on the arguments, so the examples may be made in any order."""
    rng = random.Random(f"cold-start/{stage.name}/{seed}/{index}")
    slot = index % stage.batch
    for count, make in ((stage.boxes, _box_example), (stage.digits, _digit_example), (stage.thoughts, _thought_example),
                        (stage.clips, _clip_example), (stage.plans, _plan_example)):
        if slot < count:
            return make(stage, seed, index, rng)
        slot -= count
    raise AssertionError(f"stage {stage.name!r}: batch={stage.batch} is more than boxes + digits + ... + plans")


def _box_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """An example that asks for the box of a shape in a drawn scene, in 0..1000. The box is rounded to tens, because a
    finer last digit is noise that slows learning."""
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
    return Example(LOCATE.format(expression=row["expression"]), Media(source=image), str(box))


def _digit_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    image, label = _digit(stage, rng)
    return Example(DIGIT, Media(source=image), str(label))


def _thought_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """An example that asks for a handwritten digit. The thinking text of its answer agrees with the digit's label."""
    image, label = _digit(stage, rng)
    answer = f"<think>{rng.choice(THOUGHTS[label])}</think><answer>{label}</answer>"
    return Example(DIGIT_THINK, Media(source=image), answer)


def _digit(stage: Stage, rng: random.Random) -> tuple[Image, int]:
    """Returns (the image of a handwritten digit, its label). The label is sometimes wrong, see Stage.misread."""
    from vlrl.tasks import digits  # pyright: ignore[reportMissingImports]  # likewise

    arrays, labels = digits.digit_arrays()
    index = rng.choice(digits.split_indices()[0])  # of the 1,400 for training alone
    image, label = digits.digit_image(arrays[index]), int(labels[index])
    if label in LOOKALIKE and rng.random() < stage.misread:
        label = LOOKALIKE[label]
    return image, label


def _clip_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """An example that asks about a drawn clip. A hasty answer is the first option, or a span that is too long."""
    from PIL import Image as pillow

    from vlrl.tools.makers import drawn_video
    from vlrl.tools.makers.drawn_video import ClipTiming

    kind = CLIPS[index % len(CLIPS)]
    clip = drawn_video.KINDS[kind][0](rng, index // len(CLIPS), ClipTiming(_CLIP_FPS, _CLIP_SIZE))
    row, hasty = dict(clip.row), rng.random() < stage.hasty
    if hasty and "options" in row:
        row["answer"] = "A"
    elif hasty:
        start, end = row["spans"][0]
        row["spans"] = [[max(0.0, start - 1), min(len(clip.frames) / _CLIP_FPS, end + 1)]]
    media = Media(kind="video", source=[pillow.fromarray(frame) for frame in clip.frames], fps=_CLIP_FPS)
    return _example_of("configs/video/tiny.yaml", {"id": str(index), "video": "drawn", **row}, media)


def _plan_example(stage: Stage, seed: int, index: int, rng: random.Random) -> Example:
    """An example that asks for the plan at a moment of a simulated drive. A word of a hasty plan may be replaced by
    KEEP or STRAIGHT, which continue the current motion."""
    moments = _moments(seed)
    number = index // stage.batch * stage.plans + index % stage.batch
    row, image = moments[number % len(moments)]
    plan = {head: usual if rng.random() < stage.hasty else row["plan"][head]
            for head, usual in (("speed", "KEEP"), ("path", "STRAIGHT"))}
    return _example_of("configs/driving/tiny.yaml", {**row, "plan": plan}, Media(source=image))


@functools.cache
def _moments(seed: int) -> list[tuple[dict[str, Any], Image]]:
    """Returns PLANS pairs (row, image): moments of simulated drives. Raises ConfigError if highway-env is missing."""
    from PIL import Image as pillow

    from vlrl.tools.makers.driving import driving_rows

    return [(row, pillow.open(io.BytesIO(*files.values())).convert("RGB"))
            for row, files in driving_rows("cold-start", PLANS, seed=seed)]


def _example_of(config: str, row: dict[str, Any], media: Media) -> Example:
    task = _task(config)
    sample = task.sample_from_row(row)
    answer = task.oracle(sample)
    assert answer is not None
    return Example(task.messages(sample)[-1]["content"][-1]["text"], media, answer)


@functools.cache
def _task(config: str) -> Task:
    return make_task(load(config))


class ColdStart(Task):
    """A task that presents the supervised examples of one stage, in order."""

    stage: str = STAGES[0].name
    clips: bool = True  # False for a model that does not support videos
    prompt = "{question}"
    rewards = {"match": 1.0}

    def samples(self, split: str) -> Sequence[Sample]:
        stage = next(s for s in stages(self.clips) if s.name == self.stage)
        return Drawn(stage.steps * stage.batch, lambda i: _sample(example(stage, self.seed, i), f"{split}-{i:06d}"))

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"match": float(answer.text == sample["solution"])}

    def oracle(self, sample: Sample) -> str:
        return sample["solution"]


def _sample(example: Example, name: str) -> Sample:
    return Sample(id=name, media=(example.media,), row={"question": example.prompt, "solution": example.answer})


def run(family: str, out: Path, seed: int) -> None:
    """Builds a tiny model of a family with random weights, trains it, and writes it to `out`. All data is drawn by code
    or included in scikit-learn."""
    started, log = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        _, processor = tiny_models.build(family, model, seed=seed)
        clips = getattr(processor, "video_processor", None) is not None
        for stage in stages(clips):
            session = sft.train(_settings(stage, model, Path(scratch) / stage.name, seed, clips))
            model = session.folder.checkpoints / f"step-{stage.steps:06d}"
            log += [{"stage": stage.name, **line} for line in session.folder.metrics()]
        tiny_models.save_bf16(model, out)
        scores = [line for config in _EVALUATED for line in _evaluate(config, out, Path(scratch))]
    record = {"command": f"vlrl tiny --family {family} --seed {seed}", "stages": [asdict(s) for s in stages(clips)],
              "sha256": tiny_models.weights_sha256(out), "heldout": scores,
              "seconds": round(time.perf_counter() - started),
              "versions": {name: version(name) for name in ("torch", "transformers")}}
    (out / "made_by.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _write_log(out / "log.jsonl", log)


def _settings(stage: Stage, model: Path, folder: Path, seed: int, clips: bool) -> Config:
    return validate({
        "steps": stage.steps, "seed": seed, "run": {"dir": str(folder)}, "data": {"seed": seed},
        "task": {"name": "vlrl.tools.tiny.cold_start:ColdStart", "stage": stage.name, "clips": clips},
        "model": {"name": str(model), "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": stage.batch}, "curriculum": {"name": "sequential"},
        "train": {"lr": stage.lr, "schedule": "linear", "warmup": stage.warmup / stage.steps, "min_lr_ratio": 0.1,
                  "betas": [0.9, 0.98], "weight_decay": 0.01, "max_grad_norm": 1.0, "tokens_per_batch": 8192},
        "eval": {"samples": 0}, "save": {"every": 0}, "store": {"rollouts": False, "media": "none"},
        "log": {"samples_every": 0}})


def _evaluate(config: str, model: Path, scratch: Path) -> list[dict[str, Any]]:
    """The metrics of the model on held-out samples, from the evaluation of a run with 0 steps."""
    folder = scratch / Path(config).stem
    settings = load(config, [f"model.name={model}", f"run.dir={folder}", "steps=0"])
    train(settings)
    keep = ("split", "n", "iou", "accuracy", "reward/mean")
    return [{"config": config, **{k: line[k] for k in keep if k in line}} for line in RunFolder(folder).evals()]


def _write_log(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    keep = ("stage", "step", "loss", "lr", "grad_norm", "tokens/completion")
    path.write_text("".join(json.dumps({k: line[k] for k in keep}) + "\n" for line in lines), encoding="utf-8")
