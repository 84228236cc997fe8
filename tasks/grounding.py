"""Grounding: find what an expression names and answer with its box; the reward is the soft IoU.

`task.drawn=true` draws scenes of coloured shapes, so no file is needed; else the canonical rows of `data.train` and
`data.heldout` are read, whose first box is the target (an empty list: the object is absent).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vlrl.data import SPLITS, Drawn, sample_from_row
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.boxes import box_format, format_box, iou, is_number, parse_box
from vlrl.settings import Positive
from vlrl.task import Task
from vlrl.types import Answer, Media, Parts, Sample

from ._scenes import scene


class Grounding(Task):
    """One referring expression, one box. Parts: `iou` in [0, 1], `format` 0 or 1."""

    drawn: bool = False
    """Scenes drawn by code instead of rows from a file."""
    count: Positive = 4096
    """Scenes of a drawn split."""
    size: Annotated[int, Field(ge=32, le=4096)] = 128
    """Side of a drawn scene in pixels."""
    prompt = "Locate the {expression}. Answer with its box as [x1, y1, x2, y2]."
    rewards = {"iou": 1.0, "format": 0.0}

    def samples(self, split: str) -> Sequence[Sample]:
        if not self.drawn:
            return super().samples(split)
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}: task 'grounding' draws {' and '.join(SPLITS)}")
        return Drawn(self.count, lambda index: self._draw(split, index))

    def _draw(self, split: str, index: int) -> Sample:
        image, row = scene(self.seed, split, index, self.size)
        return Sample(id=row["id"], media=(Media(source=image),), row=row)

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = sample_from_row(row, root)
        problem = _problem(sample.row)
        if problem:
            raise DataError(f"row '{sample.id}': {problem}")
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
        return {"acc@.5": float((parts["iou"] or 0.0) >= 0.5)}

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        marks = [("target", self.target(sample)), ("answer", parsed)]
        return [{"kind": "box", "at": box, "label": sample["expression"], "role": role} for role, box in marks if box]


def _problem(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a grounding row, or None."""
    for side in ("width", "height"):
        if not is_number(row.get(side)) or row[side] <= 0:
            return f"{side}={row.get(side)!r} must be the image's {side} in pixels"
    if not isinstance(row.get("expression"), str):
        return f"expression={row.get('expression')!r} must be the text to locate"
    if not isinstance(row.get("boxes"), list):
        return (f"boxes={row.get('boxes')!r} must be a list of {{\"box\": [x1, y1, x2, y2]}}; empty when the object is "
                "absent")
    for entry in row["boxes"]:
        box = entry.get("box") if isinstance(entry, dict) else None
        if not isinstance(box, list) or not all(map(is_number, box)) or iou(box, box) == 0:
            return f"box {str(box)[:200]} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2"
    return None


def _says_none(answer: Answer) -> bool:
    """An answer that says something, without any number: "none", "no box"."""
    return bool(answer.final) and not any(c.isdigit() for c in answer.final)
