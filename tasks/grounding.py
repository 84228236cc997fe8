"""Grounding: find what an expression names and answer with its box; the reward is the soft IoU.

`task.drawn=true` draws scenes of coloured shapes, so no file is needed; else the canonical rows of `data.train` and
`data.heldout` are read, whose first box is the target (an empty list: the object is absent).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.data import Drawn, sample_from_row
from vlrl.errors import DataError
from vlrl.rewards.boxes import box_format, format_box, iou, parse_box
from vlrl.task import Task
from vlrl.types import Answer, Media, Parts, Sample

from ._scenes import scene


class Grounding(Task):
    """One referring expression, one box. Parts: `iou` in [0, 1], `format` 0 or 1."""

    drawn: bool = False
    """Scenes drawn by code instead of rows from a file."""
    count: int = 4096
    """Scenes of a drawn split."""
    size: int = 128
    """Side of a drawn scene in pixels."""
    prompt = "Locate the {expression}. Answer with its box as [x1, y1, x2, y2]."
    rewards = {"iou": 1.0, "format": 0.0}

    def samples(self, split: str) -> Sequence[Sample]:
        return Drawn(self.count, lambda index: self._draw(split, index)) if self.drawn else super().samples(split)

    def _draw(self, split: str, index: int) -> Sample:
        image, row = scene(self.seed, split, index, self.size)
        return Sample(id=row["id"], media=(Media(source=image),), row=row)

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = sample_from_row(row, root)
        if not isinstance(sample.get("expression"), str):
            raise DataError(f"row '{sample.id}': expression={sample.get('expression')!r} must be the text to locate")
        if not isinstance(sample.get("boxes"), list):
            raise DataError(f"row '{sample.id}': boxes={sample.get('boxes')!r} must be a list of "
                            '{"box": [x1, y1, x2, y2], "label": text}; empty when the object is absent')
        for entry in sample["boxes"]:
            box = entry.get("box") if isinstance(entry, dict) else None
            if not isinstance(box, list) or iou(box, box) == 0:
                raise DataError(f"row '{sample.id}': box {box!r} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2")
        return sample

    def score(self, sample: Sample, answer: Answer) -> Parts:
        truth = self.target(sample)
        if truth is None:
            return {"iou": float(_says_none(answer)), "format": float(_says_none(answer))}
        box = self.parse(sample, answer)
        return {"iou": iou(box, truth) if box else 0.0, "format": box_format(answer.final)}

    def parse(self, sample: Sample, answer: Answer) -> list[float] | None:
        """The answer's first box, in original pixels: further boxes neither pay nor cost."""
        box = parse_box(answer.final)
        return self.coordinates.to_original(sample, box) if box else None

    def target(self, sample: Sample) -> list[float] | None:
        return sample["boxes"][0]["box"] if sample["boxes"] else None

    def oracle(self, sample: Sample) -> str:
        truth = self.target(sample)
        return format_box(self.coordinates.from_original(sample, truth)) if truth else "none"

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        value = parts["iou"] or 0.0
        return {"iou": value, "acc@.5": float(value >= 0.5)}

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        marks = [("target", self.target(sample)), ("answer", parsed)]
        return [{"kind": "box", "at": box, "label": sample["expression"], "role": role} for role, box in marks if box]


def _says_none(answer: Answer) -> bool:
    """An answer without any number: "none", "no box"."""
    return not any(c.isdigit() for c in answer.final)
