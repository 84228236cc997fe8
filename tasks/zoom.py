"""Zoom: read a detail that cannot be read before it is enlarged, with a tool that enlarges it.

The detail is on a plate, a small square on a shape. In the image that the prompt shows, all plates are blank, so no
model can read the answer there. The tool `zoom(box)` shows the square around a box in full detail; with
`task.media=clip`, the tool `frame(seconds)` shows one frame. The reward is for the right answer and its format. With
`task.rewards.tool`, a right answer after a tool call that showed an image earns this reward once, as in DeepEyes (arXiv
2505.14362); otherwise tool calls earn nothing."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from vlrl.config.base import Positive
from vlrl.rewards.text import said
from vlrl.task import Task
from vlrl.types import Answer, Media, Parts, Sample

from . import _zoom_scenes as scenes
from ._scenes import COLOURS
from ._shared import drawn

ASKED = {"digit": "Which digit is this? Answer with the digit only.",
         "colours": "Which three colours are these? Answer with their names only.",
         "count": "How many dots are there? Answer with the number only."}
_NAME = "|".join(COLOURS)
_FORMS = {"digit": re.compile(r"\d", re.ASCII), "colours": re.compile(f"({_NAME}) ({_NAME}) ({_NAME})"),
          "count": re.compile("[1-6]")}
_FRAMES = 6  # frames of a clip, one per second
_WHOLE = 0.9  # a box of this share of the image's side shows nothing new


class Zoom(Task):
    """Read what is written on a plate that is too small to read. Reward parts: `accuracy` and `format`, each 0 or 1,
    and `tool`, 1 for a right answer after a tool call that showed an image, with weight 0 by default."""

    prompt = "{question}"
    rewards = {"accuracy": 1.0, "format": 0.1, "tool": 0.0}
    answer: Literal["digit", "colours", "count"] = "digit"
    """Content of the plates: digit, colours or dots. A digit, three colours in a row, or up to six dots."""
    media: Literal["image", "clip"] = "image"
    """What the prompt shows, and the tool. image: an image and the tool zoom(box); clip: a clip of six seconds and the
    tool frame(seconds)."""
    tool: bool = True
    """Whether there is a tool. false: the same question is answered in one turn without a tool."""
    crops: Literal["chosen", "random"] = "chosen"
    """What the tool shows. chosen: the box or the time that the model gives; random: a random position or time, as a
    control."""
    count: Positive = 4096
    """Number of scenes per split."""
    size: Annotated[int, Field(ge=64, le=512, multiple_of=64)] = 64
    """Side length of the displayed image in pixels."""

    def samples(self, split: str) -> Sequence[Sample]:
        return drawn(self, split, self._sample)

    def _sample(self, split: str, index: int) -> Sample:
        if self.media == "image":
            blank, row = self._drawn(split, index, blank=True)
            media, where = Media(source=scenes.overview(blank)), f"Locate the {row['expression']}."
        else:  # frames are so small that a plate has the same size as in an image
            frames, second = [self._drawn(split, index, s) for s in range(_FRAMES)], index % _FRAMES
            row, where = {**frames[second][1], "second": second}, f"Look at second {second}."
            media = Media(kind="video", source=[image.reduce(4 * scenes.DETAIL) for image, _ in frames], fps=1)
        row |= {"id": f"{split}-{index:06d}", "split": split, "index": index,
                "question": f"{where} {ASKED[self.answer]}"}
        return Sample(id=row["id"], media=(media,), row=row)

    def _drawn(self, split: str, index: int, second: int | None = None,
               blank: bool = False) -> tuple[Image.Image, dict[str, Any]]:
        """Returns (scene in full detail, its row). With `second`, the scene is a frame of a clip; with `blank`, its
        plates are empty."""
        name = split if second is None else f"{split}/{second}"
        return scenes.scene(self.seed, name, index, self.size, self.answer, clear=second is not None, blank=blank)

    def tools(self, sample: Sample) -> Sequence[Callable[..., Any]]:
        if not self.tool:
            return ()
        split, index, question = sample["split"], sample["index"], ASKED[self.answer]

        def zoom(box: list[float]) -> list[Image.Image | str]:
            """Shows the part of the picture in a box [x1, y1, x2, y2], enlarged."""
            x1, y1, x2, y2 = self.coordinates.to_original(sample, _checked(box))
            if max(x2 - x1, y2 - y1) >= _WHOLE * self.size:
                raise ValueError("the box is the whole picture, which has been shown")
            if self.crops == "random":
                rng, side = random.Random(f"{sample.id}/{box}"), max(x2 - x1, y2 - y1)
                x1, y1 = (rng.uniform(0, self.size - side) for _ in range(2))
                x2, y2 = x1 + side, y1 + side
            return [scenes.crop(self._drawn(split, index)[0], (x1, y1, x2, y2), self.size), question]

        def frame(seconds: float) -> list[Image.Image | str]:
            """Shows the frame of the clip at a second, enlarged."""
            if not 0 <= seconds < _FRAMES:
                raise ValueError(f"the clip has the seconds 0 to {_FRAMES - 1}")
            second = random.Random(f"{sample.id}/{seconds}").randrange(_FRAMES) if self.crops == "random" else seconds
            return [self._drawn(split, index, int(second))[0].reduce(scenes.DETAIL), question]

        return [zoom] if self.media == "image" else [frame]

    def score(self, sample: Sample, answer: Answer) -> Parts:
        right, legal = answer.final.strip() == sample["answer"], _FORMS[self.answer].fullmatch(said(answer).strip())
        looked = any(turn.media for turn in answer.turns)
        return {"accuracy": float(right), "format": float(bool(legal)), "tool": float(right and looked)}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an episode: `called`, whether a tool call showed an image."""
        return {"called": float(any(turn.media for turn in answer.turns))}

    def oracle(self, sample: Sample) -> str:
        return sample["answer"]

    def oracle_actions(self, sample: Sample) -> Sequence[str]:
        return [self.call(sample), self.oracle(sample)]

    def call(self, sample: Sample, box: Sequence[float] | None = None) -> str:
        """The text of the tool call that shows `box`, in pixels of the image; None = the box that contains the answer.
        With task.media=clip, the call shows the frame that contains the answer."""
        if self.media == "clip":
            name, arguments = "frame", {"seconds": sample["second"]}
        else:
            place = sample["boxes"][0]["box"] if box is None else box
            name, arguments = "zoom", {"box": self.coordinates.from_original(sample, place)}
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        if self.media == "clip":
            return []
        return [{"kind": "box", "at": sample["boxes"][0]["box"], "label": sample["answer"], "role": "target"}]


def _checked(box: list[float]) -> list[float]:
    """The box unchanged. Raises ValueError if it is invalid; the model reads the message."""
    if len(box) != 4 or not (box[0] < box[2] and box[1] < box[3]) or not all(abs(v) < 1e6 for v in box):
        raise ValueError("the box must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2")
    return box
