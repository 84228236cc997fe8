"""Types of answers over a file: public sets' shapes with values of our own, the table of data check, the setting."""

import json
from pathlib import Path

import pytest

from tests.data.sets import read, save
from tests.tables import each
from vlrl.cli.main import main
from vlrl.config import load as load_config
from vlrl.config.schema import DataSettings
from vlrl.data import read_rows
from vlrl.data.coordinates import Coordinates
from vlrl.data.sources.dataset import sample_from
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qa" / "tiny.yaml"
ASK = {"image": "a.png", "question": "What does the sign say?"}


def paid(row, *texts):
    task = load("qa")
    task.coordinates = Coordinates()
    scored = score_group(task, task.sample_from_row(row), [parse_answer(text) for text in texts], 0)
    return [s.parts["accuracy"] for s in scored]


def ocr_bench(answer, asks="what is written in the image?"):
    return {"dataset_name": "Own", "type": "Regular Text Recognition", "image_path": "a.png", "image": "a.png",
            "question": asks, "answers": [answer]}


def screen_qa(*answers, asks="What is the number?"):
    return {"image_id": 31, "image": "a.png", "question": asks, "ground_truth": list(answers)}


SHAPES = {  # records -> types, and of the first answers that pay and that do not
    "OCRBench": ([ocr_bench("1-877-555-0142", "what is the number?"), ocr_bench("K-041"), ocr_bench("LILLE")],
                 ["text"] * 3, ["1-877-555-0142"], ["-1573", "1-877-0142-555", "1-877-555-0143", "18775550142"]),
    "OCRBench, a letter code": ([ocr_bench("K-041"), ocr_bench("open"), ocr_bench("24/7")], ["text"] * 3,
                                ["K-041", "k-041"], ["K-41", "K-042", "041"]),
    "ScreenQA": ([screen_qa("555-013-0142", "(555) 013-0142"), screen_qa("41", "41 years old", asks="How old is he?"),
                  screen_qa("09:45"), screen_qa("Settings")], ["text", "number", "text", "text"],
                 ["555-013-0142", "(555) 013-0142", "555–013–0142"], ["400", "555-0142-013"]),
    "FUNSD": ([{**ASK, "question": "What is the REPORT NO.?", "answer": "004710"},
               {**ASK, "question": "What is the DATE?", "answer": "11/02/91"},
               {**ASK, "question": "What is the FAX?", "answer": "336/555-0142"}], ["text"] * 3,
              ["004710"], ["4710", "0004710", "004711"]),
    "MathVista": ([{**ASK, "pid": str(n), "question": asks, "choices": None, "unit": None, "precision": precision,
                    "answer": answer, "question_type": "free_form", "answer_type": kind}
                   for n, (asks, precision, answer, kind) in enumerate((
                       ("How long is it?", 1.0, "1.2", "float"), ("How many?", None, "4", "integer"),
                       ("Which?", None, "[0, 8]", "list")))],
                  ["number", "number", "text"], ["1.2", "1.22", "1.24"], ["1.3", "1.26", "1.1"]),
    "TabMWP": ([{**ASK, "question": asks, "choices": None, "answer": answer, "unit": None, "solution": "s",
                 "ques_type": "free_text", "ans_type": kind, "grade": 3} for asks, answer, kind in (
                     ("What is the time?", "7:05 P.M.", "other_text"), ("How many?", "1,204", "integer_number"),
                     ("What share?", "5/9", "other_text"))],
               ["text", "number", "text"], ["7:05 P.M.", "7:05 p.m."], ["7:50 P.M.", "7:05 A.M."]),
    "geometry": ([{**ASK, "question": "Find x.", "answer": "2\\sqrt{3}"},
                  {**ASK, "question": "Find y.", "answer": "3/4"},
                  {**ASK, "question": "Find the angle.", "answer": "45°"}], ["math", "math", "number"],
                 ["2\\sqrt{3}", "$2\\sqrt{3}$"], ["3\\sqrt{2}", "6"]),
    "formulas by their file": ([{**ASK, "question": "?", "answer": "\\pi"}, {**ASK, "question": "?", "answer": "x^2"},
                                {**ASK, "question": "?", "answer": "3/4"}], ["math"] * 3, ["\\pi"], ["3.14"]),
    "numbers among codes": ([{**ASK, "answer": a} for a in ("12590", "012590", "3-2", "B-MW 12")], ["text"] * 4,
                            ["12590"], ["12590.0", "about 12590 m"]),
    "letters without options": ([{**ASK, "answer": a} for a in ("B", "A", "(C)", "dog")], ["choice"] * 3 + ["text"],
                                ["B", "(b)"], ["A"])}


@each("name", SHAPES)
def test_shapes_of_public_sets(tmp_path, name):
    records, types, right, wrong = SHAPES[name]
    rows = read_rows(save(tmp_path / "r.jsonl", records))
    assert [row["answer_type"] for row in rows] == types
    assert all(type(row["answer_type"]) is str for row in rows)
    assert paid(rows[0], *right) == [1] * len(right) and paid(rows[0], *wrong) == [0] * len(wrong)


CODES = ("555-010-0199", "+49 30 1234567", "3-2", "2024-05-06", "06.05.2024", "978-3-16-148410-0", "24/7", "007",
         "012590", "J-062", "12:30", "1.2.3", "192.168.0.1", "KA 01 AB 1234", "$8-12", "12E4", "B12/7")


@each("code", CODES)
@each("digit", [0, -1])
def test_a_neighbouring_code_earns_nothing(tmp_path, code, digit):
    (row,) = read_rows(save(tmp_path / "r.jsonl", [{**ASK, "answer": code}]))
    at = [i for i, c in enumerate(code) if c.isdigit()][digit]
    other = f"{code[:at]}{(int(code[at]) + 1) % 10}{code[at + 1:]}"
    assert row["answer_type"] == "text" and row["answer"] == code
    assert paid(row, code, other, f"{code}0", code.replace("-", "")[::-1]) == [1, 0, 0, 0]
    kept = {"id": "1", "question": "Which?", "answer": code}  # as an earlier convert wrote them
    if code not in ("24/7", "$8-12", "12E4", "B12/7", "KA 01 AB 1234"):
        for kind in ("math", "number"):
            assert paid({**kept, "answer_type": kind}, code, other) == [1, 0], kind


def test_kinds_precisions_and_alternatives(tmp_path, capsys):
    asks = {"image_id": 1, "image": "a.png", "question": "How old?"}
    file = save(tmp_path / "r.jsonl", [{**asks, "ground_truth": a} for a in (
        ["36", "36 years old", "thirty-six"], ["12,5", "12.5 kg"], ["no number", "36"], ["3-2", "3"])])
    rows = read_rows(file)
    assert [row["answer_type"] for row in rows] == ["number", "number", "text", "text"]
    assert paid(rows[0], "36", "36 years old", "Thirty-six", "he is 36", "37", "thirty-seven") == [1, 1, 1, 1, 0, 0]
    assert paid(rows[1], "12.5", "12,5 kg", "125") == [1, 1, 0]
    words = save(tmp_path / "w.jsonl", [{"id": 1, **ASK, "answer": ["twelve", "a dozen"], "answer_type": "count"}])
    for one in (file, words):
        assert main(["data", "check", str(one), "--allow-missing", "--no-show", "--config", str(CONFIG)]) == 0
    assert "0 bad rows" in capsys.readouterr().out
    for given in ("high", 0.95, 40):
        (row,) = read_rows(save(tmp_path / "r.jsonl", [{**ASK, "answer": "1.2", "precision": given}]))
        assert row["meta"] == {"precision": given} and "precision" not in row
        assert paid(row, "1.2", "1.22") == [1, 0]
    with pytest.raises(ConfigError, match=r"data\.answer_type='txt': Input should be .*'text'"):
        load_config(CONFIG, ["data.answer_type=txt"])


def test_the_table_of_types_has_examples_and_reasons(tmp_path, capsys, caplog):
    records = [{**ASK, "answer": a} for a in ("3-2", "4-1", "007", "1.2.3", "stop")]
    file = save(tmp_path / "r.jsonl", [*records, {**ASK, "answer": "B", "options": ["x", "y"]}])
    main(["data", "check", str(file), "--allow-missing", "--no-show"])
    out = capsys.readouterr().out
    why = "digits that are not a number: leading zeros, hyphens, slashes, letters"
    assert f"text                4   {why}: '3-2', '4-1', '007'\n" in out
    assert "text                1   words: 'stop'\n" in out and "choice              1   its options: 'B'\n" in out
    main(["data", "check", str(file), "--allow-missing", "--no-show", "--json"])
    table = json.loads(capsys.readouterr().out)["types"]
    assert [(line["type"], line["rows"], len(line["examples"])) for line in table] == [
        ("text", 4, 3), ("text", 1, 1), ("choice", 1, 1)]
    (tmp_path / "a.png").touch()
    caplog.set_level("INFO")
    file = save(tmp_path / "r.jsonl", [{**ASK, "answer": a} for a in ("3-2", "red")])
    read(file, "auto")
    assert "answer types guessed, since no field states them: text 1 (digits that are not a number" in caplog.text


def test_one_setting_decides_everywhere(tmp_path, capsys):
    (tmp_path / "a.png").touch()
    file = save(tmp_path / "r.jsonl", [{**ASK, "answer": a} for a in ("12", "3/4", "red")])
    for index in ("memory", "lazy"):
        assert [s["answer_type"] for s in read(file, index, answer_type="text")] == ["text"] * 3, index
    assert [s["answer_type"] for s in read(file)] == ["number", "text", "text"]
    assert main(["data", "convert", str(file), "-o", str(tmp_path / "o.jsonl"), "--answer-type", "math"]) == 0
    assert "math                3   data.answer_type: '12', '3/4', 'red'" in capsys.readouterr().out
    assert [json.loads(row)["answer_type"] for row in (tmp_path / "o.jsonl").read_text().splitlines()] == ["math"] * 3
    assert main(["data", "convert", str(file), "-o", str(tmp_path / "p.jsonl"), "--answer-type", "maths"]) == 1
    assert "--answer-type='maths' is not known. Did you mean 'math'?" in capsys.readouterr().err
    task = load("qa")
    task.coordinates, task.data = Coordinates(), DataSettings(answer_type="text")
    row = {"id": 1, **ASK, "answer": "12", "answer_type": "number"}
    assert sample_from(task, row, tmp_path)["answer_type"] == "text"  # before what the row says
    chosen = {**row, "answer": "B", "answer_type": "choice", "options": ["x", "y"]}
    assert sample_from(task, chosen, tmp_path)["answer_type"] == "choice"


@each("empty", ["", None])
def test_an_empty_answer_is_named(tmp_path, empty):
    for others in ([], [{**ASK, "answer": "red"}] * 2):
        with pytest.raises(DataError, match=r"answer=.* is empty, so there is no answer to the question 'What does"):
            read_rows(save(tmp_path / "r.jsonl", [*others, {**ASK, "answer": empty}]))
