"""The table of benchmarks in docs/evaluation.md: each score, row by row, against a second implementation of its
authors' definition, and `task.benchmark`: answers as the authors score them. Rows and answers are made here."""

import json
import random

import pytest
from PIL import Image

from vlrl.config import validate
from vlrl.data.coordinates import make
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.training.build_task import make_task


def records_of(task, rows, texts):
    out = []
    for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
        sample, answer = task.sample_from_row({"id": str(n), **row}), parse_answer(text)
        parts = task.score(sample, answer)
        out.append({"sample": sample.row, "answer": text, "parts": parts, "parsed": task.parse(sample, answer),
                    "target": task.target(sample), "metrics": task.metrics(sample, answer, parts)})
    return out


def measured(task, rows, texts):
    records = records_of(task, rows, texts)
    return records, task.summarize(records)


def thought(text):
    return f"<think>x</think><answer>{text}</answer>"


def box(rng, width=200, height=100):
    x, y = rng.randrange(width - 40), rng.randrange(height - 40)
    return [x, y, x + rng.randint(10, 40), y + rng.randint(10, 40)]


def moved(rng, given):
    return [v + rng.randint(-6, 6) for v in given]


def test_refcoco_is_the_share_of_boxes_with_an_iou_of_one_half():
    rng = random.Random(0)
    rows = [{"width": 200, "height": 100, "expression": "mug", "boxes": [{"box": box(rng)}]} for _ in range(100)]
    said = [moved(rng, row["boxes"][0]["box"]) for row in rows]
    records, _ = measured(load("grounding", {"recipe": "soft_iou"}), rows, [f"[{a}, {b}, {c}, {d}]"
                                                                             for a, b, c, d in said])
    expected = []
    for row, (a, b, c, d) in zip(rows, said, strict=True):
        truth = row["boxes"][0]["box"]
        pixels = {(x, y) for x in range(a, c) for y in range(b, d)}
        true = {(x, y) for x in range(truth[0], truth[2]) for y in range(truth[1], truth[3])}
        expected.append(float(len(pixels & true) >= 0.5 * len(pixels | true)))
    assert [r["metrics"]["acc@.5"] for r in records] == expected and 10 < sum(expected) < 90


def test_screenspot_is_the_share_of_points_in_the_element_by_cell():
    rng = random.Random(1)
    rows = [{"width": 200, "height": 100, "instruction": "open it", "box": box(rng),
             "platform": rng.choice(["web", "mobile", "desktop"]), "element_type": rng.choice(["text", "icon"])}
            for _ in range(120)]
    points = [(rng.randint(r["box"][0] - 9, r["box"][2] + 9), rng.randint(r["box"][1] - 9, r["box"][3] + 9))
              for r in rows]
    records, split = measured(load("gui", {"recipe": "click"}), rows, [f"[{x}, {y}]" for x, y in points])
    hits = [float(x in range(r["box"][0], r["box"][2] + 1) and y in range(r["box"][1], r["box"][3] + 1))
            for r, (x, y) in zip(rows, points, strict=True)]
    assert [r["metrics"]["click_acc"] for r in records] == hits and 20 < sum(hits) < 100
    cells = {}
    for row, hit in zip(rows, hits, strict=True):
        cells.setdefault((row["platform"], row["element_type"]), []).append(hit)
    for (platform, kind), own in cells.items():
        assert split[f"click_acc/{platform}/{kind}"] == pytest.approx(sum(own) / len(own))
    assert split["click_acc/macro"] == pytest.approx(sum(sum(own) / len(own) for own in cells.values()) / 6)
    rows = [{"width": 200, "height": 100, "instruction": "x", "box": [0, 0, 10, 10], "category": group,
             "platform": "windows", "element_type": kind}
            for group, kind in (("CAD", "icon"), ("CAD", "text"), ("Office", "text"))]
    _, split = measured(load("gui", {"recipe": "click"}), rows, ["[5, 5]", "[50, 5]", "[5, 5]"])
    assert split["click_acc/CAD"] == 0.5 and split["click_acc/CAD/icon"] == split["click_acc/Office"] == 1


def test_charades_sta_is_recall_at_three_ious_and_their_mean():
    rng = random.Random(2)
    rows, texts, overlaps = [], [], []
    for _ in range(80):
        start, end = sorted(rng.sample(range(40), 2))
        a, b = sorted(rng.sample(range(40), 2))
        rows.append({"video": "a.mp4", "question": "when?", "answer_type": "span", "duration": 40.0,
                     "spans": [[start, end]]})
        texts.append(thought(f"{a} to {b}"))
        both, either = len({*range(start, end)} & {*range(a, b)}), max(end, b) - min(start, a)
        overlaps.append(both / either if both else 0.0)
    records, _ = measured(load("video", {"recipe": "videochat_r1_span"}), rows, texts)
    for record, overlap in zip(records, overlaps, strict=True):
        expected = {"miou": overlap, **{f"r1@{bar}": float(overlap >= bar) for bar in (0.3, 0.5, 0.7)}}
        assert {name: record["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-9)
    rows = [{**rows[0], "spans": [[2.9, 15.9]]}]  # 9.1 / 13 is .7 only roughly in floating point
    for recipe, text in (("videochat_r1_span", thought("2.9 to 12.0")), ("span", "2.9 to 12.0")):
        records, _ = measured(load("video", {"recipe": recipe}), rows, [text])
        assert records[0]["metrics"]["r1@0.7"] == 1


def test_next_gqa_takes_the_true_span_that_is_best_for_the_answer():
    rng = random.Random(6)
    rows, texts, expected = [], [], []
    for _ in range(150):
        truth = sorted(sorted(rng.sample(range(30), 2)) for _ in range(rng.choice([1, 2, 3])))
        start, end = sorted(rng.choices(range(30), k=2))
        right, said = rng.choice("ABC"), rng.choice("ABC")
        rows.append({"video": "a.mp4", "question": "why?", "answer_type": "span+choice", "duration": 30.0,
                     "options": ["a cat", "a dog", "a cow"], "answer": right, "spans": truth})
        texts.append(f"{thought(said)}<glue>[({start}, {end})]</glue>")
        both = [len({*range(start, end)} & {*range(a, b)}) for a, b in truth]
        iou = max(n / len({*range(start, end)} | {*range(a, b)}) for n, (a, b) in zip(both, truth, strict=True))
        iop = max(both) / (end - start) if end > start else float(any(start in range(a, b + 1) for a, b in truth))
        expected.append({"miou": iou, "miop": iop, "gqa_acc": float(right == said and iop >= 0.5)})
    records, _ = measured(load("video", {"recipe": "videochat_r1_gqa"}), rows, texts)
    for record, want in zip(records, expected, strict=True):
        assert {name: record["metrics"][name] for name in want} == pytest.approx(want, abs=1e-9)
    assert 10 < sum(want["gqa_acc"] for want in expected) < 50
    row = {**rows[0], "answer": "A", "spans": [[0, 10], [20, 30]]}
    records, _ = measured(load("video", {"recipe": "videochat_r1_gqa"}), [row], [
        f"{thought('A')}<glue>[(0, 10), (20, 30)]</glue>"])
    assert records[0]["metrics"]["miou"] == records[0]["metrics"]["miop"] == 1


def test_got_10k_leaves_out_the_first_frame_and_what_lies_outside_the_picture():
    inside, off, half = [0, 0, 40, 40], [100, 50, 140, 90], [0, 0, 20, 40]
    row = {"id": "a", "video": "a.mp4", "question": "ball", "answer_type": "track", "width": 200, "height": 100}
    corner = [160, 60, 200, 100]
    cases = [([inside] * 3, [off, inside, inside], 1, 1), ([inside] * 3, [inside, off, half], 0.25, 0),
             ([inside, None, inside], [inside, off, inside], 1, 1),
             ([inside, corner], [off, [160, 60, 900, 500]], 1, 1),
             ([inside] * 2, [inside, [-20, -20, 20, 20]], 1, 1),  # moved to the edge, as the toolkit does
             ([inside] * 2, [inside], 0, 0), ([inside], [inside], None, None),
             ([inside, None], [inside] * 2, None, None)]
    rows = [{**row, "tracks": [{"label": "ball", "boxes": truth}]} for truth, *_ in cases]
    records, split = measured(load("video", {"recipe": "videochat_r1_track"}), rows, [
        thought(json.dumps(said)) for _, said, *_ in cases])
    assert [(r["metrics"].get("ao"), r["metrics"].get("sr")) for r in records] == [(ao, sr) for *_, ao, sr in cases]
    # two, two, one, one, one and one frames after the first
    assert (split["ao/frames"], split["sr/frames"]) == pytest.approx((5.5 / 8, 5 / 8))


def test_letters_and_base_to_new():
    rng = random.Random(3)
    rows = [{"video": "a.mp4", "question": "what?", "answer_type": "choice", "duration": 9.0,
             "options": ["one", "two", "three", "four"], "answer": rng.choice("ABCD"),
             "category": rng.choice(["short", "medium", "long"])} for _ in range(60)]
    letters = [rng.choice("ABCD") for _ in rows]
    records, split = measured(load("video", {"recipe": "direct"}), rows, letters)
    right = [float(letter == row["answer"]) for letter, row in zip(letters, rows, strict=True)]
    assert [r["parts"]["accuracy"] for r in records] == right
    for name in ("short", "medium", "long"):
        own = [value for value, row in zip(right, rows, strict=True) if row["category"] == name]
        assert split[f"accuracy/{name}"] == pytest.approx(sum(own) / len(own))
    rng = random.Random(4)
    records = [{"sample": {"half": rng.choice(["base", "new"])}, "parts": {"accuracy": float(rng.random() < 0.6)},
                "metrics": {}} for _ in range(50)]
    right = {half: [r["parts"]["accuracy"] for r in records if r["sample"]["half"] == half] for half in ("base", "new")}
    base, new = (sum(values) / len(values) for values in right.values())
    split = load("classification", {}).summarize(records)
    assert split["accuracy/h"] == pytest.approx(1 / ((1 / base + 1 / new) / 2), abs=1e-9)


CHOICE = {"question_type": "multi_choice", "answer_type": "text"}
WHOLE, DECIMAL = ({"question_type": "free_form", "answer_type": name} for name in ("integer", "float"))
MATHVISTA = [  # row, answers that are right, and wrong ones, as a second implementation of the published rule has them
    ({**CHOICE, "choices": ["145 deg", "35 deg", "55 deg"], "answer": "35 deg"}, ["B", "(B) 35", "b", "35 deg", "35"],
     ["45 deg", "A", "(c)", "(C) or (B)", "55deg"]),
    ({**CHOICE, "choices": ["Yes", "No"], "answer": "No"}, ["No", "no", "N", "(B)", "None"], ["Yes"]),
    ({**CHOICE, "choices": ["C", "A", "B"], "answer": "A"}, ["B", "(B)"], ["A", "C", "(A)", "a"]),
    ({**CHOICE, "choices": ["A. red", "B. blue", "C. green"], "answer": "B. blue"}, ["B. bleu", "B", "(b) x", "blue"],
     ["bleu"]),
    ({**WHOLE, "answer": "1200"}, ["1_200", "1200."], ["1,200"]),
    ({**WHOLE, "answer": "4"}, ["4", "4.0", "4.7"], ["5", "four", "-4", "1e1", "3.999"]),
    ({**DECIMAL, "answer": "1.2", "precision": 1}, ["1.2", "1.24", "1.20"], ["1.26", "1.15", "1", "a"]),
    ({**DECIMAL, "answer": "0.21", "precision": 2}, ["0.21", "0.2149", ".21"], ["0.2", "0.216"])]


def test_mathvista_is_the_authors_rule_for_each_kind_of_row(tmp_path):
    words = {"choices": None, "precision": None, "image": "a.png", "question": "What?", "metadata": {"category": "x"}}
    said = [(kind, text, text in right) for kind, right, wrong in MATHVISTA for text in right + wrong]
    file = tmp_path / "testmini.json"
    file.write_text(json.dumps([{"pid": str(i), **words, **kind} for i, (kind, *_) in enumerate(said)]))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    task = make_task(validate({"task": {"name": "qa", "recipe": "thinking"}, "model": {"name": "x"},
                               "data": {"heldout": str(file)}}))
    rows = [sample.row for sample in task.samples("heldout")]
    records, _ = measured(task, rows, [thought(text) for _, text, _ in said])
    for (_, text, right), record in zip(said, records, strict=True):
        assert record["metrics"]["mathvista_acc"] == right, (text, record["sample"])


def test_android_control_is_the_share_of_right_types_and_of_right_steps():
    """A click in the element's box or near its point, a text or an app as it is written, a direction; every action."""
    rng = random.Random(5)
    rows, texts, expected = [], [], []
    for _ in range(200):
        kind = rng.choice(["click", "long_press", "input_text", "open_app", "scroll", "navigate_back", "wait"])
        place, (x, y) = box(rng), (rng.randrange(200), rng.randrange(100))
        words = {"input_text": ["milk", "bread"], "open_app": ["Clock", "Mail"], "scroll": ["up", "down"]}.get(kind, [])
        action = {"type": kind, **({"direction" if kind == "scroll" else "text": rng.choice(words)} if words else {})}
        said_kind = kind if rng.random() < 0.8 else "click"
        said_word = rng.choice(words) if words else ""
        if rng.random() < 0.5:
            x, y = (place[0] + place[2]) // 2, (place[1] + place[3]) // 2
        rows.append({"width": 200, "height": 100, "instruction": "x", "action": action,
                     **({"box": place} if kind in ("click", "long_press") else {})})
        texts.append(act(said_kind, (x, y), said_word or "no input text"))
        same = said_kind == kind
        hit = place[0] <= x <= place[2] and place[1] <= y <= place[3]
        right = hit if kind in ("click", "long_press") else not words or said_word == next(
            v for k, v in action.items() if k != "type")
        expected.append({"type_acc": float(same), "step_success": float(same and right)})
    records, _ = measured(load("gui", {"recipe": "gui_r1"}), rows, texts)
    assert [r["metrics"] for r in records] == expected
    assert 30 < sum(e["step_success"] for e in expected) < sum(e["type_acc"] for e in expected) < 195
    # rows without a box: 151 of 1,080 pixels across, 336 of 2,400 down
    row = {"width": 1080, "height": 2400, "instruction": "x", "action": {"type": "click", "point": [500, 1200]}}
    cases = {(500, 1200): 1, (650, 1200): 1, (652, 1200): 0, (500, 1535): 1, (500, 1537): 0, (600, 1400): 1,
             (620, 1450): 0}
    records = records_of(load("gui", {"recipe": "gui_r1"}), [row] * len(cases), [act("click", at) for at in cases])
    assert [r["metrics"]["step_success"] for r in records] == [*cases.values()]
    assert records[1]["parts"]["accuracy"] == 0  # the reward has 140 pixels, as GUI-R1's


LETTERS = {  # answer to a row whose option C is right: MVBench's own rule, Video-MME's (None: not counted)
    "C": (1, 1), "C.": (1, 1), "(C)": (1, 1), "C) a cow": (1, 1), "(C) a cow": (1, 1), "(c)": (1, None), "c": (1, None),
    "A": (0, 0), "(B) a dog": (0, 0), "D or C": (0, 0), "C or D": (1, 1), "": (1, None), "Both": (0, 0),
    "The answer is C.": (0, 1), "Answer: C": (0, 1), "Answer: A": (0, 0), "a cow": (0, None), "C: a cow": (0, 1),
    "**C**": (0, 1), "C,": (0, 1), "none": (0, None), "C\nas it moos": (1, 1), "I think C": (0, 1), "'C'": (0, 1)}


def test_letters_are_read_as_the_authors_read_them():
    """The values are those that the authors' functions give, called on these answers."""
    for name, place in (("mvbench", 0), ("video_mme", 1)):
        row = {"id": "1", "video": "a.mp4", "question": "what?", "answer_type": "choice", "duration": 9.0,
               "category": "short", "options": ["a cat", "a dog", "a cow", "a hen"], "answer": "C"}
        task = load("video", {"recipe": "direct", "benchmark": name})
        records, split = measured(task, [row] * len(LETTERS), [*LETTERS])
        found = [record["metrics"].get(f"{name}_acc") for record in records]
        assert dict(zip(LETTERS, found, strict=True)) == {text: values[place] for text, values in LETTERS.items()}
        counted = [value for value in found if value is not None]
        assert split[f"{name}_acc/short"] == pytest.approx(sum(counted) / len(counted), abs=1e-12), (name, place)
        assert not load("video", {"recipe": "direct"}).metrics(task.sample_from_row(row), parse_answer("C"), {})
        with pytest.raises(ConfigError, match=r"task.benchmark='mvbanch'.*mvbench"):
            load("video", {"benchmark": "mvbanch"})


STEP = {"width": 1000, "height": 2000, "instruction": "x"}


def act(kind, point=(-100, -100), text="no input text"):
    return thought(f"[{{'action': '{kind}', 'point': {[*point]}, 'input_text': '{text}'}}]")


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
    records = records_of(task, [row] * 6, map(thought, boxed))
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
    said = [thought(text) for text in (wrong, right)]
    assert task.summarize(records_of(task, rows, said))["map"] == pytest.approx(51 / 101)  # precision 1 up to .5
    crowd = {"meta": {"crowd": [{"box": [40, 0, 70, 20], "label": "mug"}],
                      "empty": [{"box": [5, 5, 5, 9], "label": "mug"}]}}
    split = task.summarize(records_of(task, [{**rows[0], **crowd}, rows[1]], said[::-1]))
    # of three objects the first image's is found; the wrong one of 9 comes first: precision 1/2 up to a recall of 1/3
    assert split["map"] == pytest.approx(34 * 0.5 / 101)
    for case, paid in (("ignored", 1), ("kept", 0)):
        task = load("grounding", {"recipe": "vlm_r1_ovd", "label_case": case})
        (record,) = records_of(task, [row], [said[1].replace("mug", "MUG")])
        assert record["parts"]["accuracy"] == paid


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
