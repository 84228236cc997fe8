"""`task.benchmark` of the gui task: scores an answer as the authors of a benchmark do, in addition to the task's own
metrics.

Each benchmark function takes (task, sample, answer, parsed action or None) and returns metrics; {} for rows that it
does not apply to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.rewards import steps
from vlrl.rewards.boxes import is_number
from vlrl.rewards.points import inside
from vlrl.task.recipes import pixels, whole_units
from vlrl.types import Answer, Sample

from ._gui import element, middle
from ._gui_actions import wanted

Rule = Callable[[Any, Sample, Answer, Mapping[str, Any] | None], dict[str, float]]
_DIGITS = 6  # decimals of thousandths, so that a point on an edge stays on it


def _shares(sample: Sample, place: Sequence[float], full: float = 1.0) -> list[float]:
    """Converts a point or box from pixels to shares of the image's width and height, multiplied by `full` (1000 for
    thousandths)."""
    sides = [sample["width"], sample["height"]] * 2
    return [full * v / side for v, side in zip(place, sides, strict=False)]


def _thousandths(sample: Sample, place: Sequence[float]) -> list[float]:
    return [round(v, _DIGITS) for v in _shares(sample, place, 1000.0)]


def _right(task: Any, sample: Sample) -> dict[str, Any]:
    right = wanted(task, sample)
    place = right.get("point") or right.get("box")
    return {**right, "point": [*middle(place)]} if place else right


def _placed(sample: Sample, action: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if action is None:
        return None
    point = action.get("point")
    return {**action, "point": _thousandths(sample, point) if point else None}


def _screenspot(task: Any, sample: Sample, answer: Answer, _given: Any) -> dict[str, float]:
    box, text = element(task, sample), answer.final
    if box is None:
        return {}
    point = steps.screenspot_point(text)
    if point and "box" not in text and whole_units(task, sample):
        point = _shares(sample, pixels(task, sample, point) or point)
    return {"screenspot_acc": float(point is not None and inside(point, _shares(sample, box)))}


def _gui_r1(task: Any, sample: Sample, answer: Answer, _given: Any) -> dict[str, float]:
    """The metrics of GUI-R1. The position of a box is its upper left corner, as in the original evaluation."""
    if not sample.get("action"):
        return {}
    right, given = wanted(task, sample), steps.gui_r1_action(answer.text)
    right["point"] = (right.get("point") or right.get("box") or [0, 0])[:2]
    given["point"] = pixels(task, sample, given["point"])
    return _named("gui_r1", steps.gui_r1_step(right, given, (sample["width"], sample["height"])))


def _gui_odyssey(task: Any, sample: Sample, _answer: Answer, given: Any) -> dict[str, float]:
    if not sample.get("action"):
        return {}
    right = _placed(sample, _right(task, sample)) or {}
    box = _thousandths(sample, right["box"]) if "box" in right else None
    return _named("gui_odyssey", steps.odyssey_step(right, _placed(sample, given), box))


def _gui_act(task: Any, sample: Sample, _answer: Answer, given: Any) -> dict[str, float]:
    """The metrics of GUI-Act; {} for a row without an action. The index of the right element is the row's `element`,
    else the index of the first listed element with the target's box."""
    if not sample.get("action"):
        return {}
    right, elements = _right(task, sample), sample.get("elements") or []
    if right["type"] == "tap":
        right, given = _tapped(sample, right), given and _tapped(sample, given)
    elif "box" in right:
        own = [n for n, box in enumerate(elements) if list(box) == list(right["box"])]
        right["element"] = sample.get("element", own[0] if own else -2)  # no element: nothing hits it
        given = given and {**given, "box": _whole_box(given)}
    return _named("gui_act", steps.gui_act_step(right, given, elements))


def _tapped(sample: Sample, action: Mapping[str, Any]) -> dict[str, Any]:
    point = action.get("point")
    return {**action, "point": [round(v, 3) for v in _shares(sample, point)] if point else None}


def _whole_box(action: Mapping[str, Any]) -> list[int] | None:
    """The box of an action in integer pixels. For an action with a point, a box of zero area at this point; None for an
    action without a position."""
    place = action.get("box") or (action["point"] * 2 if action.get("point") else None)
    return place and [int(v) for v in place]


def _named(name: str, scores: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_{part}": value for part, value in scores.items()}


def problem(benchmark: str, row: Mapping[str, Any]) -> str | None:
    """Describes what is wrong with a row for the benchmark; None if the row is valid."""
    kind = (row.get("action") or {}).get("type")
    if benchmark != "gui_act":
        return None
    if kind == "select_text":
        return "action type='select_text' marks a region, and actions here have a single position; leave out these rows"
    elements = row.get("elements")
    usable = isinstance(elements, list) and all(isinstance(box, list) and len(box) == 4 and all(map(is_number, box))
                                                for box in elements)
    if kind in ("click", "hover", "select") and not (usable and elements):
        return (f"elements={str(elements)[:200]} must be a list of the boxes of all elements, of which task.benchmark="
                "gui_act takes the nearest one")
    return None


RULES: Mapping[str, Rule] = {"screenspot": _screenspot,
                             "os_atlas": lambda task, sample, _answer, given: _named("os_atlas", steps.os_atlas_step(
                                 _placed(sample, _right(task, sample)) or {}, _placed(sample, given)))
                             if sample.get("action") else {},
                             "gui_r1": _gui_r1,
                             "gui_odyssey": _gui_odyssey, "gui_act": _gui_act}


def episodes(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of whole episodes, for rows with an `episode`. `gui_odyssey_sr` is the share of complete episodes in
    which every step is right. An episode is complete if the number of its evaluated steps equals the field `steps`
    of its rows. If all rows have a category, `gui_odyssey_step/categories` and `gui_odyssey_sr/categories` are the
    means of step accuracy and success over the categories, as the authors report their random split."""
    known = [r for r in records if "gui_odyssey_step" in r["metrics"]]
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for record in known:
        by_category.setdefault(str(record["sample"].get("category") or ""), []).append(record)
    out = {"gui_odyssey_sr": _success(known)} if any(r["sample"].get("episode") for r in known) else {}
    if not known or "" in by_category:
        return out
    cells = [[r["metrics"]["gui_odyssey_step"] for r in own] for own in by_category.values()]
    out["gui_odyssey_step/categories"] = sum(sum(cell) / len(cell) for cell in cells) / len(cells)
    if "gui_odyssey_sr" in out:
        out["gui_odyssey_sr/categories"] = sum(map(_success, by_category.values())) / len(by_category)
    return out


def _success(records: Sequence[Mapping[str, Any]]) -> float:
    episodes: dict[str, list[float]] = {}
    length: dict[str, int] = {}
    for record in records:
        name = str(record["sample"].get("episode") or "")
        if name:
            episodes.setdefault(name, []).append(record["metrics"]["gui_odyssey_step"])
            length[name] = record["sample"].get("steps") or 0
    whole = [values for name, values in episodes.items() if len(values) == (length[name] or len(values))]
    return sum(all(values) for values in whole) / len(whole) if whole else 0.0
