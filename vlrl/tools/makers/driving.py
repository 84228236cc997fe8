"""Makes driving data: images of simulated traffic seen from above, with the expert's plan and trajectory and the
surrounding obstacles.

    make_driving(Path("driving"), seed=0, samples=200)      # driving/train.jsonl, driving/heldout.jsonl, images/*.png

highway-env simulates the traffic; vlrl draws the images. The plan is derived from what the expert does in the three
seconds after a decision, so image, plan, trajectory and obstacles are consistent. The same seed gives the same rows and
pixels. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import io
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlrl.errors import ConfigError
from vlrl.progress import Progress, no_progress
from vlrl.tools.makers.making import make_rows

if TYPE_CHECKING:
    from vlrl.environments.roadview import Frame
    from vlrl.tools.makers.driving_scenes import Drive

SHARES = {("STOP", "STRAIGHT"): 0.14, ("KEEP", "STRAIGHT"): 0.09, ("ACCELERATE", "STRAIGHT"): 0.08,
          ("DECELERATE", "STRAIGHT"): 0.09,
          **{(speed, path): 0.05 for path in ("LEFT_TURN", "RIGHT_TURN", "LEFT_CHANGE", "RIGHT_CHANGE")
             for speed in ("KEEP", "ACCELERATE", "DECELERATE")}}
"""Plan (speed, path) -> the share of rows with this plan."""
WHERE = {"STRAIGHT": ("highway", "merge", "exit", "intersection", "roundabout"),
         "LEFT_TURN": ("intersection", "roundabout"), "RIGHT_TURN": ("intersection", "roundabout"),
         "LEFT_CHANGE": ("highway", "merge"), "RIGHT_CHANGE": ("highway", "exit")}
"""Path of a plan (its second word) -> the scenarios in which plans with this path are generated."""
FUTURE = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Times of the waypoints and obstacle positions in a row, in seconds after the image."""
PAST = 0.5  # seconds between two successive earlier images in a row
_PATH_OF = {"Turn left.": "LEFT_TURN", "Turn right.": "RIGHT_TURN", "Merge left.": "LEFT_CHANGE",
            "Take the exit.": "RIGHT_CHANGE", "Take the next exit.": "RIGHT_TURN",
            "Stay in the roundabout.": "LEFT_TURN"}
_NEAR = 60.0  # metres within which others count as obstacles
_PATIENCE = 300  # successive scenes without the intended plan after which this plan is given up


def make_driving(out: Path, seed: int = 0, samples: int = 200, *, heldout: int | None = None, history: int = 0,
                 width: int = 128, force: bool = False, progress: Progress = no_progress) -> dict[str, int]:
    """Writes train.jsonl, heldout.jsonl, images/ and made_by.json to a folder. Returns the number of rows per split.

    An image has `width` x `width / 2` pixels. `history` is the number of earlier images in a row, half a second apart.
    Each plan gets its share of the rows as set in SHARES. No scene occurs in both splits.

    Raises ConfigError for an invalid number or if highway-env is missing, DataError if the folder is not empty."""
    if not 0 <= history <= 2:
        raise ConfigError(f"--history {history} must lie between 0 and 2, because a scene has only one second before "
                          "its first decision")
    if not 64 <= width <= 2048 or width % 2:
        raise ConfigError(f"--width {width} must be an even number of pixels from 64 to 2048")
    for name in ("highway_env", "shapely"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"making driving data needs highway-env and shapely, and {name} is not installed: pip "
                              "install 'vlrl[driving]'")
    record = {"command": "vlrl data make driving", "seed": seed, "width": width, "history": history,
              "real": "nothing", "simulated": "traffic, plans and trajectories: highway-env (MIT), expert IDM and "
              "MOBIL", "drawn": "the pictures, from above: by vlrl",
              "plan": "read off the 3 s that the expert drove after the picture; rows between two plans are left out",
              "difficulty": "a quarter for each head that text and speed alone get wrong, and up to half for a plan "
              "that is nearly another one"}
    return make_rows(out, partial(driving_rows, seed=seed, history=history, width=width), samples, heldout, record,
                     what="driving", force=force, progress=progress)


def driving_rows(split: str, count: int, *, seed: int, history: int = 0, width: int = 128
                 ) -> Iterator[tuple[dict[str, Any], Mapping[str, bytes]]]:
    """Yields up to `count` pairs (row, its images as path -> PNG). Scene n is generated from (seed, split, n). Its
    intended plan is the one whose number of rows is furthest below the plan's share."""
    from vlrl.tools.makers.driving_scenes import drive, scene

    wanted, have, tries = quotas(count), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    rng, visit, written = random.Random(f"{seed}/{split}"), 0, 0
    while written < count:
        aim = max(wanted, key=lambda plan: (wanted[plan] - have[plan]) / wanted[plan] if wanted[plan] else -1)
        if wanted[aim] <= have[aim]:
            return
        scenario = rng.choice(WHERE[aim[1]])
        name = f"{scenario}-{split}-{seed}-{visit:06d}"
        driven, visit = drive(scene(scenario, name, aim)), visit + 1
        tries[aim] += 1
        for step in () if driven.crashed else driven.decisions:
            plan = _plan(driven, step)
            key = (plan.speed, plan.path) if plan else None
            if plan is None or key is None or have[key] >= wanted.get(key, 0) or scenario not in WHERE[plan.path]:
                continue
            row = _row(driven, scenario, step, plan)
            if not _is_safe(row):
                continue
            have[key] += 1
            tries[key] = 0
            written += 1
            files = _pictures(driven, scenario, step, history, width, f"{name}-{step}")
            yield {"id": f"{name}-{step}", **_images(files), **row, **_sizes(width), "group_key": name,
                   "source": "highway-env", "split": split}, files
        if tries[aim] > _PATIENCE:  # its rows go to the most frequent plan
            commonest = max(have, key=lambda plan: (have[plan], plan))
            wanted[commonest] += wanted[aim] - have[aim]
            wanted[aim] = have[aim]


def quotas(count: int) -> dict[tuple[str, str], int]:
    """Plan -> number of rows, out of `count`. Each number differs from the plan's share in SHARES by less than one."""
    wanted = {plan: int(count * share) for plan, share in SHARES.items()}
    rest = sorted(SHARES, key=lambda plan: wanted[plan] - count * SHARES[plan])
    for plan in rest[:count - sum(wanted.values())]:
        wanted[plan] += 1
    return wanted


def _frame(driven: Drive, step: int) -> Frame:
    from vlrl.environments.roadview import Frame

    x, y, heading = (float(v) for v in driven.states[step, 0, :3])
    return Frame(x, y, heading)


def _plan(driven: Drive, step: int) -> Plan | None:
    from vlrl.environments.traffic import STEP
    from vlrl.tools.makers.driving_scenes import HORIZON

    own, frame = driven.states[step:step + round(HORIZON / STEP) + 1, 0], _frame(driven, step)
    return plan_of(frame.places(own[:, :2]), np.unwrap(frame.headings(own[:, 2])), own[:, 3])


def _row(driven: Drive, scenario: str, step: int, plan: Plan) -> dict[str, Any]:
    """The ground-truth fields of the row for one step of a scene, in the coordinate frame of the expert's vehicle."""
    from vlrl.environments.roadview import CAR, drivable
    from vlrl.environments.traffic import STEP

    frame = _frame(driven, step)
    steps = [step + round(t / STEP) for t in FUTURE]
    way = frame.places(driven.states[steps, 0, :2])
    speed, limit = float(driven.states[step, 0, 3]), driven.scene.limit
    return {
        "plan": {"speed": plan.speed, "path": plan.path}, "speed_mps": round(speed, 1) + 0.0,
        "navigation": f"{driven.scene.navigation} Speed limit {limit:.0f} m/s.",
        "trajectory": [[*_point(place), t] for place, t in zip(way, FUTURE, strict=True)],
        "obstacles": _obstacles(driven, frame, step, steps), "drivable": drivable(scenario, frame),
        "ego_size": list(CAR), "category": scenario,
        "difficulty": _difficulty(plan, driven.scene.navigation, speed, limit),
    }


def _difficulty(plan: Plan, navigation: str, speed: float, limit: float) -> float:
    """The difficulty of a row, in [0, 1]. Each word of the plan (speed, path) that would be guessed wrong from the
    navigation text and the current speed alone adds 0.25. A trajectory close to another plan adds up to 0.5."""
    guess = "ACCELERATE" if speed < limit - 1.5 else "DECELERATE" if speed > limit + 1.5 else "KEEP"
    misled = (guess != plan.speed) + (_PATH_OF.get(navigation, "STRAIGHT") != plan.path)
    return round(0.25 * misled + 0.5 * (1 - plan.margin), 2)


def _obstacles(driven: Drive, frame: Frame, step: int, steps: list[int]) -> list[dict[str, Any]]:
    """The obstacles near the vehicle at the simulation step `step`: objects on the road, and other vehicles with their
    positions at the times in FUTURE, which are the simulation steps `steps`."""
    from vlrl.environments.roadview import CAR, THING

    obstacles = []
    for other in range(1, driven.states.shape[1]):
        states = driven.states[[step, *steps], other]
        places, headings = frame.places(states[:, :2]), frame.headings(states[:, 2])
        if np.hypot(*places[0]) > _NEAR:
            continue
        heading, speed = float(headings[0]), float(states[0, 3])
        track = [[*_point(place), round(float(turn), 3) + 0.0, t]
                 for place, turn, t in zip(places, headings, (0.0, *FUTURE), strict=True)]
        obstacles.append({"center": _point(places[0]), "size": list(CAR), "heading": track[0][2],
                          "velocity": _point((speed * np.cos(heading), speed * np.sin(heading))), "track": track,
                          "label": "car"})
    for x, y, heading in driven.things:
        place, turned = frame.places(np.array([x, y])), float(frame.headings(np.array(heading)))
        if np.hypot(*place) <= _NEAR:
            obstacles.append({"center": _point(place), "size": list(THING), "heading": round(turned, 3) + 0.0,
                              "label": "barrier"})
    return obstacles


def _is_safe(row: Mapping[str, Any]) -> bool:
    """Whether the expert's waypoints avoid the obstacles of the row and stay on the drivable area of the row, by the
    checks that the rewards use."""
    from vlrl.rewards.driving import collides, footprints, leaves, sample_times

    times = sample_times(FUTURE[-1])
    ego = footprints(row["trajectory"], row["ego_size"], times)
    return not collides(ego, row["obstacles"], times) and not leaves(ego, row["drivable"])


def _pictures(driven: Drive, scenario: str, step: int, history: int, width: int, name: str) -> dict[str, bytes]:
    """Draws the image of a row and its `history` earlier images. Returns path -> PNG, the oldest image first. The paths
    contain `name`."""
    from vlrl.environments.roadview import draw
    from vlrl.environments.traffic import STEP

    files = {}
    for back in range(history, -1, -1):
        file = io.BytesIO()
        states = driven.states[step - back * round(PAST / STEP)]
        draw(scenario, states, driven.things, driven.scene.limit, width).save(file, "PNG")
        files[f"images/{name}{f'-{back}' if history else ''}.png"] = file.getvalue()
    return files


def _images(files: Mapping[str, bytes]) -> dict[str, Any]:
    paths = list(files)
    if len(paths) == 1:
        return {"image": paths[0]}
    return {"images": paths, "frames": [-PAST * back + 0.0 for back in range(len(paths) - 1, -1, -1)]}


def _sizes(width: int) -> dict[str, Any]:
    from vlrl.environments.roadview import to_pixels

    return {"width": width, "height": width // 2, "to_pixels": to_pixels(width)}


def _point(values: Any) -> list[float]:
    return [round(float(v), 2) + 0.0 for v in values]


STANDING = 0.5  # speed in m/s below which a vehicle counts as standing
TURN = math.radians(25)  # minimum change of heading, in radians, that counts as a turn
_STRAIGHT = math.radians(12)  # maximum change of heading without a turn
_SAME, _FASTER = 0.8, 1.5  # m/s of change: at most that of KEEP, at least that of ACCELERATE and DECELERATE
_LANE, _IN_LANE = 2.4, 1.0  # m to the side: at least that of a lane change, at most that of STRAIGHT


@dataclass(frozen=True)
class Plan:
    """A driving plan of two words: speed (e.g. "KEEP") and path (e.g. "LEFT_TURN"). `margin` in [0, 1] says how far the
    driven trajectory is from any other plan; 0 = borderline."""

    speed: str
    path: str
    margin: float


def plan_of(positions: np.ndarray, headings: np.ndarray, speeds: Sequence[float] | np.ndarray) -> Plan | None:
    """The plan that a driven trajectory shows; None if the trajectory lies between two plans.

    The trajectory has `positions` [n, 2] in metres, `headings` [n] in radians and `speeds` [n] in m/s. Positions and
    headings are in the vehicle's frame at the start: x ahead, y to the left, headings counter-clockwise."""
    speed, path = _speed(float(speeds[0]), float(speeds[-1])), _path(positions, headings)
    return Plan(speed[0], path[0], round(min(1.0, speed[1], path[1]), 3)) if speed and path else None


def _speed(before: float, after: float) -> tuple[str, float] | None:
    change = after - before
    if after < STANDING:
        return "STOP", 1 - after / STANDING
    if change <= -_FASTER:
        return ("DECELERATE", min(-change / _FASTER - 1, after / STANDING - 2)) if after > 2 * STANDING else None
    if change >= _FASTER:
        return "ACCELERATE", change / _FASTER - 1
    return ("KEEP", 1 - abs(change) / _SAME) if abs(change) <= _SAME and after > 2 * STANDING else None


def _path(positions: np.ndarray, headings: np.ndarray) -> tuple[str, float] | None:
    turned, aside = float(headings[-1]), float(positions[-1, 1])
    if abs(turned) >= TURN:
        return "LEFT_TURN" if turned > 0 else "RIGHT_TURN", abs(turned) / TURN - 1
    if abs(turned) > _STRAIGHT:
        return None
    if abs(aside) >= _LANE:
        return "LEFT_CHANGE" if aside > 0 else "RIGHT_CHANGE", (abs(aside) - _LANE) / (_LANE - _IN_LANE)
    if np.abs(positions[:, 1]).max() <= _IN_LANE:
        return "STRAIGHT", 1 - float(np.abs(positions[:, 1]).max()) / _IN_LANE
    return None
