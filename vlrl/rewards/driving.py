"""Comparison of a vehicle's plans and trajectories with those of an expert. No text and no finite number makes a
function raise.

A plan consists of words for two decisions, speed and path, which are called its heads. A trajectory is a list of
waypoints [x, y, t] in metres and seconds, in the ego frame: x ahead, y to the left. It starts at the vehicle's centre
[0, 0, 0], which is not listed. Headings are in radians, counter-clockwise from the x axis."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vlrl.rewards.literals import numbers_of, read_literal
from vlrl.rewards.text import denies

HEADS: Mapping[str, Mapping[str, float]] = {
    "speed": {"KEEP": 0.8, "ACCELERATE": 0.9, "DECELERATE": 1.0, "STOP": 1.0},
    "path": {"STRAIGHT": 0.8, "LEFT_TURN": 1.0, "RIGHT_TURN": 1.0, "LEFT_CHANGE": 1.0, "RIGHT_CHANGE": 1.0},
}
"""Head (speed or path) -> its words, each with the weight of a correct answer, as in AlphaDrive (2503.07608)."""
MOST_POINTS = 100
FARTHEST = 1000.0  # Metres; a waypoint farther away than this is invalid
LONGEST = 60.0  # Seconds; a waypoint later than this is invalid
STEP = 0.25  # seconds between the times at which a trajectory is checked for collisions
_WORD = re.compile(r"[A-Z]+(?:_[A-Z]+)*", re.ASCII)
_KNOWN = frozenset(word for known in HEADS.values() for word in known)
_CLAUSE = re.compile(r"[,;.:\n]|\b(?:and|but|then)\b", re.IGNORECASE)
_TURNING = 0.05  # metres per step below which a vehicle keeps its heading
_OUTSIDE = 0.01  # share of the vehicle that may lie outside the road, since polygons are rounded

Plan = Mapping[str, Collection[str]]
Points = Sequence[Sequence[float]]

# --- plans ------------------------------------------------------------------------------------------------------------


def read_plan(text: str, negation: bool = False) -> dict[str, list[str]]:
    """The plan in a text, as {head: words} for the heads speed and path. The words are those of `HEADS` that occur in
    the text in capitals, without repetition and in the order of `HEADS`.

    With `negation`, a text that says what not to do ("do not STOP, LEFT_TURN") yields no words."""
    words = _KNOWN.intersection(_WORD.findall(text))
    if words and negation and any(map(denies, {*_CLAUSE.split(text)})):
        words = set()
    return {head: [word for word in known if word in words] for head, known in HEADS.items()}


def plan_format(text: str) -> float:
    """1 if the text is `SPEED, PATH`: some of the speed words, then some of the path words, without repetition; else 0.
    Each head needs at least one word, but not all of its words."""
    words = [word.strip() for word in text.strip().split(",")]
    plan = read_plan(text)
    speeds = len(plan["speed"])
    right = all(0 < len(plan[head]) < len(known) for head, known in HEADS.items())
    right = right and sorted(words) == sorted([*plan["speed"], *plan["path"]])
    return float(right and set(words[:speeds]) == set(plan["speed"]))


def word_f1(answer: Collection[str], truth: Collection[str]) -> float:
    """The F1 score of two sets of words, in [0, 1]; 0 if either is empty."""
    answer, truth = set(answer), set(truth)
    return 2 * len(answer & truth) / (len(answer) + len(truth)) if answer and truth else 0.0


def subset_f1(answer: Collection[str], truth: Collection[str]) -> float:
    """`word_f1` if every word of the answer is in the truth, else 0, so that naming more words never pays."""
    return word_f1(answer, truth) if set(answer) <= set(truth) else 0.0


def mean_weight(words: Collection[str], weights: Mapping[str, float]) -> float:
    """The mean weight of the words; 0 if there are none."""
    return sum(weights[word] for word in words) / len(words) if words else 0.0


def diversity(answers: Sequence[Collection[str]]) -> list[float]:
    """AlphaDrive's diversity factor for each answer of a group, in [.8, 1]: 1 - min(.2, share of answers with the same
    words). Each item of `answers` has the words of one answer.

    This is Algorithm 1 of 2503.07608, but computed over the whole group, so that the result does not depend on the
    order of the answers. Answers without words are not counted and get a factor of 1."""
    said = [frozenset(words) for words in answers]
    counts = Counter(words for words in said if words)
    total = sum(counts.values())
    return [1 - min(0.2, counts[words] / total) if words else 1.0 for words in said]


def first_occurrence(answers: Sequence[Collection[str]], step: float = 0.4) -> list[float]:
    """The diversity bonus of AlphaDrive's released code for each answer of a group, in [-step, step]. Each item of
    `answers` has the words of one answer.

    In a given order, an answer gets +step if it shares no word with an earlier answer, else -step. The bonus is the
    mean over all orders of the group: if an answer shares a word with m other answers, the probability of +step is 1 /
    (m + 1). An answer without words gets -step."""
    said = [frozenset(words) for words in answers]
    kinds = Counter(said)
    met = {a: sum(count for b, count in kinds.items() if a & b) for a in kinds if a}  # itself included
    return [step * (2 / met[words] - 1) if words else -step for words in said]


def class_f1(pairs: Sequence[tuple[Collection[str], Collection[str]]]) -> dict[str, float]:
    """Word -> its F1 score in [0, 1] over several (answered, true) pairs of word sets. Only words that occur in a true
    set are included."""
    hits, given, true = Counter[str](), Counter[str](), Counter[str]()
    for answer, truth in pairs:
        hits.update(set(answer) & set(truth))
        given.update(set(answer))
        true.update(set(truth))
    return {word: 2 * hits[word] / (given[word] + true[word]) for word in sorted(true)}


def alphadrive_right(text: str, truth: Mapping[str, str]) -> bool:
    """Whether an answer is correct in AlphaDrive's planning accuracy (2503.07608, qwen2vl_plan_cmd_eval_grpo.py): both
    true words must occur somewhere in the full output; other words in the output do not matter."""
    return all(word in text for word in truth.values())


def alphadrive_f1(answers: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, float]:
    """Word -> F1 score in [0, 1], as AlphaDrive's evaluation computes it (2503.07608, qwen2vl_plan_cmd_eval_grpo.py).
    `answers` are pairs (output text, {head: true word}).

    AlphaDrive counts a word in an answer as correct whenever the answer also contains the true word of the same head.
    So an answer that names every word is never wrong."""
    hits, wrong, missed = Counter[str](), Counter[str](), Counter[str]()
    for text, truth in answers:
        for head, words in HEADS.items():
            for word in words:
                if word in text:
                    (hits if truth[head] in text else wrong)[word] += 1
                elif word == truth[head]:
                    missed[word] += 1
    return {word: 2 * hits[word] / (2 * hits[word] + wrong[word] + missed[word]) if hits[word] else 0.0
            for words in HEADS.values() for word in words}


# --- trajectories -----------------------------------------------------------------------------------------------------


def read_trajectory(text: str) -> list[list[float]] | None:
    """The waypoints `[[x, y, t], ...]` in a text that contains one list; None if there is no valid list. A valid list
    has at most 100 waypoints, within 1 km and 60 s, and the times t are positive and increasing."""
    points = read_literal(text[text.find("["):text.rfind("]") + 1])
    return None if trajectory_problem(points) else [[float(v) for v in point] for point in points]


def trajectory_problem(points: Any) -> str | None:
    """Why a value is not a valid list of waypoints; None if it is."""
    if not isinstance(points, list) or not 0 < len(points) <= MOST_POINTS:
        return f"it must be a list of 1 to {MOST_POINTS} way-points [x, y, t]"
    before = 0.0
    for point in points:
        if not _vector(point, 3):
            return "a way-point must be [x, y, t], three numbers"
        if max(abs(point[0]), abs(point[1])) > FARTHEST or not before < point[2] <= LONGEST:
            return (f"x and y must lie within {FARTHEST:g} metres, and t must rise from above 0 to at most "
                    f"{LONGEST:g} seconds")
        before = point[2]
    return None


def positions_at(points: Points, times: Sequence[float] | np.ndarray) -> np.ndarray:
    """[times, 2] The positions on a trajectory at the times: linear between waypoints, starting from [0, 0] at time 0,
    and stationary after the last waypoint."""
    known = np.array([[0.0, 0.0, 0.0], *points], dtype=float)
    return np.stack([np.interp(times, known[:, 2], known[:, axis]) for axis in (0, 1)], axis=1)


def distances(points: Points, truth: Points, times: Sequence[float] | None = None) -> np.ndarray:
    """[times] The distances in metres between two trajectories (L2), by default at the times of the true trajectory's
    waypoints."""
    times = [point[2] for point in truth] if times is None else times
    return np.hypot(*(positions_at(points, times) - positions_at(truth, times)).T)


def distance_score(points: Points, truth: Points, scale: float) -> float:
    """exp(-d / scale), in (0, 1], where d is the mean distance between the two trajectories in metres."""
    return math.exp(-float(distances(points, truth).mean()) / scale)


def sample_times(horizon: float) -> np.ndarray:
    """The times in seconds at which a trajectory is checked for collisions: at most STEP apart, ending at `horizon`."""
    count = max(1, math.ceil(horizon / STEP - 1e-9))
    return horizon * np.arange(1, count + 1) / count


def footprints(points: Points, size: Sequence[float], times: np.ndarray) -> np.ndarray:
    """[times] The area that a vehicle of `size` (length, width) covers at each time on its trajectory, as shapely
    polygons. The vehicle's heading is its direction of motion."""
    places = positions_at(points, [0.0, *times])
    displacements = np.diff(places, axis=0)
    return _boxes(places[1:], _headings(displacements), size)


@np.errstate(all="ignore")  # numbers near zero underflow inside GEOS
def collides(vehicle: np.ndarray, obstacles: Sequence[Mapping[str, Any]], times: np.ndarray) -> bool:
    """Whether a vehicle (its footprint at each of the `times`) touches an obstacle at any of these times.

    An obstacle is a dict in one of three formats, where "heading" and "velocity" [x, y] in m/s are optional:
    - {"center": [x, y], "size": [length, width], "heading": angle, "velocity": [x, y]};
    - {"track": [[x, y, heading, t], ...], "size": [length, width]};
    - {"polygon": [[x, y], ...], "velocity": [x, y]}."""
    import shapely

    return any(bool(shapely.intersects(vehicle, _moving(obstacle, times)).any()) for obstacle in obstacles)


@np.errstate(all="ignore")
def leaves(vehicle: np.ndarray, drivable: Sequence[Points]) -> bool:
    """Whether a vehicle, given by its footprints, leaves the road: more than 1 % of a footprint lies outside the union
    of the `drivable` polygons."""
    import shapely

    road = shapely.union_all([shapely.make_valid(shapely.Polygon(polygon)) for polygon in drivable])
    shapely.prepare(road)
    outside = vehicle[~shapely.contains_properly(road, vehicle)]  # the others need no intersection
    return bool((shapely.area(shapely.difference(outside, road)) > _OUTSIDE * shapely.area(outside)).any())


def obstacle_problem(obstacle: Any) -> str | None:
    """What is wrong with an obstacle in a data row; None if it is valid."""
    if not isinstance(obstacle, Mapping):
        return "it must be an object with center and size, or polygon"
    velocity = obstacle.get("velocity")
    if velocity is not None and not _vector(velocity, 2):
        return "velocity must be [x, y] in metres per second"
    if "polygon" in obstacle:
        return polygon_problem(obstacle["polygon"])
    if not _vector(obstacle.get("size"), 2) or min(obstacle["size"]) <= 0:
        return "size must be [length, width] in metres"
    if "track" in obstacle:
        poses = obstacle["track"]
        fine = isinstance(poses, list) and poses and all(_vector(p, 4) for p in poses)
        rising = fine and all(a[3] < b[3] for a, b in pairwise(poses))
        return None if rising else "track must be [[x, y, heading, t], ...] with rising t"
    if not _vector(obstacle.get("center"), 2) or not _vector([obstacle.get("heading", 0.0)], 1):
        return "center must be [x, y] in metres, and heading a number of radians"
    return None


def polygon_problem(polygon: Any) -> str | None:
    """What is wrong with a polygon in a data row; None if it is valid."""
    if not isinstance(polygon, list) or len(polygon) < 3 or not all(_vector(p, 2) for p in polygon):
        return "a polygon must be a list of at least three points [x, y]"
    return None


def project(points: Sequence[Sequence[float]], matrix: Points) -> list[list[float]]:
    """Projects ground points [x, y] of the ego frame to pixels, by a 3x3 matrix applied to [x, y, 1] or a 3x4 matrix
    applied to [x, y, 0, 1].

    Points behind the camera and points more than a million pixels away are left out."""
    used = np.array(matrix, dtype=float)[:, [0, 1, -1]]
    places = np.array([[p[0], p[1], 1.0] for p in points], dtype=float).reshape(-1, 3) @ used.T
    pixels = [[float(u / w), float(v / w)] for u, v, w in places if w > 1e-6]
    return [pixel for pixel in pixels if max(map(abs, pixel)) < 1e6]


def _vector(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and numbers_of(value, count) is not None


def _headings(displacements: np.ndarray) -> np.ndarray:
    """[steps] The headings in radians of the displacements [steps, 2]. A displacement too short to give a direction
    keeps the previous heading, initially 0."""
    out, heading = np.empty(len(displacements)), 0.0
    for i, (dx, dy) in enumerate(displacements):
        heading = math.atan2(dy, dx) if math.hypot(dx, dy) >= _TURNING else heading
        out[i] = heading
    return out


def _boxes(centres: np.ndarray, headings: np.ndarray, size: Sequence[float]) -> np.ndarray:
    """[n] Rectangles of `size` (length, width) as shapely polygons, one for each centre and heading."""
    import shapely

    corners = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * np.array(size, dtype=float) / 2
    cos, sin = np.cos(headings)[:, None], np.sin(headings)[:, None]
    x = centres[:, :1] + corners[:, 0] * cos - corners[:, 1] * sin
    y = centres[:, 1:] + corners[:, 0] * sin + corners[:, 1] * cos
    return np.asarray(shapely.polygons(np.stack([x, y], axis=2)))


def _moving(obstacle: Mapping[str, Any], times: np.ndarray) -> np.ndarray:
    """[times] The area of an obstacle at each time, as shapely polygons."""
    import shapely

    if "polygon" in obstacle:
        shape = shapely.make_valid(shapely.Polygon(obstacle["polygon"]))
        shifts = np.outer(times, obstacle.get("velocity") or (0.0, 0.0))
        return np.array([shapely.transform(shape, lambda xy, by=by: xy + by) for by in shifts])
    if "track" in obstacle:
        poses = np.array(obstacle["track"], dtype=float)
        x, y, heading = (np.interp(times, poses[:, 3], column)
                         for column in (poses[:, 0], poses[:, 1], np.unwrap(poses[:, 2])))
        return _boxes(np.stack([x, y], axis=1), heading, obstacle["size"])
    centres = np.array(obstacle["center"], dtype=float) + np.outer(times, obstacle.get("velocity") or (0.0, 0.0))
    return _boxes(centres, np.full(len(times), float(obstacle.get("heading") or 0.0)), obstacle["size"])
