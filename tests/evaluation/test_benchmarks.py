"""The table of benchmarks in docs/evaluation.md: each score, row by row, against a second implementation of its
authors' definition. Rows and answers are made here."""

import json
import math
import random

import pytest
from PIL import Image

from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.training.build_task import make_task


def measured(task, rows, texts):
    records = []
    for row, text in zip(rows, texts, strict=True):
        sample, answer = task.sample_from_row(row), parse_answer(text)
        parts = task.score(sample, answer)
        records.append({"sample": sample.row, "parts": parts, "metrics": task.metrics(sample, answer, parts),
                        "parsed": task.parse(sample, answer), "target": task.target(sample)})
    return records, task.summarize(records)


def box(rng, width=200, height=100):
    x, y = rng.randrange(width - 40), rng.randrange(height - 40)
    return [x, y, x + rng.randint(10, 40), y + rng.randint(10, 40)]


def moved(rng, given):
    return [v + rng.randint(-6, 6) for v in given]


def test_refcoco_is_the_share_of_boxes_with_an_iou_of_one_half():
    rng = random.Random(0)
    rows = [{"id": str(i), "width": 200, "height": 100, "expression": "mug", "boxes": [{"box": box(rng)}]}
            for i in range(100)]
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
    rows = [{"id": str(i), "width": 200, "height": 100, "instruction": "open it", "box": box(rng),
             "platform": rng.choice(["web", "mobile", "desktop"]), "element_type": rng.choice(["text", "icon"])}
            for i in range(120)]
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
    rows = [{"id": str(i), "width": 200, "height": 100, "instruction": "x", "box": [0, 0, 10, 10], "category": group,
             "platform": "windows", "element_type": kind} for i, (group, kind) in enumerate(
                 (("CAD", "icon"), ("CAD", "text"), ("Office", "text")))]
    _, split = measured(load("gui", {"recipe": "click"}), rows, ["[5, 5]", "[50, 5]", "[5, 5]"])
    assert split["click_acc/CAD"] == 0.5 and split["click_acc/CAD/icon"] == split["click_acc/Office"] == 1


def test_charades_sta_is_recall_at_three_ious_and_their_mean():
    rng = random.Random(2)
    rows, texts, overlaps = [], [], []
    for i in range(80):
        start, end = sorted(rng.sample(range(40), 2))
        a, b = sorted(rng.sample(range(40), 2))
        rows.append({"id": str(i), "video": "a.mp4", "question": "when?", "answer_type": "span", "duration": 40.0,
                     "spans": [[start, end]]})
        texts.append(f"<think>x</think><answer>{a} to {b}</answer>")
        both, either = len({*range(start, end)} & {*range(a, b)}), max(end, b) - min(start, a)
        overlaps.append(both / either if both else 0.0)
    records, _ = measured(load("video", {"recipe": "videochat_r1_span"}), rows, texts)
    for record, overlap in zip(records, overlaps, strict=True):
        expected = {"miou": overlap, **{f"r1@{bar}": float(overlap >= bar) for bar in (0.3, 0.5, 0.7)}}
        assert {name: record["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-9)
    rows = [{**rows[0], "spans": [[2.9, 15.9]]}]  # 9.1 / 13 is .7 only roughly in floating point
    thought = "<think>x</think><answer>2.9 to 12.0</answer>"
    for recipe, text in (("videochat_r1_span", thought), ("span", "2.9 to 12.0")):
        records, _ = measured(load("video", {"recipe": recipe}), rows, [text])
        assert records[0]["metrics"]["r1@0.7"] == 1


def test_next_gqa_takes_the_true_span_that_is_best_for_the_answer():
    rng = random.Random(6)
    rows, texts, expected = [], [], []
    for i in range(150):
        truth = sorted(sorted(rng.sample(range(30), 2)) for _ in range(rng.choice([1, 2, 3])))
        start, end = sorted(rng.choices(range(30), k=2))
        right, said = rng.choice("ABC"), rng.choice("ABC")
        rows.append({"id": str(i), "video": "a.mp4", "question": "why?", "answer_type": "span+choice", "duration": 30.0,
                     "options": ["a cat", "a dog", "a cow"], "answer": right, "spans": truth})
        texts.append(f"<think>x</think><answer>{said}</answer><glue>[({start}, {end})]</glue>")
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
        "<think>x</think><answer>A</answer><glue>[(0, 10), (20, 30)]</glue>"])
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
        f"<think>x</think><answer>{json.dumps(said)}</answer>" for _, said, *_ in cases])
    assert [(r["metrics"].get("ao"), r["metrics"].get("sr")) for r in records] == [(ao, sr) for *_, ao, sr in cases]
    # two, two, one, one, one and one frames after the first
    assert (split["ao/frames"], split["sr/frames"]) == pytest.approx((5.5 / 8, 5 / 8))


def test_letters_and_base_to_new():
    rng = random.Random(3)
    rows = [{"id": str(i), "video": "a.mp4", "question": "what?", "answer_type": "choice", "duration": 9.0,
             "options": ["one", "two", "three", "four"], "answer": rng.choice("ABCD"),
             "category": rng.choice(["short", "medium", "long"])} for i in range(60)]
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


def authors_mathvista(extraction, choices, question_type, answer_type, precision, answer):
    """The published rule, written with other means: every option's distance by dynamic programming."""
    def distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            row, before = [i], row
            for j, y in enumerate(b, 1):
                row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
        return row[-1]

    if question_type == "multi_choice":
        found = next((c for a, c, b in zip(extraction, extraction[1:], extraction[2:], strict=False)
                      if a == "(" and b == ")" and c.isascii() and c.isalpha()), None)
        said = found.upper() if found else extraction
        if len(said) == 1 and 0 <= ord(said) - 65 < len(choices):
            return choices[ord(said) - 65] == answer
        return min(choices, key=lambda c: distance(said, c)) == answer
    try:
        if answer_type == "integer":
            return format(math.trunc(float(extraction)), "d") == answer
        if answer_type == "float":
            return repr(round(float(extraction), precision)) == answer
    except ValueError:
        return False
    return extraction == answer


def test_mathvista_is_the_authors_rule_for_each_kind_of_row(tmp_path):
    words = {"choices": None, "precision": None, "image": "a.png", "question": "What?", "metadata": {"category": "x"}}
    kinds = [({"question_type": "multi_choice", "answer_type": "text", "choices": ["145 deg", "35 deg", "55 deg"],
               "answer": "35 deg"}, ["B", "(B) 35", "b", "35 deg", "35", "45 deg", "A", "(c)", "(C) or (B)", "55deg"]),
             ({"question_type": "multi_choice", "answer_type": "text", "choices": ["Yes", "No"], "answer": "No"},
              ["No", "no", "Yes", "N", "(B)", "None"]),
             ({"question_type": "multi_choice", "answer_type": "text", "choices": ["C", "A", "B"], "answer": "A"},
              ["A", "B", "C", "(A)", "(B)", "a"]),
             ({"question_type": "multi_choice", "answer_type": "text", "choices": ["A. red", "B. blue", "C. green"],
               "answer": "B. blue"}, ["bleu", "B. bleu", "B", "(b) x", "blue"]),
             ({"question_type": "free_form", "answer_type": "integer", "answer": "1200"}, ["1,200", "1_200", "1200."]),
             ({"question_type": "free_form", "answer_type": "integer", "answer": "4"},
              ["4", "4.0", "4.7", "5", "four", "-4", "1e1", "3.999"]),
             ({"question_type": "free_form", "answer_type": "float", "answer": "1.2", "precision": 1},
              ["1.2", "1.24", "1.26", "1.15", "1", "1.20", "a"]),
             ({"question_type": "free_form", "answer_type": "float", "answer": "0.21", "precision": 2},
              ["0.21", "0.2149", ".21", "0.2", "0.216"])]
    file = tmp_path / "testmini.json"
    records = [{"pid": f"{i}-{k}", **words, **kind} for i, (kind, said) in enumerate(kinds) for k in range(len(said))]
    file.write_text(json.dumps(records))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    said = [text for _, texts in kinds for text in texts]
    task = make_task(validate({"task": {"name": "qa", "recipe": "thinking"}, "model": {"name": "x"},
                               "data": {"heldout": str(file)}}))
    rows = [sample.row for sample in task.samples("heldout")]
    records_of, _ = measured(task, rows, [f"<think>x</think><answer>{text}</answer>" for text in said])
    expected = [authors_mathvista(text, r["choices"], r["question_type"], r["answer_type"], r["precision"], r["answer"])
                for text, r in zip(said, records, strict=True)]
    assert [r["metrics"]["mathvista_acc"] == 1 for r in records_of] == expected and 10 < sum(expected) < 30


def test_android_control_is_the_share_of_right_types_and_of_right_steps():
    """A click in the element's box or near its point, a text or an app as it is written, a direction; every action."""
    rng = random.Random(5)
    rows, texts, expected = [], [], []
    for i in range(200):
        kind = rng.choice(["click", "long_press", "input_text", "open_app", "scroll", "navigate_back", "wait"])
        place, (x, y) = box(rng), (rng.randrange(200), rng.randrange(100))
        words = {"input_text": ["milk", "bread"], "open_app": ["Clock", "Mail"], "scroll": ["up", "down"]}.get(kind, [])
        action = {"type": kind, **({"direction" if kind == "scroll" else "text": rng.choice(words)} if words else {})}
        said_kind = kind if rng.random() < 0.8 else "click"
        said_word = rng.choice(words) if words else ""
        if rng.random() < 0.5:
            x, y = (place[0] + place[2]) // 2, (place[1] + place[3]) // 2
        rows.append({"id": str(i), "width": 200, "height": 100, "instruction": "x", "action": action,
                     **({"box": place} if kind in ("click", "long_press") else {})})
        texts.append(f"<think>x</think><answer>[{{'action': '{said_kind}', 'point': [{x}, {y}], 'input_text': "
                     f"'{said_word or 'no input text'}'}}]</answer>")
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
    rows = [{**row, "id": str(i)} for i in range(len(cases))]
    records, _ = measured(load("gui", {"recipe": "gui_r1"}), rows, [
        f"<think>x</think><answer>[{{'action': 'click', 'point': [{x}, {y}], 'input_text': 'no input text'}}]</answer>"
        for x, y in cases])
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
