"""Parses and compares answers that name exactly one thing: a chart value, a count, yes or no, a transcript. No text
makes a function raise."""

import re

from vlrl.rewards.answers import edit_similarity, one_number
from vlrl.rewards.numbers import is_percent, read_number
from vlrl.rewards.scripts import western
from vlrl.rewards.text import clean_label, yes_no

CLOSE = 1e-5  # two chart values are equal if their relative error is at most this (GLM-4.1V, arXiv 2507.01006)
_YEARS = (1000, 3000)
_VALUE = re.compile(r"(?:[$€£¥]\s?)?([-+]?[\d.,]{1,30})\s?%?", re.ASCII)
_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
          "seventeen eighteen nineteen twenty").split()
_HAN = {c: n for n, c in enumerate("零一二三四五六七八九十")} | {"两": 2, "〇": 0}
_TEENS = re.compile(r"([二三四五六七八九]?)十([一二三四五六七八九]?)")
_NO_LIKE = re.compile(r"(?<!\w)(?:no|not|none|false|incorrect)(?!\w)")
_AS_NO = re.compile("不是|不对|不正确|没有|否|错误|いいえ|(?<!\\w)нет(?!\\w)")
_AS_YES = re.compile("是|对|正确|はい|(?<!\\w)да(?!\\w)")


def chart_value(text: str) -> float | None:
    """The number in a text that consists of one number, optionally with a currency sign, thousands separators and a
    percent sign; None for any other text."""
    match = _VALUE.fullmatch(western(text).strip().rstrip("."))
    return read_number(match[1]) if match else None


def chart_equal(answer: str, truth: str, close: float = CLOSE, units: float = 0.0) -> bool:
    """Whether two entries of a chart are equal. Numbers may differ by the relative error `close` or the absolute error
    `units`. Two integers from 1000 to 3000 are taken for years (GLM-4.1V) and must be equal. Other texts must be
    equal as labels."""
    a, b = chart_value(answer), chart_value(truth)
    if a is None or b is None:
        return bool(clean_label(answer)) and clean_label(answer) == clean_label(truth)
    if all(_YEARS[0] <= v <= _YEARS[1] and v == int(v) for v in (a, b)):
        return a == b
    return abs(a - b) <= max(units + 1e-9 if units else 0.0, close * (abs(b) + 1e-6))


def count(text: str) -> int | None:
    """The count in a text, as an integer: the only number in the text, or a text that is just a number word from zero
    to twenty or a Chinese numeral up to 99. None for a percentage and for any other text."""
    word = clean_label(text)
    if word in _WORDS:
        return _WORDS.index(word)
    if word in _HAN:
        return _HAN[word]
    if tens := _TEENS.fullmatch(word):
        return 10 * _HAN.get(tens[1], 1) + _HAN.get(tens[2], 0)
    value = None if is_percent(text) else one_number(text)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def one_yes_no(text: str) -> str | None:
    """Reads "yes" or "no" from a text in English (as `text.yes_no` does), Chinese, Japanese or Russian. None if the
    text says both, such as "yes, no", or neither."""
    text = text.casefold()
    if not text.isascii():
        text = _AS_YES.sub(" yes ", _AS_NO.sub(" no ", text))
    said = yes_no(text)
    return None if said == "yes" and _NO_LIKE.search(text) else said


def transcript_similarity(answer: str, truth: str) -> float:
    """1 minus the edit distance divided by the length of the longer text. White space is ignored (GLM-4.1V's OCR
    score)."""
    a, b = "".join(answer.split()), "".join(truth.split())
    return edit_similarity(a, b) if a else 0.0
