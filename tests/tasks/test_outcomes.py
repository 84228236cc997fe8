"""What makes an answer correct: of every shipped recipe, of own tasks, by the settings of a run; shipped configs."""

import math
import re
from pathlib import Path

import pytest

from tests.e2e.recipe_scores import CASES, think
from tests.tables import each
from vlrl import config
from vlrl.data.sources.dataset import sample_from
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, load
from vlrl.task.scoring import score_group
from vlrl.training import build_task
from vlrl.types import Sample

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = {
    "grounding/vision_r1_griffon": {"precision": 0.5, "recall": 0.5}, "grounding/visual_rft_detection": {"iou": 0.5},
    "grounding/perception_r1": {"accuracy": 0.25}, "gui/gui_g1": {"hit": 0.5}, "gui/gui_g2": {"point": 0.5},
    "gui/gui_rcpo": {"consensus": 0.5}, "gui/se_gui": {"point": 1.0}, "gui/ui_r1": {"type": 0.5, "coordinate": 0.5},
    "video/time_r1": {"span": 0.5}, "video/videochat_r1_track": {"iou": 0.5}, "driving/alphadrive": {},
    "driving/alphadrive_released": {}}
"""Recipes whose outcome is not their accuracy from 0.5 on; {} = exactly the true plan."""


def made(name):
    task = build_task.make_task(config.load(ROOT / "configs" / f"{name}.yaml"))
    return task, sample_from(task, CASES[name].sample, ROOT)


def scored(task, sample, *texts):
    return score_group(task, sample, [parse_answer(text) for text in texts], 0)


@each("name", CASES)
def test_only_what_solves_the_sample_is_correct(name):
    """The oracle is; no answer of perfect form alone, and none that says nothing."""
    task, sample = made(name)
    if OUTCOMES.get(name, True):
        assert task.criterion == OUTCOMES.get(name, {"accuracy": 0.5})
    found = scored(task, sample, *wrong(name, task, sample))
    assert not any(s.correct for s in found) and any(s.correct is False for s in found)
    part = "format" if task.weights.get("format") and task.used.rewards["format"] else None
    assert part is None or any(s.parts[part] == 1 for s in found), "none of them has the form alone"
    perfect = task.oracle(sample)
    if perfect is not None:
        assert scored(task, sample, perfect)[0].correct is True


def wrong(name, task, sample):
    """Texts that solve nothing; one of them in perfect form."""
    structured = "<think><planning>p</planning><caption>c</caption><reasoning>r</reasoning><summary>s</summary></think>"
    formed = {"video/videochat_r1_gqa": think("A") + "<glue>[(2, 4), (6, 8)]</glue>",
              "video/videochat_r1_track": think("[[0.8, 0.8, 0.9, 0.9], [0, 0.9, 0.1, 1]]"),
              "classification/rlcr": think("tabby cat") + "<confidence>0.8</confidence>",
              "qa/glm_v_rlcs": think("<|begin_of_box|>13<|end_of_box|>"),
              "qa/sari_structured": f"{structured}<answer>13</answer>"}
    write = getattr(task.used, "write", None)
    boxes = [write(task, sample, [[150.0, 70.0, 190.0, 90.0]])] if write and name != "gui/gui_rcpo" else []
    return [*boxes, *([formed[name]] if name in formed else []), think("nothing"), "", think("")]


EARNED = {"gui/se_gui": 3.0, "driving/alphadrive": 2.44, "driving/alphadrive_released": 3.6, "qa/vision_r1_ptst": 1.0,
          "video/video_r1": 2.0, "video/grpo_care": 2.0}
"""By the perfect answer where it is not the sum of the weights: bonuses, products, and parts that need more answers."""
UNPUBLISHED = {
    "classification": {"plain"}, "preference": {"direct", "respond"}, "qa": {"direct", "thinking", "easy_r1"},
    "driving": {"plan", "trajectory", "clip_baseline", "clip_goal"}, "gui": {"element", "click", "region_vote"},
    "grounding": {"soft_iou", "reasoning", "counting", "pointing"},
    "video": {"direct", "span", "time_r1_reasoning", "temporal_r1", "videochat_r1_span", "onethinker"}}


@each("name", [name for name in CASES if name != "gui/gui_rcpo"])  # whose perfect answer is what the others say
def test_perfect_answers_earn_everything_and_silence_nothing(name):
    task, sample = made(name)
    folder, recipe = name.split("/")
    assert task.used is load(folder, {"recipe": recipe}).used
    right, silent = scored(task, sample, task.oracle(sample), "")
    earned = EARNED.get(name) or sum(weight for weight in task.weights_at(0).values() if weight > 0)
    assert right.error is None and right.reward == pytest.approx(earned) and silent.reward <= 0


@each("folder", UNPUBLISHED)
def test_there_is_a_config_for_each_published_recipe(folder):
    found = {path.stem: path.read_text("utf-8") for path in (ROOT / "configs" / folder).glob("*.yaml")}
    found = {name: text for name, text in found.items() if name not in ("tiny", "digits")}
    assert set(found) - {"reward_model"} == {*load(folder)._recipes} - UNPUBLISHED[folder]
    assert [name for name, text in found.items() if not re.search(r"\(\d{4}\.\d{5}|\(25", text)] == [], "cite no paper"


@each("folder name recipe reward", [
    ("grounding", "vision_r1_griffon", "vision_r1_griffon", 2.0), ("gui", "se_gui", "element", 2.0),
    ("driving", "alphadrive", "plan", 2.1), ("video", "video_r1", "direct", 1.1)])
def test_configs_of_the_embedded_model(folder, name, recipe, reward):
    task = build_task.make_task(config.load(ROOT / "configs" / folder / "tiny.yaml"))
    assert task.used is load(folder, {"recipe": recipe}).used
    sample = sample_from(task, CASES[f"{folder}/{name}"].sample, ROOT)
    assert scored(task, sample, task.oracle(sample))[0].reward == pytest.approx(reward)


class Shaped(Task):
    rewards = {"format": 1.0, "near": 1.0, "far": 0.5}
    outcome = {"near": 0.8, "far": 0.2}

    def score(self, sample, answer):
        return {"format": 1.0, "near": float(answer.text or math.nan), "far": 0.3}


def said(task, *texts):
    return [s.correct for s in scored(task, Sample(id="1", row={}), *texts)]


def test_outcomes_of_own_parts():
    assert said(Shaped(), "0.8", "0.79", "2") == [True, False, True]
    assert said(Shaped(), "", "no number") == [None, None]
    task = Shaped()
    task.override_outcome("near", None)
    assert task.criterion == {"near": 0.8} and said(task, "0.8", "0.7") == [True, False]
    with pytest.raises(ConfigError, match=r"the part 'nera', which is missing from its rewards\. Did you mean 'near'"):
        type("Own", (Shaped,), {"outcome": {"nera": 1.0}})()
    found = config.load(ROOT / "configs" / "qa" / "mm_eureka.yaml", ["curriculum.part=format"])
    assert build_task.make_task(found).criterion == {"format": 0.5} and load("qa").criterion == {"accuracy": 0.5}


@each("rewards expected", [
    ({"format": 1.0, "accuracy": 1.0}, {"accuracy": 0.5}), ({"format": 2.0, "correct": 1.0}, {"correct": 0.5}),
    ({"format": 0.1, "iou": 1.0, "hit": 1.0}, {"iou": 0.5}), ({}, {})])
def test_what_counts_where_the_task_says_nothing(rewards, expected):
    task = type("Own", (Task,), {"rewards": rewards})
    assert task().criterion == expected
    assert task(rewards=dict.fromkeys(rewards, 0.0)).criterion == expected  # weights of a run change no outcome


@each("part least expected", [
    (None, None, [True, False]), ("far", None, [True, True]),
    ("format", None, [True, True]), ("far", 0.3, [True, True]), (None, 0.1, [True, True]),
    ("of another task", None, [True, False])])
def test_the_settings_of_a_run_override_it(part, least, expected):
    task = Shaped()
    task.override_outcome(part, least)
    assert said(task, "0.8", "0.2") == expected


def test_own_rules():
    class Own(Shaped):
        def correct(self, sample, answer, parts):
            return len(answer.text) == 3
    task = Own()
    assert said(task, "0.8", "0.79") == [True, False]
    task.override_outcome("near", 0.5)
    assert said(task, "0.8", "0.79") == [True, True]
    class Own(Shaped):
        def correct(self, sample, answer, parts):
            raise KeyError("gone")
    (found,) = scored(Own(), Sample(id="1", row={}), "0.8")
    assert found.reward == pytest.approx(1.95) and found.correct is None and "KeyError" in (found.error or "")
