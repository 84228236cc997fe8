"""Functions that all data makers use: they check the output folder, and write the rows of both splits and a record of
how the data was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.data import SPLITS, write_rows
from vlrl.errors import ConfigError, DataError
from vlrl.progress import Progress, no_progress
from vlrl.store.files import replacing, write_text

Make = Callable[[str, int], Iterator[tuple[dict[str, Any], Mapping[str, bytes]]]]
"""Function of (split, number of rows) that yields the rows, each with its files: path inside the folder -> content."""


def make_rows(out: Path, make: Make, samples: int, heldout: int | None, record: Mapping[str, Any], *, what: str,
              force: bool = False, progress: Progress = no_progress) -> dict[str, int]:
    """Writes the rows of both splits, their media and made_by.json (from `record`) to the folder `out`. Returns the
    number of rows per split. `what` is the text shown with the progress.

    A fifth of the rows is held out, or `heldout` rows if it is given. Existing output is only replaced with `force`.
    Raises ConfigError for an invalid number, DataError if the folder is not empty and `force` is not set."""
    heldout = samples // 5 if heldout is None else heldout
    check_output(out, samples, force)
    if not 0 <= heldout <= samples:
        raise ConfigError(f"--heldout {heldout} must lie between 0 and --samples {samples}, because the held-out rows "
                          "are some of these samples")
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for split, count in zip(SPLITS, (samples - heldout, heldout), strict=True):
        for row, files in make(split, count):
            for name, content in files.items():
                path = out / name
                if not (path.exists() and path.read_bytes() == content):
                    with replacing(path, sync=False) as temporary:
                        temporary.write_bytes(content)
            rows[split].append(row)
            progress(what, sum(map(len, rows.values())), samples)
    for split, split_rows in rows.items():
        write_rows(out / f"{split}.jsonl", split_rows)
    counts = {split: len(split_rows) for split, split_rows in rows.items()}
    if record:
        write_text(out / "made_by.json", json.dumps({**record, "rows": counts}, indent=1) + "\n")
    return counts


def check_output(out: Path, samples: int, force: bool) -> None:
    """Raises ConfigError if `samples` is below 1, DataError if `out` is not an empty folder. With `force`, the folder
    need not be empty."""
    if samples < 1:
        raise ConfigError(f"--samples {samples} must be at least 1")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not force)):
        raise DataError(f"{out} is not an empty folder: choose another folder, or replace its content with --force")
