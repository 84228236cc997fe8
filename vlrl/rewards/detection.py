"""Comparison of a set of predicted boxes with a set of ground-truth boxes: assignment, and rewards that account for
matched, missed and superfluous boxes.

A prediction is {"box": [x1, y1, x2, y2], "label": str, "score": float}; a ground truth is the same without a score. All
boxes use the same unit. Finite input gives finite output."""

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
THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))  # COCO's IoU thresholds, from .5 to .95 in steps of .05
_RECALLS = tuple(i / 100 for i in range(101))
_MOST = 100  # detections of one label and image that COCO considers


def assign(cost: Sequence[Sequence[float]]) -> Pairs:
    """The Hungarian assignment: min(rows, columns) pairs (row, column) of the matrix `cost` with least total cost."""
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
    """The score of the best one-to-one assignment of predictions to truths: the sum of the assigned pairs' `values`,
    divided by the larger of `predictions` and `truths`, which are the numbers of boxes. `values` [predictions,
    truths] has a similarity in [0, 1] for every pair.

    Missed truths and superfluous predictions lower the score. It is 1 if there are neither predictions nor truths."""
    if not predictions or not truths:
        return float(predictions == truths)
    pairs = assign([[-v for v in row] for row in values])
    return sum(values[i][j] for i, j in pairs) / max(predictions, truths)


# --- VLM-R1 -----------------------------------------------------------------------------------------------------------


def average_precision(predictions: Sequence[Detection], truths: Sequence[Detection],
                      thresholds: Sequence[float] = THRESHOLDS) -> float:
    """COCO's mAP for one image, in [0, 1], with the same result as pycocotools: the mean over the ground-truth labels
    and the IoU thresholds.

    Predictions with other labels are ignored; a missing score counts as 1. The result is 1 if there are neither
    predictions nor truths, and 0 if only one of the two is empty."""
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
    """For each prediction, in order of descending score: whether it matches a ground truth that no earlier prediction
    has matched. `overlaps` has one row of IoUs per prediction, `truths` is the number of ground truths, and a match
    has an IoU of at least `threshold`."""
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
    """Average precision at 101 recall levels, from the result of `_hits` and the number of ground truths. At each
    level, the best precision at this recall or a higher one counts."""
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
    """VLM-R1's penalty factor for too many boxes (2504.07615): 1 if there are at most as many predictions as truths,
    else truths / predictions."""
    return 1.0 if predictions <= truths else truths / predictions


def weighted_sum(predictions: Sequence[Detection], truths: Sequence[Detection], threshold: float = 0.5) -> float:
    """VLM-R1's reward `weighted_sum` (2504.07615, as in the authors' code), in [0, 1]: .7 P + .3 K.

    Pairs with an IoU of at least `threshold` are matched greedily by descending IoU, regardless of labels. P is the sum
    of the matched pairs' IoU (0 for a pair with different labels) divided by the number of truths. K is 1 minus the
    mean of two shares: the share of truths without a match, and the share of predictions without a match. The result is
    1 if there are neither predictions nor truths, and 0 if only one of the two is empty."""
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
    """The GIoU of each matched pair, in [-1, 1] (Vision-R1, 2503.18013). There are min(predictions, truths) pairs, from
    a Hungarian assignment.

    The cost of a pair is the sum of the distances of the four coordinates in pixels, minus 1 if the labels are equal,
    minus the GIoU."""
    quality = [[giou(d["box"], t["box"]) for t in truths] for d in predictions]
    cost = [[_l1(d["box"], t["box"]) - (d["label"] == t["label"]) - q
             for t, q in zip(truths, row, strict=True)] for d, row in zip(predictions, quality, strict=True)]
    return [quality[i][j] for i, j in assign(cost)]


def _l1(a: Sequence[float], b: Sequence[float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) + abs(a[2] - b[2]) + abs(a[3] - b[3])


def clipped(value: float, low: float, high: float) -> float:
    """0 if the value is below `low`, 1 if it is above `high`, else the value itself."""
    return 0.0 if value < low else 1.0 if value > high else value


# --- Visual-RFT -------------------------------------------------------------------------------------------------------


def greedy_matches(predictions: Sequence[Detection], truths: Sequence[Detection],
                   threshold: float = 0.5) -> list[float]:
    """For each prediction, the IoU with the ground truth that it matches; 0 if it matches none. In order of descending
    confidence, a prediction matches the best ground truth that is still free if their IoU exceeds `threshold`."""
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
    """Visual-RFT's confidence reward (2503.01785): the mean of the confidences, where an unmatched prediction counts
    with 1 - confidence. `matched` is the result of `greedy_matches`. 0 if there are no predictions."""
    given = [d["score"] if m > 0 else 1 - d["score"] for d, m in zip(predictions, matched, strict=True)]
    return sum(given) / len(given) if given else 0.0


# --- over a split -----------------------------------------------------------------------------------------------------


def coco_map(predictions: Sequence[Sequence[Detection]], truths: Sequence[Sequence[Detection]],
             crowds: Sequence[Sequence[Detection]] = ()) -> dict[str, float]:
    """COCO's metrics {"map": ..., "map@.5": ...} over several images, computed by pycocotools; {} if there are no
    ground truths. Every argument has one list of boxes per image.

    `crowds` are regions in which extra predictions of the region's label do not count as errors. A missing score counts
    as 1. Of predictions with equal scores, the earlier one in the order of the images comes first."""
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
    """A box as a COCO annotation of the given image. `number` maps labels to COCO's category numbers; `crowd` is 1 for
    a crowd region, else 0. A box that is inverted along one axis gets a negative area, which COCO ignores."""
    x1, y1, x2, y2 = detection["box"]
    return {"image_id": image, "category_id": number[detection["label"]], "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1), "iscrowd": crowd, "score": detection.get("score", 1.0)}
