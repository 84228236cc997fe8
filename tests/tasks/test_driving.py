"""Each driving recipe by hand, its cheats, bounds, rows and metrics."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from PIL import Image

from tests.tables import each, refused
from tests.tasks import scaffold
from tests.tasks.scaffold import assert_contract, scores, think
from vlrl.errors import DataError, TaskError
from vlrl.task import load
from vlrl.task.services import Services
from vlrl.testing.answers import _mark_problem

LONG = "x" * 100_000
ROW = {"id": "r1", "image": "a.png", "plan": {"speed": "KEEP", "path": "LEFT_TURN"}, "speed_mps": 8.25,
       "navigation": "Turn left"}
TWO = {**ROW, "plan": {"speed": ["DECELERATE", "STOP"], "path": ["STRAIGHT"]}}
WAY = {**ROW, "trajectory": [[4, 0, 0.5], [8, 0, 1], [12, 0, 1.5], [16, 0, 2], [20, 0, 2.5], [24, 0, 3]],
       "obstacles": [{"center": [30, 0], "size": [4, 2]}], "drivable": [[[-5, -3], [40, -3], [40, 3], [-5, 3]]]}
RECIPES = ("plan", "alphadrive", "alphadrive_released", "trajectory")
BOUNDS = {"alphadrive_released": (-0.4, 1.4)}
built = partial(scaffold.built, "driving")


def scored(recipe, row, *texts, services=None, task=None):
    return scores(task or built(recipe), row, *texts, services=services)


def heads(found):
    return [(s.parts["speed"], s.parts["path"]) for s in found]


def written(*points):
    return f"[{', '.join(str(list(point)) for point in points)}]"


PLAN = [  # speed, path, format
    (ROW, "KEEP, LEFT_TURN", 1, 1, 1), (ROW, "KEEP, STRAIGHT", 1, 0, 1), (ROW, "STOP, STRAIGHT", 0, 0, 1),
    (ROW, "KEEP, STOP, LEFT_TURN", 0, 1, 1), (TWO, "STOP, STRAIGHT", 2 / 3, 1, 1),  # a wrong word, a missing one
    (TWO, "STOP, DECELERATE, STRAIGHT", 1, 1, 1), (ROW, "LEFT_TURN, KEEP", 1, 1, 0),
    (ROW, "I will KEEP speed for the LEFT_TURN.", 1, 1, 0), (ROW, think("KEEP, LEFT_TURN"), 1, 1, 1),
    (ROW, "<think>KEEP, LEFT_TURN</think>STOP, STRAIGHT", 0, 0, 1), (ROW, "<think>KEEP, LEFT_TURN", 0, 0, 0),
    (ROW, "<answer>STOP, STRAIGHT</answer><answer>KEEP, LEFT_TURN</answer>", 0, 0, 1),
    (ROW, "keep, left_turn", 0, 0, 0),
    (ROW, "KEEP, ACCELERATE, DECELERATE, STOP, STRAIGHT, LEFT_TURN, RIGHT_TURN, LEFT_CHANGE, RIGHT_CHANGE",
     0, 0, 0), (ROW, "", 0, 0, 0)]
ALONE = [  # AlphaDrive of a single answer: the share of its plan is 1, so the factor is .8
    (ROW, think("KEEP, LEFT_TURN"), 0.64, 0.8, 1), (ROW, think("STOP, LEFT_TURN"), 0, 0.8, 1),
    (ROW, think("KEEP, STOP, LEFT_TURN"), 2 / 3 * 0.9 * 0.8, 0.8, 1), (TWO, think("STOP, STRAIGHT"), 1.6 / 3, 0.64, 1),
    (TWO, think("STOP, DECELERATE, STRAIGHT"), 0.8, 0.64, 1), (ROW, "KEEP, LEFT_TURN", 0.64, 0.8, 0),
    (ROW, "<answer>KEEP, LEFT_TURN</answer>", 0.64, 0.8, 0), (ROW, think("LEFT_TURN"), 0, 0.8, 1),
    (ROW, "<think>KEEP, LEFT_TURN</think><answer>none</answer>", 0, 0, 1),
    (ROW, think("STOP, STRAIGHT") + think("KEEP, LEFT_TURN"), 0, 0, 0), (ROW, think(""), 0, 0, 1), (ROW, "", 0, 0, 0)]
RELEASED = [  # a single answer is always new
    (ROW, think("KEEP, LEFT_TURN"), 1.2, 1.4, 1), (ROW, think("STOP, LEFT_TURN"), 0.4, 1.4, 1),
    (ROW, think("KEEP, STOP, LEFT_TURN"), 1, 1.4, 1), (TWO, think("STOP, STRAIGHT"), 2 / 3 + 0.4, 1.2, 1),
    (TWO, think("STOP, DECELERATE, STRAIGHT"), 1.4, 1.2, 1), (ROW, "KEEP, LEFT_TURN", 1.2, 1.4, 0),
    (ROW, think(""), -0.4, -0.4, 1),  # the released code pays +.4 here
    (ROW, think("LEFT_TURN"), -0.4, 1.4, 1), (ROW, "<think>KEEP, LEFT_TURN", -0.4, -0.4, 0), (ROW, "", -0.4, -0.4, 0),
    (ROW, think("🙂 STOP STRAIGHT"), 0.4, 0.4, 1)]
EXACT = WAY["trajectory"]
WAYS = [  # l2, collision, off_road, format
    (WAY, written(*EXACT), 1, 0, 0, 1), (WAY, think(written(*EXACT)), 1, 0, 0, 1),
    (WAY, f"Here: {written(*EXACT)}", 1, 0, 0, 0), (WAY, written([24, 0, 3]), 1, 0, 0, 0),  # not the times asked for
    (WAY, written(*EXACT[:5]), math.exp(-4 / 6 / 2), 0, 0, 0),  # the vehicle waits at the last
    (WAY, written(*([x, 1, t] for x, _, t in EXACT)), math.exp(-0.5), 0, 0, 1),
    (WAY, written(*([x, 2.5, t] for x, _, t in EXACT)), math.exp(-1.25), 0, 1, 1),
    (WAY, written(*([x * 1.125, 0, t] for x, _, t in EXACT)), math.exp(-1.75 / 2), 1, 0, 1),  # ends at 27
    (WAY, written(*([0, 0, t] for _, _, t in EXACT)), math.exp(-7), 0, 0, 1),
    ({**WAY, "obstacles": [], "drivable": None}, written([200, 90, 3]), math.exp(
        -np.mean([math.hypot(200 * t / 3 - x, 30 * t) for x, _, t in EXACT]) / 2), 0, 0, 0),
    ({**WAY, "ego_size": [8.1, 2]}, written(*EXACT), 1, 1, 0, 1), ({**WAY, "ego_size": [4, 6.5]}, written(*EXACT),
                                                                 1, 0, 1, 1),
    (WAY, written(*EXACT) * 2, 0, 1, 1, 0), (WAY, written(*EXACT[::-1]), 0, 1, 1, 0), (WAY, "[[4, 0", 0, 1, 1, 0),
    (WAY, f"<think>{written(*EXACT)}</think>none", 0, 1, 1, 0), (WAY, "KEEP, STRAIGHT", 0, 1, 1, 0),
    (WAY, "", 0, 1, 1, 0)]
TABLES = {"plan": PLAN, "alphadrive": ALONE, "alphadrive_released": RELEASED, "trajectory": WAYS}


@each("recipe", TABLES)
def test_by_hand(recipe):
    names = ("l2", "collision", "off_road", "format") if recipe == "trajectory" else ("speed", "path", "format")
    for row, text, *expected in TABLES[recipe]:
        parts = scored(recipe, row, text)[0].parts
        assert [parts[name] for name in names] == pytest.approx(expected, abs=1e-9), ascii(text[:80])


@each("recipe", ["plan", "alphadrive"])
def test_what_not_to_do_is_no_plan(recipe):
    ignored = load("driving", {"recipe": recipe, "negation": "ignored"})
    for text in ("do not KEEP, LEFT_TURN", "KEEP, don't LEFT_TURN", "I would not KEEP and not LEFT_TURN"):
        assert heads(scored(recipe, ROW, think(text))) == [(0, 0)]
        bare = heads(scored(recipe, ROW, think("KEEP, LEFT_TURN")))
        assert heads(scored(recipe, ROW, think(text), task=ignored)) == bare


def test_groups_by_hand():
    keep, stop = think("KEEP, LEFT_TURN"), think("STOP, STRAIGHT")
    assert heads(scored("alphadrive", ROW, *[keep] * 7, stop)) == [pytest.approx((0.64, 0.8))] * 7 + [(0, 0)]
    assert heads(scored("alphadrive", ROW, keep, *[stop] * 7))[0] == pytest.approx((0.8 * 0.875, 0.875))
    assert heads(scored("alphadrive", ROW, keep, "", *[stop] * 6, ""))[0] == pytest.approx((0.8 * 6 / 7, 6 / 7))
    assert heads(scored("alphadrive_released", ROW, keep, keep, stop)) == [
        pytest.approx(v) for v in ((0.8, 1), (0.8, 1), (0.4, 0.4))]
    same = heads(scored("alphadrive_released", ROW, *[keep] * 8))
    assert same == [pytest.approx((0.8 - 0.3, 1 - 0.3))] * 8
    assert [s.reward for s in scored("alphadrive", ROW, keep)] == [pytest.approx(2.44)]
    # Only where all are right; and no diversity makes a wrong answer better than the right one.
    keep, stop = think("KEEP, LEFT_TURN"), think("STOP, RIGHT_TURN")
    for recipe in ("alphadrive", "alphadrive_released"):
        same = scored(recipe, ROW, *[keep] * 8)[0].reward
        alone = scored(recipe, ROW, keep, *[stop] * 7)
        assert same < alone[0].reward
        mixed = scored(recipe, ROW, *[keep] * 7, stop)
        assert mixed[7].reward < mixed[0].reward, recipe


EVERY = ", ".join(word for table in ("KEEP ACCELERATE DECELERATE STOP", "STRAIGHT LEFT_TURN RIGHT_TURN LEFT_CHANGE "
                                     "RIGHT_CHANGE") for word in table.split())


@each("recipe", ["plan", "alphadrive", "alphadrive_released"])
def test_cheats_of_plans(recipe):
    """In a group that is otherwise wrong in one head, an honest answer earns more than any cheat in its place."""
    wrap = str if recipe == "plan" else think
    others = [wrap("KEEP, STRAIGHT"), wrap("STOP, LEFT_TURN")]
    right, half = wrap("KEEP, LEFT_TURN"), wrap("DECELERATE, LEFT_TURN")

    def earned(text):
        return scored(recipe, ROW, text, *others)[0].reward
    cheats = (wrap(EVERY), wrap(""), "", LONG, wrap(EVERY) * 2, f"<think>{EVERY}</think>",
              "KEEP LEFT_TURN " * 500 + EVERY, f"<think>KEEP, LEFT_TURN</think><answer>{EVERY}</answer>",
              "the plan above", wrap(ROW["navigation"]))
    assert max(map(earned, cheats)) < earned(half) < earned(right)


def test_cheats_of_trajectories():
    row = {**WAY, "trajectory": [[4, 0.2, 0.5], [8, 0.8, 1], [12, 1.6, 1.5], [15, 2.5, 2], [18, 4, 2.5], [20, 6, 3]],
           "drivable": [[[-5, -3], [40, -3], [40, 9], [-5, 9]]]}
    task = built("trajectory")
    sample = task.sample_from_row(row)
    honest = written(*([x + 0.5, y - 0.5, t] for x, y, t in row["trajectory"]))
    cheats = {**task.cheats(sample), "silence": "", "in the thinking": f"<think>{task.oracle(sample)}</think>[]",
              "two ways": f"{task.oracle(sample)} or {honest}", "far": "[[999, 999, 3]]", "every action": EVERY,
              "at once": "[[20, 6, 0.001], [20, 6, 3]]"}
    earned = {name: s.reward for name, s in zip(cheats, scored("trajectory", row, *cheats.values()), strict=True)}
    assert {"no movement", "straight on"} <= set(earned)
    assert max(earned.values()) < scored("trajectory", row, honest)[0].reward, earned
    sample = built("trajectory").sample_from_row(WAY)
    assert set(built("trajectory").cheats(sample)) == {"no movement"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_contract(recipe, tmp_path):
    behind = {"center": [-12, 4], "size": [4, 2], "velocity": [1, 0]}
    plans = itertools.product(("KEEP", "ACCELERATE", "DECELERATE", "STOP"), ("STRAIGHT", "LEFT_TURN", "RIGHT_CHANGE"))
    rows = []
    for i, (speed, path) in enumerate(plans):
        bend, pace = {"S": 0, "L": 1, "R": -0.6}[path[0]], {"K": 4, "A": 5, "D": 2.5, "S": 1}[speed[0]]
        way = [[pace * k, bend * k * k / 4, k / 2] for k in range(1, 7)]
        rows.append({**WAY, "id": str(i), "image": None, "plan": {"speed": speed, "path": path}, "trajectory": way,
                     "drivable": [[[-5, -12], [40, -12], [40, 12], [-5, 12]]],
                     "obstacles": [{"center": [40, 0], "size": [4, 2]}, behind]})
    assert_contract("driving", {"recipe": recipe}, rows, tmp_path)


test_rows_that_cannot_be_used = refused(
    DataError, lambda recipe, change: built(recipe).sample_from_row({**ROW, **change}), [
    ("plan", {"plan": None}, "plan=None must be"), ("alphadrive", {"plan": {"speed": "KEEP"}}, "plan=.*must be"),
    ("plan", {"plan": {"speed": "FAST", "path": "STRAIGHT"}}, "KEEP, ACCELERATE"),
    ("plan", {"plan": {"speed": [], "path": ["STRAIGHT"]}}, "or a list"),
    ("plan", {"plan": {"speed": [["KEEP"]], "path": "STRAIGHT"}}, "plan="),
    ("trajectory", {"trajectory": None}, "the row has no trajectory"),
    ("trajectory", {"trajectory": [[1, 2]]}, r"trajectory=\[\[1, 2\]\]: a way-point must be"),
    ("plan", {"trajectory": [[1, 2, 0]]}, "t must rise from above 0"),
    ("plan", {"trajectory": [[[1, 2, 3]]]}, "way-point"), ("plan", {"trajectory": []}, "1 to 100 way-points"),
    ("plan", {"obstacles": [{"center": [1, 2]}]}, r"obstacles\[0\]=.*size must be"),
    ("plan", {"obstacles": 3}, "a list"), ("plan", {"drivable": [[[1, 2], [3, 4]]]}, r"drivable\[0\]=.*at least three"),
    ("plan", {"ego_size": [0, 1]}, "ego_size="), ("plan", {"to_pixels": [[1, 2], [3, 4]]}, "to_pixels="),
    ("plan", {"speed_mps": "fast"}, "speed_mps=fast"), ("plan", {"navigation": 3}, "navigation=3"),
    ("plan", {"cameras": ["front", "left"]}, "for each of the 1 pictures"), ("plan", {"frames": [1]}, "seconds <= 0"),
    ("clip_goal", {}, "the row has no outcomes"), ("clip_goal", {"outcomes": {"KEEP": "../a.png"}}, "lies outside")])


def test_prompts():
    def text(recipe, row, **settings):
        task = load("driving", {"recipe": recipe, **settings}) if settings else built(recipe)
        return task.messages(task.sample_from_row(row))[0]["content"][-1]["text"]
    assert text("plan", ROW).startswith(
        "You are driving. You see the view from the vehicle. Speed: 8.2 m/s. Navigation: Turn left. Answer with the ")
    views = {"images": ["a.png", "b.png", "c.png"], "image": None}
    assert "You see 3 views from the vehicle. Speed: unknown m/s. Navigation: none." in text(
        "alphadrive", {**ROW, **views, "speed_mps": None, "navigation": None})
    assert "You see front camera, 0.5 s ago; front camera, now; left camera, now. S" in text(
        "plan", {**ROW, **views, "cameras": ["front", "front", "left"], "frames": [-0.5, 0, 0]})
    assert "after 0.5, 1, 1.5, 2, 2.5, 3 seconds?" in text("trajectory", WAY)
    assert text("plan", ROW, prompt="{navigation} at {speed}") == "Turn left at 8.2"
    task = built("plan")
    kinds = [part["type"] for part in task.messages(task.sample_from_row({**ROW, **views}))[0]["content"]]
    assert kinds == ["image", "image", "image", "text"]


def measured(recipe, *pairs):
    return scaffold.measured(built(recipe), *zip(*pairs, strict=True))


def test_metrics():
    single, split = measured("plan", (ROW, "KEEP, LEFT_TURN"), (ROW, "KEEP, STRAIGHT"), (TWO, "STOP, STRAIGHT"),
                             (TWO, ""))
    assert [list(m.values()) for m in single] == [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert list(single[0]) == ["speed_acc", "path_acc", "joint_acc"]
    assert split == pytest.approx({
        "f1/KEEP": 1, "f1/DECELERATE": 0, "f1/STOP": 2 / 3, "speed_f1": 5 / 9, "f1/LEFT_TURN": 2 / 3,
        "f1/STRAIGHT": 0.5, "path_f1": 7 / 12})
    assert measured("alphadrive", (TWO, think("STOP, DECELERATE, STRAIGHT")))[0][0]["joint_acc"] == 1
    single, split = measured(
        "trajectory", (WAY, written(*([x, 1, t] for x, _, t in EXACT))), (WAY, ""), (
            {**WAY, "trajectory": EXACT[:4], "obstacles": []}, written([12, 0, 1.5], [28, 0, 2.5])))
    assert split == {}
    assert single[0] == {"l2@1s": 1, "l2@2s": 1, "l2@3s": 1, "collision_rate": 0, "off_road_rate": 0}
    assert single[1] == {"l2@1s": 8, "l2@2s": 16, "l2@3s": 24, "collision_rate": 1, "off_road_rate": 1}
    assert single[2] == {"l2@1s": 0, "l2@2s": 4, "off_road_rate": 0}


def test_the_path_in_the_picture():
    matrix = [[0, -10, 0, 100], [-10, 0, 0, 200], [0, 0, 0, 1]]
    row = {**WAY, "to_pixels": matrix, "image": None, "images": ["a", "b", "c"], "frames": [-1, 0, 0]}
    task = built("trajectory")
    sample = task.sample_from_row({**row, "trajectory": [[5, 0, 1], [10, 1, 2]]})
    target, answer = task.overlay(sample, [[5, 1, 1]])
    assert target == {"kind": "path", "at": [[100, 200], [100, 150], [90, 100]], "label": "path", "role": "target",
                      "media": 1}
    assert answer["at"] == [[100, 200], [90, 150]] and answer["role"] == "answer"
    assert [_mark_problem(mark) for mark in (target, answer)] == [None, None]
    assert "at least 2 points" in str(_mark_problem({**target, "at": [[1, 2]]}))
    assert "finite" in str(_mark_problem({**target, "at": [[1, 2], [3, float("nan")]]}))
    assert task.overlay(task.sample_from_row(WAY), [[5, 1, 1]]) == []
    assert [m["role"] for m in built("plan").overlay(sample, {"speed": ["KEEP"], "path": []})] == ["target"]


def brightness(images, texts):
    """A service whose cosine with the first text falls with brightness, and with the others rises."""
    bright = np.array([np.asarray(image).mean() / 255 for image in images])
    return np.stack([0.02 * (1 - bright) if i == 0 else 0.02 * bright for i in range(len(texts))], axis=1)


def test_outcomes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, shade in (("dark", 0), ("middle", 102), ("bright", 255)):
        Image.new("RGB", (8, 8), (shade,) * 3).save(tmp_path / f"{name}.png")
    row = {**ROW, "plan": None, "outcomes": {
        "KEEP, LEFT_TURN": "dark.png", "STOP, STRAIGHT": "middle.png", "KEEP, STRAIGHT": "bright.png"}}
    texts = ["KEEP, LEFT_TURN", "STOP, STRAIGHT", "KEEP, STRAIGHT", "STOP, LEFT_TURN", "", "STRAIGHT and KEEP"]
    services = Services(given={"clip": brightness})
    found = [s.parts for s in scored("clip_goal", row, *texts, services=services)]
    assert [p["goal"] for p in found] == pytest.approx([1 - 0.02 / 0.03, 1 - 0.004 / 0.03, 1, 0, 0, 1])
    assert [p["format"] for p in found] == [1, 1, 1, 1, 0, 0]
    assert [s.parts["goal"] for s in scored("clip_baseline", row, *texts[:3], services=services)] == pytest.approx(
        [0, 0.008, 0.02])
    task = built("clip_goal")
    assert task.needs == {"clip"} and task.oracle(task.sample_from_row(row)) is None
    assert scored("clip_goal", row, texts[0])[0].parts == {"format": 1}  # scoring without services leaves the part out
    with pytest.raises(TaskError, match="the service 'clip' is not available"):
        scored("clip_goal", row, *texts, services=Services())
