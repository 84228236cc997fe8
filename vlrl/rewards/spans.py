"""Time spans `[start, end]` in seconds: similarity of two spans, and parsing of spans in an answer.

A span is a valid interval if both ends are finite and start < end; an invalid one overlaps nothing. Parsing takes
linear time and never raises."""

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
MOST = 1000  # maximum number of spans that are read from one answer


def is_span(span: Span) -> bool:
    """Whether a span is a valid interval: two finite numbers with start < end."""
    try:
        return len(span) == 2 and math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]
    except OverflowError:  # an int like 10**400
        return False


def temporal_iou(a: Span, b: Span) -> float:
    """Temporal intersection over union (tIoU) of two intervals, in [0, 1]; 0 if one of them is invalid."""
    if not (is_span(a) and is_span(b)):
        return 0.0
    shared = min(a[1], b[1]) - max(a[0], b[0])
    hull = max(a[1], b[1]) - min(a[0], b[0])  # of two that overlap the union
    return max(0.0, shared) / hull if math.isfinite(hull) else 0.0


def boundary_iou(span: Span, truth: Span, duration: float) -> float:
    """Time-R1's reward (2503.13377), in [0, 1]: the tIoU multiplied by the closeness of both ends, `tIoU (1 - |ds| / D)
    (1 - |de| / D)`.

    ds and de are the errors of start and end, D > 0 is the `duration` of the clip in seconds. If an end is off by the
    duration or more, the reward is 0."""
    near = [max(0.0, 1 - abs(p - t) / duration) for p, t in zip(span, truth, strict=True)]
    return temporal_iou(span, truth) * near[0] * near[1]


def merged(spans: Sequence[Span]) -> list[list[float]]:
    """The union of several intervals, as sorted intervals that do not overlap. Invalid spans are dropped."""
    out: list[list[float]] = []
    for start, end in sorted((float(s[0]), float(s[1])) for s in spans if is_span(s)):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def union_iou(spans: Sequence[Span], truth: Sequence[Span]) -> float:
    """The IoU of the unions of two lists of intervals, in [0, 1]; 1 if both are empty (VideoChat-R1, 2504.06958)."""
    if not spans and not truth:
        return 1.0
    if len(spans) == len(truth) == 1:
        return temporal_iou(spans[0], truth[0])  # exact at thresholds such as .7, unlike a difference of sums
    shared, first, second = _covered(spans, truth)
    union = first + second - shared
    return min(1.0, shared / union) if 0 < union < math.inf else 0.0


def interval_precision(spans: Sequence[Span], truth: Sequence[Span]) -> float:
    """Intersection over prediction (IoP), in [0, 1]: the share of the predicted time that lies in the true spans
    (NExT-GQA, 2309.01327). 1 if both lists are empty."""
    if not spans and not truth:
        return 1.0
    shared, answered, _ = _covered(spans, truth)
    return min(1.0, shared / answered) if 0 < answered < math.inf else 0.0


def best_grounding(span: Span, truth: Sequence[Span]) -> tuple[float, float]:
    """Returns (best IoU, best IoP) of a predicted span, each over all true spans, in [0, 1] (NExT-GQA, 2309.01327). A
    predicted span with start = end has an IoP of 1 if it lies inside a true span."""
    if span[0] == span[1]:
        return 0.0, float(any(start <= span[0] <= end for start, end in truth))
    return (max((temporal_iou(span, true) for true in truth), default=0.0),
            max((interval_precision([span], [true]) for true in truth), default=0.0))


def read_spans(text: str, most: int = MOST) -> list[list[float]]:
    """The first `most` spans in a text, in any notation and in order of appearance. The two ends are returned in the
    order in which they are written, so a span may be invalid.

    A time is in seconds ("12.5", "12.5s", "12.5 seconds") or in clock notation ("1:02", "00:01:02.5"). The two times
    are joined by to, and, until, a dash or a comma ("from 3 to 7", "3 - 7", "[3, 7]"), or named ({"start_time": 3,
    "end_time": 7}). Signs before numbers are ignored."""
    return [[_seconds(match[1]), _seconds(match[2])] for match in islice(_ANY.finditer(text), most)]


def only_spans(text: str, count: int) -> bool:
    """Whether a text consists of exactly `count` valid intervals, apart from commas and spaces between them."""
    spans = read_spans(text, count + 1)
    return len(spans) == count and all(map(is_span, spans)) and _BESIDE.fullmatch(_ANY.sub("", text)) is not None


def last_span(text: str) -> list[float] | None:
    """The last `a to b` or `a and b` in a text, where a and b are seconds as plain numbers without a unit, sign or
    clock notation. Any white space may surround the word. None if there is no match (VideoChat-R1 2504.06958,
    Time-R1 2503.13377)."""
    return _last_pair(_BARE, text)


def time_r1_span(text: str) -> list[float] | None:
    """The last `a to b` or `a and b` in a text, with single spaces around the word. Time-R1 (2503.13377, evaluate.py)
    searches the full output in this way, including the thinking. None if there is no match."""
    return _last_pair(_SPOKEN, text)


def _last_pair(pattern: re.Pattern[str], text: str) -> list[float] | None:
    pairs = pattern.findall(text)
    return [float(pairs[-1][0]), float(pairs[-1][1])] if pairs else None


def hull_iou(span: Span, truth: Span) -> float:
    """The length of the intersection of two intervals divided by the length of their hull, in [0, 1] (Time-R1,
    2503.13377). The hull extends from the earlier start to the later end."""
    shared, hull = min(span[1], truth[1]) - max(span[0], truth[0]), max(span[1], truth[1]) - min(span[0], truth[0])
    return max(0.0, shared) / hull if 0 < hull < math.inf else 0.0


def span_list(text: str) -> list[list[float]] | None:
    """The spans in a text that is `[(s, e), ...]` and nothing else, with s <= e in every pair; None for any other text
    (VideoChat-R1's <glue>, 2504.06958).

    At most 1,000 spans; `[]` gives an empty list."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")) or "~" in text:
        return None
    spans = [[float(match[1]), float(match[2])] for match in islice(_PAIR.finditer(text), MOST + 1)]
    framed = _COMMAS.fullmatch(_PAIR.sub("~", text[1:-1]).lstrip()) is not None
    return spans if framed and len(spans) <= MOST and all(s <= e for s, e in spans) else None


def format_time(seconds: float) -> str:
    """Seconds as text, without an exponent and with up to 12 decimals: "3", "12.5"."""
    return f"{seconds:.12f}".rstrip("0").rstrip(".")


def format_span(span: Span) -> str:
    """A span as text, `start to end` in seconds; parsing this text returns the same span."""
    return f"{format_time(span[0])} to {format_time(span[1])}"


def _covered(a: Sequence[Span], b: Sequence[Span]) -> tuple[float, float, float]:
    """Returns three lengths in seconds: of the intersection of two unions of intervals, of the first union, and of the
    second union."""
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
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total
