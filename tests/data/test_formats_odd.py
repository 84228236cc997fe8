"""Odd annotations that were read wrongly without a word, or refused with words that mislead."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.test_formats import make_video, one, save
from tests.tables import each, refused
from vlrl.checks.fields import field_problems, length_problem
from vlrl.cli.main import main
from vlrl.data import read_rows
from vlrl.data.formats.choices import option_letter, options_of
from vlrl.data.sources.reading import recognised_format, rows_in
from vlrl.errors import DataError
from vlrl.tools.datasets.convert import convert

SIZED = {"image": "a.png", "width": 64, "height": 32}
ASK = {"image": "a.png", "question": "Which?"}
FILM = {"video": "a.mp4", "question": "When?"}
CLICK = {"image": "a.png", "instruction": "tap"}


def talk(answer: str | None, question: str | None = "Where are cats?") -> dict:
    return {**SIZED, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def coco(bbox: list, categories: list, category: object = 1) -> dict:
    return {"images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 32}], "categories": categories,
            "annotations": [{"id": 7, "image_id": 1, "category_id": category, "bbox": bbox}]}


CAT = {"id": 1, "name": "cat"}
test_what_was_read_wrongly_is_refused = refused(DataError, one, {
    "options out of order": ({**ASK, "options": ["B. dog", "A. cat"], "answer": "A"}, "begin with B, A, which do not"),
    "options with a gap": ({**ASK, "options": ["A. x", "B. y", "D. z"], "answer": "D"}, "begin with A, B, D, which"),
    "keys from 1": ({**ASK, "options": {"1": "cat", "2": "dog"}, "answer": "1"}, "keys ['1', '2']"),
    "keys with a gap": ({**ASK, "options": {"A": "cat", "C": "cow"}, "answer": "C"}, "have the keys ['A', 'C']: name"),
    "labels from 1": ({**ASK, "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "1"}, "keys ['1', '2']"),
    "an option of a table is empty": ({**ASK, "A": "cat", "B": "", "C": "cow", "answer": "C"},
                                      "the option 'B' is empty, but C='cow' comes after it"),
    "the first option is empty": ({**ASK, "B": "cat", "C": "cow", "answer": "C"}, "the option 'A' is empty"),
    "the same option twice": ({**ASK, "options": ["cat", "dog", "dog"], "answer": "dog"}, "is the text of 2 options"),
    "a broken box as text": (talk('[{"bbox_2d": [1, 2, 30], "label": "cat"}]'), "is a position or an action"),
    "a detection cut off": (talk('[{"bbox_2d": [1, 2, 30, 20], "la'), "is a position or an action"),
    "no words of a user": (talk("cat", None), "has no question: no turn of a human or user contains text"),
    "shares in COCO": (coco([0.1, 0.2, 0.5, 0.3], [CAT]), "annotation 7: bbox=[0.1, 0.2, 0.5, 0.3] are fractions"),
    "two names of an id": (coco([1, 2, 3, 4], [CAT, {**CAT, "name": "cow"}]), "the id 1, 'cat' and 'cow': give"),
    "shares as abs_box": ({**CLICK, "abs_box": [0.1, 0.2, 0.6, 0.5]}, "abs_box=[0.1, 0.2, 0.6, 0.5] are fractions"),
    "shares of RefCOCO": ({**SIZED, "ref_id": 1, "sentences": ["x"], "bbox": [0.1, 0, 0.5, 1]}, "are fractions of the"),
    "shares of GUI-G1": ({**SIZED, "problem": "x", "rate": 1, "solution": [0.1, 0.2, 0.6, 0.5]}, "are fractions"),
    "a point in shares": ({**CLICK, "gt": {"action_type": "click", "x": 0.5, "y": 0.25}}, "x, y=[0.5, 0.25] are"),
    "YOLO's middles": ({"image": "a.png", "class": "cat", "x_center": "0.5", "y_center": "0.5", "width": "0.2",
                        "height": "0.3"}, "x_center and y_center are the centre of a box"),
    "more boxes than labels": ({"image": "a.png", "bboxes": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": ["cat"]},
                               "the 2 boxes and labels=['cat'] must be lists of the same length"),
    "one label as text": ({"image": "a.png", "bboxes": [[1, 2, 3, 4]], "labels": "cat"}, "labels='cat' must be lists"),
    "objects by columns": ({"image": "a.png", "objects": {"bbox": [[1, 2, 3, 4]], "category": [3]}},
                           "it is ambiguous whether these boxes are [x1, y1, x2, y2]"),
    "no class of a clip": ({"video": "a.mp4", "instruction": "Choose from ['run', 'walk'].", "answer": "swim"},
                           "answer='swim' is not one of the classes that the instruction lists: ['run', 'walk']"),
    "one sentence as text": ({"timestamps": [[1, 3]], "sentences": "He sits."}, "sentences='He sits.' must be a list"),
    "an interval reversed": ({**FILM, "answer": "7.5-3.1"}, "'7.5-3.1' must begin before it ends")
}.values(), plain=True)


@each("record row", [
    ({**FILM, "answer": "3.1-7.5"}, {"answer_type": "span", "spans": [[3.1, 7.5]]}),  # TVGBench without a duration
    ({**FILM, "answer": "0:03 – 0:07"}, {"answer_type": "span", "spans": [[3, 7]]}),
    ({**FILM, "answer": "2-5"}, {"answer_type": "text", "answer": "2-5"}),  # a score, say
    ({**FILM, "options": ["1.0-2.5", "3.1-7.5"], "answer": "3.1-7.5"}, {"answer_type": "choice", "answer": "B"}),
    (talk("[]"), {"boxes": [], "question": "Where are cats?"}),
    (coco([1, 2, 3, 4], [{**CAT, "id": "1"}]), {"labels": ["cat"]}),
    (coco([0, 0, 1, 1], [CAT], "1"), {"boxes": [{"box": [0, 0, 1, 1], "label": "cat"}]}),  # a pixel
    ({"image": "a.png", "bboxes": [], "labels": []}, {"boxes": [], "labels": []}),
    ({"image": "a.png", "bbox_format": "xywh", "objects": {"bbox": [[1, 2, 3, 4]], "category": ["cat"]}},
     {"boxes": [{"box": [1, 2, 4, 6], "label": "cat"}]}),
    ({"image": "a.png", "objects": {"bbox": [], "category": []}}, {"boxes": []}),
    ({"video": "a.mp4", "instruction": "Choose from ['run', 'walk'].", "answer": "Run"},
     {"answer": "run", "labels": ["run", "walk"]}),
    ({**ASK, "A": "cat", "B": "dog", "C": "", "answer": "B"}, {"options": ["cat", "dog"], "answer": "B"}),
    ({**ASK, "options": {"0": "cat", "1": "dog"}, "answer": "1"}, {"options": ["cat", "dog"], "answer": "B"}),
    ({**ASK, "options": ["B. B. King", "J. S. Bach"], "answer": "A"}, {"answer": "A"}),
    ({**FILM, "answer": "x", "start": 2, "duration": 30}, {"video_start": 2, "video_end": None, "duration": 30}),
    ({**FILM, "answer": "x", "end": "0:05"}, {"video_start": None, "video_end": 5})])
def test_what_is_told_is_read(record, row):
    found = one(record)
    assert {name: found.get(name) for name in row} == row


def test_odd_regions_and_values(tmp_path):
    value = {"x": 10, "y": 10, "width": 20, "height": 20}
    tasks = [{"id": n, "data": {"image": "a.png"}, "annotations": [{"result": [{
        "original_width": 64, "original_height": 32, "value": {**value, "rectanglelabels": labels}}]}]}
        for n, labels in enumerate((["cat"], []))]
    (_, row), (_, wrong) = rows_in(save(tmp_path / "l.json", tasks))
    assert isinstance(row, dict) and row["labels"] == ["cat"] and "a box has no label" in str(wrong)
    ((_, row),) = rows_in(save(tmp_path / "n.json", tasks[1:]))
    assert isinstance(row, dict) and row["labels"] == [""]
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    record = {**ASK, "answer": decimal.Decimal("1.50"), "on": datetime.datetime(2024, 1, 1)}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "q.parquet")
    assert convert(tmp_path / "q.parquet", tmp_path / "q.jsonl")[0] == 1
    assert read_rows(tmp_path / "q.jsonl")[0]["answer"] == 1.5
    row = {"id": "a", "image": "a.png", "answer_type": "text", "question": "q", "answer": "x", "on": record["on"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="row 'a' cannot be written as JSON"):
        convert(tmp_path / "c.parquet", tmp_path / "c.jsonl")
    pq.write_table(pa.Table.from_pylist([{**ASK, "image": {"bytes": b"GIF", "path": None}, "answer": "x"}]),
                   tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"cannot identify image file\. Replace the image") as error:
        convert(tmp_path / "p.parquet", tmp_path / "p.jsonl")
    assert "BytesIO" not in str(error.value)


@each("row words", [
    ({"boxes": [[60, 70, 10, 20]]}, "boxes=[[60, 70, 10, 20]] must be a list of"), ({"boxes": {"box": [1]}}, "boxes={"),
    ({"boxes": [{"box": ["1", 2, 3, 4]}]}, "boxes=[{"), ({"boxes": []}, None), ({"boxes": None}, None),
    ({"box": [1, 2, 3]}, "box=[1, 2, 3] must be"), ({"box": [1, 2, 3, 4]}, None),
    ({"label": "cat", "labels": "cat"}, "labels='cat' must be a list"), ({"labels": ["a", 1]}, None),
    ({"answer_type": "regression", "answer": "n/a"}, "as answer_type=regression says"),
    ({"answer_type": "count", "answer": 3}, None)])
def test_fields_of_a_wrong_shape(row, words):
    found = list(field_problems(row))
    assert [words in problem for problem in found] == [True] if words else found == []


def test_lengths_are_those_of_what_is_cut(tmp_path, capsys):
    assert length_problem({"duration": 6}, 6, "a.mp4", 2, 8) is None
    assert length_problem({"spans": [[0, 5.5]]}, 6, "a.mp4", 2, 8) is None
    assert "beyond the clip of 6 seconds" in str(length_problem({"spans": [[0, 9.5]]}, 6, "a.mp4", 2, 8))
    assert length_problem({}, 5, "a.mp4", 15, 45) == "video_end=45 lies after the end of a.mp4, which lasts 20 seconds"
    make_video(tmp_path / "a.mp4")
    rows = [{"id": n, **FILM, "answer_type": "span", "spans": [[0.1, 0.5]], "video_start": 1, "video_end": end,
             "duration": end - 1} for n, end in enumerate((2, 9))]
    file = save(tmp_path / "v.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "check", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["problems"]
    assert [(p["id"], "video_end=9 lies after the end of a.mp4, which lasts 2" in p["reason"]) for p in found] == [
        ("1", True)]
    assert recognised_format({"image": "a.png", "label": "cat", "cx": 1}) == "labelled"
    assert options_of({"a1": "x", "a2": "y"}) == [] and options_of({"option1": "x", "option2": "y"}) == ["x", "y"]
    assert option_letter("B", ["dog", "dog"]) == option_letter("B", ["B", "b", "x"]) == "B"
