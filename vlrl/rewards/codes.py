"""Codes, i.e. strings of digits that are not numbers: phone numbers, scores, dates, times, versions, addresses, plates.
They are compared literally, because one different digit makes a different code. No text makes a function raise."""

import re

from vlrl.rewards.scripts import western
from vlrl.rewards.text import clean_label

_LONGEST = 40
_MOST_LETTERS = 3  # letters beside the digits of a text that is compared as written
_MOST_DIGITS = 15  # digits of an integer; floats cannot tell longer ones apart
_ZEROS = re.compile(r"(?<![\d.,])0\d", re.ASCII)
_JOINED = re.compile(r"\(?\+?[\d()]+(?:\s?[-/.:]\s?|\s)[\d()](?:[\d\s()./:-]*[\d)])?", re.ASCII)
_TIME = re.compile(r"\d{1,2}:[0-5]\d(?:\s?[ap]\.?m\.?)?", re.ASCII | re.IGNORECASE)
_ONE_FRACTION = re.compile(r"(?:\d+\s)?\d+\s?/\s?\d+", re.ASCII)
_ONE_POINT = re.compile(r"\d+[.:]\d+", re.ASCII)
_SPACED = re.compile(r"(?<=\d)\s(?=[^\W\d])|(?<=[^\W\d])\s(?=\d)")
_DASHES = str.maketrans("\u2012\u2013\u2014", "---")


def is_code(text: str) -> bool:
    """Whether a text without words is a code: it contains digits but is neither a number nor a formula. Signs of a code
    are leading zeros, hyphens, several slashes, points or colons, a time of day, or more than 15 digits."""
    text = western(text).translate(_DASHES).strip()
    if len(text) > _LONGEST or not any(map(str.isdigit, text)) or re.search(r"[\\^=*]|[A-Za-z]{4}", text):
        return False
    if _ZEROS.search(text) or _TIME.fullmatch(text) or re.fullmatch(rf"[-+]?\d{{{_MOST_DIGITS + 1},}}", text):
        return True
    return bool(_JOINED.fullmatch(text)) and not _ONE_FRACTION.fullmatch(text) and not _ONE_POINT.fullmatch(text)


def is_exact(text: str) -> bool:
    """Whether a ground truth must be matched literally: it is a code, a single letter, or a number, alone or with a
    unit or a short name."""
    text = western(text)
    letters, digits = sum(map(str.isalpha, text)), sum(map(str.isdigit, text))
    return len(text) <= _LONGEST and (digits + letters == 1 or 0 < digits >= letters - _MOST_LETTERS)


def same_code(answer: str, truth: str) -> bool:
    """Whether two texts are equal apart from case, surrounding punctuation, and spaces next to punctuation or between
    digits and letters. "12 km" equals "12km", but "1 23" does not equal "12 3"."""
    a, b = (_SPACED.sub("", re.sub(r"\s*([-/:.,])\s*", r"\1", clean_label(text))) for text in (answer, truth))
    return a == b
