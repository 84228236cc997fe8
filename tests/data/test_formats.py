"""Native formats -> canonical rows: hand-computed values for each, and hostile files."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.data import films
from tests.data.sets import save
from vlrl.cli.main import main
from vlrl.data import sample_from_row
from vlrl.data.sources.fields import RecordSource, numbers
from vlrl.data.sources.reading import canonical_rows
from vlrl.data.values import hull, number, scaled, tidy
from vlrl.errors import DataError


def one(record: dict, format: str = "auto", root: Path | None = None) -> dict:
    """The only row of a record."""
    (row,) = canonical_rows(record, format, RecordSource("r-1", root))
    if isinstance(row, DataError):
        raise row
    return row


def make_video(path: Path, frames=20, rate=10) -> Path:
    return films.make(path, films.Made(films.even(frames, rate), size=(64, 32), codec="mpeg4", rate=rate))


def boxes(*found) -> dict:
    """The boxes of a row: corners and label of each."""
    return {"boxes": [{"box": list(corners), "label": label} for *corners, label in found]}


def asks(record: dict, question: str, answer) -> dict:
    return {**record, "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def talk(question: str, answer, **more) -> dict:
    return asks({"id": 3, **BASE, **more}, f"<image>{question}", answer)


def region(kind: str, values: dict, **more) -> dict:
    """A result of Label Studio in percent of an image of 200 x 100 pixels."""
    return {"type": kind, "original_width": 200, "original_height": 100, "value": values, **more}


REC = "Please provide the bounding box coordinate of the region this sentence describes: the red mug."
BASE = {"image": "a.png", "width": 200, "height": 100}
RED, FIND = {"id": 3, **BASE, "expression": "the red mug"}, "Detect the following objects: "
OD = {"accu_reward_method": "od_ap"}
NONE = {"id": 3, **BASE, "boxes": [], "meta": OD}
PLACE = {"x": 50, "y": 10, "width": 10, "height": 40}
COCO = {"id": 9, "file_name": "a.png", "width": 200, "height": 100}
CAT, DOG = ({"id": n, "name": name} for n, name in ((1, "cat"), (2, "dog")))
UPLOAD = {"id": 5, "data": {"image": "/data/upload/3/a.png"}}
CLOSE = {"instruction": "close", "data_type": "icon"}
OWN = {"id": 1, "image": "a.png", "question": "q", "answer": "a", "box": [1, 2, 3, 4]}

CASES = {
    # format, record, row; its id is r-1 unless another one is named
    "rec": ("vlm_r1", talk(REC, "<answer> [10, 20.5, 60, 80] </answer>"), {
        **RED, **boxes((10, 20.5, 60, 80, "the red mug"))}),
    "rec in shares": ("vlm_r1", talk(REC, "[0.1, 0.2, 0.5, 1.0]"), {**RED, **boxes((20, 20, 100, 100, "the red mug"))}),
    "rec as json text": ("vlm_r1", {**BASE, "conversations": json.dumps(
        talk("the mug", '{"bbox_2d": [1, 2, 3, 4]}')["conversations"])}, {
        **BASE, "expression": "the mug", **boxes((1, 2, 3, 4, "the mug"))}),
    "messages": ("vlm_r1", {**BASE, "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": "B"}], "accu_reward_method": "mcq"}, {
        **BASE, "question": "How many?", "answer": "B", "answer_type": "choice", "system_prompt": "be brief",
        "meta": {"accu_reward_method": "mcq"}}),
    "ovd": ("vlm_r1", talk(f"{FIND}cat, dog, 'bird'.", '```json\n[{"bbox_2d": [0, 0, 9, 9], "label": "dog"}]\n```',
                           accu_reward_method="odLength"), {
        "id": 3, **BASE, "labels": ["cat", "dog", "bird"], **boxes((0, 0, 9, 9, "dog")),
        "meta": {"accu_reward_method": "odLength"}}),
    "ovd of nothing": ("vlm_r1", talk("Find these objects: ['cat']", "None", **OD), {**NONE, "labels": ["cat"]}),
    "ovd before another sentence": ("vlm_r1", talk(f"{FIND}cat, dog. Output each as JSON.", "None", **OD), {
        **NONE, "labels": ["cat", "dog"]}),
    "ovd with a comma in a name": ("vlm_r1", talk(f"{FIND}['cat, big', 'dog']", "None", **OD), {
        **NONE, "labels": ["cat, big", "dog"]}),
    "several images": ("vlm_r1", asks({"id": 1, "image": ["a.png", "b/c.png"]}, "What went wrong?", "No Defect"), {
        "id": 1, "images": ["a.png", "b/c.png"], "question": "What went wrong?", "answer": "No Defect",
        "answer_type": "text"}),
    # referring expressions
    "problem and box": ("problem_box", {**BASE, "problem": "the mug", "solution": [1, 2, 3, 4], "dataset": "refcoco"}, {
        **BASE, "expression": "the mug", **boxes((1, 2, 3, 4, "the mug")), "meta": {"dataset": "refcoco"}}),
    "refcoco": ("refcoco", {"ref_id": 7, "image_id": 12, "bbox": [10, 20, 30.5, 40], "sentences": [{"raw": "left mug"}],
                            "width": 200, "height": 100}, {
        **BASE, "image": "COCO_train2014_000000000012.jpg", "expression": "left mug",
        **boxes((10, 20, 40.5, 60, "left mug")), "meta": {"ref_id": 7, "image_id": 12}}),
    "lisa": ("lisa", {"shapes": [{"label": "target", "points": [[5, 6], [50, 9], [20, 70]]},
                                 {"label": "ignore", "points": [[0, 0], [199, 99]]},
                                 {"label": "target", "points": [[3, 30], [4, 31]]}], "text": "what keeps tea warm",
                      "imagePath": "a.png", "imageWidth": 200, "imageHeight": 100, "is_sentence": True}, {
        **BASE, "expression": "what keeps tea warm", **boxes((3, 6, 50, 70, "what keeps tea warm")),
        "meta": {"is_sentence": True}}),
    # COCO
    "coco": ("coco", {"images": [COCO], "annotations": [
        {"id": 1, "image_id": 9, "category_id": 2, "bbox": [10, 20, 30, 40], "iscrowd": 0},
        {"id": 2, "image_id": 9, "category_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 1}], "categories": [CAT, DOG]}, {
        "id": "9", **BASE, "labels": ["cat", "dog"], **boxes((10, 20, 40, 60, "dog")),
        "meta": {"crowd": boxes((0, 0, 5, 5, "cat"))["boxes"]}}),
    "coco, an empty image": ("coco", {
        "images": [{"id": 9, "coco_url": "http://x.y/a.png", "width": 200, "height": 100}], "annotations": [],
        "categories": [CAT]}, {"id": "9", **BASE, "labels": ["cat"], "boxes": []}),
    # Label Studio: percent of the image; a quarter turn about the upper left corner of a box of 20 x 40 pixels
    "label studio": ("label_studio", {**UPLOAD, "annotations": [{"was_cancelled": True, "result": []}, {"result": [
        region("rectanglelabels", {**PLACE, "rotation": 0, "rectanglelabels": ["mug"]}),
        region("rectanglelabels", {**PLACE, "rotation": 90, "rectanglelabels": ["cup"]}),
        region("keypointlabels", {"x": 25, "y": 50, "width": 0.3, "keypointlabels": ["tip"]}),
        {"type": "choices", "value": {"choices": ["good"]}}]}]}, {
        **BASE, "id": 5, "image": "3/a.png", "labels": ["mug", "cup"],
        **boxes((100, 10, 120, 50, "mug"), (60, 10, 100, 30, "cup")), "points": [[50, 50]]}),
    "label studio, the small export": ("label_studio", {"id": 5, "image": "/data/local-files/?d=x/a.png", "label": [
        {"x": 0, "y": 0, "width": 50, "height": 50, "rectanglelabels": ["mug"], "original_width": 200,
         "original_height": 100}]}, {
        **BASE, "id": 5, "image": "x/a.png", "labels": ["mug"], **boxes((0, 0, 100, 50, "mug"))}),
    # place, label and text of a region are results of their own; an ellipse has a centre and radii; ground truth counts
    "label studio, all in parts": ("label_studio", {**UPLOAD, "annotations": [{"ground_truth": True, "result": [
        region("rectangle", {**PLACE, "rotation": 0}, id="r"),
        {"id": "r", "type": "labels", "value": {**PLACE, "labels": ["word"]}},
        {"id": "r", "type": "textarea", "value": {**PLACE, "text": ["hi"]}},
        {"id": "e", "type": "ellipselabels", "value": {
            "x": 50, "y": 50, "radiusX": 10, "radiusY": 10, "rotation": 90, "ellipselabels": ["ring"]}}]},
        {"result": []}]}, {
        **BASE, "id": 5, "image": "3/a.png", "labels": ["word", "ring"],
        **boxes((100, 10, 120, 50, "word"), (90, 30, 110, 70, "ring"))}),
    # GUI
    "unlabelled": ("unlabelled", {
        "img_filename": "pc_a.png", "width": 200, "height": 100, **CLOSE, "history": ["open"]}, {
        **BASE, "image": "pc_a.png", "instruction": "close", "history": ["open"], "meta": {"data_type": "icon"},
        "element_type": "icon", "platform": "desktop"}),
    "screenspot, shares keep their digits": ("screenspot", {
        "image": "a.png", **CLOSE, "bbox": [0.12345678, 0.3333333, 0.12865432, 0.3444444],
        "image_size": [3840, 2160]}, {
        "image": "a.png", "width": 3840, "height": 2160, "instruction": "close", "element_type": "icon",
        "box": [474.074, 720, 494.033, 744], "meta": {"data_type": "icon"}}),
    "screenspot v2": ("screenspot", {"img_filename": "mobile_a.png", "bbox": [10, 20, 30, 40], **CLOSE,
                                     "data_source": "ios", "img_width": 200, "img_height": 100}, {
        **BASE, "image": "mobile_a.png", "instruction": "close", "box": [10, 20, 40, 60], "element_type": "icon",
        "platform": "mobile", "meta": {"bbox": [10, 20, 30, 40], "data_type": "icon", "data_source": "ios"}}),
    "gui-rcpo": ("screenspot", {"id": 0, "image": "pc_a.png", "instruction": "close", "bbox": [0.25, 0.5, 0.75, 1.0],
                                "data_type": "text", "data_source": "desktop", "image_size": [960, 540]}, {
        "id": 0, "image": "pc_a.png", "width": 960, "height": 540, "instruction": "close", "box": [240, 270, 720, 540],
        "element_type": "text", "platform": "desktop", "meta": {"data_type": "text", "data_source": "desktop"}}),
    "screenspot-pro": ("screenspot_pro", {
        "id": "x_1", "img_filename": "x/a.png", "bbox": [10, 20, 30, 40], "instruction": "open file", "ui_type": "icon",
        "img_size": [3840, 2160], "application": "vscode", "platform": "macos", "group": "Dev"}, {
        "id": "x_1", "image": "x/a.png", "width": 3840, "height": 2160, "instruction": "open file",
        "box": [10, 20, 30, 40], "element_type": "icon", "platform": "desktop", "category": "Dev",
        "group_key": "vscode", "meta": {"application": "vscode", "platform": "macos"}}),
    "gui-g1": ("gui_g1", {**BASE, "problem": "Grounding instruction is: Save. Report the bbox coordinates in JSON "
                          "format.", "solution": [1, 2, 30, 40], "rate": 1.5}, {
        **BASE, "instruction": "Save", "box": [1, 2, 30, 40], "weight": 1.5}),
    "gui-g2": ("gui_g2", {"image_path": "/web/a.png", "width": 200, "height": 100, "instruction": "Wish List",
                          "rela_box": [0.1, 0.1, 0.2, 0.2], "abs_box": [20, 10, 40, 20]}, {
        **BASE, "image": "web/a.png", "instruction": "Wish List", "box": [20, 10, 40, 20]}),
    "gui-g2, shares alone": ("gui_g2", {**BASE, "instruction": "Wish List", "rela_box": [0.1, 0.1, 0.2, 0.25]}, {
        **BASE, "instruction": "Wish List", "box": [20, 10, 40, 25]}),
    "ui-r1, a click": ("android_step", {"image": "episode_12-screenshot_0.png", "gt": {
        "action_type": "click", "x": 103, "y": 20.5}, "task": "Open the menu"}, {
        "image": "episode_12-screenshot_0.png", "instruction": "Open the menu",
        "action": {"type": "click", "point": [103, 20.5]}, "group_key": "episode_12", "platform": "mobile"}),
    "ui-r1, text": ("android_step", {"image": "a.png", "gt": '{"action_type": "input_text", "text": "cake"}',
                                     "task": "Type cake"}, {
        "image": "a.png", "instruction": "Type cake", "action": {"type": "input_text", "text": "cake"},
        "platform": "mobile"}),
    "ui-r1, scroll": ("android_step", {"image": "a.png", "gt": {"action_type": "scroll", "direction": "Down"},
                                       "task": "Go on", "gt_bbox": [1, 2, 3, 4]}, {
        "image": "a.png", "instruction": "Go on", "action": {"type": "scroll", "direction": "down"},
        "box": [1, 2, 3, 4], "platform": "mobile"}),
    "gui-r1": ("gui_r1", {**BASE, "gt_action": "Click", "gt_bbox": [0.1, 0.2, 0.2, 0.4], "instruction": "press it",
                          "gt_input_text": "no input text", "history": "None", "task_type": "high"}, {
        **BASE, "instruction": "press it", "action": {"type": "click", "point": [30, 30]}, "category": "high",
        "box": [20, 20, 40, 40]}),
    "gui-r1, scroll": ("gui_r1", {**BASE, "gt_action": "scroll", "gt_bbox": [-100, -100], "instruction": "go on",
                                  "gt_input_text": "DOWN", "history": "opened it"}, {
        **BASE, "instruction": "go on", "action": {"type": "scroll", "direction": "DOWN"}, "history": "opened it"}),
    # questions
    "superclevr": ("problem_text", {"image": "/mnt/x/a.png", "problem": "How many items are there?", "solution": 4}, {
        "image": "mnt/x/a.png", "question": "How many items are there?", "answer": 4, "answer_type": "count",
        "count": 4}),
    "r1-v": ("problem_text", {"image": "a.png", "problem": "Which?", "solution": "<answer> C </answer>"}, {
        "image": "a.png", "question": "Which?", "answer": "C", "answer_type": "choice"}),
    # tables
    "xyxy": ("table", {**BASE, "xmin": "1", "ymin": "2", "xmax": "30", "ymax": "40", "class": "mug"}, {
        **BASE, "labels": ["mug"], **boxes((1, 2, 30, 40, "mug"))}),
    "xywh": ("table", {"image": "a.png", "x": 1, "y": 2, "width": 30, "height": 40, "caption": "my mug", "note": "n"}, {
        "image": "a.png", "expression": "my mug", **boxes((1, 2, 31, 42, "my mug")), "meta": {"note": "n"}}),
    "shares": ("table", {**BASE, "bbox": "0.1, 0.2, 0.5, 1.0", "instruction": "press"}, {
        **BASE, "instruction": "press", "box": [20, 20, 100, 100]}),
    "told": ("table", {**BASE, "bbox": "[1, 2, 3, 4]", "bbox_format": "xywh", "label": "mug"}, {
        **BASE, "labels": ["mug"], **boxes((1, 2, 4, 6, "mug")), "meta": {"bbox_format": "xywh"}}),
    # lists of boxes
    "boxes and labels": ("box_list", {**BASE, "boxes": [[1, 2, 3, 4], [0, 0, 9, 9]], "labels": ["mug", "jug"]}, {
        **BASE, "labels": ["mug", "jug"], **boxes((1, 2, 3, 4, "mug"), (0, 0, 9, 9, "jug"))}),
    "objects": ("box_list", {**BASE, "objects": [{"bbox": [1, 2, 30, 40], "category": "mug"}], "bbox_format": "xywh"}, {
        **BASE, "labels": ["mug"], **boxes((1, 2, 31, 42, "mug"))}),
    # what is canonical, or of a task of one's own, stays as it is
    "own": ("canonical", OWN, OWN), "grounding": ("canonical", *[{
        "id": "r-1", **BASE, "expression": "x", "boxes": [], "bbox": [1, 2, 3, 4]}] * 2)}


def test_native_rows_are_scored_as_they_are(capsys, tmp_path):
    rows = canonical_rows({"episode_id": 4, "goal": "buy milk", "step_instructions": ["open it", "scroll"], "actions": [
        {"action_type": "open_app", "app_name": "Shop"}, {"action_type": "scroll", "direction": "down"}],
        "screenshot_widths": [100, 100], "screenshot_heights": [200, 200]})
    assert [(r["id"], r["image"], r["history"], r["group_key"], r["width"], r["action"]) for r in rows] == [
        ("4-0", "episode_4-screenshot_0.png", [], "episode_4", 100, {"type": "open_app", "text": "Shop"}),
        ("4-1", "episode_4-screenshot_1.png", ["open it"], "episode_4", 100, {"type": "scroll", "direction": "down"})]
    rows = canonical_rows({"image": "a.png", "bbox": [1, 2, 3, 4], "sentences": ["one", "two"], "ref_id": 5})
    assert [(r["id"], r["expression"]) for r in rows] == [("row-1", "one"), ("row-2", "two")]
    native = {"image": "pc_a.png", "instruction": "close", "bbox": [0.25, 0.5, 0.75, 1.0], "data_type": "icon",
              "image_size": [960, 540], "coordinates": "original"}
    rows = save(tmp_path / "rows.jsonl", {"sample": native, "completions": ["[240, 270, 720, 540]", "[0, 0, 9, 9]"]})
    config = save(tmp_path / "gui.yaml", "task: {name: gui, recipe: gui_g2, coordinates: original}\n"
                  "model: {name: embedded/tiny-qwen3-vl}")
    assert main(["score", str(config), str(rows)]) == 0
    best, worst = json.loads(capsys.readouterr().out)["rewards"]
    assert best["parts"]["point"] == best["parts"]["coverage"] == 1 and worst["reward"] < best["reward"]


WRONG = {
    "bbox of text": ({**CASES["screenspot v2"][1], "bbox": ["a", 2, 3, 4]}, "bbox=['a', 2, 3, 4] must be 4 finite"),
    "a huge number": ({**CASES["xyxy"][1], "xmax": 10**400}, "must be 4 finite numbers"),
    "NaN": ({**CASES["gui-g2"][1], "abs_box": [1, 2, float("nan"), 4]}, "abs_box=[1, 2, nan, 4] must be 4 finite"),
    "three numbers": ({**CASES["gui-r1"][1], "gt_bbox": [1, 2, 3]}, "gt_bbox=[1, 2, 3] must be 2 or 4 finite"),
    "no size": ({**CASES["gui-r1"][1], "width": None, "height": None}, "gt_bbox=[0.1, 0.2, 0.2, 0.4] is relative to "
                "the image, whose size is unknown"),
    "no sound size": ({**CASES["rec"][1], "width": -3}, "width=-3, height=100 must be the image's width and height"),
    "no instruction": ({**CASES["screenspot v2"][1], "instruction": 5}, "instruction=5 must be a string"),
    "a category": ({**CASES["coco"][1], "categories": []}, "annotation 1: category_id=2 is not the id of an entry"),
    "two columns": ({**CASES["xyxy"][1], "label": "jug"}, "the columns label and class may each be the label; choose "
                    "one with --columns label=label"),
    "a solution": ({**CASES["r1-v"][1], "solution": {"a": 1}}, "solution={'a': 1} must be a string, a number or a box"),
    "a shape": ({"shapes": [5], "text": "x"}, "5 in shapes must be an object"),
    "a rate": ({**CASES["gui-g1"][1], "rate": -1}, "rate=-1 must be a finite number of at least 0")}


def test_numbers_and_sizes(tmp_path):
    assert numbers("[1, 2.5]", (2,), "p") == [1, 2.5] and numbers("1 2;3,4", (4,), "p") == [1, 2, 3, 4]
    assert numbers("(1, 2)", (2, 4), "p") == [1, 2] and numbers((1.0, "2"), (2,), "p") == [1, 2]
    assert [number(v) for v in ("1e3", "x", True, None, float("inf"), 10**400, "9" * 99)] == [1000, *[None] * 6]
    assert tidy(909.9999936) == 910 and isinstance(tidy(910.0), int) and tidy(0.1234) == 0.123
    assert hull([(3, 4), (1, 9)]) == [1, 4, 3, 9] and scaled([500, 1000], (640, 480), 1000, "p") == [320, 480]
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    turned = Image.new("RGB", (200, 100))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])  # the header is whole
    record = {"image": "a.png", "problem": "x", "solution": [1, 2, 3, 4]}
    for name, size in (("a.png", (200, 100)), ("turned.jpg", (100, 200)), ("cut.png", (200, 100))):
        row = one({**record, "image": name}, root=tmp_path)
        assert (row["width"], row["height"]) == size
    for name in ("none.png", "../a.png", "http://x/a.png", "a\0.png", "x" * 5000):
        assert "width" not in one({**record, "image": name}, root=tmp_path)
    shares = {"image": "a.png", "bbox": [0.5, 0.5, 1, 1], "instruction": "x", "data_type": "icon"}
    assert one(shares, root=tmp_path)["box"] == [100, 50, 200, 100]
    (tmp_path / "val" / "x").mkdir(parents=True)
    (tmp_path / "val" / "x" / "a.png").touch()
    source = RecordSource(root=tmp_path)
    for path in ("/home/me/val/x/a.png", f"{tmp_path}/val/x/a.png", "C:\\data\\val\\x\\a.png", "val\\x\\a.png"):
        assert source.path(path) == "val/x/a.png"
    assert source.path("/mnt/b.png") == "mnt/b.png" and source.path("a.png") == "a.png" and source.path(5) == 5
    for path in ("../../etc/passwd", "/../etc/passwd", "http://x/a.png"):
        with pytest.raises(DataError, match=r"lies outside|URL"):
            sample_from_row({"id": "1", "image": source.path(path)}, tmp_path)
