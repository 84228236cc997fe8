"""Data: rows become samples; images and videos are read safely. No torch.

    samples, media   what a run draws from; row_samples: canonical rows -> samples
    sources/         rows in files of many kinds, the Hub, URLs: imported where a task reads files
    formats/         the ways in which others write annotations
    video/           frames of video files and their times

- Times in rows, in answers and in what the model is shown count in seconds from the start of the clip (`video_start`).
  Processors get them through video.sampling.clock, never as numbers of frames and a mean rate.
- Media are decoded once their size is known, and fetched only from what `data.urls` allows.
- Bad rows stop the run or are left out under `data.quarantine`; row_index reads files larger than memory row by row.
"""

from typing import Any

from vlrl.config.registry import Table

# __init__.pyi tells type checkers where these come from
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "FIELDS",
    "MEDIA_FIELDS",
    "SPLITS",
    "BadRow",
    "Drawn",
    "Samples",
    "bad_row_lines",
    "box_problems",
    "check_suffix",
    "json_line",
    "located",
    "make_sample",
    "read_rows",
    "read_samples",
    "readable",
    "reason_lines",
    "records",
    "repeated_id",
    "sample_from_row",
    "several",
    "with_solutions",
    "write_rows",
]

_PUBLIC = Table({name: f"vlrl.data.{module}:{name}" for module, names in {
    "samples": "SPLITS BadRow Drawn Samples bad_row_lines readable",
    "reasons": "reason_lines",
    "row_samples": "FIELDS MEDIA_FIELDS box_problems make_sample repeated_id sample_from_row",
    "sources.dataset": "located read_rows read_samples several",
    "sources.records": "records",
    "sources.solutions": "with_solutions",
    "sources.writing": "check_suffix json_line write_rows",
}.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return _PUBLIC[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
