"""Answers in other scripts than the Latin one: right ones are paid, neighbours are told apart."""

import pytest

from vlrl.data.coordinates import Coordinates
from vlrl.rewards import answers, text
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group


def paid(row, *texts, **options):
    task = load("qa", options)
    task.coordinates = Coordinates()
    sample = task.sample_from_row({"id": "1", "question": "?", **row})
    found = score_group(task, sample, [parse_answer(given) for given in texts], 0, None)
    assert all(s.error is None for s in found), found
    return [s.parts["accuracy"] for s in found]


def test_rouge_of_words_with_cyrillic_arabic_and_devanagari_letters():
    for right, other in (("красная машина стоит", "синяя лодка плывёт"), ("سيارة حمراء", "قارب أزرق"),
                         ("लाल गाड़ी", "नीली नाव"), ("κόκκινο αυτοκίνητο", "μπλε βάρκα")):
        assert answers.rouge(right, right) == 1 and answers.rouge(other, right) == 0, right


def test_letters_with_accents_are_letters():
    assert answers.rouge("élève", "lve") == 0
    assert answers.rouge("cafe\u0301 noir", "café noir") == 1  # composed and not


def test_word_error_rate_goes_by_character_where_no_spaces_stand():
    assert answers.ocr("東京駅南口", "東京駅北口") == pytest.approx(0.8)
    assert answers.ocr("ห้ามจอด", "ห้ามจอด") == 1


def test_numbers_in_other_digits_and_with_a_comma():
    row = {"answer": "42.5", "answer_type": "number"}
    assert paid(row, "４２．５", "42,5", "٤٢٫٥", "४२.५", "42,6", "425") == [1, 1, 1, 1, 0, 0]
    assert paid({"answer": "４２", "answer_type": "count"}, "42", "４２", "24") == [1, 1, 0]


def test_options_in_words_without_spaces():
    row = {"answer": "B", "answer_type": "choice", "options": ["红色的车", "蓝色的船", "绿色的树"]}
    assert paid(row, "蓝色的船", "图中是蓝色的船。", "（Ｂ）", "红色的车", "不是蓝色的船") == [1, 1, 1, 0, 0]


def test_letters_of_text_similarity():
    assert text.token_f1("打开蓝牙设置", "打开网络设置") > 0 and text.token_f1("打开", "关闭") == 0
    assert paid({"answer": "12番線", "answer_type": "text"}, "12番線", "13番線", "１２番線") == [1, 0, 1]
