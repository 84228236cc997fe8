import json

import pytest

from tests.tables import each, refused
from vlrl.config.schema import DataSettings
from vlrl.data.coordinates import make
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.types import Sample

ROW = {"id": "r1", "width": 200, "height": 100, "expression": "the red mug", "boxes": [{"box": [20, 10, 60, 50]}]}


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
    ("none", 0.0, 0), ("", 0.0, 0)])
def test_soft_iou_by_hand(task, text, iou, format):
    assert score(task, text) == pytest.approx({"iou": iou, "format": format}, abs=1e-5)


def test_cheats_pay_less_than_a_mediocre_answer(task):
    mediocre = score(task, "[25, 15, 70, 60]")["iou"]
    wide = " ".join(f"[{x}, {y}, {x + 40}, {y + 40}]" for x in range(0, 160, 10) for y in range(0, 60, 10))
    for cheat in ("[0, 0, 200, 100]", "[40, 30, 41, 31]", wide, "[0, 0, 1, 1] [20, 10, 60, 50]",
                  "<think>[20, 10, 60, 50]</think><answer>the mug</answer>", "[-1000000, -1000000, 1000000, 1000000]"):
        assert score(task, cheat)["iou"] < mediocre
    assert score(task, "[20, 10, 60, 30], [20, 10, 60, 50]") == {"iou": 0.5, "format": 0}


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
        {"kind": "box", "at": [20, 10, 60, 50], "label": "the red mug", "role": "target"},
        {"kind": "box", "at": [1, 2, 3, 4], "label": "the red mug", "role": "answer"}]
    assert "the red mug" in task.messages(sample)[0]["content"][-1]["text"]
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
