"""Data: rows become samples; images and videos are read safely. No torch.

    samples, media   samples of a split and their images and videos; row_samples: canonical rows -> samples
    sources/         rows in files of many kinds, on the Hub, behind URLs; imported when a task reads files
    formats/         annotation formats of other projects
    video/           frames of video files and their timestamps

- Times in rows, in answers and in prompts count in seconds from the start of the clip (`video_start`). Processors get
  them through video.sampling.clock, never as frame numbers and a mean frame rate.
- Media are decoded once their size is known, and downloaded only from hosts that `data.urls` allows.
- A bad row stops the run, or is left out under `data.quarantine`. row_index reads files larger than memory row by row.
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
