"""Two families of tasks at several levels, for measuring samplers: reading handwritten digits and finding shapes.

    digits/<noise>   scikit-learn's digits with that share of noise over them, in percent: digits/0, digits/50 ...
    digits/any       any digit is right: solved before the run begins
    digits/four      four digits in one picture; the model answers with one, so no answer is ever right
    boxes/<percent>  drawn scenes, right from that IoU on: boxes/10, boxes/50 ...

The reward is 1 or 0. A row's category is its level. `task.levels` maps level -> share of the training samples; the
held-out ones have equal shares of every level but digits/four."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlrl.rewards.boxes import format_box, iou, parse_box
from vlrl.task import Task
from vlrl.tasks._scenes import scene  # pyright: ignore[reportMissingImports]
from vlrl.tasks.digits import digit_arrays, digit_image, split_indices  # pyright: ignore[reportMissingImports]
from vlrl.types import Answer, Media, Parts, Sample

READ = "Which digit is this? Answer with the digit only."
LOCATE = "Locate the {}. Answer with its box as [x1, y1, x2, y2]."


class Levels(Task):
    """Parts: `correct` 0 or 1."""

    prompt = "{question}"
    rewards = {"correct": 1.0}
    levels: dict[str, float] = {"digits/0": 0.5, "boxes/50": 0.5}
    """Level -> share of the training samples."""
    count: int = 2048
    """Samples of a split."""

    def samples(self, split: str) -> Sequence[Sample]:
        even = {level: 1.0 for level in self.levels if level != "digits/four"}
        return _samples(split, self.seed, self.count, tuple((self.levels if split == "train" else even).items()))

    def score(self, sample: Sample, answer: Answer) -> Parts:
        if "answer" in sample.row:
            said = answer.final.strip()
            whichever = sample.category == "digits/any" and said.isdecimal() and len(said) == 1
            return {"correct": float(whichever or said == sample["answer"])}
        box = self.parse(sample, answer)
        return {"correct": float(box is not None and iou(box, self.target(sample)) >= sample["least"])}

    def parse(self, sample: Sample, answer: Answer) -> Any:
        if "answer" in sample.row:
            return answer.final.strip()
        box = parse_box(answer.final)
        return self.coordinates.to_original(sample, box) if box else None

    def target(self, sample: Sample) -> Any:
        return sample["answer"] if "answer" in sample.row else sample["boxes"][0]["box"]

    def oracle(self, sample: Sample) -> str:
        target = self.target(sample)
        return target if isinstance(target, str) else format_box(self.coordinates.from_original(sample, target))

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracy of each level, e.g. `boxes/50`."""
        found: dict[str, list[float]] = {}
        for record in records:
            found.setdefault(record["sample"]["category"], []).append(record["parts"]["correct"])
        return {f"level/{name}": float(np.mean(values)) for name, values in sorted(found.items())}


@functools.cache
def _samples(split: str, seed: int, count: int, levels: tuple[tuple[str, float], ...]) -> list[Sample]:
    stream = random.Random(f"levels/{seed}/{split}")
    names = stream.choices([name for name, _ in levels], [share for _, share in levels], k=count)
    return [_made(split, seed, index, name) for index, name in enumerate(names)]


def _made(split: str, seed: int, index: int, level: str) -> Sample:
    family, _, degree = level.partition("/")
    image, row = (_digits if family == "digits" else _boxes)(split, seed, index, degree)
    row = {**row, "id": f"{split}-{index:06d}", "width": image.width, "height": image.height, "category": level}
    return Sample(id=row["id"], media=(Media(source=image),), row=row)


def _digits(split: str, seed: int, index: int, degree: str) -> tuple[Image.Image, Mapping]:
    stream = np.random.default_rng([seed, split == "train", index])
    arrays, labels = digit_arrays()
    places = stream.choice(split_indices()[split != "train"], 4 if degree == "four" else 1)
    pictures = [digit_image(arrays[place]) for place in places]
    if degree == "four":
        image = Image.new("RGB", pictures[0].size)
        for i, picture in enumerate(pictures):
            image.paste(picture.resize((32, 32)), (32 * (i % 2), 32 * (i // 2)))
    else:
        clean, noise = np.asarray(pictures[0], float), stream.uniform(0, 255, (64, 64, 1))
        share = 0.0 if degree == "any" else float(degree) / 100
        image = Image.fromarray(np.rint((1 - share) * clean + share * noise).astype(np.uint8))
    return image, {"question": READ, "answer": "".join(str(labels[place]) for place in places)}


def _boxes(split: str, seed: int, index: int, degree: str) -> tuple[Image.Image, Mapping]:
    image, row = scene(seed, f"levels-{split}", index)
    return image, {"question": LOCATE.format(row["expression"]), "boxes": row["boxes"],
                   "expression": row["expression"], "least": float(degree) / 100}
