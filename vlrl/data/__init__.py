"""Data files and media: rows in many formats become samples; images and videos are read safely. No torch."""

from vlrl.data.dataset import (
    SPLITS,
    BadRow,
    Drawn,
    Samples,
    check_suffix,
    json_line,
    read_rows,
    read_samples,
    readable,
    rows_told_once,
    told_once,
    write_rows,
)
from vlrl.data.row_samples import FIELDS, MEDIA_FIELDS, box_problems, make_sample, sample_from_row

__all__ = ["FIELDS", "MEDIA_FIELDS", "SPLITS", "BadRow", "Drawn", "Samples", "box_problems", "check_suffix",
           "json_line", "make_sample", "read_rows", "read_samples", "readable", "rows_told_once", "sample_from_row",
           "told_once", "write_rows"]
