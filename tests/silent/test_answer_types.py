"""Rows of other people's records whose answers look like numbers, formulas or letters and are texts: what pays."""

import json

import pytest

from vlrl.data import read_rows
from vlrl.data.coordinates import Coordinates
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group


def rows_of(tmp_path, *records):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"image": "a.png", "question_id": n, **r}) + "\n"
                            for n, r in enumerate(records)))
    return read_rows(path)


def paid(row, *texts):
    task = load("qa")
    task.coordinates = Coordinates()
    found = score_group(task, task.sample_from_row(row), [parse_answer(text) for text in texts], 0, None)
    assert all(s.error is None for s in found), found
    return [s.parts["accuracy"] for s in found]


def test_a_times_sum_or_order_is_not_worked_out(tmp_path):
    (row,) = rows_of(tmp_path, {"question": "What is the bus timetable entry?", "answer": "08-15-30"})
    assert paid(row, "08-15-30", "-37", "30-15-08", "8-15-30") == [1, 0, 0, 0]


def test_zeros_before_a_number_are_part_of_it(tmp_path):
    (row,) = rows_of(tmp_path, {"question": "Which postcode is on the letter?", "answer": "01067"})
    assert paid(row, "01067", "1067", "001067") == [1, 0, 0]


def test_a_number_with_an_exponent_is_no_number_where_it_names_a_seat(tmp_path):
    (row,) = rows_of(tmp_path, {"question": "Which seat is printed on the ticket?", "answer": "12E1"})
    assert paid(row, "12E1", "120") == [1, 0]


def test_a_price_range_is_no_formula(tmp_path):
    (row,) = rows_of(tmp_path, {"question": "What does the menu ask for lunch?", "answer": "$8-12"})
    assert paid(row, "$8-12", "-4", "12-8") == [1, 0, 0]


def test_a_letter_that_is_read_from_a_picture_is_no_option(tmp_path):
    row, *_ = rows_of(tmp_path, {"question": "Which grade did she get?", "answer": "A"},
                      {"question": "Who teaches it?", "answer": "Mr Smith"},
                      {"question": "Which subject is it?", "answer": "Biology"})
    assert paid(row, "A", "A+", "A or B") == [1, 0, 0]


@pytest.mark.parametrize("given", ["math", "number"])
def test_a_type_of_an_earlier_convert_does_not_pay_other_codes(given):
    row = {"id": "1", "question": "Which order number?", "answer": "0041-007", "answer_type": given}
    row |= {"answer": "0041-007" if given == "math" else "0041"}
    wrong = ["34", "41-7", "0007-041"] if given == "math" else ["41", "00041"]
    assert paid(row, row["answer"], *wrong) == [1, *[0] * len(wrong)]
