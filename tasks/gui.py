"""Gui: find an element of a screenshot, or predict the next action on it.

`task.recipe` chooses the prompt and the reward: one element by box or point (element, click, gui_g1, gui_g2, se_gui),
an action (ui_r1, gui_r1, infigui_r1, glm_v_androidworld), or agreement within the group for rows without labels
(gui_rcpo, region_vote).

Rows have `image`, `width`, `height`, `instruction`, and either `box` (the target element) or `action` (`type` and,
depending on it, `point`, `text`, `direction`). Optional fields: `history`, `platform` and `element_type`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.config.base import Rate
from vlrl.config.registry import resolve
from vlrl.rewards.boxes import iou, is_number
from vlrl.rewards.points import inside
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Parts, Sample

from . import _gui as elements
from . import _gui_actions as actions
from . import _gui_benchmarks as benchmarks
from ._shared import means

RECIPES = {
    "element": elements.ELEMENT, "click": elements.CLICK, "gui_g1": elements.GUI_G1, "gui_g2": elements.GUI_G2,
    "se_gui": elements.SE_GUI, "gui_rcpo": elements.GUI_RCPO, "region_vote": elements.REGION_VOTE,
    "ui_r1": actions.UI_R1, "gui_r1": actions.GUI_R1, "infigui_r1": actions.INFIGUI_R1,
    "glm_v_androidworld": actions.GLM_V_ANDROIDWORLD,
}


class Gui(RecipeTask):
    """Find elements of screenshots, or predict actions on them; see `task.recipe`. Reward parts of the default recipe:
    `hit`, 0 or 1 (whether the centre of the box lies in the element), `iou`, in [0, 1], and `format`, 0 or 1."""

    _recipes = RECIPES
    recipe: str = "element"
    """Prompt and reward (docs/tasks.md). element, click, gui_g1, gui_g2, se_gui, gui_rcpo, region_vote, ui_r1, gui_r1,
    infigui_r1, glm_v_androidworld, or your own module:function that returns a Recipe."""
    point_reach: Rate = 50.0
    """gui_rcpo, region_vote: half side of a point's square in pixels. A point votes for the square that extends this
    many pixels to each side."""
    word_rule: Literal["alike", "contained"] = "alike"
    """gui_r1: when a typed word matches a longer one. The other word contains it. alike: if the F1 score of their
    letters is at least .5; contained: always, as in the paper, so that a single letter matches a long word."""
    iou_full: Annotated[float, Field(gt=0, le=1)] = 0.7
    """infigui_r1: IoU from which a box earns everything."""

    benchmark: str = ""
    """Benchmark for additional metrics (docs/evaluation.md). Its own scoring rules apply: screenspot, os_atlas
    (AndroidControl), gui_r1 (AndroidControl, GUI-Act, GUI-Odyssey), gui_odyssey, gui_act, or your own
    module:function."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._rule = resolve("task.benchmark", self.benchmark, benchmarks.RULES) if self.benchmark else None

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _problem(row) or benchmarks.problem(self.benchmark, row)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        history = row.get("history") or "none"
        return {"history": history if isinstance(history, str) else "; ".join(map(str, history))}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer: `click_acc` for rows with an element, `type_acc` and `step_success` for rows with an
        action, and the metrics of `benchmark`."""
        given = self.parse(sample, answer)
        own = self._own(sample, given)
        if self._rule is None:
            return own
        action = actions.in_pixels(self, sample, given)
        if isinstance(action, list):
            action = {"type": "click", "point": [*elements.middle(action)]}
        return {**own, **self._rule(self, sample, answer, action)}

    def _own(self, sample: Sample, given: Any) -> dict[str, float]:
        if self.used.target is elements.element:
            box = elements.element(self, sample)
            hit = given is not None and box is not None and inside(elements.middle(given), box)
            return {} if box is None else {"click_acc": float(hit)}
        return actions.step_metrics(self, sample, given)

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split: the mean of each metric by platform, by kind of element, and by category (the group of
        ScreenSpot-Pro), e.g. `click_acc/web` and `click_acc/icon`. In addition, the means by platform (or category) and
        kind of element, e.g. `click_acc/web/icon`, and the mean of these means, `click_acc/macro`, which is SeeClick's
        average on ScreenSpot (2401.10935)."""
        values: list[tuple[str, float]] = []
        cells: dict[str, set[str]] = {}
        for record in records:
            row = record["sample"]
            kinds = {str(row[key]) for key in ("platform", "element_type", "category") if row.get(key)}
            cell = (row.get("category") or row.get("platform"), row.get("element_type"))
            both = {"/".join(map(str, cell))} if all(cell) else set()
            for metric, value in record["metrics"].items():
                values += [(f"{metric}/{kind}", value) for kind in kinds | both]
                cells.setdefault(metric, set()).update(f"{metric}/{kind}" for kind in both)
        found = means(values)
        return found | {f"{metric}/macro": sum(found[name] for name in names) / len(names)
                        for metric, names in cells.items() if len(names) > 1} | benchmarks.episodes(records)

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        target = self.target(sample)
        return [*_marks(actions.wanted(self, sample) if isinstance(target, dict) else target, "target"),
                *_marks(actions.in_pixels(self, sample, parsed), "answer")]


def _marks(place: Any, role: str) -> list[dict[str, Any]]:
    label = "element"
    if isinstance(place, dict):
        label = str(place.get("type", place.get("action_type", "")))[:100]
        place = place.get("box") or place.get("point")
    if not isinstance(place, (list, tuple)) or len(place) not in (2, 4):
        return []
    return [{"kind": "point" if len(place) == 2 else "box", "at": [*place], "label": label, "role": role}]


def _problem(row: Mapping[str, Any]) -> str | None:
    for side in ("width", "height"):
        if not is_number(row.get(side)) or row[side] <= 0:
            return f"{side}={row.get(side)!r} must be the screenshot's {side} in pixels"
    if not isinstance(row.get("instruction"), str):
        return f"instruction={row.get('instruction')!r} must be the text that names the element or the step"
    if not isinstance(row.get("history", ""), (str, list, type(None))):
        return f"history={str(row['history'])[:200]} must be a string or a list of the steps so far"
    action = row.get("action")
    if action is not None and not (isinstance(action, dict) and isinstance(action.get("type"), str)):
        return f"action={str(action)[:200]} must be an object with a type, e.g. {{\"type\": \"click\"}}"
    for box in (row.get("box"), (action or {}).get("box")):
        if box is not None and not (isinstance(box, list) and all(map(is_number, box)) and iou(box, box) > 0):
            return f"box {str(box)[:200]} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2"
    for key in ("point", "coordinate"):
        point = (action or {}).get(key)
        if point is not None and not (isinstance(point, list) and len(point) == 2 and all(map(is_number, point))):
            return f"action {key}={str(point)[:200]} must be [x, y]"
    return None
