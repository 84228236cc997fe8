"""Every shipped recipe: cheats, what makes an answer correct, templates that begin the answer, the contract."""

import math
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.recipe_scores import CASES, think
from tests.tables import each
from tests.tasks.scaffold import assert_contract
from vlrl import config
from vlrl.data.coordinates import Coordinates
from vlrl.data.sources.dataset import sample_from
from vlrl.errors import ConfigError
from vlrl.rewards.text import EnvironmentAction, completion_for, parse_answer
from vlrl.task import Task, load
from vlrl.task.scoring import score_group
from vlrl.task.tool_calls import calls_of
from vlrl.tasks import _web_actions  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
from vlrl.tools.tasks.score_rows import score_row
from vlrl.training import build_task
from vlrl.types import PastAction, Sample

from . import test_grounding as grounding
from . import test_gui as gui

RECIPES = [("grounding", name) for name in ("soft_iou", *grounding.TABLES)] + [
    ("gui", name) for name in (*gui.TABLES, "gui_rcpo", "region_vote")]
BOX = [20.0, 10.0, 60.0, 50.0]
NEAR = [30.0, 10.0, 70.0, 50.0]  # IoU .6
ROWS = {"grounding": {**grounding.ROW, "labels": ["mug", "cat"], "boxes": [{"box": BOX, "label": "mug"}]},
        "gui": {**gui.ROW, "platform": "web"}}


@cache
def built(name, recipe):
    task = load(name, {"recipe": recipe})
    return task, task.sample_from_row(ROWS[name])


def scores_of(task, sample, *texts):
    return score_group(task, sample, [parse_answer(text) for text in texts], 0)


def rewards(task, sample, *texts):
    found = scores_of(task, sample, *texts)
    assert all(s.error is None for s in found)
    return [s.reward for s in found]


WHOLE, CORNER, TINY = [0, 0, 200, 100], [0, 0, 2, 2], [39, 29, 41, 31]
HUNDRED = [[x * 20, y * 10, x * 20 + 20, y * 10 + 10] for y in range(10) for x in range(10)]
WRONG = [120, 60, 150, 90]


def cheats(task, sample):
    """Name -> text of what must not pay, for a recipe whose answers hold boxes or points."""
    write, right = task.used.write, task.used.write(task, sample, [BOX])
    found = {"whole image": [WHOLE], "hundred boxes": HUNDRED, "duplicates": [WRONG] * 100, "corner": [CORNER]}
    if right != write(task, sample, [TINY]):  # to a recipe of points this is the perfect answer
        found["tiny box in the middle"] = [TINY]
    texts = {name: write(task, sample, boxes) for name, boxes in found.items()}
    wrong = write(task, sample, [WRONG])
    bare, other = parse_answer(right).final, parse_answer(wrong).final
    return texts | {
        "answer in the thinking": f"<think>{bare}</think><answer>{other}</answer>",
        "answer in the thinking, no tag": f"<think>{bare}</think>{other}", "thinking alone": f"<think>{bare}",
        "tag in the thinking": f"<think><answer>{bare}</answer></think><answer>{other}</answer>",
        "nested thinking": f"<think>{right}</think>{wrong}", "silence": "",
        "prompt": task.messages(sample)[0]["content"][-1]["text"]}


@each("name recipe", [r for r in RECIPES if built(*r)[0].used.write and r[1] not in ("gui_rcpo", "region_vote")])
def test_no_cheat_beats_an_honest_mediocre_answer(name, recipe):
    task, sample = built(name, recipe)
    honest = rewards(task, sample, task.used.write(task, sample, [NEAR]))[0]
    for cheat, text in cheats(task, sample).items():
        earned = rewards(task, sample, text)[0]
        assert earned < honest, f"{cheat} earns {earned}, an honest answer {honest}"


@each("recipe", ["gui_rcpo", "region_vote"])
def test_no_cheat_beats_an_honest_member_of_a_group(recipe):
    task, sample = built("gui", recipe)
    honest = [f"[{20 + d}, 10, {60 + d}, 50]" for d in (0, 2, 4, 6, 8)]
    write = task.used.write
    for text in (write(task, sample, [WHOLE]), write(task, sample, [CORNER]), write(task, sample, HUNDRED),
                 write(task, sample, [WRONG] * 100), f"<think>{honest[2]}</think>{write(task, sample, [WRONG])}", ""):
        *others, cheat = rewards(task, sample, *honest, text)
        assert cheat < min(others)


@each("recipe mediocre texts", [
    ("curr_reft_binary", think("So yes"), ("", "yes, no", think("unknown"), think("no"), "<think>yes</think>no")),
    ("curr_reft_choice", think("It is A."), (think("A, B"), think("A,B,C,D,E"), "", "ABCDE", "<think>A</think>B")),
    ("counting", think("about 1"), (think("0123456789"), "0 1 2 3", "", "<think>1</think>2", think("one"))),
    ("pointing", "[[30, 20]]", (str([[x, y] for x in range(0, 200, 20) for y in range(0, 100, 10)]), "[[1, 1]]", "none",
                                "", "[[30, 20], [31, 20], [32, 20]]", "<think>[[30, 20]]</think>none"))])
def test_no_cheat_in_words_beats_an_honest_answer(recipe, mediocre, texts):
    task, sample = built("grounding", recipe)
    honest = rewards(task, sample, mediocre)[0]
    assert all(rewards(task, sample, text)[0] < honest for text in texts)


def contract_rows(name, recipe):
    """Rows with different answers, in several conventions."""
    if name == "gui":
        rows = [{}, {"box": [100, 20, 176, 60], "coordinates": "norm1"}, {"box": [10, 70, 60, 95], "history": ["tap"]},
                {"box": [120, 65, 190, 95], "processed_size": [196, 112]}]
        if built(name, recipe)[0].used.target is built("gui", "element")[0].used.target:
            return rows
        return [*rows[:2], *({**row, "box": None} for row in (gui.TYPE, gui.SCROLL, gui.BACK))]
    dogs = [{"box": [20, 50, 70, 92], "label": "dog"}, {"box": [100, 8, 160, 42], "label": "dog"},
            {"box": [100, 50, 160, 92], "label": "mug"}]
    rows = [{}, {"boxes": [{"box": [80, 33, 170, 83], "label": "cat"}], "coordinates": "norm1"},
            {"boxes": dogs, "labels": ["mug", "dog"], "expression": None, "processed_size": [196, 112]}]
    if built(name, recipe)[0].used.target is built("grounding", "soft_iou")[0].used.target:  # which refuse several
        rows[-1] = {**rows[-1], "boxes": dogs[-1:], "labels": ["mug"]}
    return [*rows, grounding.OPTIONS if recipe == "curr_reft_choice" else {"expression": "cup", "boxes": []}]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_the_contract(name, recipe, tmp_path):
    rows = [{**ROWS[name], **row, "id": str(i)} for i, row in enumerate(contract_rows(name, recipe))]
    assert_contract(name, {"recipe": recipe}, rows, tmp_path)


ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = {
    "grounding/vision_r1_griffon": {"precision": 0.5, "recall": 0.5}, "grounding/visual_rft_detection": {"iou": 0.5},
    "grounding/perception_r1": {"accuracy": 0.25}, "gui/gui_g1": {"hit": 0.5}, "gui/gui_g2": {"point": 0.5},
    "gui/gui_rcpo": {"consensus": 0.5}, "gui/se_gui": {"point": 1.0}, "gui/ui_r1": {"type": 0.5, "coordinate": 0.5},
    "video/time_r1": {"span": 0.5}, "video/videochat_r1_track": {"iou": 0.5}, "driving/alphadrive": {},
    "driving/alphadrive_released": {}}
"""Recipes whose outcome is not their accuracy from 0.5 on; {} = exactly the true plan."""


@cache
def made(name):
    task = build_task.make_task(config.load(ROOT / "configs" / f"{name}.yaml"))
    return task, sample_from(task, CASES[name].sample, ROOT)


@each("name", CASES)
def test_only_what_solves_the_sample_is_correct(name):
    """The oracle is; no answer of perfect form alone, and none that says nothing."""
    task, sample = made(name)
    if OUTCOMES.get(name, True):
        assert task.criterion == OUTCOMES.get(name, {"accuracy": 0.5})
    found = scores_of(task, sample, *wrong(name, task, sample))
    assert not any(s.correct for s in found) and any(s.correct is False for s in found)
    part = "format" if task.weights.get("format") and task.used.rewards["format"] else None
    assert part is None or any(s.parts[part] == 1 for s in found), "none of them has the form alone"
    perfect = task.oracle(sample)
    if perfect is not None:
        assert scores_of(task, sample, perfect)[0].correct is True


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
    right, silent = scores_of(task, sample, task.oracle(sample), "")
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
    assert scores_of(task, sample, task.oracle(sample))[0].reward == pytest.approx(reward)


class Shaped(Task):
    rewards = {"format": 1.0, "near": 1.0, "far": 0.5}
    outcome = {"near": 0.8, "far": 0.2}

    def score(self, sample, answer):
        return {"format": 1.0, "near": float(answer.text or math.nan), "far": 0.3}


def said(task, *texts):
    return [s.correct for s in scores_of(task, Sample(id="1", row={}), *texts)]


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
    (None, None, [True, False]), ("far", None, [True, True]), ("format", None, [True, True]),
    ("far", 0.3, [True, True]), (None, 0.1, [True, True]), ("of another task", None, [True, False])])
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
    (found,) = scores_of(Own(), Sample(id="1", row={}), "0.8")
    assert found.reward == pytest.approx(1.95) and found.correct is None and "KeyError" in (found.error or "")


BEGINNINGS = ("<think>", "<think>\n", "<think>\n\n</think>\n\n")


def paid(name, completions, **line):
    case, task = CASES[name], made(name)[0]
    rewards = score_row(task, {"sample": dict(case.sample), "completions": completions, **case.line, **line}, None)
    return [r["reward"] for r in rewards["rewards"]]


def written(given):
    return given["text"] if isinstance(given, dict) else given


def changed(given, text):
    return {**given, "text": text} if isinstance(given, dict) else text


@each("name", CASES)
def test_what_the_prompt_opened_is_paid_with_the_answer(name):
    """trl#6966: think-format reward always 0 because the template already opens <think>."""
    given = [(text, written(text), reward) for text, _, reward in CASES[name].scores]
    thinks = any("<think>" in text for _, text, _ in given)
    for opened in BEGINNINGS:
        rewards = paid(name, [changed(one, completion_for(text, opened)) for one, text, _ in given], opened=opened)
        for (_, text, expected), reward in zip(given, rewards, strict=True):
            assert reward == pytest.approx(expected) if text.startswith("<think>") or not thinks else (
                reward >= expected - 1e-9), (opened, text)  # an empty block has a form that a bare answer has not
    doubled = paid(name, [one for one, *_ in given], opened="<think>\n")
    assert all(reward <= expected + 1e-9 for (_, text, expected), reward in zip(given, doubled, strict=True)
               if text.startswith("<think>") and thinks)


@each("name", CASES)
def test_thinking_that_was_cut_earns_no_more_than_silence(name):
    """Thinking that names the answer, and never ends."""
    bare = [re.sub("</?answer>", "", written(text).rpartition("</think>")[2]) for text, *_ in CASES[name].scores]
    *cut, nothing = paid(name, [*(f"perhaps {text}, or" for text in bare), ""], opened="<think>\n")
    assert max(cut) <= nothing + 1e-9


def test_actions_behind_their_thinking():
    assert paid("qa/vision_r1_ptst", [think("5").removeprefix("<think>")]) == [0.0]
    task = load("recall", {})
    sample = task.samples("train")[0]
    turns = ("next", "next", task.oracle(sample))
    answer = parse_answer(f"Now.\n</think>\n\n{turns[-1]}", opened="<think>\n")
    assert task.score(sample, answer) == {"accuracy": 1.0, "format": 1.0}
    assert task.score(sample, parse_answer(turns[-1], opened="<think>\n")) == {"accuracy": 0.0, "format": 0.0}
    task = load("repair", {"base": "digits"})
    sample = task.samples("train")[0]
    right = task.other.oracle(sample)
    for text, done in ((f"I see.\n</think>\n\n{right}", True), (f"I see {right}", False), (right, False)):
        world = task.environment(sample)
        world.reset(0)
        action = EnvironmentAction(text, "<think>\n")
        assert world.step(pickle.loads(pickle.dumps(action))).done == done  # as it reaches another process
        turns = (PastAction(action=action, done=done),)
        assert task.score(sample, replace(parse_answer(text, opened="<think>\n"), turns=turns))["solved"] == done
    task = load("web", {})
    sample = Sample(id="1", row={"scale": 1.0, "width": 100, "height": 100, "processed_size": [100, 100]})
    task.coordinates = Coordinates()
    for form, text in (("call", "click(30, 40)"), ("ui_tars", "Thought: There.\nAction: click(start_box='(30,40)')")):
        action = EnvironmentAction(f"It is there.</think>\n{text}", "<think>")
        read = _web_actions.read(_web_actions.FORMS[form], task, sample, action)
        assert (read.verb, read.point) == ("click", (30, 40)) and _web_actions.FORMS[form].strict(action)
        with pytest.raises(_web_actions.UnreadableAction):
            _web_actions.read(_web_actions.FORMS[form], task, sample, EnvironmentAction(f"perhaps {text}", "<think>"))
    call = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>'
    assert [c.name for c in calls_of(EnvironmentAction(f"Look.</think>{call}", "<think>"))] == ["zoom"]
    assert calls_of(EnvironmentAction(f"Perhaps {call}", "<think>")) == []
