"""Draws a driving scene as seen from above, with the ego vehicle at the left, heading right.

Moving cars are blue and standing cars orange. Braking cars have red lamps. The streak in front of a vehicle is its path
in the next half second. The bar at the bottom shows the ego vehicle's speed, with a mark at the speed limit. A route to
follow is drawn as a line with a bar across its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from highway_env.road.lane import LineType
from PIL import Image, ImageDraw

from vlrl.environments.traffic import network

BEHIND, AHEAD, ASIDE = 16.0, 48.0, 16.0
"""Visible distance in metres behind the ego vehicle, ahead of it, and to each side."""
CAR = (5.0, 2.0)  # length and width of a vehicle in metres
THING = (2.0, 2.0)
MOST_SPEED = 20.0  # the speed in metres per second at which the speed bar is full
_BAR = 6 / 64  # of the picture's height
_DETAIL = 3  # drawn so many times larger, then averaged
_PIECE = 2.0  # metres between the points of a lane's edge
_GROUND, _ROAD, _LINE, _EGO = (38, 56, 40), (98, 98, 104), (225, 225, 225), (70, 235, 110)
_MOVING, _STANDING, _STREAK = (80, 150, 255), (255, 150, 40), (190, 225, 255)
_LAMP, _THING, _WAY = (255, 20, 20), (255, 235, 0), (200, 120, 255)


@dataclass(frozen=True)
class Frame:
    """The coordinate system of a vehicle: metres, x forward, y to the left, headings counter-clockwise."""

    x: float
    y: float
    heading: float

    def places(self, points: np.ndarray) -> np.ndarray:
        """Converts points [..., 2] from world coordinates to this coordinate system."""
        c, s = np.cos(self.heading), np.sin(self.heading)
        dx, dy = points[..., 0] - self.x, points[..., 1] - self.y
        return np.stack([c * dx + s * dy, s * dx - c * dy], axis=-1)

    def headings(self, headings: np.ndarray) -> np.ndarray:
        """Converts world headings to headings in this coordinate system, in (-pi, pi]."""
        turned = self.heading - headings
        return np.arctan2(np.sin(turned), np.cos(turned))


@dataclass(frozen=True)
class Edges:
    """The left and right edge of a lane, [points, 2] in world metres, and highway-env's line type of each."""

    left: np.ndarray
    right: np.ndarray
    painted: tuple[Any, Any]

    def near(self, frame: Frame, far: float) -> Edges | None:
        """Returns the part of the lane within `far` metres of the vehicle whose coordinate system is `frame`; None if
        no part of the lane is within this distance."""
        middle = (self.left + self.right) / 2
        inside = np.flatnonzero(np.hypot(middle[:, 0] - frame.x, middle[:, 1] - frame.y) < far)
        if inside.size < 2:
            return None
        part = slice(inside[0], inside[-1] + 1)
        return Edges(self.left[part], self.right[part], self.painted)


@cache
def lanes(scenario: str, margin: float = 0.0) -> tuple[Edges, ...]:
    """The lanes of a scenario, each widened by `margin` metres on both sides."""
    edges = []
    for lane in network(scenario).lanes_list():
        length = min(lane.length, 1500.0)
        ways = np.linspace(0, length, max(2, round(length / _PIECE) + 1))
        left, right = (np.array([lane.position(s, side * (lane.width_at(s) / 2 + margin)) for s in ways])
                       for side in (-1, 1))
        edges.append(Edges(left, right, (lane.line_types[0], lane.line_types[1])))
    return tuple(edges)


def to_pixels(width: int) -> list[list[float]]:
    """The 3x3 matrix that converts [x, y, 1] from metres in the vehicle's coordinates to pixels of an image of `width`.
    """
    scale = width / (BEHIND + AHEAD)
    return [[scale, 0.0, scale * BEHIND], [0.0, -scale, round(scale * ASIDE * (1 - _BAR), 4)], [0.0, 0.0, 1.0]]


def draw(scenario: str, states: np.ndarray, things: Sequence[Sequence[float]], limit: float, width: int,
         way: np.ndarray | None = None) -> Image.Image:
    """Draws a scene as an image of `width` x `width / 2` pixels. states: [vehicles, 5] x, y, heading, speed and
    acceleration of each vehicle, the ego vehicle first. things: x, y and heading of obstacles on the road. limit: speed
    limit in metres per second. way: [points, 2] route to the goal in world metres."""
    big = width * _DETAIL
    image = Image.new("RGB", (big, big // 2), _GROUND)
    pen, (a, _, u), (_, b, v) = ImageDraw.Draw(image), *to_pixels(big)[:2]
    frame = Frame(*map(float, states[0, :3]))

    def pixels(points: np.ndarray) -> list[tuple[float, float]]:
        own = frame.places(points)
        return [(float(x) * a + u, float(y) * b + v) for x, y in own]

    near = [part for lane in lanes(scenario) if (part := lane.near(frame, AHEAD + ASIDE))]
    for lane in near:
        pen.polygon(pixels(np.concatenate([lane.left, lane.right[::-1]])), fill=_ROAD)
    for lane in near:
        for edge, paint in zip((lane.left, lane.right), lane.painted, strict=True):
            _paint(pen, pixels(edge), paint, max(1, round(0.35 * a)))
    if way is not None:
        _way(pen, pixels(way), max(1, round(0.35 * a)))
    for x, y, heading in things:
        pen.polygon(pixels(corners((x, y), heading, THING)), fill=_THING)
    for index, (x, y, heading, speed, push) in reversed(list(enumerate(states))):
        _vehicle(pen, pixels, np.array([x, y]), heading, speed, push, index == 0, max(1, round(0.5 * a)))
    _dashboard(pen, image.size, float(states[0, 3]), limit)
    return image.reduce(_DETAIL)


def corners(at: Sequence[float] | np.ndarray, heading: float, size: tuple[float, float]) -> np.ndarray:
    """[4, 2] corners of a rectangle of (length, width) `size` with its centre at `at`."""
    forward = np.array([np.cos(heading), np.sin(heading)]) * size[0] / 2
    aside = np.array([-np.sin(heading), np.cos(heading)]) * size[1] / 2
    return np.asarray(at) + np.array([forward + aside, forward - aside, -forward - aside, -forward + aside])


def _vehicle(pen: ImageDraw.ImageDraw, pixels: Callable[[np.ndarray], list[tuple[float, float]]], at: np.ndarray,
             heading: float, speed: float, push: float, own: bool, thick: int) -> None:
    forward = np.array([np.cos(heading), np.sin(heading)])
    if speed > 0.5:
        pen.line(pixels(np.array([at + forward * CAR[0] / 2, at + forward * (CAR[0] / 2 + speed / 2)])), fill=_STREAK,
                 width=thick)
    colour = _EGO if own else _MOVING if speed > 0.5 else _STANDING
    pen.polygon(pixels(corners(at, heading, CAR)), fill=colour)
    if push < -1:
        pen.polygon(pixels(corners(at - forward * 2, heading, (1.0, CAR[1]))), fill=_LAMP)


def _way(pen: ImageDraw.ImageDraw, points: list[tuple[float, float]], thick: int) -> None:
    pen.line(points, fill=_WAY, width=thick)
    (x, y), (u, v) = points[-2:]
    along = max(1e-9, float(np.hypot(u - x, v - y)))
    across = 5 * thick / along
    pen.line([(u - (v - y) * across, v + (u - x) * across), (u + (v - y) * across, v - (u - x) * across)], fill=_WAY,
             width=2 * thick)


def _paint(pen: ImageDraw.ImageDraw, points: list[tuple[float, float]], paint: Any, thick: int) -> None:
    if paint == LineType.STRIPED:
        for start, end in list(pairwise(points))[::2]:
            pen.line([start, end], fill=_LINE, width=thick)
    elif paint != LineType.NONE:
        pen.line(points, fill=_LINE, width=thick)


def _dashboard(pen: ImageDraw.ImageDraw, size: tuple[int, int], speed: float, limit: float) -> None:
    width, height = size
    top = round(height * (1 - _BAR))
    pen.rectangle((0, top, width, height), fill=(0, 0, 0))
    pen.rectangle((0, top + height // 64, min(1.0, speed / MOST_SPEED) * width, height), fill=_EGO)
    at = limit / MOST_SPEED * width
    pen.rectangle((at - width / 128, top, at + width / 128, height), fill=(255, 255, 255))


def drivable(scenario: str, frame: Frame, margin: float = 1.0) -> list[list[list[float]]]:
    """Returns the drivable area near a vehicle as polygons, one per lane, each widened by `margin` metres. The points
    are in metres in the vehicle's coordinate system `frame`."""
    near: Iterable[Edges | None] = (lane.near(frame, AHEAD + ASIDE) for lane in lanes(scenario, margin))
    return [_thinned(frame.places(np.concatenate([lane.left, lane.right[::-1]]))) for lane in near if lane]


def _thinned(points: np.ndarray) -> list[list[float]]:
    before, after = np.roll(points, 1, 0) - points, np.roll(points, -1, 0) - points
    bent = np.abs(before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]) > 1e-3
    return [[round(float(x), 2), round(float(y), 2)] for x, y in points[bent]]
