"""Drive: a vehicle in traffic of highway-env, in closed loop, one decision per second.

Each turn shows the road from above. A decision is a pair of words as in the task `driving` (`task.actions=meta`), or
waypoints in metres (`task.actions=waypoints`). The drive ends at the goal, with a collision, off the road, or when time
is up. `task.reward` selects the rewarded part: `carl`, route completion times soft penalties, where a hard infraction
ends the episode (CaRL, 2504.17838); `shaped`, a sum of terms; or `contrast`, VLM-RL's (2412.15544), which needs the
service `clip`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vlrl.config.base import Positive
from vlrl.errors import ConfigError, DataError
from vlrl.rewards import closed_loop as rules
from vlrl.rewards.contrast import contrast_goal, linear_falloff, vlm_rl_reward
from vlrl.rewards.driving import HEADS, read_plan, read_trajectory
from vlrl.rewards.text import answer_text
from vlrl.task import Task
from vlrl.task.environment import Environment
from vlrl.types import Answer, Media, Observation, Parts, Sample, Step

from ._shared import drawn, means

if TYPE_CHECKING:
    from ._drive_world import Decision, DrivenSecond, World

Scenario = Literal["highway", "merge", "intersection", "roundabout"]
PATHS = ("STRAIGHT", "LEFT_CHANGE", "RIGHT_CHANGE")
"""Turns follow the route, which is drawn."""
PARTS = ("carl", "shaped", "contrast", "completion", "success", "collision", "off_road", "comfort", "speed", "centring",
         "format")
_MEANS = ("comfort", "speed", "centring", "format")  # parts averaged over the turns of an episode
_ASK = {"meta": "What to do in the next second? Answer with the speed (KEEP, ACCELERATE, DECELERATE or STOP) and the "
                "path (STRAIGHT, LEFT_CHANGE or RIGHT_CHANGE) as SPEED, PATH.",
        "waypoints": "Where to drive in the next 1.5 seconds? Answer with [[x, y, t], ...]: metres, x ahead and y to "
                     "the left of where the vehicle is, and seconds."}
_LANE = 2.0  # metres from the lane centre at which VLM-RL's term of it is 0
_DONE = 1 - 1e-9
_TRIES = 100  # scenes tried to find one in which the expert arrives


class DriveEnvironment(Environment):
    """One drive. An unreadable decision brakes the vehicle."""

    def __init__(self, task: Drive, sample: Sample):
        self.task, self.sample = task, sample
        self.world: World | None = None

    def reset(self, seed: int) -> Observation:
        """The scene depends on the sample alone."""
        from ._drive_world import World

        self.world = world = World(self.sample["scenario"], self.sample["scene"], self.task.seconds, self.task.traffic)
        return self._shown(world, f"{world.scene.navigation} Limit {world.limit:.0f} m/s. ")

    def step(self, action: str) -> Step:
        from ._drive_world import Decision

        world = self.world
        assert world is not None, "reset comes first"
        read = read_decision(action, self.task.actions)
        second = world.drive(read or Decision("STOP"))
        arrived = second.now >= _DONE and not second.ended
        parts = {**self._paid(world, second), "success": float(arrived), "format": float(read is not None)}
        info = {"completion": round(second.now, 4), "speed": round(world.ego.speed, 2), "limit": world.limit,
                "ttc": round(min(second.ttc, 99.0), 2), "collision": second.collision, "off_road": second.off_road,
                "read": read is not None}
        return Step(self._shown(world), parts, second.ended or arrived or world.left <= 0, world.state(), info)

    def _paid(self, world: World, second: DrivenSecond) -> dict[str, float]:
        speed, (aside, turned) = world.ego.speed, world.offset
        comfort = rules.comfort_factor(second.along, second.across)
        factors = (rules.speed_factor(second.fastest, world.limit), rules.gap_factor(second.ttc), comfort)
        sum_of_terms = rules.shaped(speed, rules.target_speed(world.limit, world.gap), world.limit, aside, turned,
                                    second.ended)
        return {"carl": rules.carl(second.before, second.now, factors), "shaped": sum_of_terms / self.task.seconds,
                "completion": second.now - second.before, "collision": float(second.collision),
                "off_road": float(second.off_road), "comfort": float(comfort == 1), "speed": speed / world.limit,
                "centring": linear_falloff(aside, _LANE)}

    def _shown(self, world: World, before: str = "") -> Observation:
        left = max(0.0, world.route.length - world.done)
        return Observation(f"{before}{world.ego.speed:.0f} m/s, {left:.0f} m to go.",
                           [Media(source=world.picture(self.task.width))])


class Drive(Task):
    """Drive to the goal in time, without a collision. Parts: `carl`, in [0, 1]; `shaped`, at most 1; `contrast`, at
    most 1; `completion` of the route; `success`, `collision`, `off_road`, 0 or 1; and means over the seconds:
    `comfort`, `centring` in the lane and `format` in [0, 1], `speed`, a share of the limit."""

    prompt = "You drive the green car to the end of the violet line. {ask}"
    outcome = {"success": 1.0}
    needs = {"clip": ("contrast",)}
    reward: Literal["carl", "shaped", "contrast"] = "carl"
    """The rewarded part: carl, shaped, contrast; task.rewards.<part> sets the weight of any part."""
    actions: Literal["meta", "waypoints"] = "meta"
    """meta: words for speed and path; waypoints: [[x, y, t], ...] in the vehicle's frame."""
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)] = ("highway", "merge", "intersection", "roundabout")
    """The roads, in turn."""
    seconds: Annotated[int, Field(ge=2, le=60)] = 10
    """Decisions until time is up; the goal is as far as 65 % of the limit reaches in that time. episode.max_turns must
    not be less."""
    traffic: Annotated[float, Field(ge=0, le=1.4)] = 1.0
    """Density of traffic: 0 = almost none."""
    solvable: bool = False
    """Whether to draw only scenes in which the expert arrives in time, which takes a moment for each."""
    width: Annotated[int, Field(ge=64, le=1024, multiple_of=32)] = 128
    """Width of an image in pixels; its height is half of that."""
    count: Positive = 4096
    """Scenes per split."""
    goal_negative: str = "Two cars have collided with each other on the road"
    """contrast: what an image must not look like."""
    goal_positive: str = "The road is clear with no car accidents"
    """contrast: what it should look like."""
    goal_span: Annotated[float, Field(gt=0, le=2)] = 0.03
    """contrast: by how much the cosine with the negative text may exceed the other before the road counts as
    blocked."""

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
        return {part: float(part == settings.get("reward", cls.reward)) for part in PARTS}

    def samples(self, split: str) -> Sequence[Sample]:
        if importlib.util.find_spec("highway_env") is None:
            raise ConfigError("task.name=drive: the traffic is simulated by highway-env, which is not installed: "
                              "pip install 'vlrl[driving]'")
        return drawn(self, split, self._sample)

    def _sample(self, split: str, index: int) -> Sample:
        """The scene's name has its split, so no scene is in two splits. Raises DataError if none is solvable."""
        scenario, scene = self.scenarios[index % len(self.scenarios)], f"{self.seed}/{split}/{index}"
        row = {"scenario": scenario, "scene": scene, "category": scenario, "ask": _ASK[self.actions]}
        sample = Sample(id=f"{split}-{index:06d}", row=row)
        for other in range(1, _TRIES + 1):
            if not self.solvable or self.oracle_actions(sample) is not None:
                return sample
            sample = replace(sample, row={**row, "scene": f"{scene}/{other}"})
        raise DataError(f"sample '{sample.id}': task.solvable, and the expert arrives in none of {_TRIES} scenes of "
                        f"{scenario}: set another task.seconds (it is {self.seconds}) or less task.traffic "
                        f"({self.traffic:g}), or leave it out of task.scenarios")

    def environment(self, sample: Sample) -> Environment:
        return DriveEnvironment(self, sample)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        count = max(1, len(answer.turns))
        sums = {part: sum(turn.parts.get(part, 0.0) for turn in answer.turns) for part in PARTS if part != "contrast"}
        return {part: value / count if part in _MEANS else value for part, value in sums.items()}

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """VLM-RL's reward of each second's image: speed for how clear the road looks, times lane keeping; -1 if a
        collision or leaving the road ended the drive. Averaged over the maximum number of seconds."""
        clip = services.clip  # asked for first: where it is absent, no picture is read
        return [{"contrast": self._contrast(clip, answer)} for answer in answers]

    def _contrast(self, clip: Any, answer: Answer) -> float | None:
        pictures = [turn.media[0].source for turn in answer.turns if turn.media]
        if len(pictures) < len(answer.turns):
            return None  # stored episodes have no pictures
        paid = 0.0
        cosines: Any = clip(pictures, [self.goal_negative, self.goal_positive]) if pictures else ()
        for turn, (negative, positive) in zip(answer.turns, cosines, strict=True):
            ended = turn.parts.get("collision", 0.0) + turn.parts.get("off_road", 0.0)
            clear = contrast_goal(float(negative), float(positive), self.goal_span)
            paid += vlm_rl_reward(-ended, turn.parts.get("speed", 0.0), clear, 1.0, turn.parts.get("centring", 0.0))
        return paid / self.seconds

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Success and share of collisions by scenario (`success/merge`, `collision/merge`)."""
        return means((f"{part}/{record['sample']['scenario']}", record["parts"].get(part) or 0.0)
                     for record in records for part in ("success", "collision"))

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """Those of an expert that tries them out first; None if it does not arrive in time."""
        from ._drive_expert import demonstration

        decisions = demonstration(sample["scenario"], sample["scene"], self.seconds, self.traffic,
                                  self.actions == "waypoints")
        return None if decisions is None else [written(decision) for decision in decisions]


def read_decision(text: str, actions: str) -> Decision | None:
    """The decision in a text, or None: one word of speed and one of path in its answer, or waypoints."""
    from ._drive_world import Decision

    said = answer_text(text)
    if actions == "waypoints":
        way = read_trajectory(said)
        return None if way is None else Decision(way=way)
    plan = read_plan(said, negation=True)
    if any(len(plan[head]) != 1 for head in HEADS) or plan["path"][0] not in PATHS:
        return None
    return Decision(plan["speed"][0], plan["path"][0])


def written(decision: Decision) -> str:
    """The text of a decision."""
    if decision.way is None:
        return f"{decision.speed}, {decision.path}"
    return f"[{', '.join(f'[{x:g}, {y:g}, {t:g}]' for x, y, t in decision.way)}]"
