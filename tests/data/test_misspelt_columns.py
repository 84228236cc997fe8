"""Misspelt columns of records in formats of other projects: the message names the column and settings that read it."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.tables import each
from vlrl.cli.main import main
from vlrl.config import load
from vlrl.data.row_samples import checked_sample
from vlrl.data.sources.misspelt import column_hint
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError
from vlrl.task import Task
from vlrl.tools.machine.dryrun import problems_of

EASYR1 = {"images": ["a.png"], "problem": "<image>Find the bounding box of the mug.", "answer": "[5, 6, 40, 50]"}
TABLE = {"image": "a.png", "expression": "the mug", "xmin": 5, "ymin": 6, "xmax": 40, "ymax": 50}


def renamed(record, names):
    return {names.get(name, name): value for name, value in record.items()}


def read(path, **options):
    return [checked_sample(Task(), row, Path(path.parent)) for _, row in rows_in(path, **options)]


@each("suffix record names", [
    (".jsonl", EASYR1, {"answer": "anwser"}), (".jsonl", EASYR1, {"problem": "problm"}),
    (".jsonl", EASYR1, {"images": "imges"}), (".jsonl", EASYR1, {"problem": "problm", "answer": "anwser"}),
    (".csv", TABLE, {"image": "file"}),
    (".csv", {"image": "a.png", "question": "Where is the mug?", "answer": "[5; 6]"}, {"image": "file"})])
def test_the_settings_that_are_named_read_the_file(tmp_path, suffix, record, names):
    Image.new("RGB", (96, 64)).save(tmp_path / "a.png")
    path, wrong = tmp_path / f"rows{suffix}", renamed(record, names)
    path.write_text(json.dumps(wrong) if suffix == ".jsonl" else f"{','.join(wrong)}\n"
                    + ",".join(map(str, wrong.values())))
    with pytest.raises(DataError) as error:
        read(path)
    settings = re.findall(r"data\.columns=\{(.*?)\} \(--columns ", str(error.value))
    said = dict(pair.split(": ") for pair in settings[0].split(", "))
    assert said == names
    (sample,) = read(path, columns=said)
    path.write_text(json.dumps(record) if suffix == ".jsonl" else f"{','.join(record)}\n"
                    + ",".join(map(str, record.values())))
    assert sample.row.get("boxes") == read(path)[0].row.get("boxes")


def test_columns_of_ones_own_get_no_hint():
    for record in ({"prompt_text": "x", "target": 3}, {"colour": "red", "shape": "round"}, {}, {"images": ["a.png"]}):
        assert column_hint(record) == ""


def test_check_does_not_call_an_unknown_format_canonical(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(renamed(EASYR1, {"answer": "anwser"})))
    assert main(["data", "check", str(path), "--allow-missing", "--no-show"]) == 1
    said = capsys.readouterr().out
    assert "no known format" in said and "canonical (vlrl)" not in said and "NAME=" not in said
    assert "--columns answer=anwser" in said


def test_a_dry_run_names_a_problem_of_both_parts_of_a_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (96, 64)).save("a.png")
    Path("rows.jsonl").write_text(f"{json.dumps(renamed(EASYR1, {'answer': 'anwser'}))}\n" * 20)
    config = load("quickstart.yaml", ["task.drawn=false", "data.train=rows.jsonl", "data.heldout=",
                                      "data.heldout_share=0.25"])
    (problem,) = problems_of(config)
    assert "data.columns={answer: anwser}" in problem
