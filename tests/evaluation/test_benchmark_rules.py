"""`task.benchmark`: answers as the authors of a benchmark score them, from row and text to the numbers of a split."""

import json

import pytest

from vlrl.data.coordinates import make
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load

STEP = {"width": 1000, "height": 2000, "instruction": "x"}


def records_of(task, rows, texts):
    out = []
    for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
        sample, answer = task.sample_from_row({"id": str(n), **row}), parse_answer(text)
        parts = task.score(sample, answer)
        out.append({"sample": sample.row, "answer": text, "parts": parts, "parsed": task.parse(sample, answer),
                    "target": task.target(sample), "metrics": task.metrics(sample, answer, parts)})
    return out


def act(kind, point=(-100, -100), text="no input text"):
    return f"<think>x</think><answer>[{{'action': '{kind}', 'point': {[*point]}, 'input_text': '{text}'}}]</answer>"


def values(records, name):
    return [record["metrics"].get(name) for record in records]


def test_steps_and_places_of_gui_benchmarks():
    task = load("gui", {"recipe": "click", "benchmark": "screenspot"})
    task.coordinates = make("norm1")
    row = {**STEP, "width": 997, "box": [33, 20, 55, 40]}
    texts = [f"({33 / 997}, 0.015)", "x=0.04, y=0.015", "0.04 0.015 at 100%", "<box>(40,15),(40,15)</box>", "none"]
    records = records_of(task, [row] * 5, texts)
    assert values(records, "screenspot_acc") == [1, 1, 0, 1, 0]
    assert values(records, "click_acc")[1] == 0  # without a bracket it is no place here
    click = {**STEP, "action": {"type": "click", "point": [500, 1000]}, "box": [0, 900, 600, 1100]}
    typed = {**STEP, "action": {"type": "type", "text": "milk bread"}}
    rows = [click, click, click, typed, typed, {**STEP, "action": {"type": "press_back"}}]
    texts = [act("click", (584, 1224)), act("click", (10, 1000)), act("tap", (500, 1000)),
             act("type", text="milk soup"), act("type", text="bread milk"), act("press_back")]
    found = {name: records_of(load("gui", {"recipe": "gui_r1", "benchmark": name}), rows, texts)
             for name in ("os_atlas", "gui_r1", "gui_odyssey")}
    assert values(found["os_atlas"], "os_atlas_step") == [1, 0, 0, 1, 0, 1]
    assert values(found["os_atlas"], "os_atlas_type") == [1, 1, 0, 1, 1, 1]
    assert values(found["gui_r1"], "gui_r1_step") == [0, 0, 1, 1, 1, None]  # 140 away is too far; not the type
    assert values(found["gui_odyssey"], "gui_odyssey_step") == [1, 1, 0, 1, 0, 1]  # in the box; half of the letters
    assert values(found["gui_odyssey"], "step_success") == [0, 1, 0, 1, 1, 1]  # the task's own


def test_elements_of_gui_act_and_episodes_of_gui_odyssey():
    task = load("gui", {"recipe": "gui_r1", "benchmark": "gui_act"})
    elements = [[0, 0, 100, 100], [100, 0, 200, 100]]
    row = {**STEP, "action": {"type": "click"}, "box": [100, 0, 200, 100], "elements": elements}
    tap = {**STEP, "action": {"type": "tap", "point": [500, 1000]}}
    records = records_of(task, [row, row, tap, tap], [act("click", (250, 50)), act("click", (90, 50)),
                                                      act("tap", (570, 1000)), act("tap", (500, 1400))])
    assert values(records, "gui_act_step") == [1, 0, 1, 0]
    assert values(records, "gui_act_score") == pytest.approx([0, 0, 0.5, 0])
    with pytest.raises(DataError, match="elements=None must be a list of the boxes"):
        task.sample_from_row({"id": "1", **row, "elements": None})
    with pytest.raises(DataError, match="select_text"):
        task.sample_from_row({"id": "1", **STEP, "action": {"type": "select_text"}})
    rows = [{**STEP, "action": {"type": "press_back"}, "episode": name, "steps": count, "category": kind}
            for name, count, kind in (("a", 2, "x"), ("a", 2, "x"), ("b", 1, "y"), ("c", 3, "y"), ("d", 1, "x"))]
    task = load("gui", {"recipe": "gui_r1", "benchmark": "gui_odyssey"})
    texts = [act("press_back"), act("press_back"), act("wait"), act("press_back"), act("press_back")]
    split = task.summarize(records_of(task, rows, texts))
    assert split["gui_odyssey_sr"] == pytest.approx(2 / 3)  # of a, b and d; of c two steps are missing
    assert split["gui_odyssey_sr/categories"] == pytest.approx((1 + 0) / 2)
    assert split["gui_odyssey_step/categories"] == pytest.approx((1 + 1 / 2) / 2)


SPANS = {  # of [10, 20]: what Time-R1's own reading and IoU give
    "<think>x</think><answer>10 to 17</answer>": 0.7, "<think>12 to 20</think><answer>none</answer>": 0.8,
    "<think>x</think><answer>10 - 20</answer>": 0, "10 and 20": 1, "20 to 10": 0, "10s to 20s": 0, "": 0,
    "1.10 to 20": 10 / 18.9, "10 to 20 to 30": 1, "<answer>10  to 20</answer>": 0, "v10 to 20x": 1}


def test_rules_of_video_benchmarks():
    task = load("video", {"recipe": "time_r1", "benchmark": "time_r1"})
    row = {"video": "a.mp4", "question": "when?", "answer_type": "span", "duration": 40.0, "spans": [[10, 20]]}
    records = records_of(task, [row] * len(SPANS), [*SPANS])
    assert values(records, "time_r1_miou") == pytest.approx([*SPANS.values()], abs=1e-9)
    assert values(records, "time_r1_r1@0.7") == [float(v >= 0.7) for v in SPANS.values()]
    task = load("video", {"recipe": "direct", "benchmark": "activitynet_qa"})
    rows = [{"video": "a.mp4", "question": "?", "answer_type": "text", "answer": "yes", "type": kind}
            for kind in (0, 3, 3, 8)]
    split = task.summarize(records_of(task, rows, ["yes", "yes", "Yes", "yes."]))
    assert {name.rpartition("/")[2]: value for name, value in split.items() if "activitynet" in name} == pytest.approx(
        {"motion": 1, "yes_no": 0.5, "other": 0, "free": 1 / 3})


def test_refcoco_in_single_precision_and_by_whole_pixels():
    row = {"width": 999, "height": 999, "expression": "mug", "boxes": [{"box": [10, 10, 30, 30]}]}
    task = load("grounding", {"recipe": "soft_iou", "benchmark": "qwen_vl"})
    texts = ["<box>(10,10),(30,30)</box>", "(10,10),(30,21)", "(10,10),(30,19)", "[10, 10, 30, 30]", "(a,b),(c,d)", ""]
    assert values(records_of(task, [row] * 6, texts), "qwen_vl_acc") == [1, 1, 0, 0, 0, 0]
    task = load("grounding", {"recipe": "vlm_r1_rec", "benchmark": "vlm_r1"})
    boxed = ['{"a": [10, 10, 30, 30]}', '{"a": [10, 10, 30, 20]}', '{"a": [10, 10, 30, 21]}', "[10, 10, 30, 30]",
             '[{"a": [1, 1, 2, 2]}, {"a": [10, 10, 30, 30]}]', '{"a": [10.0, 10, 30, 30]}']
    records = records_of(task, [row] * 6, [f"<think>x</think><answer>{text}</answer>" for text in boxed])
    assert values(records, "vlm_r1_acc") == [1, 0, 1, 0, 1, 0] and values(records, "acc@.5")[1] == 1
    with pytest.raises(ConfigError, match=r"task\.benchmark='vlm_r1' needs a recipe with one box"):
        load("grounding", {"recipe": "vlm_r1_ovd", "benchmark": "vlm_r1"})
    with pytest.raises(ConfigError, match=r"task\.benchmark='qwen' is not known.*qwen_vl"):
        load("grounding", {"recipe": "soft_iou", "benchmark": "qwen"})


ENTRY = "{'Position': [100, 100, 200, 200], 'Confidence': 0.9}"


def test_visual_rft_repairs_lists():
    task = load("grounding", {"recipe": "visual_rft_detection", "benchmark": "visual_rft"})
    row = {"width": 1000, "height": 500, "expression": "mug", "boxes": [{"box": [100, 50, 200, 100]}]}
    for text, found in ((f"<answer>[{ENTRY}]</answer>", 1), (f"<answer>[[{ENTRY}]]</answer>", 1), (f"[{ENTRY}]", 1),
                        (f"<answer>[{ENTRY}, {{'Position': [1, 2", 0), (f"[{ENTRY}, {{'Position': [1, 2", 1),
                        (f"<answer>[{ENTRY}, {ENTRY.replace('0.9', '0.8')}]</answer>", 1),  # the first of equal places
                        (f"<answer>[{{'Position': [1, 2, 3, 4]}}, {ENTRY}]</answer>", 0), ("<answer>[]</answer>", 0),
                        (f"<answer>[{ENTRY}, ...]</answer>", 1), (f"<answer>{ENTRY}</answer>", 0),
                        ("No Objects", 0), (f"<answer>[{ENTRY}, {{'Confidence': 1}}]</answer>", 0)):
        assert task.summarize(records_of(task, [row], [text]))["visual_rft_map"] == pytest.approx(found), text


def test_a_split_of_coco_has_its_crowds_and_goes_by_number():
    """Without confidences all detections are equal, and the first image's come first: 9 before 10."""
    row = {"width": 100, "height": 100, "labels": ["mug"], "boxes": [{"box": [0, 0, 10, 10], "label": "mug"}]}
    right, wrong = (f'```json\n[{{"bbox_2d": [{x}, 0, {x + 10}, 10], "label": "mug"}}]\n```' for x in (0, 50))
    task = load("grounding", {"recipe": "vlm_r1_ovd"})
    rows = [{**row, "id": "10"}, {**row, "id": "9"}]
    said = [f"<think>x</think><answer>{text}</answer>" for text in (wrong, right)]
    assert task.summarize(records_of(task, rows, said))["map"] == pytest.approx(51 / 101)  # precision 1 up to .5
    crowd = {"meta": {"crowd": [{"box": [40, 0, 70, 20], "label": "mug"}],
                      "empty": [{"box": [5, 5, 5, 9], "label": "mug"}]}}
    split = task.summarize(records_of(task, [{**rows[0], **crowd}, rows[1]], said[::-1]))
    # of three objects the first image's is found; the wrong one of 9 comes first: precision 1/2 up to a recall of 1/3
    assert split["map"] == pytest.approx(34 * 0.5 / 101)
    row = {"id": "1", "width": 100, "height": 100, "labels": ["mug"],
           "boxes": [{"box": [0, 0, 10, 10], "label": "mug"}]}
    said = json.dumps([{"bbox_2d": [0, 0, 10, 10], "label": "MUG"}])
    text = f"<think>x</think><answer>```json\n{said}\n```</answer>"
    for case, paid in (("ignored", 1), ("kept", 0)):
        task = load("grounding", {"recipe": "vlm_r1_ovd", "label_case": case})
        assert task.score(task.sample_from_row(row), parse_answer(text))["accuracy"] == paid


def test_alphadrive_counts_words_wherever_they_stand():
    task = load("driving", {"recipe": "alphadrive", "benchmark": "alphadrive"})
    plans = [("KEEP", "STRAIGHT"), ("STOP", "STRAIGHT"), ("STOP", "LEFT_TURN")]
    rows = [{"image": "a.png", "plan": {"speed": speed, "path": path}} for speed, path in plans]
    texts = ["<answer>KEEP, STRAIGHT</answer>", "<think>STOP</think><answer>KEEP, STRAIGHT</answer>", "LEFT_TURN"]
    records = records_of(task, rows, texts)
    assert values(records, "alphadrive_acc") == [1, 1, 0] and values(records, "joint_acc") == [1, 0, 0]
    split = task.summarize(records)
    assert split["alphadrive_acc/STOP_STRAIGHT"] == 1 and split["alphadrive_acc/STOP_LEFT_TURN"] == 0
    # KEEP is said twice, both times beside the true word of its row; STOP once, and missed once
    found = [split[f"alphadrive_f1/{word}"] for word in ("KEEP", "STOP", "LEFT_TURN", "ACCELERATE")]
    assert found == pytest.approx([1, 2 / 3, 1, 0])
    for recipe, name, told in (("plan", "alphadriv", "alphadrive"), ("trajectory", "alphadrive", "scores plans")):
        with pytest.raises(ConfigError, match=f"task.benchmark='{name}'.*{told}"):
            load("driving", {"recipe": recipe, "benchmark": name})
