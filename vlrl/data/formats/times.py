"""Reads times in records of other projects: seconds, clock times, and intervals in various notations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlrl.data.row_fields import cut_problem
from vlrl.data.sources.fields import pick
from vlrl.data.values import number, short, unpacked
from vlrl.errors import DataError

_CLOCK = re.compile(r"(?:(\d{1,3}):)?(\d{1,3}):(\d{1,2}(?:\.\d{1,6})?)")
_MILLIS = re.compile(r"(:\d\d),(\d{3})(?!\d)")
"""Matches a comma before milliseconds, as in subtitles (00:00:02,500)."""
_WITH_MILLIS = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}):(\d{3})")
_UNIT = re.compile(r"\s*(?:s|sec|secs|second|seconds)\.?$", re.IGNORECASE)
_BETWEEN = re.compile(r"\s*(?:\bto\b|\band\b|,|–|—|~|->|-)\s*", re.IGNORECASE)
_CUT = re.compile(r"_(\d\d:\d\d:\d\d[:.]\d{3})_(\d\d:\d\d:\d\d[:.]\d{3})(?=\.\w+$)")
_SAME = 1.0
"""The video file is taken to be the clip of a record if the durations of file and clip differ by at most this many
seconds."""
_EARLY = 0.5
"""Seconds by which an annotated start may precede the clip, as in NExT-GQA; such a start becomes 0."""
_LONGEST = 100


def seconds(value: Any, name: str) -> float:
    """Converts 12.5, "12.5 s", "1:02", "00:01:02.5" or "00:01:02:500" to seconds. Raises DataError naming the field for
    any other value."""
    moment = number(value)
    if moment is None and isinstance(value, str) and len(value) <= _LONGEST:
        said = _MILLIS.sub(r"\1.\2", _UNIT.sub("", value.strip()))
        millis, clock = _WITH_MILLIS.fullmatch(said), _CLOCK.fullmatch(said)
        if millis:
            h, m, s, ms = map(int, millis.groups())
            moment = number(3600 * h + 60 * m + s + ms / 1000)
        elif clock and float(clock[3]) < 60 and (not clock[1] or int(clock[2]) < 60):
            moment = number(3600 * int(clock[1] or 0) + 60 * int(clock[2]) + float(clock[3]))
        else:
            moment = number(said)
    if moment is None or moment < 0:
        raise DataError(f"{name}={short(value)} must be a time in seconds of at least 0, or h:m:s")
    return moment


def interval(value: Any, name: str) -> list[float]:
    """Converts an interval to [start, end] in seconds.

    Accepts a pair, an object with "start" and "end" or similar keys, and "3 to 7", "3-7" or "0:03 - 0:07". Raises
    DataError naming the field for anything else, and if the end is not after the start."""
    pair = unpacked(value)
    if isinstance(pair, str) and len(pair) <= _LONGEST:
        said = re.sub(r"^\s*(?:from|between)\b", "", pair.strip(" []()"), flags=re.IGNORECASE)
        pair = _between(said.strip())
    if isinstance(pair, Mapping):
        pair = [pick(pair, "start", "start_time", "begin", "s"), pick(pair, "end", "end_time", "stop", "e")]
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise DataError(f"{name}={short(value)} must be an interval [start, end] in seconds")
    early = number(pair[0])
    start = 0 if early is not None and -_EARLY <= early < 0 else seconds(pair[0], name)
    end = seconds(pair[1], name)
    if not start < end:
        raise DataError(f"{name}={short(value)} must begin before it ends")
    return [start, end]


def _between(text: str) -> list[str]:
    return _BETWEEN.split(_MILLIS.sub(r"\1.\2", text))


def intervals(value: Any, name: str) -> list[list[float]]:
    """Converts one interval or a list of intervals to a list of [start, end] in seconds; see `interval`."""
    given = unpacked(value)
    several = isinstance(given, (list, tuple)) and given and all(
        isinstance(v, (list, tuple, Mapping)) or (isinstance(v, str) and len(_between(v)) == 2) for v in given)
    return [interval(v, name) for v in given] if several else [interval(given, name)]


def clip(record: Mapping[str, Any], video: Any, length: float | None, measured: Any) -> dict[str, float]:
    """Returns `video_start` and `video_end` if a record uses only a part of the video file; {} if it uses the whole
    file.

    `length` is the length of the clip that the record states, if any. `measured(video)` returns the length of the file,
    or None if the file is missing. A file as long as the clip is the clip itself. A missing file is taken to be the
    clip itself if its name ends in a start and an end time (`..._00:00:39:000_00:01:24:700.mp4`, as in InternVid)."""
    given = [pick(record, *names) for names in (("video_start", "start"), ("video_end", "end"))]
    if None in given:  # from there to the end of the file, or from its beginning
        return {name: seconds(v, name) for name, v in zip(("video_start", "video_end"), given, strict=True)
                if v is not None}
    start, end = (seconds(v, "video_start, video_end") for v in given)
    if problem := cut_problem(start, end):
        raise DataError(problem)
    whole = measured(video)
    cut = bool(_CUT.search(str(video))) if whole is None else abs(whole - (length or end - start)) <= _SAME
    return {} if cut else {"video_start": start, "video_end": end}
