"""Grounding: find what an expression names and answer with its box; the reward is the soft IoU.

`task.recipe` chooses the prompt and the reward: one box (soft_iou, vlm_r1_rec, curr_reft_open, reasoning), all boxes of
some categories (vlm_r1_ovd, vision_r1_griffon, visual_rft_detection, perception_r1), yes or no (curr_reft_binary), a
choice (curr_reft_choice), a count (counting) or points (pointing).

`task.drawn=true` draws scenes of coloured shapes at any difficulty, without a file. Otherwise the canonical rows of
`data.train` and `data.heldout` are read. A recipe with one box refuses rows with several boxes; an empty list of boxes
means that the object is absent. A row with a `question` and boxes, but without `expression` and `labels`, is asked with
this question, followed by the answer format."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.config.base import Positive
from vlrl.data.row_samples import xywh_hint
from vlrl.errors import ConfigError
from vlrl.rewards.boxes import iou, is_number
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Media, Parts, Sample

from . import _grounding as boxes
from . import _grounding_benchmarks as benchmarks
from . import _grounding_words as words
from ._scenes import KNOBS, generated_scene, scene
from ._shared import drawn

_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")

RECIPES = {
    "soft_iou": boxes.SOFT_IOU, "vlm_r1_rec": boxes.VLM_R1_REC, "vlm_r1_ovd": boxes.VLM_R1_OVD,
    "vision_r1_griffon": boxes.VISION_R1_GRIFFON, "visual_rft_detection": boxes.VISUAL_RFT_DETECTION,
    "perception_r1": boxes.PERCEPTION_R1, "curr_reft_binary": words.CURR_REFT_BINARY,
    "curr_reft_choice": words.CURR_REFT_CHOICE, "curr_reft_open": boxes.CURR_REFT_OPEN, "reasoning": boxes.REASONING,
    "counting": words.COUNTING, "pointing": words.POINTING,
}


class Grounding(RecipeTask):
    """Referring expressions, detection, counting and pointing; see `task.recipe`. Reward parts of the default recipe:
    `iou`, in [0, 1], and `format`, 0 or 1."""

    _recipes = RECIPES
    recipe: str = "soft_iou"
    """Prompt and reward (docs/tasks.md). soft_iou, vlm_r1_rec, vlm_r1_ovd, vision_r1_griffon, visual_rft_detection,
    perception_r1, curr_reft_binary, curr_reft_choice, curr_reft_open, reasoning, counting, pointing, or your own
    module:function that returns a Recipe."""
    drawn: bool = False
    """Whether samples are generated scenes, not rows."""
    count: Positive = 4096
    """Number of scenes per split, with task.drawn=true."""
    size: Annotated[int, Field(ge=32, le=4096)] = 128
    """Side length of a generated scene in pixels."""
    ovd_reward: Literal["row", "odLength", "od_ap", "od_ap50", "weighted_sum"] = "row"
    """Recipe vlm_r1_ovd: the reward of a list of boxes. row: the reward that the row's accu_reward_method names
    (default odLength); any other value is the reward for all rows."""
    negation: Literal["read", "ignored"] = "read"
    """How a negated answer ("not C") is scored. Recipes curr_reft_choice and counting. read: as an answer that names
    nothing; ignored: as if the negation were missing, as in Curr-ReFT."""
    progressive: bool = True
    """vision_r1_griffon: whether thresholds rise at switch_step. They are those for the quality of boxes and for
    recall. false: only boxes with a quality of at least .5 count for recall, as in the original code if it is not told
    the step."""
    switch_step: Positive = 1500
    """vision_r1_griffon: step from which higher thresholds apply."""
    label_case: Literal["ignored", "kept"] = "ignored"
    """Recipes with all boxes: how labels are compared. ignored: without regard to case and spaces; kept: exactly, as in
    VLM-R1."""
    benchmark: str = ""
    """Benchmark for additional metrics (docs/evaluation.md). Its own scoring rules apply: qwen_vl or vlm_r1 (RefCOCO)
    for recipes with one box, visual_rft (COCO, LVIS) for recipes with all boxes."""
    reach: Annotated[float, Field(gt=0, le=1)] = 0.05
    """pointing: largest distance of a hit. It is the distance from a point of the row to an answer's point, as a share
    of the image's longer side."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.knobs = KNOBS if self.drawn else {}
        if self.used.target in (boxes.first_box, boxes.truths):
            benchmarks.check(self.benchmark, self.used.target is boxes.first_box)
        elif self.benchmark:
            raise ConfigError(f"task.benchmark={self.benchmark!r} needs a recipe that answers with boxes, but "
                              f"task.recipe={self.recipe!r} does not. Choose another recipe, or remove task.benchmark")

    def samples(self, split: str) -> Sequence[Sample]:
        if not self.drawn:
            return super().samples(split)
        return drawn(self, split, lambda split, index: self._sample(*scene(self.seed, split, index, self.size)))

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        return self._sample(*generated_scene(self.seed, index, knobs, self.size))

    def _sample(self, image: Any, row: Mapping[str, Any]) -> Sample:
        return Sample(id=row["id"], media=(Media(source=image),), row=self.filled(row))

    def templates_for(self, sample: Sample) -> tuple[str, ...]:
        """The task's templates; that of the recipe for questions if the row has a question of its own and `task.prompt`
        is not set."""
        own = self.templates == (self.used.prompt,) and _asks_itself(sample.row)
        return (self.used.asked,) if own and self.used.asked else self.templates

    def problem(self, row: Mapping[str, Any]) -> str | None:
        one = self.used.target is boxes.first_box
        return (_problem(row, self.used.asks) or words.other_question(self.recipe, row)
                or (_several(row, self.recipe) if one else None) or self._unfilled(row))

    def _unfilled(self, row: Mapping[str, Any]) -> str | None:
        if self.templates == (self.used.prompt,):
            return None
        known, asked = self.placeholders(row), {n for t in self.templates for n in re.findall(r"\{(\w+)\}", t)}
        for name in sorted(asked & {"question", "expression", "categories"} - known.keys() - row.keys()):
            has = "question" if name != "question" else "expression" if row.get("expression") else "labels"
            place = "categories" if has == "labels" else has
            return (f"task.prompt contains {{{name}}}, which the row does not have; it has "
                    f"{has}={str(row.get(has))[:120]!r}: use {{{place}}} in task.prompt, or leave task.prompt out")
        return None

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        name = boxes.name_of(row)
        told = {} if _asks_itself(row) else {"categories": ", ".join(row.get("labels") or ()) or name,
                                             "expression": name}
        question = row.get("question")
        asks = {"question": question or f"Is there any {name} in the image?"} if question or self.used.asks else {}
        return {**told, **asks, "how_many": question or f"How many {name} are in the image?",
                "choices": words.choice_question(row)}

    def guidance(self, sample: Sample, answers: Sequence[Answer]) -> str | None:
        """A hint for a sample: the row's own hint or, for recipes with one box, which ninth of the image contains the
        centre of the box. None if there is neither."""
        place = self.target(sample) if self.used.target is boxes.first_box else None
        if hint := super().guidance(sample, answers):
            return hint
        if not place:
            return None
        (x1, y1, x2, y2), width, height = place, sample["width"], sample["height"]
        row, column = int(3 * (y1 + y2) / (2 * height)), int(3 * (x1 + x2) / (2 * width))
        return f"It is at the {_ROWS[min(row, 2)]} {_COLUMNS[min(column, 2)]} of the image."

    def answered(self, row: Mapping[str, Any], parsed: Any) -> Mapping[str, Any] | None:
        """The row with the box of a teacher model (`parsed`) as its right answer. None if the teacher gave no box, and
        for recipes that do not answer with one box."""
        if self.used.target is not boxes.first_box or not parsed:
            return None
        return {**row, "boxes": [{"box": [float(v) for v in parsed], "label": boxes.name_of(row)}]}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer, for recipes with one box: `acc@.5` (whether the IoU is at least .5), and the metric of
        `benchmark`."""
        if self.used.target is not boxes.first_box:
            return {}
        truth, theirs = self.target(sample), {}
        if self.benchmark:
            theirs = benchmarks.RULES[self.benchmark](self, sample, answer)
        if truth is not None and "iou" not in parts:
            box = self.parse(sample, answer)
            return {"acc@.5": float(box is not None and iou(box, truth) >= 0.5), **theirs}
        return {"acc@.5": float((parts.get("iou", parts.get("accuracy")) or 0.0) >= 0.5), **theirs}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split, for recipes with all boxes: COCO's mAP of the boxes as the task parses them, and as
        `benchmark` parses them."""
        if self.used.target is not boxes.truths:
            return {}
        return benchmarks.maps(records, lambda entries: boxes.labelled(self, entries),
                               lambda row: boxes.label_of(self, boxes.name_of(row)), self.benchmark)

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        return [mark for role, place in (("target", self.target(sample)), ("answer", parsed))
                for mark in _marks(place, boxes.name_of(sample.row), role)]


def _marks(place: Any, name: str, role: str) -> list[dict[str, Any]]:
    if not isinstance(place, list) or not place:
        return []
    kind = {2: "point", 4: "box"}.get(len(place)) if is_number(place[0]) else None
    if kind:
        return [{"kind": kind, "at": place, "label": name, "role": role}]
    marks = []
    for entry in place:
        at, label = (entry["box"], entry["label"]) if isinstance(entry, dict) else (entry, name)
        marks.append({"kind": "point" if len(at) == 2 else "box", "at": at, "label": label, "role": role})
    return marks


def _asks_itself(row: Mapping[str, Any]) -> bool:
    return bool(row.get("question")) and not row.get("expression") and not row.get("labels")


def _several(row: Mapping[str, Any], recipe: str) -> str | None:
    count, labels = len(row["boxes"]), row.get("labels") or ()
    ways = ("choose a recipe of all boxes (task.recipe=vlm_r1_ovd, vision_r1_griffon, visual_rft_detection or "
            "perception_r1), or give each box a row with its own expression")
    if count > 1:
        return f"the row has {count} boxes, and task.recipe={recipe} asks for one: {ways}"
    if len(labels) > 1 and not row.get("expression"):
        return f"the row asks for {len(labels)} labels, and task.recipe={recipe} for one thing: {ways}"
    if not count and row.get("points"):
        return f"the row has points and no box, and task.recipe={recipe} asks for a box: choose task.recipe=pointing"
    return None


def _problem(row: Mapping[str, Any], asks: bool) -> str | None:
    for side in ("width", "height"):
        if not is_number(row.get(side)) or row[side] <= 0:
            return f"{side}={row.get(side)!r} must be the image's {side} in pixels"
    labels = row.get("labels")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(v, str) for v in labels)):
        return f"labels={str(labels)[:200]} must be a list of strings, the categories to find"
    if asks and isinstance(row.get("question"), str) and row.get("answer") is not None and not row.get("boxes"):
        return words.count_problem(row)
    if not isinstance(row.get("expression"), str) and not labels and not isinstance(row.get("question"), str):
        return f"expression={row.get('expression')!r} must be the text to locate"
    if not isinstance(row.get("boxes"), list):
        return (f"boxes={row.get('boxes')!r} must be a list of {{\"box\": [x1, y1, x2, y2]}}; empty when the object is "
                "absent")
    for entry in row["boxes"]:
        box = entry.get("box") if isinstance(entry, dict) else None
        if not isinstance(box, list) or not all(map(is_number, box)) or iou(box, box) == 0:
            return f"box {str(box)[:200]} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2" + (
                xywh_hint(box, (row["width"], row["height"])))
    return words.count_problem(row)
