"""`task.benchmark` of the grounding task: scores an answer as the authors of a benchmark do, in addition to the task's
own metrics.

There are two kinds of benchmark functions: one computes metrics of a single answer, the other parses the detections
from which a split's mAP is computed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.errors import ConfigError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.rewards.detection import coco_map
from vlrl.task.recipes import pixels
from vlrl.types import Answer, Sample

from ._grounding import first_box

Rule = Callable[[Any, Sample, Answer], dict[str, float]]
Detections = list[dict[str, Any]]
_QWEN = re.compile(r"\((.*?)\),\((.*?)\)")
_BOX = re.compile(r"\[(\d{1,18}),\s*(\d{1,18}),\s*(\d{1,18}),\s*(\d{1,18})\]")
_LONGEST = 2000  # characters of an answer in which Qwen-VL's box is searched


# --- one box ----------------------------------------------------------------------------------------------------------


def _qwen_vl(task: Any, sample: Sample, answer: Answer) -> dict[str, float]:
    """The metric of Qwen-VL on RefCOCO (2308.12966, evaluate_grounding.py): 1 if the first `(x1,y1),(x2,y2)` in 0..999
    has an IoU of at least .5, computed in single precision, else 0. An answer that cannot be parsed counts as a box
    of zero area. {} if the object is absent."""
    import numpy as np
    truth = first_box(task, sample)
    if truth is None:
        return {}
    true = np.array(truth, np.float32)
    box = np.array(_qwen_box(answer.final), np.float32) / np.float32(999)
    box *= np.array([sample["width"], sample["height"]] * 2, np.float32)
    width, height = (np.maximum(np.minimum(box[2:], true[2:]) - np.maximum(box[:2], true[:2]), 0))
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, true)]
    shared = width * height
    union = areas[0] + areas[1] - shared
    return {"qwen_vl_acc": float(bool(union) and float(shared / union) >= 0.5)}


def _qwen_box(text: str) -> list[float]:
    match = _QWEN.search(text[:_LONGEST])
    corners = [corner.split(",") for corner in match.groups()] if match else []
    try:
        values = [float(v) for corner in corners for v in corner]
    except ValueError:
        values = []
    usable = len(values) == 4 and len(corners[0]) == 2 and all(-1e9 < v < 1e9 for v in values)
    return values if usable else [0.0] * 4


def _vlm_r1(task: Any, sample: Sample, answer: Answer) -> dict[str, float]:
    """The metric of VLM-R1 on RefCOCO (2504.07615, test_rec_r1.py): 1 if the answer's box has an IoU above .5, else 0.
    The answer's box is the last box of integers inside {} in the first <answer>, or [0, 0, 0, 0] if there is none.
    An overlap of at most one pixel counts as no overlap. {} if the object is absent."""
    truth = first_box(task, sample)
    if truth is None:
        return {}
    body, closed, _ = answer.text.partition("<answer>")[2].partition("</answer>")
    body = body if closed else ""
    inside = [m for m in _BOX.finditer(body, max(body.find("{"), 0)) if m.end() <= body.rfind("}")]
    box = pixels(task, sample, [float(v) for v in inside[-1].groups()]) if inside and "{" in body else [0.0] * 4
    return {"vlm_r1_acc": float(_inclusive_iou(box or [], truth) > 0.5)}


def _inclusive_iou(a: Sequence[float], b: Sequence[float]) -> float:
    left, top, right, bottom = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]) - 1, min(a[3], b[3]) - 1
    shared = (right - left + 1) * (bottom - top + 1) if left < right and top < bottom else 0.0
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


# --- all boxes --------------------------------------------------------------------------------------------------------


def _visual_rft(row: Mapping[str, Any], text: str, label: str) -> Detections:
    """The detections of an answer on COCO and LVIS as parsed by Visual-RFT (2503.01785, Qwen2_VL_coco_infere.py), with
    boxes in 0..1000. All detections get the label `label`. The list is taken from the first <answer>, or from the
    full text if there is none. Line breaks, `, ...` and double brackets are repaired, and a truncated list is
    closed. A repeated box is dropped. So are the first entry without a box or confidence and all later entries."""
    for wrong, right in (("[[", "["), ("]]", "]"), ("\n", ""), (", ...", "")):
        text = text.replace(wrong, right)
    body, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    entries = _list_of(body.strip() if closed else text.strip())
    if not all(isinstance(e, dict) and isinstance(e.get("Position"), list) for e in entries):
        return []
    out: Detections = []
    keys: set[str] = set()
    for entry in entries:
        place, score = entry["Position"], entry.get("Confidence")
        if (key := json.dumps(place)) in keys:
            continue
        keys.add(key)
        if len(place) != 4 or not all(map(is_number, place)) or not is_number(score):
            break
        sides = (row["width"], row["height"]) * 2
        out.append({"box": [v / 1000.0 * side for v, side in zip(place, sides, strict=True)], "label": label,
                    "score": float(score)})
    return out


def _list_of(text: str) -> list[Any]:
    text = text.partition("</answer>")[0]
    if "<answer>" in text:  # never closed, and wrapped once more
        return []
    if not text.endswith("]"):
        text = f"{text.rsplit('},', 1)[0]}}}]"
    try:
        entries = json.loads(text.replace("'", '"'))
    except (ValueError, RecursionError):
        return []
    return entries if isinstance(entries, list) else []


RULES: Mapping[str, Rule] = {"qwen_vl": _qwen_vl, "vlm_r1": _vlm_r1}
READINGS: Mapping[str, Callable[[Mapping[str, Any], str, str], Detections]] = {"visual_rft": _visual_rft}


def check(name: str, one_box: bool) -> None:
    """Raises ConfigError if `name` is not a benchmark for this type of recipe: with `one_box` for recipes whose answer
    is one box, else for recipes with all boxes. "" (no benchmark) is allowed."""
    known, other = (RULES, READINGS) if one_box else (READINGS, RULES)
    if name and name not in known:
        why = ("needs a recipe with all boxes." if one_box else "needs a recipe with one box.") if name in other else \
            f"is not known.{did_you_mean(name, known)}"
        raise ConfigError(f"task.benchmark={name!r} {why} The benchmarks of this recipe are {', '.join(known)}.")


def maps(records: Sequence[Mapping[str, Any]], labelled: Callable[[Any], Detections], name_of: Callable[[Any], str],
         benchmark: str) -> dict[str, float]:
    """COCO's mAP of the answers as the task parses them and, as `<benchmark>_map`, as the benchmark parses them.
    `labelled` converts boxes of a row to detections; `name_of` returns what a row asks for. As in COCO's evaluation,
    crowd boxes and boxes of zero area (in the field `meta` of COCO's rows) are treated separately, and samples are
    sorted by id if all ids are numbers, since the order of images decides between equal confidences."""
    if all(str(r["sample"].get("id", "")).isdecimal() for r in records):
        records = sorted(records, key=lambda r: int(r["sample"]["id"]))
    metas = [meta if isinstance(meta := r["sample"].get("meta"), Mapping) else {} for r in records]
    truths = [[*r["target"], *labelled(meta.get("empty") or [])] for r, meta in zip(records, metas, strict=True)]
    crowds = [labelled(meta.get("crowd") or []) for meta in metas]
    out = coco_map([r["parsed"] or [] for r in records], truths, crowds)
    if benchmark:
        detections = [READINGS[benchmark](r["sample"], r["answer"], name_of(r["sample"])) for r in records]
        out |= {f"{benchmark}_{name}": value for name, value in coco_map(detections, truths, crowds).items()}
    return out
