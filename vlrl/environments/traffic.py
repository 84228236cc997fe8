"""Traffic simulated by highway-env (Farama Foundation, MIT license): roads, and drivers that follow the Intelligent
Driver Model (IDM).

World coordinates are highway-env's: metres, y pointing down on the screen, headings in radians clockwise from x. The
lanes of a road are counted from the left. Requires the extra `driving`."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, cast

import numpy as np

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # highway-env brings pygame, which would look for a screen
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
from highway_env.envs.exit_env import ExitEnv
from highway_env.envs.highway_env import HighwayEnv
from highway_env.envs.intersection_env import IntersectionEnv
from highway_env.envs.merge_env import MergeEnv
from highway_env.envs.roundabout_env import RoundaboutEnv
from highway_env.road.regulation import RegulatedRoad
from highway_env.road.road import Road, RoadNetwork
from highway_env.vehicle.behavior import IDMVehicle
from highway_env.vehicle.objects import Obstacle

STEP = 0.1  # seconds per simulation step
MOST_SPEED = 30.0  # the highest speed of any driver, in metres per second
Lane = tuple[str, str, int]
_ROADS = {"highway": (HighwayEnv, {"lanes_count": 3, "vehicles_count": 1}), "merge": (MergeEnv, {}),
          "intersection": (IntersectionEnv, {"initial_vehicle_count": 1}), "roundabout": (RoundaboutEnv, {}),
          "exit": (ExitEnv, {"lanes_count": 3, "vehicles_count": 1})}


class Driver(IDMVehicle):
    """A vehicle driven by highway-env's IDM. A lane change takes about three seconds. After yielding, the vehicle
    returns to its own target speed, and not to the lane's speed limit as in highway-env."""

    ACC_MAX = 5.0
    COMFORT_ACC_MAX = 2.5
    COMFORT_ACC_MIN = -4.0
    DISTANCE_WANTED = 7.0
    TIME_WANTED = 1.2
    KP_LATERAL = 0.7
    LANE_CHANGE_MIN_ACC_GAIN = 0.5
    EASE = 1.8
    wanted = 0.0  # target speed on a free road in metres per second

    def acceleration(self, ego_vehicle: Any, front_vehicle: Any = None, rear_vehicle: Any = None) -> float:
        """Returns the acceleration by the IDM in m/s^2. Braking only because of the target speed is gentle."""
        whole = float(super().acceleration(ego_vehicle, front_vehicle, rear_vehicle))
        free = float(super().acceleration(ego_vehicle))
        yields = getattr(ego_vehicle, "target_speed", 0) <= 0
        return whole if yields else whole - free + max(free, -self.EASE)

    def act(self, action: Any = None) -> None:
        self.target_speed = min(self.target_speed, self.wanted)
        super().act(action)

    def on_state_update(self) -> None:
        """Finds the lane that the vehicle is on, searching only the lanes near its previous lane."""
        lanes = neighbouring_lanes(self.road.network, self.lane_index)
        self.lane_index, self.lane = min(
            lanes, key=lambda lane: lane[1].distance_with_heading(self.position, self.heading))

    def step(self, dt: float) -> None:
        super().step(dt)
        self.speed = max(0.0, self.speed)  # braking ends at a stand


@cache
def neighbouring_lanes(roads: Any, lane: Lane) -> list[tuple[Lane, Any]]:
    """Returns (index, lane) of each lane between the same two nodes as `lane` (itself included), and of the lanes
    before and after it. `lane` is an index of a lane in the network `roads`."""
    return [(index, other) for index, other in roads.lanes_dict().items()
            if index[:2] == lane[:2] or index[0] == lane[1] or index[1] == lane[0]]


@cache
def network(scenario: str) -> RoadNetwork:
    """The road network of a scenario in highway-env."""
    environment, config = _ROADS[scenario]
    simulator: Any = environment(config)
    simulator.reset(seed=0)
    for lane in simulator.road.network.lanes_list():
        lane.speed_limit = MOST_SPEED  # each driver keeps to a limit of its own
    return simulator.road.network


def empty_road(scenario: str, seed: int) -> Road:
    """Returns the road of a scenario without vehicles. At the intersection, highway-env's right-of-way rules hold.
    `seed` seeds the road's random numbers."""
    kind: Any = RegulatedRoad if scenario == "intersection" else Road
    return kind(network(scenario), np_random=np.random.default_rng(seed), neighbour_vehicles_connected_lanes=True)


def place_vehicle(road: Road, lane: Lane, at: float, speed: float, wanted: float | None = None) -> Driver | None:
    """Adds a vehicle that stays on `lane`, and returns the vehicle; None if there is no room. at: position along the
    lane in metres. speed, wanted: current and target speed; without a target, the vehicle keeps its speed."""
    where = road.network.get_lane(lane)
    if not 0 <= at <= where.length:
        return None
    position = where.position(at, 0)
    for other in road.vehicles:
        along, aside = where.local_coordinates(other.position)
        if np.hypot(*(other.position - position)) < 8 and abs(along - at) < 8 and abs(aside) < 3:
            return None
    vehicle = Driver(road, position, where.heading_at(at), speed, target_lane_index=lane, target_speed=MOST_SPEED,
                     enable_lane_change=False)
    vehicle.lane_index, vehicle.lane = lane, where  # at a junction others are as close
    vehicle.wanted = max(speed if wanted is None else wanted, 0.01)
    road.vehicles.append(vehicle)
    return vehicle


def place_obstacle(road: Road, lane: Lane, at: float) -> None:
    """Adds a standing obstacle to a lane, `at` metres from its start."""
    road.objects.append(Obstacle(road, cast(Any, road.network.get_lane(lane).position(at, 0))))
