"""Driving: the next action of a vehicle, or its trajectory.

`task.recipe` chooses the prompt and the reward: words for speed and path (plan, alphadrive, alphadrive_released),
waypoints (trajectory), or images of a plan's outcome (clip_goal, clip_baseline).

Rows have `image` or `images` (oldest first), and `plan` (`speed`, `path`). Optional fields: `speed_mps`, `navigation`;
`cameras` and `frames`, the camera name and the time in seconds (<= 0, relative to now) of each image; `trajectory` [[x,
y, t], ...], with `obstacles`, `drivable` and `ego_size` as in vlrl/rewards/driving.py; `to_pixels`, a 3x3 or 3x4 matrix
that projects the ground onto the first current image; `outcomes`, an image for each plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.data.media import MediaAccess, resolve
from vlrl.errors import ConfigError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.rewards.driving import HEADS, alphadrive_right, obstacle_problem, polygon_problem, project, trajectory_problem
from vlrl.rewards.text import parse_answer
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Parts, Sample

from . import _driving as recipes

RECIPES = {
    "plan": recipes.PLAN, "alphadrive": recipes.ALPHADRIVE, "alphadrive_released": recipes.ALPHADRIVE_RELEASED,
    "trajectory": recipes.TRAJECTORY, "clip_goal": recipes.CLIP_GOAL, "clip_baseline": recipes.CLIP_BASELINE,
}
_Positive = Annotated[float, Field(gt=0, le=1000)]
_KNOWN = ("alphadrive",)
_BEND = 3.0  # lateral metres from which a trajectory is not straight


class Driving(RecipeTask):
    """Plan the next action or the trajectory of a vehicle; see `task.recipe`. Reward parts of the default recipe:
    `speed` and `path`, each the F1 of the words in [0, 1], but 0 if a word is wrong, and `format`, 0 or 1."""

    _recipes = RECIPES
    recipe: str = "plan"
    """Prompt and reward (docs/tasks.md). plan, alphadrive, alphadrive_released, trajectory, clip_goal, clip_baseline,
    or your own module:function that returns a Recipe."""
    negation: Literal["read", "ignored"] = "read"
    """How a negated plan ("do not STOP") is parsed. Recipes with plans. read: as a plan without words; ignored: as the
    words that the text contains, as in AlphaDrive."""
    benchmark: str = ""
    """Benchmark for additional metrics (docs/evaluation.md). Its own scoring rules apply: alphadrive, for recipes with
    plans."""
    l2_scale: _Positive = 2.0
    """trajectory: metres at which the part `l2` is 1/e. They are the mean distance."""
    ego_size: tuple[_Positive, _Positive] = (4.8, 2.0)
    """trajectory: length and width of the vehicle in metres. A row's ego_size takes precedence."""
    goal_negative: str = "Two cars have collided with each other on the road"
    """clip_goal: text that the image should not resemble. The image is that of an outcome. Recipe clip_baseline: the
    baseline text."""
    goal_positive: str = "The road is clear with no car accidents"
    """clip_goal, clip_baseline: text that the image should resemble. The image is that of an outcome."""
    goal_span: Annotated[float, Field(gt=0, le=2)] = 0.03
    """clip_goal: similarity gap at which the reward is 0. By how much the image's cosine similarity to goal_negative
    must exceed its similarity to goal_positive."""
    goal_alpha: Annotated[float, Field(ge=0, le=1)] = 0.0
    """clip_baseline: how far the embedding is projected, 0 to 1. The image's embedding is moved towards its projection
    on the line between the embeddings of the two texts. A value above 0 needs task.goal_texts_cosine."""
    goal_texts_cosine: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """clip_baseline: cosine similarity of the two texts. It is that of the CLIP model of the service."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        if self.benchmark not in ("", *_KNOWN):
            raise ConfigError(f"task.benchmark={self.benchmark!r} is not known.{did_you_mean(self.benchmark, _KNOWN)} "
                              f"Known: {', '.join(_KNOWN)}.")
        if self.benchmark and self.used.read is recipes.read_way:
            raise ConfigError(f"task.benchmark={self.benchmark!r} scores plans, but task.recipe={self.recipe!r} asks "
                              "for a trajectory. Choose a recipe with plans, or remove task.benchmark")

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _scene_problem(row) or _road_problem(row)

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = super().sample_from_row(row, root)
        outcomes = sample.get("outcomes")
        if not isinstance(outcomes, Mapping):
            return sample
        roots = MediaAccess.of(self.data).roots
        paths = {plan: str(resolve(path, root or Path.cwd(), roots)) for plan, path in outcomes.items()}
        return replace(sample, row={**sample.row, "outcomes": paths})

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        speed = row.get("speed_mps")
        times = [f"{point[2]:g}" for point in row.get("trajectory") or ()]
        return {"speed": "unknown" if speed is None else f"{round(speed, 1):g}", "views": _views(row),
                "navigation": row.get("navigation") or "none", "times": ", ".join(times)}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer. For plans: `speed_acc`, `path_acc`, `joint_acc`. For trajectories: `l2@1s`, `l2@2s`,
        `l2@3s`, `collision_rate`, `off_road_rate`."""
        given = self.parse(sample, answer)
        if self.used.read is recipes.read_way:
            return recipes.way_metrics(self, sample, given, parts)
        own, plan = recipes.plan_metrics(self, sample, given), recipes.one_plan(self.target(sample))
        if self.benchmark and plan:
            own["alphadrive_acc"] = float(alphadrive_right(answer.text, plan))
        return own

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split, for plans: the F1 of every word, e.g. `f1/STOP`, and `speed_f1` and `path_f1`, the mean
        F1 of the words for speed and for path."""
        if self.used.read is recipes.read_way:
            return {}
        theirs = recipes.alphadrive_summary(records) if self.benchmark else {}
        return recipes.plan_summary(records) | theirs

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        """The true path and the answer's path as marks on the first current image, if the row has `to_pixels`."""
        matrix, path = sample.get("to_pixels"), parsed if isinstance(parsed, list) else None
        if matrix is None:
            return []
        paths = {"target": sample.get("trajectory"), "answer": path}
        lines = {role: project([[0.0, 0.0], *points], matrix) for role, points in paths.items() if points}
        return [{"kind": "path", "at": line, "label": "path", "role": role, "media": _current(sample.row)}
                for role, line in lines.items() if len(line) > 1]

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Name -> an answer that should not earn the full reward: every action at once; no movement although the
        vehicle should move; driving straight on although the road bends."""
        right = self.oracle(sample)
        if right is None:
            return {}
        if self.used.read is not recipes.read_way:
            every = recipes.plan_text({head: list(words) for head, words in HEADS.items()})
            return {"every action": right.replace(parse_answer(right).final, every)}
        points = sample["trajectory"]
        answers: dict[str, str | None] = {}
        if max(map(abs, points[-1][:2])) > _BEND:
            answers["no movement"] = recipes.written_way([[0.0, 0.0, t] for _, _, t in points])
        if abs(points[-1][1]) > _BEND:
            speed = sample.get("speed_mps") or 0.0
            answers["straight on"] = recipes.written_way([[speed * t, 0.0, t] for _, _, t in points])
        return answers


def _views(row: Mapping[str, Any]) -> str:
    count, cameras, frames = _count(row), row.get("cameras"), row.get("frames")
    if not cameras and not frames:
        return "the view from the vehicle" if count < 2 else f"{count} views from the vehicle"
    names = [f"{name} camera" for name in cameras] if cameras else ["the view"] * count
    moments = [f", {-t:g} s ago" if t else ", now" for t in frames] if frames else [""] * count
    return "; ".join(name + moment for name, moment in zip(names, moments, strict=True))


def _current(row: Mapping[str, Any]) -> int:
    frames = row.get("frames") or [0.0]
    return frames.index(max(frames))


def _count(row: Mapping[str, Any]) -> int:
    images = row.get("images")
    return (row.get("image") is not None) + (len(images) if isinstance(images, list) else images is not None)


def _scene_problem(row: Mapping[str, Any]) -> str | None:
    speed, navigation, count = row.get("speed_mps"), row.get("navigation"), _count(row)
    if speed is not None and not is_number(speed):
        return f"speed_mps={str(speed)[:200]} must be a number of metres per second"
    if not isinstance(navigation, (str, type(None))):
        return f"navigation={str(navigation)[:200]} must be a string"
    cameras, frames = row.get("cameras"), row.get("frames")
    if cameras and not (_listed(cameras, count) and all(isinstance(name, str) for name in cameras)):
        return f"cameras={str(cameras)[:200]} must be a list of names, one for each of the {count} pictures"
    if frames and not (_listed(frames, count) and all(is_number(t) and t <= 0 for t in frames)):
        return f"frames={str(frames)[:200]} must be a list of seconds <= 0, one for each of the {count} pictures"
    return None


def _road_problem(row: Mapping[str, Any]) -> str | None:
    problem = trajectory_problem(row["trajectory"]) if row.get("trajectory") is not None else None
    if problem:
        return f"trajectory={str(row['trajectory'])[:200]}: {problem}"
    for field, check in (("obstacles", obstacle_problem), ("drivable", polygon_problem)):
        given = row.get(field) or []
        if not isinstance(given, list):
            return f"{field}={str(given)[:200]} must be a list"
        for i, entry in enumerate(given):
            if problem := check(entry):
                return f"{field}[{i}]={str(entry)[:200]}: {problem}"
    size, matrix = row.get("ego_size"), row.get("to_pixels")
    if size is not None and not (_listed(size, 2) and all(is_number(v) and 0 < v <= 1000 for v in size)):
        return f"ego_size={str(size)[:200]} must be [length, width] in metres"
    if matrix is not None and not (_listed(matrix, 3) and any(all(_listed(r, n) and all(map(is_number, r))
                                                                  for r in matrix) for n in (3, 4))):
        return f"to_pixels={str(matrix)[:200]} must be a matrix of 3 rows and 3 or 4 columns"
    return None


def _listed(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count
