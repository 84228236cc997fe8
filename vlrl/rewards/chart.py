"""Values of charts, words of pictures, counts, and yes or no: answers that name exactly one thing. Never raises."""

import math
import re

from vlrl.rewards.answers import edit_similarity, one_number
from vlrl.rewards.text import clean_label, yes_no

CLOSE = 1e-5
"""Relative error up to which two values of a chart are equal (GLM-4.1V, arXiv 2507.01006)."""
_YEARS = (1000, 3000)
_VALUE = re.compile(r"(?:[$€£¥]\s?)?([-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?)\s?%?", re.ASCII)
_FRACTION = re.compile(r"([-+\u2212]?)(\d{1,9})\s?/\s?(\d{1,9})", re.ASCII)
_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
          "seventeen eighteen nineteen twenty").split()
_NO_LIKE = re.compile(r"(?<!\w)(?:no|not|none|false|incorrect)(?!\w)")


def chart_value(text: str) -> float | None:
    """Returns the value that a text is, but for a currency sign, commas and a percent sign; None for any other text."""
    match = _VALUE.fullmatch(text.strip().rstrip("."))
    return float(match[1].replace(",", "")) if match else None


def chart_equal(given: str, truth: str, close: float = CLOSE, units: float = 0.0) -> bool:
    """Returns whether two entries of a chart are equal: values up to the relative error `close`, or up to `units` in
    their own units; years and other texts exactly.

    Two whole numbers from 1000 to 3000 are years (GLM-4.1V), whatever else is allowed.
    """
    a, b = chart_value(given), chart_value(truth)
    if a is None or b is None:
        return bool(clean_label(given)) and clean_label(given) == clean_label(truth)
    if all(_YEARS[0] <= v <= _YEARS[1] and v == int(v) for v in (a, b)):
        return a == b
    return abs(a - b) <= max(units + 1e-9 if units else 0.0, close * (abs(b) + 1e-6))


def finite_number(text: str) -> float | None:
    """Returns the number of a text that has exactly one, whatever words stand around it, or is a fraction; None for
    others.
    """
    part, value = fraction(text), one_number(text)
    return part if part is not None else value if value is not None and math.isfinite(value) else None


def fraction(text: str) -> float | None:
    """Returns the value of a text that is a fraction in lowest terms ("1/2"); None for others, "34/2" is not worked
    out.
    """
    match = _FRACTION.fullmatch(text.strip().rstrip("."))
    above, below = (int(match[2]), int(match[3])) if match else (0, 1)
    if not match or below < 2 or math.gcd(above, below) > 1:
        return None
    return (-1 if match[1] in ("-", "\u2212") else 1) * above / below


def count(text: str) -> int | None:
    """Returns the count that a text gives: its one number, or a number word from zero to twenty alone; None without
    one.
    """
    word = clean_label(text)
    if word in _WORDS:
        return _WORDS.index(word)
    value = finite_number(text)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def one_yes_no(text: str) -> str | None:
    """"yes" or "no" as `text.yes_no` reads it, but None where a text says both, as "yes, no" does."""
    said = yes_no(text)
    return None if said == "yes" and _NO_LIKE.search(text.casefold()) else said


def transcript_similarity(given: str, truth: str) -> float:
    """1 minus the edits as a share of the longer text, spaces and line breaks left out (GLM-4.1V's OCR score)."""
    a, b = "".join(given.split()), "".join(truth.split())
    return edit_similarity(a, b) if a else 0.0
