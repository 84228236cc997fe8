"""Numbers, words and codes of texts of every script: tables by hand, and whatever text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from vlrl.rewards import answers, chart, codes, scripts
from vlrl.rewards.numbers import is_percent, numbers, read_number

ONE = {  # text -> the number that it is
    "12": 12, "-2.5": -2.5, "+4": 4, "5.": 5, ".5": 0.5, "1,200": 1200, "1,234,567.5": 1234567.5, "1,00,000": 100000,
    "12,5": 12.5, "0,125": 0.125, "1234,5": 1234.5, "1.234,5": 1234.5, "1\u202f234,5": 1234.5, "1/2": 0.5,
    "-3/4": -0.75, "12 1/2": 12.5, "\\frac{25}{2}": 12.5, "-\\dfrac12": -0.5, "12\\frac{1}{2}": 12.5, "2e3": 2000,
    "\u22125": -5, "\uff11\uff12\uff0e\uff15": 12.5, "\u0663": 3, "\u0664\u0662\u066b\u0665": 42.5, "\u0967\u0968": 12}
NONE = ["", "x2", "3D", "3^2", "3\u00b2", "3*4", "3 * 4", "34/2", "1,2,3", "1.2.3", "1/8/93", "12 cm", "2\u03c0",
        "12\\pi", "\\sqrt{2}", "\u221a2", "x^2", "1_2", "nan", "inf", "1e999", "9" * 400, "\u2460", "\u00b9"]
AMONG = {  # text -> all numbers in it
    "**12** cats": [12], "3 or 4": [3, 4], "$5.99": [5.99], "\\boxed{12}": [12], "60 km/h": [60], "(10, 20)": [10, 20],
    "\\frac{1}{2} or 3": [0.5, 3], "3\u4e2a": [3], "it is 3/4": [0.75], "3^2 = 9": [9], "2019-2021": [2019, 2021]}


def test_numbers_and_counts_by_hand():
    assert {text: read_number(text) for text in ONE} == ONE
    assert [text for text in NONE if read_number(text) is not None] == []
    assert {text: list(numbers(text)) for text in AMONG} == AMONG
    assert answers.one_number("\\frac{24}{2}") is None and answers.read_number("12,5") == 12.5
    assert [is_percent(text) for text in ("3%", "3 percent", "3\\%", "\uff13\uff05", "3", "% 3")] == [1, 1, 1, 1, 0, 0]
    assert [chart.count(text) for text in ("\u4e09", "\u5341\u4e8c", "\u4e8c\u5341", "3\u4e2a", "twenty", "3%")] == [
        3, 12, 20, 3, 20, None]
    said = {"\u662f": "yes", "\u4e0d\u662f": "no", "\u043d\u0435\u0442": "no", "\u662f\uff0c\u4e0d\u662f": None}
    assert {text: chart.one_yes_no(text) for text in said} == said


WORDS = {"Hello, w\u00f6rld_1": ["Hello", "w\u00f6rld", "1"],
         "\u7ea2\u706f12\u53f7": ["\u7ea2", "\u706f", "12", "\u53f7"],
         "\u0939\u093f\u0928\u094d\u0926\u0940 12": ["\u0939\u093f\u0928\u094d\u0926\u0940", "12"],
         "cafe\u0301": ["caf\u00e9"], "\u6771\u4eac\u99c5A1": ["\u6771", "\u4eac", "\u99c5", "A1"], "\U0001f642 !": []}


def test_words_by_hand():
    assert {text: scripts.words(text) for text in WORDS} == WORDS
    assert scripts.pieces("\u6771\u4eac A1, x") == ["\u6771", "\u4eac", "A1,", "x"]
    assert scripts.western("10\u00b2") == "10\u00b2"


@each("given_ right rouge", [
    ("\u7ea2\u706f12\u53f7", "\u7eff\u706f12\u53f7", (3 / 4 + 2 / 3 + 3 / 4) / 3),
    ("\u0442\u043e\u0442 \u0434\u043e\u043c", "\u044d\u0442\u043e\u0442 \u0434\u043e\u043c", 1 / 3)])
def test_rouge_of_other_scripts_by_hand(given_, right, rouge):
    assert answers.rouge(given_, right) == pytest.approx(rouge) and answers.rouge(right, right) == 1


CODES = ["555-010-0199", "(555) 010-0199", "+1 888 867 2757", "3-2", "3\u20132", "1/8/93", "007", "012590", "J-062",
         "12:30", "12:30 PM", "1.2.3", "192.168.0.1", "978-3-16-148410-0", "9" * 16, "10 - 12"]
NO_CODES = ["0.5", "0", "10", "1/2", "-5", "1,200", "3.14", "2x+3", "x=3", "2019", "a cat", "", "36 years old", "0,5",
            "\\frac{01}{2}", "24/7", "1 1/2"]


def test_codes_by_hand():
    assert [text for text in CODES if not codes.is_code(text)] == []
    assert [text for text in NO_CODES if codes.is_code(text)] == []
    assert codes.same_code("j-062.", "J-062") and codes.same_code("3 \u2013 2", "3-2")
    assert codes.same_code("12km", "12 km") and codes.same_code("(3,4)", "(3, 4)")
    assert not codes.same_code("62", "062") and not codes.same_code("12 3", "1 23")
    assert answers.free_text("012591", "012590") == answers.free_text("12 m", "13 m") == 0
    assert answers.free_text("Highway 102", "Highway 101") == answers.free_text("37 years old", "36 years old") == 0
    assert answers.free_text("years old: 36", "36 years old") > 0
    assert answers.free_text("3 red cars on a road", "2 red cars on a road") > 0.5  # a sentence


@given(st.text(max_size=60), st.text(max_size=20))
def test_whatever_the_text(text, other):
    assert all(isinstance(v, float) for v in numbers(text))
    value = read_number(text)
    assert value is None or math.isfinite(value)
    assert scripts.western(scripts.western(text)) == scripts.western(text)
    assert "".join(scripts.words(text)).split() == ["".join(scripts.words(text))] * bool(scripts.words(text))
    assert codes.same_code(text, text) and codes.is_code(text) in (True, False)
    assert 0 <= answers.free_text(text, other) <= 1


@given(st.integers(-10**9, 10**9), st.sampled_from([0x30, 0xff10, 0x660, 0x6f0, 0x966, 0x9e6, 0xe50]))
def test_whole_numbers_in_any_digits(value, zero):
    assert read_number(str(value).translate({ord("0") + n: chr(zero + n) for n in range(10)})) == value
    assert read_number(f"{value:,}") == value
