"""Drive: a vehicle in traffic of highway-env, in closed loop, one decision per second.

Each turn shows the road from above. A decision is a pair of words as in the task `driving` (`task.actions=meta`), or
waypoints in metres (`task.actions=waypoints`). The drive ends when the vehicle reaches the goal, collides or leaves the
road, or when time is up.

`task.reward` selects the rewarded part. `carl` is the completed share of the route multiplied by soft penalties; a
collision or leaving the road ends the episode (CaRL, 2504.17838). `shaped` is a sum of terms for the speed and the
position in the lane. `contrast` (VLM-RL, 2412.15544) rewards a speed that suits the road ahead; the service `clip`
judges from the images whether the road is clear."""

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
"""The possible words for the path. There are no words for turns, because the vehicle follows the route that the image
shows."""
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
    """One drive, with one decision per turn. If a decision cannot be parsed, the vehicle brakes."""

    def __init__(self, task: Drive, sample: Sample):
        self.task, self.sample = task, sample
        self.world: World | None = None

    def reset(self, seed: int) -> Observation:
        """Starts the drive. The scene depends only on the sample, not on `seed`."""
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
    """Drive to the goal in time, without a collision. Reward parts: `carl`, the reward of CaRL, in [0, 1]; `shaped`, a
    dense reward for speed and lane keeping, and `contrast`, a reward for a speed that suits the road, each at most
    1; `completion`, the completed share of the route; `success`, `collision` and `off_road`, each 0 or 1. Parts
    averaged over the seconds of the drive: `comfort`, `centring` in the lane and `format`, each in [0, 1], and
    `speed` as a share of the limit."""

    prompt = "You drive the green car to the end of the violet line. {ask}"
    outcome = {"success": 1.0}
    needs = {"clip": ("contrast",)}
    reward: Literal["carl", "shaped", "contrast"] = "carl"
    """The part with weight 1: carl, shaped or contrast. task.rewards.<part> sets the weight of any part."""
    actions: Literal["meta", "waypoints"] = "meta"
    """Form of the decisions. meta: words for speed and path; waypoints: [[x, y, t], ...] in the vehicle's frame."""
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)] = ("highway", "merge", "intersection", "roundabout")
    """Kinds of road. The samples of a split cycle through them."""
    seconds: Annotated[int, Field(ge=2, le=60)] = 10
    """Number of decisions until time is up. The goal is placed where the vehicle arrives in this time at 65 % of the
    speed limit. episode.max_turns must be at least this number."""
    traffic: Annotated[float, Field(ge=0, le=1.4)] = 1.0
    """Density of the traffic: 0 = almost none."""
    solvable: bool = False
    """Use only scenes that the expert solves in time. Testing a scene takes a moment."""
    width: Annotated[int, Field(ge=64, le=1024, multiple_of=32)] = 128
    """Width of an image in pixels. The height is half of it."""
    count: Positive = 4096
    """Number of scenes per split."""
    goal_negative: str = "Two cars have collided with each other on the road"
    """Part contrast: the text that images should not resemble."""
    goal_positive: str = "The road is clear with no car accidents"
    """Part contrast: the text that images should resemble."""
    goal_span: Annotated[float, Field(gt=0, le=2)] = 0.03
    """Part contrast: similarity gap of a blocked road. By how much the image's cosine similarity to goal_negative must
    exceed its similarity to goal_positive for the road to count as completely blocked."""

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
        return {part: float(part == settings.get("reward", cls.reward)) for part in PARTS}

    def samples(self, split: str) -> Sequence[Sample]:
        if importlib.util.find_spec("highway_env") is None:
            raise ConfigError("task.name=drive simulates the traffic with highway-env, which is not installed: "
                              "pip install 'vlrl[driving]'")
        return drawn(self, split, self._sample)

    def _sample(self, split: str, index: int) -> Sample:
        """Sample number `index` of a split. The name of the sample's scene contains the split, so that splits share no
        scene. With task.solvable, scenes are tried until the expert reaches the goal; DataError if it never does."""
        scenario, scene = self.scenarios[index % len(self.scenarios)], f"{self.seed}/{split}/{index}"
        row = {"scenario": scenario, "scene": scene, "category": scenario, "ask": _ASK[self.actions]}
        sample = Sample(id=f"{split}-{index:06d}", row=row)
        for other in range(1, _TRIES + 1):
            if not self.solvable or self.oracle_actions(sample) is not None:
                return sample
            sample = replace(sample, row={**row, "scene": f"{scene}/{other}"})
        raise DataError(f"sample '{sample.id}': task.solvable=true, but the expert reaches the goal in none of "
                        f"{_TRIES} scenes of {scenario}: change task.seconds={self.seconds}, lower task.traffic="
                        f"{self.traffic:g}, or leave {scenario} out of task.scenarios")

    def environment(self, sample: Sample) -> Environment:
        return DriveEnvironment(self, sample)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        count = max(1, len(answer.turns))
        sums = {part: sum(turn.parts.get(part, 0.0) for turn in answer.turns) for part in PARTS if part != "contrast"}
        return {part: value / count if part in _MEANS else value for part, value in sums.items()}

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """The part `contrast` of each episode in a group: VLM-RL's reward, averaged over the maximum number of seconds.
        A second with a collision or off the road has the reward -1. In any other second the reward is how well the
        speed fits the road ahead, multiplied by a term for lane keeping. None for an episode without images (a
        stored one)."""
        clip = services.clip  # looked up first, so that no image is read if the service is absent
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
        """Metrics by scenario: the means of success and of collision, e.g. `success/merge` and `collision/merge`."""
        return means((f"{part}/{record['sample']['scenario']}", record["parts"].get(part) or 0.0)
                     for record in records for part in ("success", "collision"))

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """The decisions of an expert that tries each action in a copy of the world first; None if the expert does not
        reach the goal in time."""
        from ._drive_expert import demonstration
        decisions = demonstration(sample["scenario"], sample["scene"], self.seconds, self.traffic,
                                  self.actions == "waypoints")
        return None if decisions is None else [decision_text(decision) for decision in decisions]


def read_decision(text: str, actions: str) -> Decision | None:
    """Parses the decision in a text: waypoints (`actions` = "waypoints"), or one word for speed and one for path. None
    if the text has no valid decision."""
    from ._drive_world import Decision
    said = answer_text(text)
    if actions == "waypoints":
        way = read_trajectory(said)
        return None if way is None else Decision(way=way)
    plan = read_plan(said, negation=True)
    if any(len(plan[head]) != 1 for head in HEADS) or plan["path"][0] not in PATHS:
        return None
    return Decision(plan["speed"][0], plan["path"][0])


def decision_text(decision: Decision) -> str:
    """Writes a decision as an answer of the model."""
    if decision.way is None:
        return f"{decision.speed}, {decision.path}"
    return f"[{', '.join(f'[{x:g}, {y:g}, {t:g}]' for x, y, t in decision.way)}]"
