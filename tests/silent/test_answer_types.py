"""Answers that look like numbers, formulas or letters and are texts, and answers in other scripts: what is paid."""

import json

import pytest

from vlrl.data import read_rows
from vlrl.data.coordinates import Coordinates
from vlrl.rewards import answers, text
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
    sample = task.sample_from_row({"id": "1", "question": "?", **row})
    found = score_group(task, sample, [parse_answer(given) for given in texts], 0, None)
    assert all(s.error is None for s in found), found
    return [s.parts["accuracy"] for s in found]


def test_texts_that_look_like_numbers_pay_no_other_codes(tmp_path):
    for question, answer, *wrong in (
            ("What is the bus timetable entry?", "08-15-30", "-37", "30-15-08", "8-15-30"),
            ("Which postcode is on the letter?", "01067", "1067", "001067"),
            ("Which seat is printed on the ticket?", "12E1", "120"),
            ("What does the menu ask for lunch?", "$8-12", "-4", "12-8")):
        (row,) = rows_of(tmp_path, {"question": question, "answer": answer})
        assert paid(row, answer, *wrong) == [1, *[0] * len(wrong)], answer
    row, *_ = rows_of(tmp_path, {"question": "Which grade did she get?", "answer": "A"},
                      {"question": "Who teaches it?", "answer": "Mr Smith"},
                      {"question": "Which subject is it?", "answer": "Biology"})
    assert paid(row, "A", "A+", "A or B") == [1, 0, 0]
    for given, answer, *wrong in (("math", "0041-007", "34", "41-7", "0007-041"), ("number", "0041", "41", "00041")):
        row = {"id": "1", "question": "Which order number?", "answer": answer, "answer_type": given}
        assert paid(row, answer, *wrong) == [1, *[0] * len(wrong)]


def test_words_letters_numbers_and_options_of_other_scripts():
    for right, other in (("красная машина стоит", "синяя лодка плывёт"), ("سيارة حمراء", "قارب أزرق"),
                         ("लाल गाड़ी", "नीली नाव"), ("κόκκινο αυτοκίνητο", "μπλε βάρκα")):
        assert answers.rouge(right, right) == 1 and answers.rouge(other, right) == 0, right
    assert answers.rouge("élève", "lve") == 0
    assert answers.rouge("cafe\u0301 noir", "café noir") == 1  # composed and not
    assert answers.ocr("東京駅南口", "東京駅北口") == pytest.approx(0.8)
    assert answers.ocr("ห้ามจอด", "ห้ามจอด") == 1
    assert text.token_f1("打开蓝牙设置", "打开网络设置") > 0 and text.token_f1("打开", "关闭") == 0
    assert paid({"answer": "12番線", "answer_type": "text"}, "12番線", "13番線", "１２番線") == [1, 0, 1]
    row = {"answer": "42.5", "answer_type": "number"}
    assert paid(row, "４２．５", "42,5", "٤٢٫٥", "४२.५", "42,6", "425") == [1, 1, 1, 1, 0, 0]
    assert paid({"answer": "４２", "answer_type": "count"}, "42", "４２", "24") == [1, 1, 0]
    row = {"answer": "B", "answer_type": "choice", "options": ["红色的车", "蓝色的船", "绿色的树"]}
    assert paid(row, "蓝色的船", "图中是蓝色的船。", "（Ｂ）", "红色的车", "不是蓝色的船") == [1, 1, 1, 0, 0]
