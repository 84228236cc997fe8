"""Every recipe of grounding and gui: what cheats earn, bounds over hostile texts, the contract."""

from functools import cache

import pytest

from tests.tables import each
from tests.tasks.scaffold import assert_contract
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group

from . import test_grounding_recipes as grounding
from . import test_gui as gui

RECIPES = [("grounding", name) for name in ("soft_iou", *grounding.TABLES)] + [
    ("gui", name) for name in (*gui.TABLES, "gui_rcpo", "region_vote")]
BOX = [20.0, 10.0, 60.0, 50.0]
NEAR = [30.0, 10.0, 70.0, 50.0]  # IoU .6
ROWS = {"grounding": {**grounding.ROW, "labels": ["mug", "cat"], "boxes": [{"box": BOX, "label": "mug"}]},
        "gui": {**gui.ROW, "platform": "web"}}
think = grounding.think


@cache
def built(name, recipe):
    task = load(name, {"recipe": recipe})
    return task, task.sample_from_row(ROWS[name])


def rewards(task, sample, *texts):
    found = score_group(task, sample, [parse_answer(text) for text in texts], 0)
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
