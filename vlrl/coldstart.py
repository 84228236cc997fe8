"""The cold start of the embedded model: supervised stages over vlrl's own SFT path, then a bf16 copy to ship.

`run(build folder, out, seed)` trains a random tiny model through tiny.STAGES, evaluates it on the held-out samples of
the quickstart and of digits, and writes model, processor, `log.jsonl` and `made_by.json` to `out`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlrl import sft, tiny
from vlrl.config import Config, load, validate
from vlrl.data import Drawn
from vlrl.loop import train
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tiny import STAGES, Example, Stage, example
from vlrl.types import Answer, Media, Parts, Sample

_EVALUATED = ("configs/quickstart.yaml", "configs/classification/digits.yaml")


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
    made = {"command": f"python -m vlrl.tiny --family {family} --seed {seed}", "stages": [asdict(s) for s in STAGES],
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
