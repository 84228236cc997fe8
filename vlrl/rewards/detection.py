"""Sets of boxes against sets of boxes: assignment, and rewards for matched, missed and superfluous boxes.

A detection is {"box": [x1, y1, x2, y2], "label": str, "score": float}, a ground truth the same without a score. Boxes
share one unit. Pure; finite input gives finite output."""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from vlrl.rewards.boxes import giou, iou_matrix

Detection = Mapping[str, Any]
Pairs = list[tuple[int, int]]
THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
"""COCO's IoU thresholds, .5 to .95."""
_RECALLS = tuple(i / 100 for i in range(101))
_MOST = 100  # detections of one label and image that COCO considers


def assign(cost: Sequence[Sequence[float]]) -> Pairs:
    """The min(rows, columns) pairs (row, column) of least total cost (the Hungarian assignment)."""
    if not cost or not cost[0]:
        return []
    if len(cost) == 1:
        return [(0, min(range(len(cost[0])), key=cost[0].__getitem__))]
    if len(cost[0]) == 1:
        return [(min(range(len(cost)), key=lambda i: cost[i][0]), 0)]
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def mean_matched(values: Sequence[Sequence[float]], predictions: int, truths: int) -> float:
    """Sum over the best one-to-one assignment of `values` [predictions, truths] in [0, 1], divided by the larger count.

    Missed and superfluous detections both lower it. 1 if both sides are empty."""
    if not predictions or not truths:
        return float(predictions == truths)
    pairs = assign([[-v for v in row] for row in values])
    return sum(values[i][j] for i, j in pairs) / max(predictions, truths)


# --- VLM-R1 -----------------------------------------------------------------------------------------------------------


def average_precision(predictions: Sequence[Detection], truths: Sequence[Detection],
                      thresholds: Sequence[float] = THRESHOLDS) -> float:
    """COCO's mAP of one image, in [0, 1], equal to pycocotools: mean over the labels of the ground truth and the
    thresholds.

    Detections of other labels are ignored; a missing score is 1. 1 if both sides are empty, 0 if one is."""
    if not predictions or not truths:
        return float(not predictions and not truths)
    total, labels = 0.0, {t["label"] for t in truths}
    for label in labels:
        wanted = [t["box"] for t in truths if t["label"] == label]
        own = sorted((d for d in predictions if d["label"] == label), key=lambda d: -d.get("score", 1.0))[:_MOST]
        overlaps = iou_matrix([d["box"] for d in own], wanted)
        for threshold in thresholds:
            total += _interpolated(tuple(_hits(overlaps, len(wanted), threshold)), len(wanted))
    return total / (len(labels) * len(thresholds))


def _hits(overlaps: Sequence[Sequence[float]], truths: int, threshold: float) -> list[bool]:
    """Whether each detection, best first, matches a ground truth that is still free."""
    free, hits = set(range(truths)), []
    for row in overlaps:
        best = max(free, key=lambda j: (row[j], j), default=None)
        hit = best is not None and row[best] >= min(threshold, 1 - 1e-10)
        if best is not None and hit:
            free.discard(best)
        hits.append(hit)
    return hits


@lru_cache(maxsize=64)  # neighbouring thresholds mostly have the same hits
def _interpolated(hits: tuple[bool, ...], truths: int) -> float:
    """Average precision over 101 recalls, with the best precision at each recall or above."""
    right = list(accumulate(hits))
    precision = [n / (i + 1) for i, n in enumerate(right)]
    best = list(accumulate(reversed(precision), max))[::-1]
    total, before = 0.0, 0
    for n, hit, value in zip(right, hits, best, strict=True):
        if hit:
            reached = bisect_right(_RECALLS, n / truths)
            total += (reached - before) * value
            before = reached
    return total / len(_RECALLS)


def length_penalty(predictions: int, truths: int) -> float:
    """VLM-R1's factor against too many boxes (2504.07615): 1 up to the number of ground truths, else their ratio."""
    return 1.0 if predictions <= truths else truths / predictions


def weighted_sum(predictions: Sequence[Detection], truths: Sequence[Detection], threshold: float = 0.5) -> float:
    """VLM-R1's `weighted_sum` (2504.07615, its code), in [0, 1]: .7 P + .3 K.

    Pairs with an IoU of at least `threshold` are matched, the largest first, regardless of labels. P is the sum of the
    matched IoU (0 for pairs of different labels) over the number of ground truths; K is 1 minus the mean of the shares
    of unmatched ground truths and unmatched detections. 1 if both sides are empty, 0 if one is."""
    if not predictions or not truths:
        return float(not predictions and not truths)
    overlaps = iou_matrix([d["box"] for d in predictions], [t["box"] for t in truths])
    pairs = sorted((-v, i, j) for i, row in enumerate(overlaps) for j, v in enumerate(row) if v >= threshold)
    taken: dict[int, int] = {}
    total = 0.0
    for value, i, j in pairs:
        if i not in taken and j not in taken.values():
            taken[i] = j
            total -= value if predictions[i]["label"] == truths[j]["label"] else 0.0
    missed = (1 - len(taken) / len(truths) + 1 - len(taken) / len(predictions)) / 2
    return 0.7 * total / len(truths) + 0.3 * (1 - missed)


# --- Griffon's Vision-R1 ----------------------------------------------------------------------------------------------


def match_quality(predictions: Sequence[Detection], truths: Sequence[Detection]) -> list[float]:
    """GIoU of each matched pair, min(predictions, truths) of them, each in [-1, 1] (Vision-R1, 2503.18013).

    The Hungarian cost is the sum of the four distances in pixels, minus 1 for equal labels, minus GIoU."""
    quality = [[giou(d["box"], t["box"]) for t in truths] for d in predictions]
    cost = [[_l1(d["box"], t["box"]) - (d["label"] == t["label"]) - q
             for t, q in zip(truths, row, strict=True)] for d, row in zip(predictions, quality, strict=True)]
    return [quality[i][j] for i, j in assign(cost)]


def _l1(a: Sequence[float], b: Sequence[float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) + abs(a[2] - b[2]) + abs(a[3] - b[3])


def clipped(value: float, low: float, high: float) -> float:
    """0 below `low`, 1 above `high`, else the value itself."""
    return 0.0 if value < low else 1.0 if value > high else value


# --- Visual-RFT -------------------------------------------------------------------------------------------------------


def greedy_matches(predictions: Sequence[Detection], truths: Sequence[Detection],
                   threshold: float = 0.5) -> list[float]:
    """IoU of each detection, in order of confidence, with its best free ground truth; 0 unless above `threshold`."""
    order = sorted(range(len(predictions)), key=lambda i: -predictions[i]["score"])
    overlaps = iou_matrix([d["box"] for d in predictions], [t["box"] for t in truths])
    free, matched = set(range(len(truths))), [0.0] * len(predictions)
    for i in order:
        best = max(free, key=lambda j: (overlaps[i][j], -j), default=None)
        if best is not None and overlaps[i][best] > threshold:
            matched[i] = overlaps[i][best]
            free.discard(best)
    return matched


def calibration(predictions: Sequence[Detection], matched: Sequence[float]) -> float:
    """Visual-RFT's confidence reward (2503.01785): mean confidence of matched and 1 - confidence of unmatched
    detections."""
    given = [d["score"] if m > 0 else 1 - d["score"] for d, m in zip(predictions, matched, strict=True)]
    return sum(given) / len(given) if given else 0.0


# --- over a split -----------------------------------------------------------------------------------------------------


def coco_map(predictions: Sequence[Sequence[Detection]], truths: Sequence[Sequence[Detection]],
             crowds: Sequence[Sequence[Detection]] = ()) -> dict[str, float]:
    """COCO's `map` and `map@.5` of the detections and ground truths of each image, by pycocotools; {} without ground
    truths.

    `crowds` are regions of each image in which further detections of their label are not counted. A missing score is 1;
    of equal scores the earlier one, in image order, comes first."""
    labels = sorted({t["label"] for image in truths for t in image})
    if not labels:
        return {}
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    number = {label: i for i, label in enumerate(labels, 1)}
    with contextlib.redirect_stdout(io.StringIO()):
        known: Any = COCO()
        detected: Any = COCO()
        for one, regions in ((known, (truths, crowds)), (detected, (predictions,))):
            entries = [_entry(i, d, number, crowd) for crowd, images in enumerate(regions)
                       for i, image in enumerate(images, 1) for d in image if d["label"] in number]
            one.dataset = {"images": [{"id": i} for i in range(1, len(truths) + 1)],
                           "categories": [{"id": i, "name": name} for name, i in number.items()],
                           "annotations": [{**e, "id": k} for k, e in enumerate(entries, 1)]}
            one.createIndex()
        judge = COCOeval(known, detected, "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"map": float(judge.stats[0]), "map@.5": float(judge.stats[1])}


def _entry(image: int, detection: Detection, number: Mapping[str, int], crowd: int) -> dict[str, Any]:
    """A COCO annotation. A box inverted along one axis has a negative area, which COCO does not count."""
    x1, y1, x2, y2 = detection["box"]
    return {"image_id": image, "category_id": number[detection["label"]], "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1), "iscrowd": crowd, "score": detection.get("score", 1.0)}
