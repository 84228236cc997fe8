"""Boxes of files as three communities write them, in five frames: they are read right, or a named doubt says with which
setting they are. Never are wrong boxes trained on without a word."""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
from PIL import Image

from tests.tables import each
from vlrl.checks import preflight
from vlrl.cli.main import main
from vlrl.config import load
from vlrl.config.box_forms import BoxForm, parse_box_form
from vlrl.data.formats.box_answers import boxes_of
from vlrl.data.row_samples import box_problems
from vlrl.data.sources.box_forms import box_doubt, boxes_to_pixels, resized_size
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.reading import canonical_rows, rename_columns, rows_in
from vlrl.errors import ConfigError, DataError, VlrlError
from vlrl.rewards.boxes import iou
from vlrl.task import task_samples
from vlrl.training.build_task import make_task

SIZES = {"mixed": [(640, 480), (480, 640), (1280, 960), (1920, 1080), (800, 600), (1080, 1920), (320, 240)],
         "large": [(1600, 1200), (2048, 1536), (1920, 1080), (3000, 2000)],
         "small": [(640, 480), (500, 375), (480, 640), (427, 640)]}
RESIZE = (28, 3136, 1003520)
NATIVE = {"coco": "xywh", "refcoco": "xywh"}
"""Formats that write [x, y, width, height]; the others write corners."""


def pictures(kind):
    """24 times a name, a size, a box in pixels of the original picture, and what is in it."""
    rng = random.Random(0)
    for i in range(24):
        width, height = SIZES[kind][i % len(SIZES[kind])]
        w, h = rng.uniform(0.1, 0.45) * width, rng.uniform(0.1, 0.45) * height
        x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
        yield f"{i}.png", (width, height), [round(v) for v in (x, y, x + w, y + h)], f"the mug {i}"


def framed(box, size, frame, layout):
    edge = {"pixels": size, "resized": resized_size(size, RESIZE), "norm1": (1, 1), "norm1000": (1000, 1000)}[frame]
    values = [round(v * edge[i % 2] / size[i % 2], 4 if frame == "norm1" else 0) for i, v in enumerate(box)]
    return [*values[:2], values[2] - values[0], values[3] - values[1]] if layout == "xywh" else values


def talk(question, answer, who=("role", "content", "user", "assistant")):
    return [{who[0]: who[2], who[1]: question}, {who[0]: who[3], who[1]: answer}]


RECORDS = {
    "refcoco": lambda p, v, name, ask: {"image": p, "bbox": v, "sentences": [name], "ref_id": 1},
    "EasyR1": lambda p, v, name, ask: {"images": [p], "problem": f"<image>{ask}", "answer": json.dumps(v)},
    "EasyR1, a list": lambda p, v, name, ask: {"images": [p], "problem": name, "answer": v},
    "TRL": lambda p, v, name, ask: {"image": p, "solution": f"<answer>{json.dumps(v)}</answer>", "prompt": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ask}]}]},
    "TRL, a text": lambda p, v, name, ask: {"image": p, "prompt": ask, "solution": json.dumps(v)},
    "ms-swift": lambda p, v, name, ask: {
        "images": [p], "objects": {"ref": [name], "bbox": [v]},
        "messages": talk("<image>Find <ref-object>.", "<bbox>")},
    "LLaMA-Factory": lambda p, v, name, ask: {"images": [p], "conversations": talk(
        f"<image>{ask}", json.dumps(v), ("from", "value", "human", "gpt"))},
    "a sentence": lambda p, v, name, ask: {"images": [p], "messages": talk(
        f"<image>{ask}", f"The bounding box is {json.dumps(v)}.")},
    "in JSON": lambda p, v, name, ask: {"images": [p], "messages": talk(
        f"<image>{ask}", "```json\n" + json.dumps([{"bbox_2d": v, "label": name}]) + "\n```")},
}
FILES = ("coco", *RECORDS)


def written(folder, kind, pictures_, frame, layout):
    found = [*pictures(pictures_)]
    boxes = [framed(box, size, frame, layout) for _, size, box, _ in found]
    size_of = [{"width": size[0], "height": size[1]} for _, size, *_ in found]
    content = [{**RECORDS[kind](p, v, name, f"Please provide the bounding box of {name}."), **size} for (p, _, _, name),
               v, size in zip(found, boxes, size_of, strict=True)] if kind != "coco" else {
        "images": [{"id": i, "file_name": p, **size} for i, ((p, *_), size) in enumerate(zip(found, size_of,
                                                                                         strict=True))],
        "annotations": [{"id": i, "image_id": i, "category_id": 1, "bbox": v, "caption": name}
                        for i, ((*_, name), v) in enumerate(zip(found, boxes, strict=True))],
        "categories": [{"id": 1, "name": "mug"}]}
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return path, [(size, box) for _, size, box, _ in found]


def outcome(path, truth, form="auto", depth=2):
    """The settings after which the boxes are right; None where they stay wrong and nothing says so."""
    rows = [row for _, row in rows_in(path, boxes=form)]
    sound = [row for row in rows if not isinstance(row, DataError)]
    doubt = box_doubt(sound, form)
    said = [doubt.message] if doubt else []
    said += [str(row) for row in rows if isinstance(row, DataError)][:1]
    said += ["outside" for row, (size, _) in zip(rows, truth, strict=True)
             if isinstance(row, dict) and [*box_problems(row, size)]]
    if not said:
        right = all(len(row["boxes"]) == 1 and iou(row["boxes"][0]["box"], box) > 0.85 for row, (_, box) in zip(
            rows, truth, strict=True))
        return [] if right else None
    if not depth:
        return None
    settings = dict.fromkeys(re.findall(r"data\.boxes=([\w:-]+\w)", " ".join(said)))
    found = ((name, outcome(path, truth, name, depth - 1)) for name in settings if name != "pixels")
    return next(([name, *rest] for name, rest in found if rest is not None), None)


@pytest.mark.parametrize("kind", FILES)
def test_boxes_in_five_frames_are_right_or_named(tmp_path, kind):
    own = NATIVE.get(kind, "xyxy")
    for sizes, frame, layout in product(("mixed", "large"), ("pixels", "resized", "norm1", "norm1000"),
                                        ("xyxy", "xywh")):
        path, truth = written(tmp_path, kind, sizes, frame, layout)
        found = outcome(path, truth)
        assert found is not None, (kind, sizes, frame, layout)
        if layout == own:
            need = {"pixels": "", "norm1": "norm1", "norm1000": "norm1000", "resized": "resized:28:3136:1003520"}[frame]
            by_itself = frame == "pixels" or (frame == "norm1" and kind not in NATIVE)
            assert found == ([] if by_itself else [need]), (kind, sizes, frame, layout)
        else:
            assert found[-1].startswith(layout), (kind, sizes, frame, layout, found)


ANY_SIZE = [(64, 48), (96, 64), (112, 84), (200, 150), (320, 240), (427, 640), (640, 480), (800, 600), (1024, 768),
            (1280, 720), (1280, 960), (1600, 1200), (1920, 1080), (1080, 1920)]


def right_rows(seed):
    """20 to 200 rows with boxes in pixels of pictures of one size or several: anywhere, far from all edges, small,
    large, often at the right and lower edges, or ending on multiples of 28."""
    rng = random.Random(seed)
    sizes = rng.sample(ANY_SIZE, rng.choice([1, 1, 2, 3, 6]))
    style = rng.choice(["", "far", "small", "large", "edge", "28"])
    low, high = {"small": (0.02, 0.2), "large": (0.4, 0.8)}.get(style, (0.05, 0.6))
    for _ in range(rng.randint(20, 200)):
        size, sides = rng.choice(sizes), []
        for side in size:
            gap = 0.1 * side if style == "far" else 0
            extent = rng.uniform(low, high) * side
            start = rng.uniform(gap, side - gap - extent)
            end = {"28": max(28, (start + extent) // 28 * 28), "edge": rng.choice([side, start + extent])}.get(
                style, start + extent)
            sides.append((round(min(start, end - 2)), round(end)))
        (x1, x2), (y1, y2) = sides
        yield {"width": size[0], "height": size[1], "boxes": [{"box": [x1, y1, max(x2, x1 + 1), max(y2, y1 + 1)]}]}


def test_boxes_that_are_pixels_never_stop_a_run():
    found = [doubt for seed in range(250) if (doubt := box_doubt([*right_rows(seed)]))]
    assert not [doubt.message for doubt in found if doubt.sure] and len(found) <= 2


def test_a_form_that_is_only_more_probable_is_a_warning():
    for frame, kind in product(("resized", "norm1000"), SIZES):
        rows = [{"width": size[0], "height": size[1], "box": framed(box, size, frame, "xyxy")}
                for _, size, box, _ in pictures(kind)]
        outside = sum(any(v > row[side] + 1 for v, side in zip(row["box"][2:], ("width", "height"), strict=True))
                      for row in rows)
        doubt = box_doubt(rows)
        assert (doubt and doubt.sure) == (outside > 2 if (frame, kind) != ("resized", "small") else None)
    assert box_doubt([{"width": 640, "height": 480, "box": [0.1, 0.2, 0.5, 0.9]}] * 9).sure
    assert box_doubt([{"width": 640, "height": 480, "box": [300, 200, 50, 60]}] * 9).sure


def test_small_pictures_and_what_is_said_where_nothing_can_show(tmp_path, capsys):
    for kind, frame in product(("coco", "EasyR1", "ms-swift"), ("pixels", "norm1", "norm1000")):
        assert outcome(*written(tmp_path, kind, "small", frame, NATIVE.get(kind, "xyxy"))) is not None, (kind, frame)
    # rounding to multiples of 28 alone shows nowhere: the frame that is assumed is said
    path, _ = written(tmp_path, "EasyR1", "small", "resized", "xyxy")
    main(["data", "check", str(path), "--allow-missing", "--no-show"])
    assert "read as pixels of the original images" in (said := capsys.readouterr().out) and "data.boxes=resized" in said
    main(["data", "check", str(path), "--allow-missing", "--no-show", "--boxes", "resized:28:3136:1003520"])
    assert "read as pixels" not in capsys.readouterr().out


def test_check_convert_split_and_train_stop_at_a_doubt_that_a_setting_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "wide", [(1400, 60), (1200, 50)])
    _, truth = written(tmp_path, "EasyR1", "wide", "norm1000", "xyxy")
    for number, (name, size, *_) in enumerate(pictures("wide")):
        Image.new("RGB", size, (number, 0, 0)).save(tmp_path / name)
    split = ["data", "split", "file.json", "-o", "parts", "--no-near-duplicates", "--root", "."]
    for words in (["data", "check", "file.json"], ["data", "convert", "file.json", "-o", "rows.jsonl"], split):
        assert main(words) == 1, words
        told = capsys.readouterr()
        assert "data.boxes=norm1000" in " ".join((told.out + told.err).split()), words
    settings = ["task.drawn=false", "data.train=file.json", "data.heldout=file.json", "eval.samples=0"]
    for form, message in (("auto", r"data\.boxes=norm1000"), ("norm1000", "")):
        config = load("quickstart.yaml", [*settings, f"data.boxes={form}"])
        task = make_task(config)
        with pytest.raises(VlrlError, match=message) if message else nullcontext():
            preflight.check(task, task_samples(task, "train"), config)
    assert main(["data", "convert", "file.json", "-o", "rows.jsonl", "--boxes", "norm1000"]) == 0
    rows = [row for _, row in rows_in(tmp_path / "rows.jsonl")]
    assert all(iou(row["boxes"][0]["box"], box) > 0.85 for row, (_, box) in zip(rows, truth, strict=True))
    assert main([*split, "--boxes", "norm1000"]) == 0


def test_a_question_of_the_rows_is_asked_in_its_own_words_at_every_visit():
    record = {**RECORDS["EasyR1"]("a.png", [1, 2, 30, 40], "mug", "Where is the mug? Give its box."),
              "width": 100, "height": 100}
    (row,) = canonical_rows(record)
    task = make_task(load("quickstart.yaml", ["task.drawn=false", "data.train=x.jsonl"]))
    sample = task.sample_from_row(row)
    for visit in range(3):
        text = task.messages(replace(sample, prompt=task.template(sample, visit)))[-1]["content"][-1]["text"]
        assert text == "Where is the mug? Give its box. Answer with the box as [x1, y1, x2, y2]."


@each("name form", [
    ("auto", BoxForm()), ("pixels", BoxForm("", "pixels")), ("xywh", BoxForm("xywh")), ("norm1", BoxForm("", "norm1")),
    ("xyxy-norm1000", BoxForm("xyxy", "norm1000")), ("resized", BoxForm("", "resized")),
    ("xywh-resized:28:3136:1003520", BoxForm("xywh", "resized", RESIZE))])
def test_names_of_forms(name, form):
    assert parse_box_form(name) == form


@each("name", ["norm100", "xywh-pixels", "resized:28", "resized:0:1:2", "resized:28:9:3", "norm1:28:1:2", "xyxy-"])
def test_unknown_forms_are_refused(name):
    with pytest.raises(ConfigError, match=r"data\.boxes="):
        parse_box_form(name)


@each("size resized", [((640, 480), (644, 476)), ((500, 375), (504, 364)), ((1920, 1080), (1316, 728)),
                       ((20, 10), (84, 56)), ((2048, 1536), (1148, 840))])
def test_sizes_after_the_processor_of_qwen_vl(size, resized):
    # by hand from smart_resize; the last two: below 3136 and above 1003520 pixels
    assert resized_size(size, RESIZE) == resized


def test_the_size_of_the_resized_picture_may_stand_in_the_row():
    row = {"width": 2000, "height": 1000, "box": [100, 50, 500, 250]}
    right = [200, 100, 1000, 500]
    assert boxes_to_pixels({**row, "processed_size": [1000, 500]}, "resized")["box"] == right
    assert boxes_to_pixels({**row, "meta": {"resized_width": 1000, "resized_height": "500"}}, "resized")["box"] == right
    assert boxes_to_pixels({**row, "box": [100, 50, 400, 200], "processed_size": [1000, 500]}, "xywh-resized"
                           )["box"] == right
    with pytest.raises(DataError, match=r"data\.boxes=resized:28:3136:1003520"):
        boxes_to_pixels(row, "resized")


def test_what_a_record_says_of_its_boxes_stands_above_the_file():
    swift = {**RECORDS["ms-swift"]("a.png", [100, 100, 500, 500], "the mug", ""), "width": 2000, "height": 1000}
    swift["objects"]["bbox_type"] = "norm1000"
    for form in ("auto", "norm1000"):
        (row,) = canonical_rows(swift, "auto", RecordSource(boxes=form))
        assert row["boxes"][0]["box"] == [200, 100, 1000, 500], form
    (error,) = canonical_rows(swift, "auto", RecordSource(boxes="norm1"))
    assert "bbox_type='norm1000' and data.boxes='norm1' contradict" in str(error)
    (error,) = canonical_rows({"data": {"image": "a.png"}, "annotations": []}, "auto", RecordSource(boxes="norm1000"))
    assert "label_studio defines the form of its boxes" in str(error)


QWEN = "<|object_ref_start|>mug<|object_ref_end|><|box_start|>(100,200),(300,400)<|box_end|>"


@each("answer question boxes", [
    ("[1, 2, 3, 4]", "", [[1, 2, 3, 4]]), ("It is at (1, 2), (30, 40).", "the bounding box?", [[1, 2, 30, 40]]),
    ("It is at [1, 2, 30, 40].", "How many?", None), ("None", "", None), ("[]", "", []),
    (QWEN, "", [[100, 200, 300, 400]]), ("<ref>mug</ref><box>[[1, 2, 30, 40]]</box>", "", [[1, 2, 30, 40]]),
    ("<box>(1,2),(3,4)</box><box>(5,6),(7,8)</box>", "", [[1, 2, 3, 4], [5, 6, 7, 8]]), ("<box>here</box>", "", None)])
def test_boxes_that_an_answer_says(answer, question, boxes):
    found = boxes_of(answer, "", question)
    assert (found and [one["box"] for one in found]) == boxes if boxes else found == boxes


def test_tokens_of_a_model_need_their_unit(tmp_path):
    record = {"images": ["a.png"], "messages": talk("<image>Where is the mug?", QWEN), "width": 500, "height": 500}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    ((_, error),) = rows_in(tmp_path / "a.json")
    assert "data.boxes=norm1000" in str(error)
    ((_, row),) = rows_in(tmp_path / "a.json", boxes="norm1000")
    assert row["boxes"] == [{"box": [50, 100, 150, 200], "label": "mug"}]


@each("more words", [
    ({}, "yes"), ({"answer": "no"}, "no"), ({"reward_model": {"ground_truth": "no"}}, "no")])
def test_the_answer_of_a_conversation_outlives_another_question(more, words):
    record = {"problem": "Is it red?", "images": ["a.png"], "messages": talk("<image>What colour?", "yes"), **more}
    (row,) = canonical_rows(rename_columns(record, {"question": "problem"}))
    assert (row["question"], row["answer"]) == ("Is it red?", words)
    turns = [{"role": "system", "content": "Be brief."}, *record["messages"]]
    kept = rename_columns({**record, "messages": turns}, {"question": "problem"})
    assert isinstance(kept, DataError) is (not more) and (more or "earlier turns" in str(kept))


@each("record grounded", [
    ({"problem": "Find the mug.", "answer": "[1, 2, 30, 40]"}, True),
    ({"prompt": "Where is the mug?", "solution": "[1, 2, 30, 40]"}, True),
    ({"question": "the mug", "answer": [1, 2, 30, 40]}, True),
    ({"question": "Which numbers are shown?", "answer": "[1, 2, 30, 40]"}, False),
    ({"problem": "How many are there per row?", "answer": [1, 2, 30, 40]}, False),
    ({"problem": "Detect all mugs.", "answer": '[{"bbox_2d": [1, 2, 3, 4], "label": "mug"}]'}, True)])
def test_four_numbers_are_a_box_where_a_place_is_asked_for(record, grounded):
    (row,) = canonical_rows({"image": "a.png", "width": 90, "height": 90, **record})
    assert ("boxes" in row) is grounded


def test_the_share_that_is_held_out_does_not_depend_on_the_folder(tmp_path):
    held = []
    for place in ("a", "b/c"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        path, _ = written(folder, "EasyR1", "small", "pixels", "xyxy")
        for name, *_ in pictures("small"):
            Image.new("RGB", (9, 9)).save(folder / name)
        settings = ["task.drawn=false", f"data.train={path}", "data.heldout=", "data.heldout_share=0.25"]
        task = make_task(load("quickstart.yaml", settings))
        held.append([sample.id for sample in task_samples(task, "heldout")])
    assert held[0] == held[1] and len(held[0]) == 6
