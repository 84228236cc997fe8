"""Generates traffic scenes for highway-env (Farama Foundation, MIT) and simulates how highway-env's expert drives in
them.

The expert controls its speed with the Intelligent Driver Model (IDM, cond-mat/0002177) and its lane changes with MOBIL.
It follows a route through junctions, yields, and stops behind standing objects. Roads and drivers come from
vlrl/environments/traffic.py. Positions and speeds of the vehicles are generated here, so that every manoeuvre occurs.

World coordinates are those of highway-env: metres, with y pointing down on the screen, and headings in radians
clockwise from x."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from highway_env.road.road import Road

from vlrl.environments.traffic import STEP, Driver, Lane, empty_road, place_obstacle, place_vehicle

WARM_UP = 1.0  # Seconds of driving before the first decision. The earlier images show this time.
HORIZON = 3.0  # seconds of driving after a decision from which the plan is derived
DECISIONS = (0.0, 1.0)  # times of the decisions in a scene, in seconds after the warm-up
_USUAL = 0.6
"""Probability with which an element of a scene fits the intended plan; otherwise the element is chosen at random."""
T = TypeVar("T")
Aim = tuple[str, str]  # the intended plan of a scene: (speed, path)
_SPEEDS = {"STOP": (0.0, 0.7), "KEEP": (0.96, 1.04), "ACCELERATE": (0.0, 0.8), "DECELERATE": (1.25, 1.7)}
_LEADS = {"STOP": "standing", "KEEP": "none", "ACCELERATE": "none", "DECELERATE": "slow"}


@dataclass(frozen=True)
class Scene:
    """A traffic scene before the simulation. The expert's vehicle is the first vehicle of the road."""

    road: Road
    navigation: str
    limit: float  # speed in m/s at which the expert drives on a free road
    free: bool  # whether the expert may change lanes


@dataclass(frozen=True)
class Drive:
    """A simulated scene: the states of all vehicles at each step, and the steps at which the expert decides."""

    scene: Scene
    states: np.ndarray
    """[steps, vehicles, 5] x, y, heading, speed and acceleration of each vehicle; the expert's vehicle is the first."""
    decisions: tuple[int, ...]
    """Simulation steps at which a decision is made. The expert is in the middle of its lane at these steps."""
    crashed: bool

    @property
    def things(self) -> list[tuple[float, float, float]]:
        """(x, y, heading) of each standing object that is not a vehicle."""
        return [(float(thing.position[0]), float(thing.position[1]), float(thing.heading))
                for thing in self.scene.road.objects]


def scene(scenario: str, seed: str, aim: Aim) -> Scene:
    """Generates a scene in which the expert is likely, but not certain, to carry out the intended plan `aim`. The
    result depends only on the arguments."""
    rng = random.Random(seed)
    road = empty_road(scenario, rng.getrandbits(64))
    return SCENARIOS[scenario](road, rng, aim)


def drive(scene: Scene) -> Drive:
    """Simulates a scene: the warm-up, the decisions, and the horizon after the last decision."""
    road, vehicles = scene.road, cast(list[Driver], scene.road.vehicles)
    ego = vehicles[0]
    ego.enable_lane_change = False
    begin, moments = round(WARM_UP / STEP), {round((WARM_UP + at) / STEP) for at in DECISIONS}
    steps = max(moments) + round(HORIZON / STEP)
    states, decisions = np.empty((steps + 1, len(vehicles), 5)), []
    for step in range(steps + 1):
        for index, vehicle in enumerate(vehicles):
            action = cast(dict[str, float], vehicle.action)
            states[step, index] = (*vehicle.position, vehicle.heading, vehicle.speed, action["acceleration"])
        if step in moments and _settled(ego):
            decisions.append(step)
            ego.timer = 2 * ego.LANE_CHANGE_DELAY  # the next lane change is considered at once
        if step == begin:
            ego.wanted = ego.target_speed = scene.limit
            ego.enable_lane_change = scene.free
        if step < steps:
            road.act()
            road.step(STEP)
    return Drive(scene, states, tuple(decisions), any(vehicle.crashed for vehicle in vehicles))


def _settled(ego: Driver) -> bool:
    lane, target = ego.lane_index, ego.target_lane_index
    changing = lane[:2] == target[:2] and lane != target
    return not changing and abs(ego.lane.local_coordinates(ego.position)[1]) < 0.6


# --- scenes -----------------------------------------------------------------------------------------------------------


def _usual(value: T, others: Sequence[T], rng: random.Random) -> T:
    """Returns `value` with probability _USUAL, else a random element of `others`."""
    return value if rng.random() < _USUAL else rng.choice(others)


def _ego(road: Road, lane: Lane, at: float, limit: float, aim: Aim, rng: random.Random
         ) -> tuple[Driver, float]:
    """Returns (the expert's vehicle, its start position). The vehicle is placed so that it reaches about position `at`
    during the warm-up.

    The vehicle drives at the speed limit, slower or faster, or stands; it keeps its speed until the first decision."""
    share = rng.uniform(*_SPEEDS[_usual(aim[0], list(_SPEEDS), rng)])
    speed = share * limit if share > 0.1 else 0.0
    at = max(0.0, at - speed * WARM_UP)
    ego = place_vehicle(road, lane, at, speed)
    assert ego is not None
    return ego, at


def _lead(road: Road, ego: Driver, lane: Lane, at: float, limit: float, aim: Aim, rng: random.Random) -> None:
    """May place something in the expert's lane, ahead of the expert at position `at`: a slower, standing or equally
    fast vehicle, or an object on the road. `limit` is the speed limit."""
    routed = bool(ego.route)  # without a route, only a slower vehicle ahead makes it change lanes
    usual = _LEADS[aim[0]] if aim[1] == "STRAIGHT" else "none" if routed else "slow"
    kind = _usual(usual, ("none", "slow", "standing", "same"), rng)
    if kind == "none":
        return
    share = {"slow": rng.uniform(0.2, 0.6), "standing": 0.0, "same": rng.uniform(0.9, 1.1)}[kind]
    gap = rng.uniform(8, 11) + rng.uniform(0.3, 1.2 if kind == "standing" else 2.2) * ego.speed
    length = road.network.get_lane(lane).length
    if kind == "standing" and rng.random() < 0.3 and at + gap < length:
        place_obstacle(road, lane, at + gap)
    else:
        place_vehicle(road, lane, at + gap, share * limit)


def _neighbours(road: Road, own: Lane, others: Iterable[int], at: float, limit: float, aim: Aim, rng: random.Random
            ) -> None:
    """May place vehicles in the lanes `others` next to the expert's lane `own`, around the position `at`. If the
    intended plan `aim` is a change to one of these lanes, vehicles in this lane are less likely."""
    goal = own[2] + {"LEFT_CHANGE": -1, "RIGHT_CHANGE": 1}.get(aim[1], 99)
    for number in others:
        lane, wanted = (own[0], own[1], number), number == goal
        if rng.random() < (0.2 if wanted else 0.6):
            place_vehicle(road, lane, at + rng.uniform(-9, 9), limit * rng.uniform(0.7, 1.0))
        if rng.random() < (0.15 if wanted else 0.3):
            place_vehicle(road, lane, at + rng.uniform(15, 40), limit * rng.uniform(0.3, 1.0))


def highway(road: Road, rng: random.Random, aim: Aim) -> Scene:
    """Makes a scene on `road`, three straight lanes. The expert overtakes slower traffic if there is a free lane."""
    limit, lane, at = rng.choice((10.0, 12.0, 14.0, 16.0)), rng.randrange(3), rng.uniform(100, 900)
    ego, at = _ego(road, ("0", "1", lane), at, limit, aim, rng)
    _lead(road, ego, ("0", "1", lane), at, limit, aim, rng)
    _neighbours(road, ("0", "1", lane), sorted({0, 1, 2} - {lane}), at, limit, aim, rng)
    return Scene(road, "Follow the road.", limit, True)


def merge(road: Road, rng: random.Random, aim: Aim) -> Scene:
    """Makes a scene on `road`, a motorway with a ramp. The expert starts either on the ramp, or on the lane of the
    motorway that the ramp merges into."""
    limit, at = rng.choice((10.0, 12.0, 14.0)), rng.uniform(2, 50)
    ramp = _usual(aim[1] == "LEFT_CHANGE", (True, False), rng)
    lane = ("b", "c", 2 if ramp else 1)
    ego, at = _ego(road, lane, at, limit, aim, rng)
    if ramp:
        ego.route = [("b", "c", 1), ("c", "d", 1)]
    _lead(road, ego, lane, at, limit, aim, rng)
    _neighbours(road, lane, sorted({0, 1, 2} - {lane[2]}), at, limit, aim, rng)
    place_obstacle(road, ("b", "c", 2), 79)
    return Scene(road, "Merge left." if ramp else "Follow the road.", limit, True)


def exit_road(road: Road, rng: random.Random, aim: Aim) -> Scene:
    """Makes a scene on `road`, whose three lanes widen to four. The fourth lane is the exit."""
    limit, wants = rng.choice((10.0, 12.0, 14.0)), rng.random() < 0.8
    wide = rng.random() < 0.8
    at = rng.uniform(2, 45) if wide else rng.uniform(340, 375)
    lane = ("1", "2", 2) if wide else ("0", "1", 2)
    ego, at = _ego(road, lane, at, limit, aim, rng)
    if wants:
        ego.route = [("1", "2", 3), ("2", "exit", 0)]
    _lead(road, ego, lane, at, limit, aim, rng)
    _neighbours(road, lane, (1, 3) if wide else (1,), at, limit, aim, rng)
    return Scene(road, "Take the exit." if wants else "Follow the road.", limit, wants)


def intersection(road: Road, rng: random.Random, aim: Aim) -> Scene:
    """Makes a scene on `road`, an intersection of four roads. Crossing traffic goes first or yields according to
    highway-env's rules."""
    turns = {"STRAIGHT": "straight", "LEFT_TURN": "left", "RIGHT_TURN": "right"}
    arm, turn, limit = rng.randrange(4), _usual(turns[aim[1]], list(turns.values()), rng), 10.0
    to = (arm + {"left": 1, "straight": 2, "right": 3}[turn]) % 4
    lane = (f"o{arm}", f"ir{arm}", 0)
    at = 100 - rng.uniform(*_usual((0, 10) if aim[1] != "STRAIGHT" else (10, 40), ((0, 12), (12, 40)), rng))
    ego, at = _ego(road, lane, at, limit, aim, rng)
    ego.plan_route_to(f"o{to}")
    if rng.random() < (0.9 if aim[0] == "STOP" else 0.4):
        _lead(road, ego, lane, at, limit, aim, rng)
    if rng.random() < (0.6 if aim[0] == "DECELERATE" else 0.3):  # something slow in the way after the turn
        place_vehicle(road, (f"ir{arm}", f"il{to}", 0), rng.uniform(4, 14), limit * rng.uniform(0, 0.4))
    for other in rng.sample(sorted({0, 1, 2, 3} - {arm}), rng.randint(0, 2)):
        crossing = place_vehicle(road, (f"o{other}", f"ir{other}", 0), rng.uniform(70, 98),
                                 limit * rng.uniform(0.5, 1), limit)
        if crossing:
            crossing.plan_route_to(f"o{rng.choice(sorted({0, 1, 2, 3} - {other}))}")
    words = {"left": "Turn left.", "straight": "Go straight.", "right": "Turn right."}[turn]
    return Scene(road, words, limit, False)


def roundabout(road: Road, rng: random.Random, aim: Aim) -> Scene:
    """Makes a scene on `road`, a roundabout. The expert drives into it, around it, or out of it."""
    arms, limit = "senw", 8.0
    arm = rng.randrange(4)
    here, after = arms[arm], arms[(arm + 1) % 4]
    leave = _usual(aim[1] == "RIGHT_TURN", (True, False), rng)
    begin = _usual("entry" if aim[1] == "STRAIGHT" else "ring", ("entry", "ring"), rng)
    out = after if leave else arms[(arm + 2) % 4]
    lane = (here + "es", here + "e", 0) if begin == "entry" else (here + "e", after + "x", rng.randint(0, 1))
    at = rng.uniform(0, road.network.get_lane(lane).length)
    ego, at = _ego(road, lane, at, limit, aim, rng)
    ego.plan_route_to(out + "xr")
    if rng.random() < 0.5:
        ahead = (after + "x", after + ("xs" if leave else "e"), 0 if leave else lane[2])
        place_vehicle(road, ahead, rng.uniform(2, 14),
                      limit * _usual(0.0 if aim[0] == "STOP" else 0.9, (0.0, 0.4, 0.9), rng))
    if begin == "entry" and rng.random() < 0.5:
        place_vehicle(road, (here + "x", here + "e", 1), rng.uniform(2, 14), limit * rng.uniform(0.4, 1.0))
    return Scene(road, "Take the next exit." if leave else "Stay in the roundabout.", limit, False)


SCENARIOS: dict[str, Callable[[Road, random.Random, Aim], Scene]] = {
    "highway": highway, "merge": merge, "exit": exit_road, "intersection": intersection, "roundabout": roundabout,
}
