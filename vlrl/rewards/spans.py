"""Time spans `[start, end]` in seconds: how similar two are, and how to read them from an answer.

A span is an interval only if start < end and both are finite; anything else overlaps nothing. Reading takes linear time
and never raises, whatever the text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import islice

Span = Sequence[float]

_NUMBER = r"\d{1,9}(?:\.\d{0,20})?"  # bounded, so every number is finite
_CLOCK = r"(?:\d{1,2}:)?\d{1,3}:[0-5]\d(?:\.\d{0,20})?"
_UNIT = r"(?:\s{0,9}(?:seconds|second|secs|sec|s)(?!\w))?"
_ALONE, _ENDS = r"(?<![\w.:\u2212-])", r"(?!\w|:\d|\.\d)"
_BARE = re.compile(rf"{_ALONE}({_NUMBER})\s{{1,9}}(?:to|and)\s{{1,9}}({_NUMBER}){_ENDS}", re.ASCII | re.IGNORECASE)
_SPOKEN = re.compile(r"(?<!\d)(\d++(?:\.\d*+)?+) (?:to|and) (\d+\.?\d*)")
_BETWEEN = (r"\s{0,9}(?:to|until|till|and|-|\u2013|\u2014|~|,|"
            r"[\"']?\s{0,9}[,;]?\s{0,9}[\"']?end(?:[_ ]?time)?[\"']?\s{0,9}[:=])\s{0,9}[\"']?")
_ANY = re.compile(rf"(?<![\w.\u2212-])(?<!\d:)({_CLOCK}|{_NUMBER}){_UNIT}{_BETWEEN}({_CLOCK}|{_NUMBER}){_UNIT}{_ENDS}",
                  re.ASCII | re.IGNORECASE)
_PAIR = re.compile(rf"\(\s{{0,9}}({_NUMBER})\s{{0,9}},\s{{0,9}}({_NUMBER})\s{{0,9}}\)", re.ASCII)
_BESIDE = re.compile(r"[\s,;.]*")
_COMMAS = re.compile(r"(?:~(?:\s*,\s*~)*(?:\s*,)?)?\s*")
MOST = 1000
"""Spans of one answer that are read."""


def is_span(span: Span) -> bool:
    """Whether a span is an interval: two finite numbers, start before end."""
    try:
        return len(span) == 2 and math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]
    except OverflowError:  # an int like 10**400
        return False


def temporal_iou(a: Span, b: Span) -> float:
    """Intersection over union of two intervals (tIoU), in [0, 1]; 0 if one is not an interval."""
    if not (is_span(a) and is_span(b)):
        return 0.0
    shared = min(a[1], b[1]) - max(a[0], b[0])
    hull = max(a[1], b[1]) - min(a[0], b[0])  # of two that overlap the union
    return max(0.0, shared) / hull if math.isfinite(hull) else 0.0


def boundary_iou(span: Span, truth: Span, duration: float) -> float:
    """tIoU times the closeness of both ends, in [0, 1]: Time-R1's `tIoU (1 - |ds| / D) (1 - |de| / D)` (2503.13377).

    `duration` D > 0 is the clip's, in seconds. An end that is off by the whole clip or more scores 0."""
    near = [max(0.0, 1 - abs(p - t) / duration) for p, t in zip(span, truth, strict=True)]
    return temporal_iou(span, truth) * near[0] * near[1]


def merged(spans: Sequence[Span]) -> list[list[float]]:
    """The union of intervals as sorted, disjoint intervals; invalid spans are dropped."""
    out: list[list[float]] = []
    for start, end in sorted((float(s[0]), float(s[1])) for s in spans if is_span(s)):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def union_iou(spans: Sequence[Span], truth: Sequence[Span]) -> float:
    """IoU of two unions of intervals, in [0, 1]; 1 if both lists are empty (VideoChat-R1, 2504.06958)."""
    if not spans and not truth:
        return 1.0
    if len(spans) == len(truth) == 1:
        return temporal_iou(spans[0], truth[0])  # exact at a bar such as .7, where a difference of sums is not
    shared, first, second = _covered(spans, truth)
    union = first + second - shared
    return min(1.0, shared / union) if 0 < union < math.inf else 0.0


def interval_precision(spans: Sequence[Span], truth: Sequence[Span]) -> float:
    """IoP: share of the answered time that is true, in [0, 1] (NExT-GQA, 2309.01327); 1 if both lists are empty."""
    if not spans and not truth:
        return 1.0
    shared, answered, _ = _covered(spans, truth)
    return min(1.0, shared / answered) if 0 < answered < math.inf else 0.0


def best_grounding(span: Span, truth: Sequence[Span]) -> tuple[float, float]:
    """The best IoU and the best IoP of one answered span over the true ones, each by itself, in [0, 1]: NExT-GQA
    (2309.01327). A moment, start = end, has an IoP of 1 inside a true span."""
    if span[0] == span[1]:
        return 0.0, float(any(start <= span[0] <= end for start, end in truth))
    return (max((temporal_iou(span, true) for true in truth), default=0.0),
            max((interval_precision([span], [true]) for true in truth), default=0.0))


def read_spans(text: str, most: int = MOST) -> list[list[float]]:
    """The spans of a text in any notation, in order; ends are kept as written, so a span may not be an interval.

    Seconds ("12.5", "12.5s", "12.5 seconds") or a clock ("1:02", "00:01:02.5"), joined by to, and, until, a dash or a
    comma ("from 3 to 7", "3 - 7", "[3, 7]"), or named ({"start_time": 3, "end_time": 7}). Signs are not read."""
    return [[_seconds(match[1]), _seconds(match[2])] for match in islice(_ANY.finditer(text), most)]


def only_spans(text: str, count: int) -> bool:
    """Whether a text is exactly `count` intervals, apart from commas and spaces between them."""
    spans = read_spans(text, count + 1)
    return len(spans) == count and all(map(is_span, spans)) and _BESIDE.fullmatch(_ANY.sub("", text)) is not None


def last_span(text: str) -> list[float] | None:
    """The last `a to b` or `a and b` of bare seconds, with any white space around the word; None without one
    (VideoChat-R1 2504.06958, Time-R1 2503.13377). No unit, sign or clock."""
    return _last_pair(_BARE, text)


def time_r1_span(text: str) -> list[float] | None:
    """The last `a to b` or `a and b` with single spaces around the word, anywhere in a text: Time-R1's reading of the
    full output, thinking included (2503.13377, evaluate.py). None without one."""
    return _last_pair(_SPOKEN, text)


def _last_pair(pattern: re.Pattern[str], text: str) -> list[float] | None:
    pairs = pattern.findall(text)
    return [float(pairs[-1][0]), float(pairs[-1][1])] if pairs else None


def hull_iou(span: Span, truth: Span) -> float:
    """Intersection over hull of two intervals, in [0, 1], computed from their ends (2503.13377)."""
    shared, hull = min(span[1], truth[1]) - max(span[0], truth[0]), max(span[1], truth[1]) - min(span[0], truth[0])
    return max(0.0, shared) / hull if 0 < hull < math.inf else 0.0


def span_list(text: str) -> list[list[float]] | None:
    """The spans of a text that is `[(s, e), ...]` and nothing else, each with s <= e; None for any other text.

    At most 1,000; `[]` is an empty list (VideoChat-R1's <glue>, 2504.06958)."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")) or "~" in text:
        return None
    spans = [[float(match[1]), float(match[2])] for match in islice(_PAIR.finditer(text), MOST + 1)]
    framed = _COMMAS.fullmatch(_PAIR.sub("~", text[1:-1]).lstrip()) is not None
    return spans if framed and len(spans) <= MOST and all(s <= e for s, e in spans) else None


def format_time(seconds: float) -> str:
    """Seconds without an exponent and with up to 12 decimals: 3, 12.5."""
    return f"{seconds:.12f}".rstrip("0").rstrip(".")


def format_span(span: Span) -> str:
    """`start to end` in seconds, which reads back as the same span."""
    return f"{format_time(span[0])} to {format_time(span[1])}"


def _covered(a: Sequence[Span], b: Sequence[Span]) -> tuple[float, float, float]:
    """Seconds in both unions, in the first and in the second."""
    first, second = merged(a), merged(b)
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared, sum(e - s for s, e in first), sum(e - s for s, e in second)


def _seconds(text: str) -> float:
    """Seconds of "62.5" or "1:02.5"."""
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total
