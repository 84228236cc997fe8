"""Data files and media: rows in many formats become samples; images and videos are read safely. No torch."""

from vlrl.data.dataset import (
    FIELDS,
    MEDIA_FIELDS,
    SPLITS,
    BadRow,
    Drawn,
    Samples,
    box_problems,
    check_suffix,
    json_line,
    make_sample,
    read_rows,
    read_samples,
    readable,
    rows_told_once,
    sample_from_row,
    told_once,
    write_rows,
)

__all__ = ["FIELDS", "MEDIA_FIELDS", "SPLITS", "BadRow", "Drawn", "Samples", "box_problems", "check_suffix",
           "json_line", "make_sample", "read_rows", "read_samples", "readable", "rows_told_once", "sample_from_row",
           "told_once", "write_rows"]
