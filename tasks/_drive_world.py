"""A closed-loop drive: a vehicle with a route, in the traffic of highway-env (vlrl/environments/traffic.py).

    world = World("merge", "train-17", seconds=10)
    second = world.drive(Decision("ACCELERATE", "LEFT_CHANGE"))     # or Decision(way=[[7, 0, 1], [15, 0, 2]])

The same scenario and seed give the same world, and the same decisions give the same outcomes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np
from highway_env.road.road import Road
from highway_env.vehicle.controller import MDPVehicle
from highway_env.vehicle.kinematics import Vehicle
from PIL import Image

from vlrl.environments.roadview import CAR, Frame, draw
from vlrl.environments.traffic import Lane, neighbouring_lanes
from vlrl.rewards import closed_loop as rules
from vlrl.rewards.driving import positions_at

from ._drive_scenes import SCENES

STEP = 0.2
"""Seconds per simulation step; a decision lasts one second."""
PACE = 0.65
"""Mean speed, as a share of the speed limit, with which the vehicle reaches the goal just in time."""
_MARGIN = 1.0  # metres beside the lanes of the route that still count as on it
_FASTER = 3.0  # largest change of speed per second by a speed word, in m/s
_SOON = 0.5  # seconds ahead at which a vehicle following waypoints aims
_FAR = 60.0  # metres ahead within which other vehicles are considered
_SHIFT = {"LEFT_CHANGE": -1, "RIGHT_CHANGE": 1}


@dataclass(frozen=True)
class Decision:
    """An action for one second: words for speed and path, or (in `way`) waypoints [x, y, t] relative to the vehicle."""

    speed: str = "KEEP"
    path: str = "STRAIGHT"
    way: Sequence[Sequence[float]] | None = None


@dataclass
class DrivenSecond:
    """What happened in the second after a decision."""

    before: float
    """Share of the route completed before this second, in [0, 1]; `now` is the share completed after it."""
    now: float = 0.0
    collision: bool = False
    off_road: bool = False
    fastest: float = 0.0
    """Highest speed in metres per second."""
    ttc: float = math.inf
    """Smallest time to a collision with anything ahead, in seconds."""
    along: list[float] = field(default_factory=list)
    """Longitudinal acceleration in each simulation step, in m/s^2; `across` is the lateral acceleration."""
    across: list[float] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list, compare=False)
    """Position [x, y] of the vehicle after each simulation step, in world coordinates."""

    @property
    def ended(self) -> bool:
        """Whether a collision or leaving the road ended the drive."""
        return self.collision or self.off_road


class Ego(MDPVehicle):
    """The driven vehicle. It keeps to a lane of its route or follows waypoints, within the limits of a car. It is an
    MDPVehicle because highway-env's RegulatedRoad makes all other controlled vehicles yield, but not an MDPVehicle."""

    KP_LATERAL, KP_HEADING = 0.55, 2.1  # so that a lane change is comfortable
    BRAKE, PUSH = -6.0, 2.4
    way: np.ndarray | None = None
    """[n, 3] waypoints: x and y in world coordinates, and seconds since the decision. The first is the current position
    at 0 s."""
    clock = 0.0
    edges: Collection[tuple[str, str]] = ()
    """The edges of the vehicle's route in the road network."""

    def act(self, action: Any = None) -> None:
        if self.way is None:
            self.follow_road()
            steering = self.steering_control(self.target_lane_index)
            push = self.speed_control(self.target_speed)
        else:
            steering, push = self._following(self.way)
        Vehicle.act(self, {"steering": steering, "acceleration": float(np.clip(push, self.BRAKE, self.PUSH))})

    def _following(self, way: np.ndarray) -> tuple[float, float]:
        aim = [np.interp(self.clock + _SOON, way[:, 2], way[:, axis]) for axis in (0, 1)]
        dx, dy = float(aim[0] - self.position[0]), float(aim[1] - self.position[1])
        cos, sin = math.cos(self.heading), math.sin(self.heading)
        ahead, aside, far = cos * dx + sin * dy, cos * dy - sin * dx, math.hypot(dx, dy)
        bend = 2 * aside / far**2 if far > 1 else 0.0  # of the circle to there: pure pursuit
        slip = math.asin(max(-0.7, min(0.7, bend * self.LENGTH / 2)))
        return math.atan(2 * math.tan(slip)), (max(0.0, ahead) / _SOON - self.speed) / _SOON

    def step(self, dt: float) -> None:
        super().step(dt)
        self.speed, self.clock = max(0.0, self.speed), self.clock + dt

    def on_state_update(self) -> None:
        """Assigns the vehicle to the nearest lane of its route, never to a lane of a road that crosses the route."""
        lanes = [lane for lane in neighbouring_lanes(self.road.network, self.lane_index) if lane[0][:2] in self.edges]
        self.lane_index, self.lane = min(lanes, key=lambda lane: lane[1].distance_with_heading(
            self.position, self.heading))


class Route:
    """The roads from the start of a drive to its goal. Converts between positions and metres along the route."""

    def __init__(self, road: Road, start: Lane, nodes: Sequence[str], begin: float, length: float):
        self.network: Any = road.network
        self.edges = [(start[0], start[1]), *pairwise(nodes)]
        self.lengths = [self.network.get_lane((*edge, 0)).length for edge in self.edges]
        self.begin = begin
        self.length = float(min(length, sum(self.lengths) - begin - 1))
        """Metres from the start to the goal."""

    def done(self, lane: Lane, position: np.ndarray) -> float:
        """Metres from the start along the route to a position on one of its lanes."""
        place, way = self.edges.index(lane[:2]), self.network.get_lane(lane)
        along = way.local_coordinates(position)[0] / way.length
        return float(sum(self.lengths[:place]) + along * self.lengths[place] - self.begin)

    def after(self, lane: Lane) -> list[tuple[str, str, None]]:
        """The edges of the route from a lane to the end, in the format of highway-env."""
        return [(*edge, None) for edge in self.edges[self.edges.index(lane[:2]):]]

    def holds(self, lane: Lane, position: np.ndarray) -> bool:
        """Whether a position is on a lane, with a small margin to each side."""
        way = self.network.get_lane(lane)
        along, aside = way.local_coordinates(position)
        return abs(aside) <= way.width_at(along) / 2 + _MARGIN

    def points(self, lane: int, done: float, far: float = _FAR) -> np.ndarray:
        """Returns [n, 2] positions along the route, two metres apart. The first position is `done` metres after the
        start of the route. The last is `far` metres after the first, or at the goal if the goal is nearer. All lie
        on lane number `lane`; on roads with fewer lanes, on the last lane."""
        ends = np.arange(done, min(done + far, self.length), 2.0)
        return np.array([self._place(lane, float(at)) for at in (*ends, min(done + far, self.length))])

    def _place(self, lane: int, done: float) -> np.ndarray:
        left = done + self.begin
        for edge, length in zip(self.edges, self.lengths, strict=True):
            if left <= length or edge == self.edges[-1]:
                break
            left -= length
        way = self.network.get_lane((*edge, min(lane, len(self.network.graph[edge[0]][edge[1]]) - 1)))
        return way.position(left / length * way.length, 0)


class World:
    """The state of a drive: the scene, the driven vehicle, and the seconds that are left."""

    def __init__(self, scenario: str, seed: str, seconds: int, traffic: float = 1.0):
        rng = random.Random(f"drive/{scenario}/{seed}")
        self.scenario = scenario
        self.scene = SCENES[scenario](rng, Ego, traffic)
        self.road, self.limit = self.scene.road, self.scene.limit
        self.ego = cast(Ego, self.road.vehicles[0])
        self.route = Route(self.road, self.scene.lane, self.scene.nodes, self.scene.at, PACE * self.limit * seconds)
        self.ego.edges = self.route.edges
        self.ego.route = cast(Any, self.route.after(self.scene.lane))
        self.done = 0.0
        """Metres of the route that are completed."""
        self.left = seconds

    def copy(self) -> World:
        """An independent copy of the world; the same decisions have the same outcomes in both."""
        shared = (self.road.network, self.route, self.scene)
        return copy.deepcopy(self, {id(thing): thing for thing in shared})

    @property
    def completion(self) -> float:
        return min(1.0, self.done / self.route.length)

    def drive(self, decision: Decision) -> DrivenSecond:
        """Carries out a decision for one second, or until the goal is reached or an infraction ends the drive. Returns
        what happened."""
        self._decide(decision)
        second = DrivenSecond(self.completion)
        for _ in range(round(1 / STEP)):
            self.road.act()
            heading = self.ego.heading
            self.road.step(STEP)
            self._observe(second, (self.ego.heading - heading) / STEP)
            if second.ended or self.completion >= 1:
                break
        if self.ego.way is not None:  # words that follow go on from the lane that it is in
            self.ego.target_lane_index = self.ego.lane_index
            self.ego.route = cast(Any, self.route.after(self.ego.lane_index))
        self.left -= 1
        second.now = self.completion
        return second

    def picture(self, width: int) -> Image.Image:
        """An image of the current view, `width` pixels wide and half as high."""
        here, vehicles = self._here, cast(list[Any], self.road.vehicles)
        near = [v for v in vehicles if np.linalg.norm(v.position - here) < 2 * _FAR]
        states = np.array([(*v.position, v.heading, v.speed, cast(Any, v.action)["acceleration"]) for v in near])
        things = [(*map(float, t.position), float(t.heading)) for t in self.road.objects]
        lane = self.ego.lane_index if self.ego.way is not None else self.ego.target_lane_index
        way = self.route.points(lane[2], min(self.done, self.route.length - 1))
        return draw(self.scenario, states, things, self.limit, width, way)

    @property
    def _here(self) -> np.ndarray:
        """The position of the vehicle. It is a copy, because highway-env changes its own array in place."""
        return np.array(self.ego.position)

    @property
    def gap(self) -> float:
        """Metres to the next obstacle ahead in the vehicle's path, at most 60; 60 if there is none."""
        return min((gap for gap, _ in self._ahead()), default=_FAR)

    @property
    def offset(self) -> tuple[float, float]:
        """The vehicle's distance from the centre of its lane (metres), and its heading in the lane (radians)."""
        along, aside = self.ego.lane.local_coordinates(self.ego.position)
        return float(aside), float(self.ego.lane.local_angle(self.ego.heading, along))

    def state(self) -> str:
        """A coarse description of the vehicle's state, as numbers separated by "/": completed tenths of the route,
        lane, speed (in units of 3 m/s) and distance to the next obstacle (in units of 10 m)."""
        lane = "".join(map(str, self.ego.lane_index[1:]))
        return f"{int(10 * self.completion)}/{lane}/{round(self.ego.speed / 3)}/{int(self.gap / 10)}"

    def _decide(self, decision: Decision) -> None:
        ego = self.ego
        ego.clock, ego.way = 0.0, None
        if decision.way is not None:
            ego.way = self._in_world(decision.way)
            return
        ego.target_speed = {"KEEP": ego.speed, "ACCELERATE": ego.speed + _FASTER, "STOP": 0.0,
                            "DECELERATE": max(0.0, ego.speed - _FASTER)}[decision.speed]
        a, b, number = ego.target_lane_index
        beside = (a, b, number + _SHIFT.get(decision.path, 0))
        known = len(self.road.network.graph[a][b])
        if 0 <= beside[2] < known and self.road.network.get_lane(beside).is_reachable_from(ego.position):
            ego.target_lane_index = beside

    def _in_world(self, way: Sequence[Sequence[float]]) -> np.ndarray:
        times = np.array([0.0, *(point[2] for point in way)])
        x, y = positions_at(cast(Any, way), times).T
        cos, sin = math.cos(self.ego.heading), math.sin(self.ego.heading)
        return np.stack([self.ego.position[0] + cos * x + sin * y, self.ego.position[1] + sin * x - cos * y, times], 1)

    def _observe(self, second: DrivenSecond, turning: float) -> None:
        ego = self.ego
        self.done = max(self.done, self.route.done(ego.lane_index, ego.position))
        second.collision = bool(ego.crashed)
        second.off_road = not second.collision and not self.route.holds(ego.lane_index, ego.position)
        second.fastest = max(second.fastest, ego.speed)
        second.places.append(self._here)
        second.along.append(float(cast(Any, ego.action)["acceleration"]))
        second.across.append(float(turning * ego.speed))
        for gap, closing in self._ahead():
            second.ttc = min(second.ttc, rules.time_to_collision(gap, closing))

    def _ahead(self) -> list[tuple[float, float]]:
        """Returns one (distance in metres, closing speed in m/s) for each vehicle or object in the vehicle's path, up
        to 60 m ahead."""
        (x, y), gaps = map(float, self.ego.position), []
        frame = Frame(x, y, float(self.ego.heading))
        for thing in (*self.road.vehicles, *self.road.objects):
            if thing is self.ego:
                continue
            ahead, aside = map(float, frame.places(thing.position))
            if 0 < ahead < _FAR and abs(aside) < CAR[1]:
                turned = float(frame.headings(np.array(thing.heading)))
                gap = ahead - CAR[0] / 2 - thing.LENGTH / 2
                gaps.append((gap, float(self.ego.speed - thing.speed * math.cos(turned))))
        return gaps
