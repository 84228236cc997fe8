"""What only all records of a file together tell: ids that no two rows share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vlrl.errors import DataError

log = logging.getLogger(__name__)


def unique_ids(path: Any, rows: Sequence[dict[str, Any] | DataError], taken: set[str]) -> None:
    """Gives rows whose id occurs before, or is `taken` by another file, one by their place ("7-2" is the second 7), and
    keeps the old one as `original_id`. Adds the ids of the rows to `taken`. Says so once."""
    sound = [row for row in rows if not isinstance(row, DataError) and row.get("id") not in (None, "")]
    own, changed, count = {str(row["id"]) for row in sound}, [], dict[str, int]()
    for row in sound:
        id = str(row["id"])
        if id in taken:
            count.setdefault(id, 1)
            while (new := f"{id}-{count[id] + 1}") in taken or new in own:
                count[id] += 1
            row["original_id"], row["id"] = row["id"], new
            changed.append((id, new))
        taken.add(str(row["id"]))
    if changed:
        log.warning("%s: %d of %d rows have an id that occurs before; each got its own, such as %r for %r, and keeps "
                    "the old one as original_id", path, len(changed), len(sound), *reversed(changed[0]))
