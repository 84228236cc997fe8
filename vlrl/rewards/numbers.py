r"""Parses numbers in text of any script: "-2.5", "1,200", "12,5", "1/2", "\frac{25}{2}", "3e4".

All tasks parse numeric answers with this module, so that they agree on what a number is. No text makes a function
raise."""

import math
import re
from collections.abc import Iterator

from vlrl.rewards.scripts import western

# no possessive group: Python before 3.11.5 matches "3e" whole with one
_GROUPED = (r"\d{1,3}(?:,\d{3})+(?!,\d{3})(?:\.\d++)?"  # 1,234.5
            r"|\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])(?:\.\d++)?"  # 1,00,000
            r"|\d{1,3}(?:[\u00a0\u202f\u2009]\d{3})+(?!\d)(?:[.,]\d++)?"
            r"|\d{1,3}(?:\.\d{3})+,\d++(?![\d,])")  # 1.234,5
_COMMA = r"(?<!\d,)(?:0,\d++|\d++,(?:\d{1,2}|\d{4,30}))(?![\d,])"  # 12,5
_PLAIN = r"\d++(?:\.\d++)?|\.\d++"
_PARTS = r"(?:(?P<whole>\d{1,9})\s)?(?P<above>\d{1,9})\s?/\s?(?P<below>\d{1,9})"
_RAISED = "\u00b2\u00b3\u00b9\u2070-\u2079"
_TIMES = r"[*/^\u00d7\u00b7\u00f7]"
_BEFORE = (r"(?<![A-Za-z0-9_.])(?<![\^\u221a])(?<!\^\{)(?<!sqrt)(?<!sqrt\{)"
           + "".join(rf"(?<!\d{before}{_TIMES}{after})" for before in ("", r"\s") for after in ("", r"\s")))
_AFTER = rf"(?![A-Za-z0-9_\^{_RAISED}]|\.\d|\s?{_TIMES}\s?[\d({{\\]|\s?(?:[\u03c0\u221a]|\\pi|\\sqrt))"
"""Lookarounds that reject a number next to an operator or letter, because it would be part of an unevaluated expression
or a word."""
_START = r"(?=[-+.\d])"  # first, as it fails fastest: 3 times faster on long texts
_NUMBER = re.compile(rf"{_START}{_BEFORE}(?P<sign>[-+])?(?:{_PARTS}|(?P<number>{_GROUPED}|{_COMMA}|{_PLAIN})"
                     rf"(?P<power>[eE][-+]?\d{{1,2}})?){_AFTER}")
_FRAC = re.compile(r"(?:(\d)\s*)?\\[dt]?frac\s*(?:\{\s*(\d{1,9})\s*\}\s*\{\s*(\d{1,9})\s*\}|(\d)\s*(\d))")
_PERCENT = re.compile(r"\d\s?(?:\\?%|(?:percent|per cent|pct)(?![A-Za-z]))", re.IGNORECASE)


def numbers(text: str) -> Iterator[float]:
    """All stand-alone numbers in a text, in order of appearance. A number beyond the range of floats is infinite. A
    fraction that is not in lowest terms is NaN, because "34/2" is not fully evaluated."""
    return map(_value, _NUMBER.finditer(_as_written(text)))


def read_number(text: str) -> float | None:
    """The finite number in a text that contains nothing else ("1,200", "-3.5", "1/2"); a final full stop is ignored.
    None for any other text."""
    text = _as_written(text).strip()
    match = _NUMBER.fullmatch(text) or (_NUMBER.fullmatch(text[:-1]) if text.endswith(".") else None)
    value = _value(match) if match else math.nan
    return value if math.isfinite(value) else None


def is_percent(text: str) -> bool:
    """Whether a text contains a percentage: "12 %", "12 percent"."""
    return _PERCENT.search(western(text)) is not None


def _as_written(text: str) -> str:
    """The text with the digits of all scripts converted to ASCII, and LaTeX fractions converted to a/b."""
    text = western(text)
    if "frac" not in text:
        return text
    return _FRAC.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2] or m[4]}/{m[3] or m[5]}", text)


def _value(match: re.Match[str]) -> float:
    sign = -1.0 if match["sign"] == "-" else 1.0
    if match["above"]:
        above, below = int(match["above"]), int(match["below"])
        reduced = below > 1 and math.gcd(above, below) == 1
        return sign * (int(match["whole"] or 0) + above / below) if reduced else math.nan
    number = re.sub(r"\s", "", match["number"])
    head, comma, tail = number.rpartition(",")
    decimal = comma and "." not in tail and (len(tail) != 3 or "." in head or head == "0")
    number = f"{head.replace('.', '').replace(',', '')}.{tail}" if decimal else number.replace(",", "")
    return sign * float(number + (match["power"] or ""))
