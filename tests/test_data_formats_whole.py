"""What all records of a file together tell: ids."""

import json

import pytest

from tests.test_data_formats import save
from vlrl.cli import main
from vlrl.data import FIELDS, read_rows
from vlrl.errors import DataError
from vlrl.formats import rows_in


def test_repeated_ids_of_others_become_unique_by_place(tmp_path, caplog, capsys):
    file = save(tmp_path / "val.csv", "video,question,answer,qid,a0,a1\n" + "".join(
        f"{1000 + n},why?,1,{qid},x,y\n" for n, qid in enumerate((6, 7, 6, 6, "6-2"))))
    rows = read_rows(file)
    assert [row["id"] for row in rows] == ["6", "7", "6-3", "6-4", "6-2"]
    assert [row.get("original_id") for row in rows] == [None, None, "6", "6", None]
    assert "2 of 5 rows have an id that occurs before" in caplog.text and "'6-3' for '6'" in caplog.text
    assert "original_id" in FIELDS
    assert main(["data", "check", str(file), "--allow-missing"]) == 0 and "0 bad rows" in capsys.readouterr().out
    assert main(["data", "convert", str(file), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["id"] for row in read_rows(tmp_path / "rows.jsonl")] == ["6", "7", "6-3", "6-4", "6-2"]


def test_files_that_follow_one_another_share_no_id(tmp_path):
    pair = {"id": "a", "prompt": "q", "chosen": "x", "rejected": "y"}
    one, two = (save(tmp_path / f"{n}.json", [pair]) for n in "12")
    taken: set[str] = set()
    assert [row["id"] for file in (one, two) for _, row in rows_in(file, taken=taken)] == ["a", "a-2"]


def test_canonical_rows_keep_their_ids(tmp_path):
    row = {"id": 1, "image": "a.png", "question": "q", "answer": "a", "answer_type": "text"}
    file = save(tmp_path / "r.jsonl", f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert [row["id"] for row in read_rows(file)] == [1, 1]
    with pytest.raises(DataError, match="ids must be unique"):
        from vlrl.tools.dataconvert import convert

        convert(file, tmp_path / "out.jsonl")
