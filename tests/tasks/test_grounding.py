"""Grounding: soft IoU, absent objects, conventions, drawn scenes; each recipe by hand, as its paper defines it."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tests.tables import each, refused
from tests.tasks.scaffold import think
from vlrl.config.schema import DataSettings
from vlrl.data.coordinates import make
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.tasks.grounding import RECIPES, Grounding
from vlrl.types import Sample


@pytest.fixture
def task():
    return load("grounding")


def score(task, text, **row):
    return task.score(Sample(id="r1", row={**ROW, **row}), parse_answer(text))


@each("text iou format", [
    ("[20, 10, 60, 50]", 1.0, 1), ("[20, 10, 60, 30]", 0.5, 1), ("[40, 30, 80, 70]", 400 / 2800, 1),
    ("[60, 50, 20, 10]", 0.0, 1),  # inverted
    ("[20, 10, 60]", 0.0, 0), ("It is [20, 10, 60, 50]", 1.0, 0),
    ('[{"bbox_2d": [20, 10, 60, 50], "label": "mug"}]', 1.0, 0),
    ("<think>[0, 0, 1, 1]</think><answer>[20, 10, 60, 50]</answer>", 1.0, 1),
    ("<answer>[0, 0, 1, 1]</answer><answer>[20, 10, 60, 50]</answer>", 1.0, 1), ("[٢٠, ١٠, ٦٠, ٥٠]", 0.0, 0),
    ("none", 0.0, 0), ("", 0.0, 0), ("[20, 10, 60, 30], [20, 10, 60, 50]", 0.5, 0)])
def test_soft_iou_by_hand(task, text, iou, format):
    assert score(task, text) == pytest.approx({"iou": iou, "format": format}, abs=1e-5)


@each("text iou", [("none", 1), ("no box", 1), ("", 0), ("<think>it is gone", 0), ("[1, 2, 3, 4]", 0), ("[1, 2, 3", 0)])
def test_an_absent_object(task, text, iou):
    assert score(task, text, boxes=[])["iou"] == iou
    sample = Sample(id="r1", row={**ROW, "boxes": []})
    assert task.oracle(sample) == "none" and task.target(sample) is None and task.overlay(sample, None) == []


@each("convention written", [
    ("norm1000", "[100, 100, 300, 500]"), ("norm999", "[100, 100, 300, 500]"), ("norm1", "[0.1, 0.1, 0.3, 0.5]"),
    ("processed", "[56, 28, 168, 140]"), ("original", "[20, 10, 60, 50]")])
def test_answers_in_every_convention(task, convention, written):
    task.coordinates = make(convention)
    sample = Sample(id="r1", row={**ROW, "processed_size": [560, 280]})
    assert task.score(sample, parse_answer(written))["iou"] == pytest.approx(1, abs=0.02)
    assert task.score(sample, parse_answer(task.oracle(sample)))["iou"] > 0.97
    assert task.parse(sample, parse_answer(written)) == pytest.approx([20, 10, 60, 50], abs=0.3)


def test_metrics_marks_and_rows(task, tmp_path):
    sample = Sample(id="r1", row=ROW)
    answer = parse_answer("[20, 10, 60, 30]")
    assert task.metrics(sample, answer, {"iou": 0.5, "format": 1.0}) == {"acc@.5": 1.0}
    assert task.metrics(sample, answer, {"iou": 0.49, "format": 1.0}) == {"acc@.5": 0.0}
    assert task.overlay(sample, [1, 2, 3, 4]) == [
        {"kind": "box", "at": [20, 10, 60, 50], "label": "mug", "role": "target"},
        {"kind": "box", "at": [1, 2, 3, 4], "label": "mug", "role": "answer"}]
    assert "mug" in task.messages(sample)[0]["content"][-1]["text"]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW), encoding="utf-8")
    task.data = DataSettings(train=str(path))
    assert task.oracle(task.samples("train")[0]) == "[20, 10, 60, 50]"
    sample = task.sample_from_row({**ROW, "expression": "{boxes}"})
    assert task.messages(sample)[0]["content"][-1]["text"] == (
        "Locate the {boxes}. Answer with its box as [x1, y1, x2, y2].")


test_bad_rows_are_named = refused(DataError, lambda change, task: task.sample_from_row({**ROW, **change}), [
    ({"expression": None}, "expression=None"), ({"width": None}, "width=None"), ({"height": 0}, "height=0"),
    ({"boxes": None}, "boxes=None"), ({"boxes": [[1, 2, 3, 4]]}, "box None"),
    ({"boxes": [{"box": [3, 2, 1, 4]}]}, "x1 < x2"), ({"boxes": [{"box": ["a", 2, 3, 4]}]}, "x1 < x2"),
    ({"boxes": [{"box": [1, 2, 3]}]}, "x1 < x2"), ({"boxes": [{"box": [1, 2, 3, 10**400]}]}, "x1 < x2"),
    ({"boxes": [{"box": [1, 2, 3, float("inf")]}]}, "x1 < x2"),
    ({"boxes": [{"box": [float("nan"), 2, 3, 4]}]}, "x1 < x2"), ({"boxes": [{"box": [True, 2, 3, 4]}]}, "x1 < x2"),
    ({"width": 10**400}, "width=1000"), ({"height": float("nan")}, "height=nan")], start=r"row 'r1'.*")


def test_drawn_scenes_and_own_guidance():
    task, other = load("grounding", {"drawn": True, "count": 5}), load("grounding", {"drawn": True, "count": 5})
    other.seed = 1
    rows = [[s.row for s in t.samples(split)] for t, split in ((task, "train"), (task, "heldout"), (other, "train"))]
    assert len(rows[0]) == 5 and rows[0] == [s.row for s in task.samples("train")]
    boxes = [[row["boxes"] for row in split] for split in rows]
    assert boxes[0] != boxes[1] and boxes[0] != boxes[2]
    for split in ("valid", "", "heldout-2"):
        with pytest.raises(ConfigError, match=rf"task 'grounding' has no split '{split}'"):
            task.samples(split)
    row = {"width": 200, "height": 100, "boxes": [{"box": [0, 0, 20, 20]}], "expression": "mug"}
    assert load("grounding").guidance(Sample(id="a", row={**row, "hints": ["On the desk."]}), []) == "On the desk."
    assert load("grounding").guidance(Sample(id="a", row={**row, "boxes": []}), []) is None
    assert load("grounding", {"recipe": "counting"}).guidance(Sample(id="a", row=row), []) is None


@each("size", [32, 33, 50, 300])
def test_scenes_of_any_size(size):
    for sample in load("grounding", {"drawn": True, "count": 20, "size": size}).samples("train"):
        (x1, y1, x2, y2) = sample["boxes"][0]["box"]
        assert 0 <= x1 < x2 <= size and 0 <= y1 < y2 <= size and sample.media[0].source.size == (size, size)


@each("key value", [("size", 31), ("size", 5000), ("size", 0), ("size", True), ("count", 0),
                                            ("count", -1), ("count", 2**63), ("count", "many"), ("count", 1.5)])
def test_sizes_and_counts_that_cannot_be_drawn(key, value):
    with pytest.raises(ConfigError, match=rf"task\.{key}={value!r}: "):
        load("grounding", {"drawn": True, key: value})


@each("box said", [
    ([0, 0, 20, 20], "top left"), ([90, 40, 130, 60], "middle centre"), ([190, 80, 200, 100], "bottom right"),
    ([0, 0, 200, 100], "middle centre"), ([60, 0, 72, 66], "top left"), ([62, 0, 72, 67], "middle centre")])
def test_guidance_is_the_ninth_of_the_image_that_it_lies_in(box, said):
    sample = Sample(id="a", row={"width": 200, "height": 100, "boxes": [{"box": box}], "expression": "mug"})
    assert load("grounding").guidance(sample, []) == f"It is at the {said} of the image."


LONG = "x" * 100_000
ROW = {"id": "r1", "width": 200, "height": 100, "expression": "mug", "boxes": [{"box": [20, 10, 60, 50]}]}
TWO = {**ROW, "labels": ["mug", "cat"], "boxes": [{"box": [20, 10, 60, 50], "label": "mug"},
                                                  {"box": [100, 20, 140, 60], "label": "cat"}]}
TWINS = {**ROW, "boxes": [{"box": [20, 10, 60, 50]}, {"box": [100, 20, 140, 60]}]}
ABSENT = {**ROW, "boxes": []}


def fenced(*boxes):
    entries = ", ".join(f'{{"bbox_2d": {list(box)}, "label": "{label}"}}' for *box, label in boxes)
    return f"```json\n[{entries}]\n```"


MUG, CAT, HALF = (20, 10, 60, 50, "mug"), (100, 20, 140, 60, "cat"), (20, 10, 60, 30, "mug")


def parts(recipe, row, text, step=0, **settings):
    task = load("grounding", {"recipe": recipe, **settings})
    (scored,) = score_group(task, task.sample_from_row(row), [parse_answer(text, step=step)], step)
    assert scored.error is None
    return tuple(scored.parts.values())


REC = [
    (ROW, think('{"bbox_2d": [20, 10, 60, 50]}'), 1, 1), (ROW, think('{"bbox_2d": [20, 10, 60, 30]}'), 0.5, 1),
    (ROW, think("[20, 10, 60, 50]"), 1, 0),  # the format wants braces
    (ROW, "", 0, 0), (ROW, think('{"bbox_2d": [20, 10, 60'), 0, 0),
    (ROW, think('{"bbox_2d": [60, 50, 20, 10]}'), 0, 1),  # inverted
    (ROW, think('{"bbox_2d": [20.0, 10, 60, 50]}'), 0, 0),  # whole numbers only
    (ROW, think('{"bbox_2d": [-20, 10, 60, 50]}'), 0, 0),
    (ROW, think("{[0, 0, 10, 10]}") + "<answer>{[20, 10, 60, 50]}</answer>", 0, 0),  # the first tag counts
    (ROW, "<think><answer>{[20, 10, 60, 50]}</answer></think><answer>{[0, 0, 10, 10]}</answer>", 0, 0),
    (ROW, think('{"bbox_2d": [20, 10, 60, 50]}') + " as you see", 1, 1),  # text around is allowed
    (ROW, think('{"框🙂": [20, 10, 60, 50]}'), 1, 1), (ROW, think('{"box": [٢٠, ١٠, ٦٠, ٥٠]}'), 0, 0),
    (ROW, think(LONG + '{"bbox_2d": [20, 10, 60, 50]}'), 1, 1), (ROW, "<answer>" * 12_000, 0, 0),
    (ROW, think("None"), 0, 0), (ABSENT, think("None"), 1, 1), (ABSENT, think('{"bbox_2d": [20, 10, 60, 50]}'), 0, 1),
    (ABSENT, "", 0, 0)]
OVD = [
    (TWO, think(fenced(MUG, CAT)), 1, 1), (TWO, think(fenced(MUG)), 0.5, 1),
    (TWO, think(fenced(MUG, MUG, CAT)), 2 / 3, 1),  # one box too many: times 2 / 3
    (TWO, think(fenced(HALF, CAT)), 0.55, 1),  # IoU .5 counts at one of ten thresholds
    (TWO, think(fenced((20, 10, 60, 50, "dog"), CAT)), 0.5, 1),
    (TWO, think(fenced((60, 50, 20, 10, "mug"), CAT)), 0.5, 1),  # inverted
    (TWO, think(fenced((20, 10, 60, 50, "MUG"), CAT)), 1, 1),
    (TWO, think('[{"bbox_2d": [20, 10, 60, 50], "label": "mug"}]'), 0, 1),  # no fence
    (TWO, think("```json\n[{\"bbox_2d\": [20, 10\n```"), 0, 1),
    (TWO, think(fenced(MUG)) + f"<answer>{fenced(MUG, CAT)}</answer>", 1, 0),  # the last tag counts
    (TWO, f"<think><answer>{fenced(MUG, CAT)}</answer></think><answer>None</answer>", 0, 0),
    (TWO, think(fenced(MUG, CAT)) + " there", 1, 0), (TWO, think("🙂 " + fenced(MUG, CAT)), 1, 1),
    (TWO, think(LONG + fenced(MUG, CAT)), 1, 1), (TWO, fenced(MUG, CAT), 0, 0), (TWO, "", 0, 0),
    (ABSENT, think("None"), 1, 1), (ABSENT, think("```json\n[]\n```"), 1, 1), (ABSENT, think(fenced(MUG)), 0, 1),
    (ABSENT, think(""), 0, 1), (ABSENT, think("[1, 2"), 0, 1),  # unreadable is not empty
    (ABSENT, "", 0, 0)]
GRIFFON = [
    (TWO, fenced(MUG, CAT), 1, 1, 1), (TWO, fenced(CAT, MUG), 1, 1, 1), (TWO, fenced(MUG), 1, 0.5, 1),
    (TWO, fenced((20, 10, 60, 34, "mug"), CAT), 0.8, 1, 1),  # GIoU .6: precision (.6 + 1) / 2, recalled at .5
    (TWO, fenced((20, 10, 60, 29, "mug"), CAT), 0.5, 0.5, 1),  # GIoU .475 is below both bars
    (TWO, fenced((20, 10, 60, 50, "dog"), (100, 20, 140, 60, "dog")), 1, 1, 1),  # labels decide the matching only
    (TWO, "[20, 10, 60, 50], [100, 20, 140, 60]", 1, 1, 0),  # read plainly
    (TWO, fenced((60, 50, 20, 10, "mug")), 0, 0, 1),  # inverted ones are dropped
    (TWO, "```json\n[{\"bbox_2d\": [20, 10]}]\n```", 0, 0, 0), (TWO, f"<think>{fenced(MUG, CAT)}</think>none", 0, 0, 0),
    (TWO, "<answer>" + fenced(MUG, CAT) + "</answer> 🙂", 1, 1, 1), (TWO, LONG + fenced(MUG, CAT), 1, 1, 1),
    (TWO, "[]", 0, 0, 0), (TWO, "", 0, 0, 0), (ABSENT, "", 1, 1, 1), (ABSENT, "[]", 1, 1, 1),
    (ABSENT, fenced(MUG), 0, 0, 0)]


def positions(*boxes):
    return "[" + ", ".join(f"{{'Position': {list(box)}, 'Confidence': {c}}}" for *box, c in boxes) + "]"


M, C, OFF = (20, 10, 60, 50), (100, 20, 140, 60), (0, 60, 20, 90)
VISUAL_RFT = [
    (TWINS, think(positions((*M, 0.9), (*C, 0.8))), 1, 0.85, 1),
    (TWINS, think(positions((*M, 0.9), (*OFF, 0.4))), 0.5, 0.75, 1),
    (TWINS, think(positions((*M, 0.9), (*M, 0.9))), 0.5, 0.9, 1),  # exact duplicates are one
    (TWINS, think(positions((*M, 0.8), (20, 10, 60, 42, 0.9))), 0.4, 0.55, 1),  # the surer one has the mug
    (TWINS, think(positions((*M, 5), (*C, -1))), 1, 0.5, 1),  # a confidence lies in [0, 1]
    (TWINS, think("[{'Position': [20, 10, 60, 50]}]"), 0, 0, 1), (TWINS, think("[{'Position': [20, 10"), 0, 0, 1),
    (TWINS, think(positions((60, 50, 20, 10, 1.0))), 0, 0, 1),
    (TWINS, think(positions((*M, 0.9))) + think("x"), 0.5, 0.9, 0),
    (TWINS, f"<think><answer>{positions((*M, 1.0))}</answer></think><answer>No Objects</answer>", 0, 0, 0),
    (TWINS, think(positions((*M, 0.9), (*C, 0.9))) + " done", 1, 0.9, 0),
    (TWINS, think("\n" + positions((*M, 0.9), (*C, 0.9)) + "\n"), 1, 0.9, 1),  # over several lines
    (TWINS, "", 0, 0, 0), (ABSENT, think("No Objects"), 1, 1, 1), (ABSENT, think(positions((*M, 0.9))), 0, 0.1, 1),
    (ABSENT, think(""), 0, 0, 1)]


def marked(*boxes):
    return "".join(f"<|box_start|>({a},{b}),({c},{d})<|box_end|>" for a, b, c, d in boxes)


PERCEPTION = [
    (ROW, marked(M), 1, 1), (ROW, marked((20, 10, 60, 30)), 0.25, 1), (ROW, marked(M, OFF), 0.5, 1),
    (TWINS, marked(C, M), 1, 1), (TWINS, marked(M), 0.5, 1), (ROW, "(20,10),(60,50)", 0, 0),
    (ROW, marked((60, 50, 20, 10)), 0, 1), (ROW, "the mug " + marked(M), 1, 0), (ROW, marked(M) + " there", 1, 0),
    (ROW, f"<think>{marked(M)}</think>{marked(OFF)}", 0, 1), (ROW, "<|box_start|>(20,10)<|box_end|>", 0, 0),
    (ROW, LONG + marked(M), 1, 0), (ROW, "", 0, 0), (ABSENT, "none", 1, 1),
    (ABSENT, marked(M), 0, 0), (ABSENT, "", 0, 0)]
QUESTION = {"id": "r1", "width": 200, "height": 100, "question": "Is it red?", "answer": "No"}
BINARY = [
    (ROW, think("yes"), 1, 1), (ROW, think("no"), 0, 1), (ROW, "yes", 1, 0), (ROW, think("unknown"), 0, 1),
    (ABSENT, think("No, there is none."), 1, 1), (ABSENT, think("not correct"), 1, 1), (ABSENT, think("yes"), 0, 1),
    (QUESTION, think("false"), 1, 1), (ROW, "<think>yes</think><answer>no</answer>", 0, 1),
    (ROW, "<think>a</think><answer>yes", 1, 0),  # an unclosed answer is still read
    (ROW, think("no") + think("yes"), 0, 0), (ROW, "<think>yes", 0, 0), (ROW, think("是 🙂"), 0, 1),
    (ROW, think("yes") + " sure", 1, 0), (ROW, "", 0, 0)]
OPTIONS = {"id": "r1", "width": 200, "height": 100, "question": "Which?", "options": ["a", "b", "c"], "answer": "B"}
CHOICE = [
    (TWO, think("A,B"), 1, 1), (TWO, think("A, B"), 1, 1), (TWO, think("B,A"), 0, 1), (TWO, think("A"), 0, 1),
    (TWO, think("A,A,B"), 1, 1), (OPTIONS, think("B"), 1, 1), (OPTIONS, think("(b)"), 1, 1),
    (OPTIONS, think("a red B"), 1, 1),  # an article is no letter
    (OPTIONS, think("A, B"), 0, 1), (OPTIONS, "B", 1, 0), (OPTIONS, "<think>B</think><answer>C</answer>", 0, 1),
    (OPTIONS, think("C") + think("B"), 0, 0), (OPTIONS, think("B") + " indeed", 1, 0), (OPTIONS, think("Ｂ"), 0, 1),
    (OPTIONS, think(LONG), 0, 1), (OPTIONS, "", 0, 0), (TWO, think("A and B"), 1, 1), (OPTIONS, think("A and B"), 0, 1),
    (OPTIONS, think("B is wrong"), 0, 1)]
OPEN = [
    (ROW, think('{"bbox_2d": [20, 10, 60, 50]}'), 1, 1), (ROW, think('{"bbox_2d": [20, 10, 60, 31]}'), 1, 1),
    (ROW, think('{"bbox_2d": [20, 10, 60, 30]}'), 0, 1),  # .5 is not above .5
    (ROW, think("[20.0, 10.0, 60.0, 50.0]"), 1, 0), (ROW, "[20, 10, 60, 50]", 1, 0),
    (ROW, think('{"bbox_2d": [60, 50, 20, 10]}'), 0, 1), (ROW, think("{[20, 10, 60"), 0, 0),
    (ROW, "<think>{[20, 10, 60, 50]}</think><answer>{[0, 0, 5, 5]}</answer>", 0, 1),
    (ROW, think("{[0, 0, 5, 5]}") + think("{[20, 10, 60, 50]}"), 0, 0),
    (ROW, think("{[20, 10, 60, 50]}") + " there", 1, 0), (ROW, think("{🙂 [20, 10, 60, 50]}"), 1, 1),
    (ROW, think("{" + LONG + "[20, 10, 60, 50]}"), 1, 1), (ROW, "", 0, 0),
    (ABSENT, think("none"), 1, 1), (ABSENT, think("{[20, 10, 60, 50]}"), 0, 1), (ABSENT, "", 0, 0)]
REASONING = [
    (ROW, think("[20, 10, 60, 50]"), 1, 1), (ROW, think("(20,10),(60,50)"), 1, 1),
    (ROW, think("[30, 20, 70, 60]"), 900 / 2300 - 200 / 2500, 1), (ROW, think("[100, 60, 120, 90]"), 0, 1),
    (ROW, think("[60, 50, 20, 10]"), 0, 1), (ROW, "[20, 10, 60, 50]", 0, 0), (ROW, "", 0, 0),
    (ABSENT, think("none"), 1, 1)]
COUNTING = [
    (TWINS, think("2"), 1, 1), (TWINS, think("There are 2 mugs"), 1, 1), (TWINS, think("two"), 0, 1),
    (TWINS, "2", 1, 0), (TWINS, think("12"), 0, 1), (ABSENT, think("0"), 1, 1), (ABSENT, "", 0, 0),
    ({**QUESTION, "question": "How many?", "answer": 4}, think("4"), 1, 1), ({**ROW, "count": 7}, think("7"), 1, 1),
    (TWINS, think("2^3"), 0, 1), (TWINS, think("2%"), 0, 1), (TWINS, think("2 is wrong"), 0, 1),
    (TWINS, think("4/2"), 0, 1), (TWINS, think("\uff12"), 1, 1)]
POINTS = {**ROW, "points": [[40, 30], [120, 40]]}
POINTING = [
    (TWINS, "[[40, 30], [120, 40]]", 1, 1), (TWINS, "[[40, 30]]", 0.5, 1), (TWINS, "[40, 30]", 0.5, 1),
    (TWINS, "[[40, 30], [41, 30]]", 0.5, 1), (TWINS, '```json\n[{"point_2d": [40, 30]}]\n```', 0.5, 1),
    (TWINS, "40, 30 and 120, 40", 1, 0), (POINTS, "[[45, 30], [120, 49]]", 1, 1), (POINTS, "[[45, 40]]", 0, 1),
    (ABSENT, "none", 1, 1), (ABSENT, "[]", 1, 1), (ABSENT, "[[1, 1]]", 0, 1), (ROW, "", 0, 0)]
TABLES = {"vlm_r1_rec": REC, "vlm_r1_ovd": OVD, "vision_r1_griffon": GRIFFON, "visual_rft_detection": VISUAL_RFT,
          "perception_r1": PERCEPTION, "curr_reft_binary": BINARY, "curr_reft_choice": CHOICE, "curr_reft_open": OPEN,
          "reasoning": REASONING, "counting": COUNTING, "pointing": POINTING}


@each("text p k", [  # P, K
    (fenced(MUG, CAT), 1, 1), (fenced(MUG), 0.5, 0.75), (fenced(HALF, CAT), 0.75, 1),
    (fenced(MUG, (*CAT[:4], "mug")), 0.5, 1),  # a matched pair of two labels has no IoU
    (fenced(MUG, CAT, MUG), 1, 1 - 1 / 6), (fenced((0, 0, 5, 5, "mug")), 0, 0)])
def test_weighted_sum_by_hand(text, p, k):
    row = {**TWO, "meta": {"accu_reward_method": "weighted_sum"}}
    paid = 0.7 * p + 0.3 * k
    assert parts("vlm_r1_ovd", row, think(text))[0] == pytest.approx(paid)
    assert parts("vlm_r1_ovd", TWO, think(text), ovd_reward="weighted_sum")[0] == pytest.approx(paid)


def test_rewards_of_rows_and_of_absent_objects():
    text = think(fenced(HALF, CAT, (0, 0, 9, 9, "cat")))
    rows = {name: {**TWO, "accu_reward_method": name} for name in ("od_ap", "od_ap50", "odLength")}
    found = {name: parts("vlm_r1_ovd", row, text)[0] for name, row in rows.items()}
    assert found["od_ap50"] == pytest.approx(1) and 0.5 < found["od_ap"] < 0.6
    assert found["odLength"] == pytest.approx(found["od_ap"] * 2 / 3) == parts("vlm_r1_ovd", TWO, text)[0]
    assert parts("vlm_r1_ovd", rows["od_ap"], text, ovd_reward="odLength")[0] == found["odLength"]
    with pytest.raises(DataError, match=r"accu_reward_method='mcq' is not a reward for boxes.*task.name=qa"):
        parts("vlm_r1_ovd", {**TWO, "meta": {"accu_reward_method": "mcq"}}, text)
    for text, paid in (("```json\n[]\n```", 1), ("None", 1), ("qz wv", 0), ("", 1), ("I do not know", 0),
                       ("<think>no cat", 0), ("<think>no</think>", 0)):
        assert parts("vision_r1_griffon", ABSENT, text) == (paid,) * 3


@each("recipe case", [(name, case) for name, table in TABLES.items() for case in table])
def test_by_hand(recipe, case):
    row, text, *expected = case
    assert parts(recipe, row, text) == pytest.approx(tuple(expected), abs=1e-9)


@each("settings step expected", [
    ({}, 0, (0.8, 1, 1)), ({}, 1499, (0.8, 1, 1)), ({}, 1500, (0.5, 0.5, 1)),
    ({"switch_step": 10}, 10, (0.5, 0.5, 1)), ({"progressive": False}, 9999, (0.8, 1, 1))])
def test_the_bars_of_griffon_rise(settings, step, expected):
    text = fenced((20, 10, 60, 34, "mug"), CAT)  # GIoU .6 and 1
    assert parts("vision_r1_griffon", TWO, text, step, **settings) == pytest.approx(expected)


test_rows_that_miss_what_a_recipe_needs = refused(
    DataError, lambda recipe, change: load("grounding", {"recipe": recipe}).sample_from_row({**ROW, **change}), [
    ("vlm_r1_ovd", {"labels": "mug"}, "labels=mug"), ("vlm_r1_ovd", {"labels": [1]}, "labels="),
    ("counting", {"count": 1.5}, "count=1.5"), ("pointing", {"points": [[1]]}, "points="),
    ("curr_reft_binary", {"answer": "maybe"}, "must be yes or no"), ("curr_reft_choice", {}, "0 options"),
    ("curr_reft_choice", {"options": list("abcdef")}, "6 options"),
    ("curr_reft_choice", {"options": ["a", "b"]}, "names none of the options"),
    ("counting", {"answer": "many"}, "must be a number"), ("vlm_r1_rec", {"boxes": None}, "boxes=None")
], start="row 'r1'.*")


class Mine(Grounding):
    prompt = "Where is the {expression}?"
    rewards: ClassVar = {"iou": 2.0, "format": 0.5}


def test_what_a_subclass_sets_itself_wins(monkeypatch):
    task = Mine()
    assert task.prompt == Mine.prompt and task.weights == {"iou": 2.0, "format": 0.5}
    assert Mine(prompt="{expression}?").prompt == "{expression}?"
    own = replace(RECIPES["soft_iou"], rewards={"iou": 3.0, "format": 0.0})
    monkeypatch.setitem(sys.modules, "my_recipes", SimpleNamespace(mine=lambda: own, other=lambda: 5))
    task = load("grounding", {"recipe": "my_recipes:mine"})
    assert task.weights == {"iou": 3.0, "format": 0.0}
    with pytest.raises(ConfigError, match=r"task\.recipe='my_recipes:other' must be one of"):
        load("grounding", {"recipe": "my_recipes:other"})
    with pytest.raises(ConfigError, match=r"task\.recipe='vlm_r1_red' is not known.*vlm_r1_rec"):
        load("grounding", {"recipe": "vlm_r1_red"})
    with pytest.raises(ConfigError, match=r"task\.recipe=5 must be one of"):
        load("grounding", {"recipe": 5})
    with pytest.raises(ConfigError, match=r"unknown setting 'task\.rewards\.iou'.*accuracy, format"):
        load("grounding", {"recipe": "vlm_r1_rec", "rewards": {"iou": 1.0}})
    assert load("grounding", {"recipe": "vlm_r1_rec", "rewards": {"format": 0.5}}).weights == {
        "accuracy": 1.0, "format": 0.5}


def test_prompts_and_marks():
    def asked(recipe, row):
        task = load("grounding", {"recipe": recipe})
        return task.messages(task.sample_from_row(row))[0]["content"][-1]["text"]
    assert "objects: [mug, cat]" in asked("vlm_r1_ovd", TWO) and "category 'mug'" in asked("visual_rft_detection", ROW)
    assert asked("curr_reft_binary", ROW).startswith("Is there any mug in the image?")
    assert asked("curr_reft_choice", OPTIONS).startswith("Which?\nA. a\nB. b\nC. c\n")
    assert asked("curr_reft_binary", QUESTION).startswith("Is it red?")
    drawn = load("grounding", {"recipe": "vlm_r1_ovd", "drawn": True, "count": 1})
    assert "{categories}" not in drawn.messages(drawn.samples("train")[0])[0]["content"][-1]["text"]
    assert asked("soft_iou", ROW) == "Locate the mug. Answer with its box as [x1, y1, x2, y2]."
    def marks(recipe, row, text):
        task = load("grounding", {"recipe": recipe})
        sample = task.sample_from_row(row)
        return [(m["kind"], m["at"], m["label"], m["role"])
                for m in task.overlay(sample, task.parse(sample, parse_answer(text)))]
    assert marks("vlm_r1_ovd", TWO, think(fenced(MUG)))[1:] == [
        ("box", [100, 20, 140, 60], "cat", "target"), ("box", [20, 10, 60, 50], "mug", "answer")]
    assert marks("pointing", POINTS, "[[1, 2]]")[2:] == [("point", [1, 2], "mug", "answer")]
    assert marks("curr_reft_binary", ROW, "yes") == [] and marks("counting", ROW, "1") == []


def test_what_is_measured_over_a_split():
    task = load("grounding", {"recipe": "vlm_r1_ovd"})
    records = []
    for row, text in ((TWO, think(fenced(MUG, CAT))), ({**TWO, "id": "r2"}, think(fenced(MUG)))):
        sample, answer = task.sample_from_row(row), parse_answer(text)
        records.append({"sample": sample.row, "parsed": task.parse(sample, answer), "target": task.target(sample)})
        assert task.metrics(sample, answer, {}) == {}
    # the mug is always found; the cat in half of the images: precision 1 up to recall .5, 51 of 101 points
    assert task.summarize(records) == pytest.approx({"map": (1 + 51 / 101) / 2, "map@.5": (1 + 51 / 101) / 2})
    rec = load("grounding", {"recipe": "vlm_r1_rec"})
    for row, text, acc in ((ROW, think("[20, 10, 60, 50]"), 1), (ROW, think("[20, 10, 60, 29]"), 0),
                           (ABSENT, think("None"), 1), (ROW, "", 0)):
        sample, answer = rec.sample_from_row(row), parse_answer(text)
        assert rec.metrics(sample, answer, rec.score(sample, answer)) == {"acc@.5": acc}
    assert rec.summarize([]) == {}


@each("recipe answer text", [
    ("curr_reft_choice", "C", "not C"), ("curr_reft_choice", "A", "It isn't A"), ("counting", 3, "not 3")])
def test_what_is_not_so_is_no_answer(recipe, answer, text):
    row = {**ROW, "boxes": [], "question": "Which?", "options": ["x", "y", "z"], "answer": answer}
    paid = [parts(recipe, row, think(text), negation=rule)[0] for rule in ("read", "ignored")]
    assert paid == [0, 1]
