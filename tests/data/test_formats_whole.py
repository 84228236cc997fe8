"""What all records of a file together tell: its format, and ids."""

import json

import pytest

from tests.data.test_dataset import task
from tests.data.test_formats import save
from tests.tables import each
from vlrl.cli.main import main
from vlrl.data import FIELDS, read_rows
from vlrl.data.sources.reading import canonical_rows, recognised_format, rows_in
from vlrl.errors import DataError
from vlrl.tools.datasets.convert import convert

ASK = {"image": "a.png", "question": "What could lead to a collision?", "answer": "Turning left."}
FOUND = {"image": "a.png", "width": 9, "height": 9, "x1": 1, "y1": 2, "x2": 3, "y2": 4, "label": "mug"}


@each("usual other wanted", [
    (ASK, {**ASK, "answer": "ACCELERATE, STRAIGHT"}, ("answer", "ACCELERATE, STRAIGHT")),  # no plan among questions
    (ASK, {"id": 5, **ASK, "answer": "No"}, ("answer_type", "yes_no")),  # alone it would be a canonical row
    ({**ASK, "id": 1, "answer_type": "text"}, {**ASK, "id": 7, "options": ["x", "y"]}, ("answer", "Turning left.")),
    ({"image": "a.png", "label": "cat"}, {"id": 7, "image": "a.png", "label": "dog"}, ("labels", ["cat", "dog"]))])
def test_a_record_is_read_as_the_others_of_its_file(tmp_path, usual, other, wanted):
    rows = read_rows(save(tmp_path / "r.json", [usual, usual, other]))
    assert rows[2][wanted[0]] == wanted[1]


@each("usual other words", [
    (FOUND, {**ASK, "answer": "KEEP, STRAIGHT"}, "of format alphadrive, but most of the file's rows are of format tab"),
    (ASK, {"image": "a.png", "label": "cat"}, "of format labelled, but most of the file's rows are of format qa"),
    (ASK, {"image": "a.png", "caption": "a cat"}, "of no known format ('image, caption'), but most of the file's"),
    ({"image": "a.png", "label": "cat"}, ASK, "are those of format qa, but")])
def test_a_record_of_another_format_is_refused(tmp_path, usual, other, words):
    file = save(tmp_path / "r.json", [usual, other, usual])
    wrong = [(where, row) for where, row in rows_in(file) if isinstance(row, DataError)]
    assert len(wrong) == 1 and wrong[0][0].endswith("row 2") and words in str(wrong[0][1])
    forced = [row for _, row in rows_in(file, recognised_format(usual) or "") if isinstance(row, DataError)]
    assert not any("most of the file's rows" in str(row) for row in forced)


def test_large_files_and_followers_are_of_one_format_and_share_no_id(tmp_path):
    (tmp_path / "a.png").touch()
    rows = [ASK] * 200 + [{**ASK, "answer": "ACCELERATE, STRAIGHT"}, {"image": "a.png", "label": "cat"}]
    file = save(tmp_path / "r.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    samples = task(train=str(file), index="lazy", cache=str(tmp_path / "cache")).samples("train")
    assert samples[200]["answer"] == "ACCELERATE, STRAIGHT"
    with pytest.raises(DataError, match="of format labelled, but most of the file's rows are of format qa"):
        samples[201]
    pair = {"id": "a", "prompt": "q", "chosen": "x", "rejected": "y"}
    one, two = (save(tmp_path / f"{n}.json", [pair]) for n in "12")
    taken: set[str] = set()
    found = [row for file in (one, two) for _, row in rows_in(file, taken=taken)]
    assert [row["id"] for row in found if isinstance(row, dict)] == ["a", "a-2"]
    row = {"id": 1, "image": "a.png", "question": "q", "answer": "a", "answer_type": "text"}
    file = save(tmp_path / "r.jsonl", f"{json.dumps(row)}\n{json.dumps(row)}\n")
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
    assert "original_id" in FIELDS
    assert main(["data", "check", str(file), "--allow-missing"]) == 0 and "0 bad rows" in capsys.readouterr().out
    assert main(["data", "convert", str(file), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["id"] for row in read_rows(tmp_path / "rows.jsonl")] == ["6", "7", "6-3", "6-4", "6-2"]


IMAGES = [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}]
CATS = {"categories": [{"id": 1, "name": "cat"}]}


def test_annotations_of_coco_find_their_image_or_are_refused(tmp_path):
    def read(images, *annotations):
        found = [{"id": n, "category_id": 1, **a} for n, a in enumerate(annotations)]
        return [row for _, row in rows_in(save(tmp_path / "c.json", {"images": images, "annotations": found, **CATS}))]
    (row,) = read(IMAGES, {"image_id": "1", "bbox": [1, 2, 3, 4]}, {"image_id": 1, "bbox": [1, 2, 0, 4]})
    assert isinstance(row, dict) and row["boxes"] == [{"box": [1, 2, 4, 6], "label": "cat"}]
    assert row["meta"] == {"empty": [{"box": [1, 2, 1, 6], "label": "cat"}]}
    (row,) = read(IMAGES, {"image_id": 1, "bbox": [5, 5, -3, 4]})  # no region: its corners are refused
    assert isinstance(row, dict) and row["boxes"] == [{"box": [5, 5, 2, 9], "label": "cat"}]
    two = read([*IMAGES, {**IMAGES[0], "file_name": "b.png"}], {"image_id": 1, "bbox": [1, 2, 3, 4]})
    assert all("2 files in 'images' have the id 1" in str(row) for row in two)
    (row,) = canonical_rows({"images": IMAGES, "annotations": [{"id": 5, "image_id": 7, "category_id": 1}], **CATS})
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
