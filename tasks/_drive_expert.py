"""A rule-based driver for demonstrations. It tries its preferred actions one after the other in a copy of the world,
and takes the first safe one.

An action is safe if the vehicle can come to a stop afterwards without an infraction. The driver knows what the other
vehicles will do, which no model knows, so its success does not show what can be inferred from the images."""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ._drive_world import STEP, Decision, World

_STOPPING = 4  # seconds within which a stop is tried
_BEHIND = 35.0
"""Largest distance in metres to a slower vehicle ahead at which a lane change is considered; `_FREER` says by how many
metres the other lane must be freer."""
_FREER = 8.0
_SIDEWAYS, _EASY = 4.0, 2.0  # lateral acceleration in a bend, and deceleration before it, in m/s^2
_BEND = 3  # points over which curvature is measured, because roads meet at cut angles
_AIMS = (0.5, 1.0, 1.5)  # seconds of the waypoints


@lru_cache(maxsize=4096)
def demonstration(scenario: str, seed: str, seconds: int, traffic: float, ways: bool) -> tuple[Decision, ...] | None:
    """Lets the expert drive in `World(scenario, seed, seconds, traffic)`. Returns the expert's decisions, as waypoints
    (with `ways`) or as words; None if the expert does not reach the goal within `seconds`."""
    world, decisions = World(scenario, seed, seconds, traffic), []
    while world.left:
        decisions.append(choose(world, ways))
        second = world.drive(decisions[-1])
        if second.ended or second.now >= 1:
            return None if second.ended else tuple(decisions)
    return None


def choose(world: World, ways: bool) -> Decision:
    """The first of the expert's preferred decisions that is safe; if none is safe, the decision to stop. With `ways`,
    the decision is given as waypoints, else as words."""
    liked = (as_waypoints(world, words) if ways else words for words in _liked(world))
    stop = Decision("STOP")
    return next((decision for decision in liked if _safe(world, decision)), as_waypoints(world, stop) if ways else stop)


def as_waypoints(world: World, words: Decision) -> Decision:
    """Converts a decision in words to the waypoints of the path that the vehicle would drive."""
    tried, points = world.copy(), []
    places = [world.ego.position, *tried.drive(words).places, *tried.drive(Decision()).places]
    cos, sin = math.cos(world.ego.heading), math.sin(world.ego.heading)
    for t in _AIMS:
        dx, dy = (float(np.interp(t / STEP, range(len(places)), [place[axis] for place in places])
                        - world.ego.position[axis]) for axis in (0, 1))
        points.append([round(cos * dx + sin * dy, 1) + 0.0, round(sin * dx - cos * dy, 1) + 0.0, t])
    return Decision(way=points)


def _safe(world: World, decision: Decision) -> bool:
    tried = world.copy()
    if tried.drive(decision).ended:
        return False
    for _ in range(_STOPPING):
        if tried.completion >= 1 or tried.ego.speed < 0.5:
            return True
        if tried.drive(Decision("STOP")).ended:
            return False
    return True


def _liked(world: World) -> Iterator[Decision]:
    speed, wanted = world.ego.speed, _pace(world)
    speeds = ["KEEP", "DECELERATE", "STOP"]
    if speed < wanted - 1:
        speeds = ["ACCELERATE", *speeds]
    elif speed > wanted + 1:
        speeds = ["DECELERATE", "STOP", "KEEP"]
    for path in _paths(world):
        for word in speeds:
            yield Decision(word, path)


def _pace(world: World) -> float:
    pace, points = world.limit, world.route.points(world.ego.lane_index[2], min(world.done, world.route.length - 1))
    headings = np.unwrap(np.arctan2(*np.diff(points, axis=0).T[::-1]))
    for place, turn in enumerate(headings[_BEND:] - headings[:-_BEND]):
        bend = abs(float(turn)) / (2 * _BEND)  # points lie two metres apart
        if bend > 0.01:
            pace = min(pace, math.sqrt(min(_SIDEWAYS / bend, 900.0) + 2 * _EASY * 2 * place))
    return pace


def _paths(world: World) -> list[str]:
    ego, graph = world.ego, world.road.network.graph
    if ego.lane_index != ego.target_lane_index:
        return ["STRAIGHT"]  # on its way to another lane
    a, b, number = ego.lane_index
    place = world.route.edges.index((a, b))
    after = world.route.edges[place + 1] if place + 1 < len(world.route.edges) else None
    if after and number >= len(graph[after[0]][after[1]]) and len(graph[a][b]) > len(graph[after[0]][after[1]]) > 1:
        return ["LEFT_CHANGE", "STRAIGHT"]  # the lane ends
    if len(graph[a][b]) == 1 or world.scenario == "roundabout":
        return ["STRAIGHT"]
    own = _free(world, number)
    beside = {"LEFT_CHANGE": number - 1, "RIGHT_CHANGE": number + 1}
    free = {path: _free(world, n) for path, n in beside.items() if 0 <= n < len(graph[a][b])
            and world.road.network.get_lane((a, b, n)).is_reachable_from(ego.position)}
    better = [path for path in sorted(free, key=lambda path: -free[path]) if free[path] > own + _FREER]
    return [*better, "STRAIGHT"] if own < _BEHIND else ["STRAIGHT"]


def _free(world: World, number: int) -> float:
    """Metres to the next vehicle ahead in lane number `number` of the current road; 100 if no vehicle is ahead."""
    lane = world.road.network.get_lane((*world.ego.lane_index[:2], number))
    own, ahead = lane.local_coordinates(world.ego.position)[0], [100.0]
    for other in world.road.vehicles:
        along, aside = lane.local_coordinates(other.position)
        if other is not world.ego and along > own and abs(aside) < 2:
            ahead.append(float(along - own))
    return min(ahead)
