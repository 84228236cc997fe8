"""Initial states of drives on four kinds of road: the driven vehicle, the other vehicles, and the goal."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from highway_env.road.road import Road

from vlrl.environments.traffic import Lane, empty_road, place_obstacle, place_vehicle


@dataclass(frozen=True)
class Scene:
    """The initial state of a drive. The driven vehicle is the first of `road.vehicles`."""

    road: Road
    lane: Lane
    """The lane in which the driven vehicle starts, `at` metres from the start of the lane."""
    at: float
    nodes: tuple[str, ...]
    """The rest of the route after the starting lane, as nodes of the road network."""
    limit: float
    """The speed limit in metres per second."""
    navigation: str


Make = Callable[..., Any]


def _begin(road: Road, rng: random.Random, new_vehicle: Make, lane: Lane, at: float, limit: float) -> None:
    where, speed = road.network.get_lane(lane), rng.uniform(0.5, 0.9) * limit
    ego = new_vehicle(road, where.position(at, 0), where.heading_at(at), speed, target_lane_index=lane)
    ego.lane_index, ego.lane = lane, where
    ego.target_speed = speed
    road.vehicles.append(ego)


def highway(rng: random.Random, new_vehicle: Make, traffic: float) -> Scene:
    """Makes a random Scene on a highway with three lanes, where the driver has to overtake slower traffic to reach the
    goal in time. `new_vehicle` constructs the driven vehicle; `traffic` scales the number of other vehicles."""
    road, limit = empty_road("highway", rng.getrandbits(32)), rng.choice((12.0, 14.0, 16.0))
    lane, at = ("0", "1", rng.randrange(3)), rng.uniform(100, 900)
    _begin(road, rng, new_vehicle, lane, at, limit)
    for number in range(3):
        ahead = at + (rng.uniform(18, 30) if number == lane[2] else rng.uniform(-6, 25))
        while ahead < at + 130:
            if rng.random() < 0.7 * traffic or number == lane[2]:
                place_vehicle(road, ("0", "1", number), ahead, limit * rng.uniform(0.35, 0.6))
            ahead += rng.uniform(30, 60)
        if number != lane[2] and rng.random() < 0.4 * traffic:
            place_vehicle(road, ("0", "1", number), at - rng.uniform(12, 30), limit * rng.uniform(0.7, 1.0))
    return Scene(road, lane, at, ("1",), limit, "Follow the road.")


def merge(rng: random.Random, new_vehicle: Make, traffic: float) -> Scene:
    """Makes a random Scene on a motorway ramp: the lane ends, so the driver has to merge into a gap in the next lane.
    The arguments are those of `highway`."""
    road, limit, at = empty_road("merge", rng.getrandbits(32)), rng.choice((10.0, 12.0, 14.0)), rng.uniform(2, 14)
    lane = ("b", "c", 2)
    _begin(road, rng, new_vehicle, lane, at, limit)
    for number in (0, 1):
        ahead = at + rng.uniform(-8, 12)
        while ahead < 76:
            if rng.random() < 0.6 * traffic:
                place_vehicle(road, ("b", "c", number), ahead, limit * rng.uniform(0.6, 0.9))
            ahead += rng.uniform(16, 30)
        behind = 230 - rng.uniform(8, 25) + at
        while behind > 180:
            if rng.random() < 0.6 * traffic:
                place_vehicle(road, ("a", "b", number), behind, limit * rng.uniform(0.7, 1.0))
            behind -= rng.uniform(16, 40)
    place_obstacle(road, lane, 79)
    return Scene(road, lane, at, ("c", "d"), limit, "Merge left.")


def intersection(rng: random.Random, new_vehicle: Make, traffic: float) -> Scene:
    """Makes a random Scene at an intersection with four arms. All vehicles yield according to the right of way. The
    arguments are those of `highway`."""
    road, limit = empty_road("intersection", rng.getrandbits(32)), 10.0
    arm, (turn, words) = rng.randrange(4), rng.choice(
        ((1, "Turn left."), (2, "Go straight."), (3, "Turn right.")))
    to, at = (arm + turn) % 4, 100 - rng.uniform(14, 30)
    lane = (f"o{arm}", f"ir{arm}", 0)
    _begin(road, rng, new_vehicle, lane, at, limit)
    for other in sorted({0, 1, 2, 3} - {arm}):
        before = rng.uniform(2, 30)
        while before < 60:
            if rng.random() < 0.55 * traffic:
                crossing = place_vehicle(road, (f"o{other}", f"ir{other}", 0), 100 - before,
                                         limit * rng.uniform(0.6, 0.9),
                                         limit)
                if crossing:
                    crossing.plan_route_to(f"o{rng.choice(sorted({0, 1, 2, 3} - {other}))}")
            before += rng.uniform(18, 45)
    return Scene(road, lane, at, (f"ir{arm}", f"il{to}", f"o{to}"), limit, words)


def roundabout(rng: random.Random, new_vehicle: Make, traffic: float) -> Scene:
    """Makes a random Scene at a roundabout with traffic on its ring: the driver has to enter and to leave the ring. The
    arguments are those of `highway`."""
    road, limit, arms, arm = empty_road("roundabout", rng.getrandbits(32)), 8.0, "senw", rng.randrange(4)
    here, lane = arms[arm], (f"{arms[arm]}er", f"{arms[arm]}es", 0)
    exits = rng.choice((1, 2, 3))
    out = arms[(arm + exits) % 4]
    at = road.network.get_lane(lane).length - rng.uniform(1, 6)
    _begin(road, rng, new_vehicle, lane, at, limit)
    nodes = [f"{here}es", f"{here}e"]
    for step in range(1, exits + 1):
        nodes += [f"{arms[(arm + step) % 4]}x", f"{arms[(arm + step) % 4]}e"]
    nodes = [*nodes[:-1], f"{out}xs", f"{out}xr"]
    for back in range(4):
        first, second = arms[(arm - back - 1) % 4], arms[(arm - back) % 4]
        if rng.random() < 0.6 * traffic:
            ring = place_vehicle(road, (f"{first}e", f"{second}x", rng.randrange(2)), rng.uniform(1, 14),
                                 limit * rng.uniform(0.6, 0.9), limit)
            if ring:
                ring.plan_route_to(f"{arms[(arm - back + rng.choice((0, 1, 2))) % 4]}xr")
    return Scene(road, lane, at, tuple(nodes), limit, f"Take exit {exits}.")


SCENES: dict[str, Callable[[random.Random, Make, float], Scene]] = {
    "highway": highway, "merge": merge, "intersection": intersection, "roundabout": roundabout,
}
