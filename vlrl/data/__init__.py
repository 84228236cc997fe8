"""Data: turns rows into samples, and loads their images and videos safely. Imports no torch.

    samples, media   the samples of a split; loading of images and videos
    row_samples      turns a canonical row into a sample
    sources/         reads rows from files, Hub data sets and URLs; imported only when a task reads files
    formats/         recognises and converts the annotation formats of other projects
    video/           video files: timestamps, frame sampling and decoding

- Times in rows, answers and prompts are seconds from the start of the clip (`video_start`). Processors of transformers
  get their timestamps from video.sampling.clock, so that these are correct for clips and variable frame rates too.
- No image or video is decoded before its size is checked. Media are downloaded only from hosts that `data.urls` allows.
- A bad row stops the run, or is left out under `data.quarantine`. Files larger than memory are read row by row."""

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
    "locate_files",
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
    "samples": "SPLITS BadRow Drawn Samples bad_row_lines readable reason_lines",
    "row_samples": "FIELDS MEDIA_FIELDS box_problems make_sample repeated_id sample_from_row",
    "sources.dataset": "locate_files read_rows read_samples several",
    "sources.folders": "records",
    "sources.solutions": "with_solutions",
    "sources.json_rows": "check_suffix json_line write_rows",
}.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return _PUBLIC[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
