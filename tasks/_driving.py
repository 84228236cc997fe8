"""Recipes of the driving task. The answer is a plan in words or a trajectory of waypoints; some recipes reward a plan
by an image of its outcome."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlrl.rewards import driving as rules
from vlrl.rewards.boxes import format_box
from vlrl.rewards.contrast import contrast_goal, goal_baseline
from vlrl.rewards.driving import HEADS
from vlrl.rewards.text import answer_text, think_answer_format
from vlrl.task.recipes import Recipe
from vlrl.types import Answer, Media, Parts, Sample

from ._shared import think_answer

Group = Callable[[Sequence[Sequence[str]]], list[float]]
_WORDS = ("the speed (KEEP, ACCELERATE, DECELERATE or STOP) and the path (STRAIGHT, LEFT_TURN, RIGHT_TURN, LEFT_CHANGE "
          "or RIGHT_CHANGE)")
_SCENE = "You are driving. You see {views}. Speed: {speed} m/s. Navigation: {navigation}. "
_SAME_TIME = 0.01  # seconds within which two times are equal


def words_of(plan: Any) -> dict[str, list[str]] | None:
    """The words of a row's plan, as {"speed": words, "path": words}; a plan may accept several words for each. None if
    "speed" or "path" is missing or has an unknown word."""
    if not isinstance(plan, Mapping):
        return None
    given: dict[str, Any] = {head: [plan.get(head)] if isinstance(plan.get(head), str) else plan.get(head)
                             for head in HEADS}
    right = all(isinstance(words, list) and all(isinstance(w, str) and w in HEADS[head] for w in words)
                and 0 < len(set(words)) < len(HEADS[head]) for head, words in given.items())
    return {head: [w for w in HEADS[head] if w in given[head]] for head in HEADS} if right else None


def needs_plan(_task: Any, row: Mapping[str, Any]) -> str | None:
    if words_of(row.get("plan")) is None:
        return (f"plan={str(row.get('plan'))[:200]} must be {{\"speed\": ..., \"path\": ...}}, each one of "
                f"{', '.join(HEADS['speed'])} and of {', '.join(HEADS['path'])}, or a list of some of them")
    return None


def plan_text(plan: Mapping[str, Sequence[str]]) -> str:
    """Writes a plan, {"speed": words, "path": words}, as in an answer: `SPEED, PATH`."""
    return ", ".join(word for head in HEADS for word in plan[head])


def _true_plan(_task: Any, sample: Sample) -> dict[str, list[str]] | None:
    return words_of(sample.get("plan"))


def _plan_of(task: Any, answer: Answer) -> dict[str, list[str]]:
    return rules.read_plan(answer_text(answer.text), task.negation == "read")


def _read_plan(task: Any, _sample: Sample, answer: Answer) -> dict[str, list[str]] | None:
    plan = _plan_of(task, answer)
    return plan if any(plan.values()) else None


def _oracle_plan(task: Any, sample: Sample) -> str | None:
    plan = _true_plan(task, sample)
    return plan_text(plan) if plan else None


def plan_metrics(task: Any, sample: Sample, given: Any) -> dict[str, float]:
    """The metrics of the parsed plan `given`: `speed_acc`, `path_acc` and, for both, `joint_acc`. Each is 1 if the
    words are the true words, else 0. {} for a row without a valid plan."""
    truth = _true_plan(task, sample)
    if truth is None:
        return {}
    right = {head: float(bool(given) and given[head] == truth[head]) for head in HEADS}
    return {**{f"{head}_acc": value for head, value in right.items()}, "joint_acc": min(right.values())}


def _is_plan(task: Any, sample: Sample, answer: Answer) -> bool | None:
    metrics = plan_metrics(task, sample, _plan_of(task, answer))
    return bool(metrics["joint_acc"]) if metrics else None


def plan_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a split: the F1 of every word, e.g. `f1/STOP`, and the means over the words for speed (`speed_f1`) and
    for the path (`path_f1`). Only words that occur in the true plans are included."""
    summary: dict[str, float] = {}
    for head in HEADS:
        pairs = [((r["parsed"] or {}).get(head, ()), r["target"][head]) for r in records if r["target"]]
        scores = rules.class_f1(pairs)
        summary |= {f"f1/{word}": score for word, score in scores.items()}
        if scores:
            summary[f"{head}_f1"] = sum(scores.values()) / len(scores)
    return summary


def one_plan(target: Any) -> dict[str, str] | None:
    """Returns a plan with one word each for speed and path as {"speed": word, "path": word}; None for any other."""
    single = isinstance(target, Mapping) and all(len(target[head]) == 1 for head in HEADS)
    return {head: target[head][0] for head in HEADS} if single else None


def alphadrive_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics that AlphaDrive's authors report: the F1 of every word, e.g. `alphadrive_f1/STOP`, and the accuracy
    of the answers by true plan, e.g. `alphadrive_acc/STOP_STRAIGHT`."""
    known = [(str(r["answer"]), plan) for r in records if (plan := one_plan(r["target"]))]
    cells: dict[str, list[bool]] = {}
    for text, plan in known:
        cells.setdefault(f"{plan['speed']}_{plan['path']}", []).append(rules.alphadrive_right(text, plan))
    return {**{f"alphadrive_f1/{word}": value for word, value in rules.alphadrive_f1(known).items() if known},
            **{f"alphadrive_acc/{cell}": sum(right) / len(right) for cell, right in sorted(cells.items())}}


def _plan(task: Any, sample: Sample, answer: Answer) -> Parts:
    plan, truth = _plan_of(task, answer), _true_plan(task, sample) or {}
    return {**{head: rules.subset_f1(plan[head], truth.get(head, ())) for head in HEADS},
            "format": rules.plan_format(answer.final)}


PLAN = Recipe(
    prompt=f"{_SCENE}Answer with {_WORDS} as SPEED, PATH.", rewards={"speed": 1.0, "path": 1.0, "format": 0.1},
    read=_read_plan, score=_plan, target=_true_plan, oracle=_oracle_plan, problem=needs_plan,
    correct=_is_plan)


# --- AlphaDrive -------------------------------------------------------------------------------------------------------


def _heads(pay: Callable[[float, float, float], float], novelty: Group) -> Any:
    """Makes a group reward function with the parts `speed` and `path`. Each part is `pay(f1, weight, new)`: the
    arguments are the F1, the mean weight and the novelty of the answer's words for the speed or the path. `novelty`
    computes the novelty for all answers of the group, from the words of each answer."""
    def group(task: Any, sample: Sample, answers: Sequence[Answer], _services: Any = None) -> list[Parts]:
        truth = _true_plan(task, sample) or {}
        plans = [_plan_of(task, answer) for answer in answers]
        parts: list[Parts] = [{} for _ in answers]
        for head, weights in HEADS.items():
            for i, new in enumerate(novelty([plan[head] for plan in plans])):
                words = plans[i][head]
                parts[i][head] = pay(rules.word_f1(words, truth.get(head, ())), rules.mean_weight(words, weights), new)
        return parts
    return group


def _alphadrive(pay: Callable[[float, float, float], float], novelty: Group) -> Recipe:
    return Recipe(
        prompt=f"{_SCENE}Plan the next three seconds: {_WORDS}. Output the thinking process in <think> </think> and "
               "the plan as SPEED, PATH in <answer> </answer>.",
        rewards={"speed": 1.0, "path": 1.0, "format": 1.0}, read=_read_plan,
        score=lambda _task, _sample, answer: {"format": think_answer_format(answer.text)}, target=_true_plan,
        oracle=lambda task, sample: (answer := _oracle_plan(task, sample)) and think_answer(
            answer, "I follow the route and watch the traffic."),
        group=_heads(pay, novelty), problem=needs_plan, correct=_is_plan)


# The paper (2503.07608, Algorithm 1): F1 * weight * diversity per head.
ALPHADRIVE = _alphadrive(lambda f1, weight, factor: f1 * weight * factor, rules.diversity)
# The released code adds +.4 where an answer's words occur for the first time, else -.4. It counts in the order of all
# prompts of a device, and gives an answer without any word +.4. Here that bonus is its mean over all orders of the
# group, and -.4 without a word. F1 is plain, where the code adds 1e-6 to its terms.
ALPHADRIVE_RELEASED = _alphadrive(lambda f1, weight, bonus: f1 * weight + bonus, rules.first_occurrence)


# --- trajectories -----------------------------------------------------------------------------------------------------


def needs_trajectory(_task: Any, row: Mapping[str, Any]) -> str | None:
    if row.get("trajectory") is None:
        return "the row has no trajectory, and task.recipe=trajectory compares with one: [[x, y, t], ...]"
    return None


def read_way(_task: Any, _sample: Sample, answer: Answer) -> list[list[float]] | None:
    return rules.read_trajectory(answer_text(answer.text))


def written_way(points: Sequence[Sequence[float]]) -> str:
    """Waypoints as an answer writes them: `[[x, y, t], ...]` with two decimals."""
    return f"[{', '.join(format_box([round(v, 2) for v in point]) for point in points)}]"


def _way_format(answer: Answer, points: Any, truth: Any) -> float:
    bare = answer.final.strip()
    complete = bool(points) and bare[0] == "[" and bare[-1] == "]" and len(points) == len(truth)
    return float(complete and all(abs(p[2] - t[2]) <= _SAME_TIME for p, t in zip(points, truth, strict=True)))


def risks(task: Any, sample: Sample, points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns two penalties of a trajectory, each 0 or 1: the first for hitting an obstacle, the second for leaving the
    road. Both are checked up to the time of the last true waypoint."""
    obstacles, drivable = sample.get("obstacles"), sample.get("drivable")
    if not obstacles and not drivable:
        return 0.0, 0.0
    times = rules.sample_times(sample["trajectory"][-1][2])
    vehicle = rules.footprints(points, sample.get("ego_size") or task.ego_size, times)
    return (float(bool(obstacles) and rules.collides(vehicle, obstacles, times)),
            float(bool(drivable) and rules.leaves(vehicle, drivable)))


def _trajectory(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of a trajectory: `l2`, `collision`, `off_road` and `format`. An answer that cannot be parsed
    gets the worst value of each part, so that leaving out the trajectory never pays."""
    points, truth = read_way(task, sample, answer), sample["trajectory"]
    if points is None:
        return {"l2": 0.0, "collision": 1.0, "off_road": 1.0, "format": 0.0}
    collision, off_road = risks(task, sample, points)
    return {"l2": rules.distance_score(points, truth, task.l2_scale), "collision": collision, "off_road": off_road,
            "format": _way_format(answer, points, truth)}


def way_metrics(_task: Any, sample: Sample, points: Any, parts: Parts) -> dict[str, float]:
    """The metrics of a trajectory:
        `l2@1s`, `l2@2s`, `l2@3s`: metres from the true position at that time, if the true trajectory is long enough;
        `collision_rate`: for rows with obstacles;
        `off_road_rate`: for rows with a road.

    An answer that cannot be parsed is scored as a vehicle that stays where it is."""
    truth = sample["trajectory"]
    times = [t for t in (1, 2, 3) if t <= truth[-1][2] + _SAME_TIME]
    away = rules.distances(points or [[0.0, 0.0, 1.0]], truth, times) if times else ()
    known = {"obstacles": "collision", "drivable": "off_road"}
    rates = {f"{part}_rate": float(parts[part] or 0.0) for field, part in known.items() if sample.get(field)}
    return {**{f"l2@{t}s": float(d) for t, d in zip(times, away, strict=True)}, **rates}


TRAJECTORY = Recipe(
    prompt=f"{_SCENE}Where will the vehicle be after {{times}} seconds? Answer with [[x, y, t], ...]: metres, x ahead "
           "and y to the left of where it is.",
    rewards={"l2": 1.0, "collision": -1.0, "off_road": -0.5, "format": 0.1}, read=read_way, score=_trajectory,
    target=lambda _task, sample: sample.get("trajectory"),
    oracle=lambda _task, sample: written_way(sample["trajectory"]) if sample.get("trajectory") else None,
    problem=needs_trajectory, outcome={"l2": 0.5})


# --- pictures of outcomes ---------------------------------------------------------------------------------------------


def needs_outcomes(_task: Any, row: Mapping[str, Any]) -> str | None:
    outcomes = row.get("outcomes")
    if not isinstance(outcomes, Mapping) or not outcomes:
        return ("the row has no outcomes, and task.recipe rewards images of a plan's outcome: "
                "{\"KEEP, STRAIGHT\": \"keep.png\", ...}")
    return None


def _outcomes(pay: Callable[[Any, Sequence[float]], float]) -> Any:
    """Makes a group reward function with the part `goal`. A row has images of the outcomes of some plans. The part is
    `pay(task, cosines)`, where `cosines` are the cosine similarities of the image for the answer's plan to
    task.goal_negative and task.goal_positive; 0 if the row has no image for this plan."""
    def group(task: Any, sample: Sample, answers: Sequence[Answer], services: Any = None) -> list[Parts]:
        clip = services.clip  # looked up first, so that no image is read if the service is absent
        plans = [plan_text(_plan_of(task, answer)) for answer in answers]
        shown = sorted({plan for plan in plans if plan in sample["outcomes"]})
        texts = [task.goal_negative, task.goal_positive]
        cosines = clip([_picture(sample["outcomes"][plan]) for plan in shown], texts) if shown else []
        paid = {plan: float(pay(task, [float(c) for c in row])) for plan, row in zip(shown, cosines, strict=True)}
        return [{"goal": paid.get(plan, 0.0)} for plan in plans]
    return group


def _picture(path: str) -> Any:
    from vlrl.config.schema import LimitsSettings
    from vlrl.data import media
    return media.load(Media(source=Path(path)), LimitsSettings()).frames[0]


def _by_outcome(pay: Callable[[Any, Sequence[float]], float]) -> Recipe:
    return replace(
        PLAN, rewards={"goal": 1.0, "format": 0.1}, oracle=lambda _task, _sample: None, problem=needs_outcomes,
        score=lambda _task, _sample, answer: {"format": rules.plan_format(answer.final)}, group=_outcomes(pay),
        needs=frozenset({"clip"}))


CLIP_GOAL = _by_outcome(lambda task, cosines: contrast_goal(cosines[0], cosines[1], task.goal_span))
CLIP_BASELINE = _by_outcome(lambda task, cosines: goal_baseline(
    cosines[1], cosines[0], task.goal_texts_cosine, task.goal_alpha))
