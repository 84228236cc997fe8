"""Odd annotations that were read wrongly without a word, or refused with words that mislead; what all records of a file
together tell: its format, and ids."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.sets import read, save
from tests.data.test_formats import make_video, one
from tests.tables import each, refused
from vlrl.checks.fields import length_problem
from vlrl.cli.main import main
from vlrl.data import FIELDS, read_rows
from vlrl.data.formats.choices import option_letter, options_of
from vlrl.data.sources.reading import canonical_rows, recognised_format, rows_in
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


def test_lengths_are_those_of_what_is_cut(tmp_path, capsys):
    assert length_problem({"duration": 6}, 6, "a.mp4", 2, 8) is None
    assert length_problem({"spans": [[0, 5.5]]}, 6, "a.mp4", 2, 8) is None
    assert "beyond the clip of 6 seconds" in str(length_problem({"spans": [[0, 9.5]]}, 6, "a.mp4", 2, 8))
    assert length_problem({}, 5, "a.mp4", 15, 45) == "video_end=45 lies after the end of a.mp4, which lasts 20 seconds"
    make_video(tmp_path / "a.mp4")
    rows = [{"id": n, **FILM, "answer_type": "span", "spans": [[0.1, 0.5]], "video_start": 1, "video_end": end,
             "duration": end - 1} for n, end in enumerate((2, 9))]
    assert main(["data", "check", str(save(tmp_path / "v.jsonl", rows)), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["problems"]
    assert found["id"] == "1" and "video_end=9 lies after the end of a.mp4, which lasts 2" in found["reason"]
    assert recognised_format({"image": "a.png", "label": "cat", "cx": 1}) == "labelled"
    assert options_of({"a1": "x", "a2": "y"}) == [] and options_of({"option1": "x", "option2": "y"}) == ["x", "y"]
    assert option_letter("B", ["dog", "dog"]) == option_letter("B", ["B", "b", "x"]) == "B"


PLAIN = {"image": "a.png", "question": "What could lead to a collision?", "answer": "Turning left."}
FOUND = {"image": "a.png", "width": 9, "height": 9, "x1": 1, "y1": 2, "x2": 3, "y2": 4, "label": "mug"}


@each("usual other wanted", [
    (PLAIN, {**PLAIN, "answer": "ACCELERATE, STRAIGHT"}, ("answer", "ACCELERATE, STRAIGHT")),  # no plan among questions
    (PLAIN, {"id": 5, **PLAIN, "answer": "No"}, ("answer_type", "yes_no")),  # alone it would be a canonical row
    ({**PLAIN, "id": 1, "answer_type": "text"}, {**PLAIN, "id": 7, "options": ["x", "y"]}, ("answer", "Turning left.")),
    ({"image": "a.png", "label": "cat"}, {"id": 7, "image": "a.png", "label": "dog"}, ("labels", ["cat", "dog"]))])
def test_a_record_is_read_as_the_others_of_its_file(tmp_path, usual, other, wanted):
    rows = read_rows(save(tmp_path / "r.json", [usual, usual, other]))
    assert rows[2][wanted[0]] == wanted[1]


@each("usual other words", [
    (FOUND, {**PLAIN, "answer": "KEEP, STRAIGHT"}, "of format alphadrive, but most of the file's rows are of format"),
    (PLAIN, {"image": "a.png", "label": "cat"}, "of format labelled, but most of the file's rows are of format qa"),
    (PLAIN, {"image": "a.png", "caption": "a cat"}, "of no known format ('image, caption'), but most of the file's"),
    ({"image": "a.png", "label": "cat"}, PLAIN, "are those of format qa, but")])
def test_a_record_of_another_format_is_refused(tmp_path, usual, other, words):
    file = save(tmp_path / "r.json", [usual, other, usual])
    wrong = [(where, row) for where, row in rows_in(file) if isinstance(row, DataError)]
    assert len(wrong) == 1 and wrong[0][0].endswith("row 2") and words in str(wrong[0][1])
    forced = [row for _, row in rows_in(file, recognised_format(usual) or "") if isinstance(row, DataError)]
    assert not any("most of the file's rows" in str(row) for row in forced)


def test_large_files_and_followers_are_of_one_format_and_share_no_id(tmp_path):
    (tmp_path / "a.png").touch()
    rows = [PLAIN] * 200 + [{**PLAIN, "answer": "ACCELERATE, STRAIGHT"}, {"image": "a.png", "label": "cat"}]
    samples = read(save(tmp_path / "r.jsonl", rows))
    assert samples[200]["answer"] == "ACCELERATE, STRAIGHT"
    with pytest.raises(DataError, match="of format labelled, but most of the file's rows are of format qa"):
        samples[201]
    pair = {"id": "a", "prompt": "q", "chosen": "x", "rejected": "y"}
    taken: set[str] = set()
    found = [row for n in "12" for _, row in rows_in(save(tmp_path / f"{n}.json", [pair]), taken=taken)]
    assert [row["id"] for row in found] == ["a", "a-2"]
    row = {"id": 1, "image": "a.png", "question": "q", "answer": "a", "answer_type": "text"}
    file = save(tmp_path / "r.jsonl", [row, row])
    assert [row["id"] for row in read_rows(file)] == [1, 1]
    with pytest.raises(DataError, match="ids must be unique"):
        convert(file, tmp_path / "out.jsonl")


def test_repeated_ids_of_others_become_unique_by_place(tmp_path, caplog, capsys):
    file = save(tmp_path / "val.csv", "video,question,answer,qid,a0,a1\n" + "".join(
        f"{1000 + n},why?,1,{qid},x,y\n" for n, qid in enumerate((6, 7, 6, 6, "6-2"))))
    rows = read_rows(file)
    assert [row["id"] for row in rows] == ["6", "7", "6-3", "6-4", "6-2"]
    assert [row.get("original_id") for row in rows] == [None, None, "6", "6", None]
    assert "2 of 5 rows had the id of another row" in caplog.text and "'6-3' instead of '6'" in caplog.text
    assert "original_id" in FIELDS and main(["data", "check", str(file), "--allow-missing"]) == 0
    assert "0 bad rows" in capsys.readouterr().out
    assert main(["data", "convert", str(file), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["id"] for row in read_rows(tmp_path / "rows.jsonl")] == ["6", "7", "6-3", "6-4", "6-2"]


def test_annotations_of_coco_find_their_image_or_are_refused(tmp_path):
    images, names = [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}], {"categories": [CAT]}

    def read(images, *annotations):
        found = [{"id": n, "category_id": 1, **a} for n, a in enumerate(annotations)]
        return [row for _, row in rows_in(save(tmp_path / "c.json", {"images": images, "annotations": found, **names}))]
    (row,) = read(images, {"image_id": "1", "bbox": [1, 2, 3, 4]}, {"image_id": 1, "bbox": [1, 2, 0, 4]})
    assert isinstance(row, dict) and row["boxes"] == [{"box": [1, 2, 4, 6], "label": "cat"}]
    assert row["meta"] == {"empty": [{"box": [1, 2, 1, 6], "label": "cat"}]}
    (row,) = read(images, {"image_id": 1, "bbox": [5, 5, -3, 4]})  # no region: its corners are refused
    assert isinstance(row, dict) and row["boxes"] == [{"box": [5, 5, 2, 9], "label": "cat"}]
    two = read([*images, {**images[0], "file_name": "b.png"}], {"image_id": 1, "bbox": [1, 2, 3, 4]})
    assert all("2 files in 'images' have the id 1" in str(row) for row in two)
    (row,) = canonical_rows({"images": images, "annotations": [{"id": 5, "image_id": 7, "category_id": 1}], **names})
    assert isinstance(row, DataError) and "annotation 5: image_id=7 is not the id of an entry" in str(row)


@each("name content words", [
    ("p.json", [{"question": "q", "response_a": "x", "response_b": "y", "label": n} for n in (0, 1)],
     ["answer=0 must say", "answer=1 is ambiguous: another row of the file has the answer 0"]),
    ("t.csv", "image,xmin,ymin,xmax,ymax,label\na.png,1,2,3,4,\nb.png,1,2,3,4,dog\n", ["box has no label", None]),
    ("k.json", [{"image": "a.png", "label": " "}, {"image": "b.png", "label": "cat"}], ["not empty", None]),
    ("i.json", [{"shapes": [], "text": [], "image": "a.png"}], ["there is no question"])])
def test_what_would_be_read_wrongly_in_silence_is_refused(tmp_path, name, content, words):
    found = [row for _, row in rows_in(save(tmp_path / name, content))]
    assert all((word is None) == isinstance(row, dict) and (word or "") in str(row)
               for word, row in zip(words, found, strict=True))
