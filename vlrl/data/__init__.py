"""Data files and media: rows in many formats become samples; images and videos are read safely. No torch.

- Times in rows, in answers and in what the model is shown count in seconds from the start of the clip (`video_start`).
  Processors get them through video_sampling.clock, never as numbers of frames and a mean rate.
- Media are decoded once their size is known, and fetched only from what `data.urls` allows.
- Bad rows stop the run or are left out under `data.quarantine`; row_index reads files larger than memory row by row.
"""

from vlrl.data.dataset import (
    SPLITS,
    BadRow,
    Drawn,
    Samples,
    bad_row_lines,
    check_suffix,
    json_line,
    located,
    read_rows,
    read_samples,
    readable,
    several,
    write_rows,
)
from vlrl.data.reasons import reason_lines
from vlrl.data.row_samples import FIELDS, MEDIA_FIELDS, box_problems, make_sample, repeated_id, sample_from_row

__all__ = ["FIELDS", "MEDIA_FIELDS", "SPLITS", "BadRow", "Drawn", "Samples", "bad_row_lines", "box_problems",
           "check_suffix", "json_line", "located", "make_sample", "read_rows", "read_samples", "readable",
           "reason_lines", "repeated_id", "sample_from_row", "several", "write_rows"]
