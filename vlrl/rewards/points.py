"""Comparison of points with boxes in the same unit: whether a point is inside a box, and smooth rewards based on the
distance. Finite input never makes a function raise."""

import math
from collections.abc import Sequence

_EPSILON = 1e-8


def inside(point: Sequence[float], box: Sequence[float], strict: bool = False) -> bool:
    """Whether a point lies in a box. The edges belong to the box unless `strict` is set."""
    x, y = point
    x1, y1, x2, y2 = box
    return (x1 < x < x2 and y1 < y < y2) if strict else (x1 <= x <= x2 and y1 <= y <= y2)


def gaussian_point(box: Sequence[float], truth: Sequence[float], scale: float = 0.5) -> float:
    """GUI-G2's point reward (2507.15846), in [0, 1]: how close the centre of a box is to the centre of the ground-truth
    box.

    exp(-((dx / sx)^2 + (dy / sy)^2) / 2), where dx and dy are the distances between the centres and sx and sy are
    `scale` times the width and height of the ground-truth box. 0 if the ground-truth box has no area."""
    (mean, _), (true_mean, sigma) = _normal(box, scale), _normal(truth, scale)
    if min(sigma) <= 0:
        return 0.0
    away = [(m - t) / s for m, t, s in zip(mean, true_mean, sigma, strict=True)]
    return math.exp(-0.5 * sum(a * a for a in away))


def gaussian_coverage(box: Sequence[float], truth: Sequence[float], scale: float = 0.5) -> float:
    """GUI-G2's coverage reward (2507.15846), in [0, 1]: how similar two boxes are as normal distributions.

    The Bhattacharyya coefficient of the two distributions N(centre, diag((scale * side)^2)). 0 if a box is inverted or
    has no area."""
    (mean, sigma), (true_mean, true_sigma) = _normal(box, scale), _normal(truth, scale)
    if min(*sigma, *true_sigma) <= 0:
        return 0.0
    distance = 0.0
    for m, t, s, ts in zip(mean, true_mean, sigma, true_sigma, strict=True):
        variance = (s * s + ts * ts) / 2 + _EPSILON
        distance += (m - t) * (m - t) / variance / 8 + (math.log(variance) - math.log(s) - math.log(ts)) / 2
    return min(1.0, math.exp(-distance))


def distance_reward(point: Sequence[float], box: Sequence[float], width: float, height: float) -> float:
    """SE-GUI's dense point reward (2505.12370), in [0, 2]: 1 if the point is inside the box, plus 1 - (d / dmax)^2.

    d is the distance from the point to the box centre, with x and y divided by the image width and height. dmax is the
    largest distance from the box centre to a corner of the image. The second term is 0 if d > 1."""
    cx, cy = (box[0] + box[2]) / 2 / width, (box[1] + box[3]) / 2 / height
    distance = math.hypot(point[0] / width - cx, point[1] / height - cy)
    farthest = max(math.hypot(cx - x, cy - y) for x in (0, 1) for y in (0, 1))
    near = 1 - (distance / farthest) ** 2 if distance <= 1 else 0.0
    return float(inside(point, box)) + max(0.0, near)


def _normal(box: Sequence[float], scale: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (mean, standard deviation) along x and y of the normal distribution that stands for a box. The standard
    deviation of an inverted box is not positive."""
    return ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), (scale * (box[2] - box[0]), scale * (box[3] - box[1]))
