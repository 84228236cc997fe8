"""Remarks on the rollout files that a page is based on."""

from __future__ import annotations

from collections.abc import Sequence

from .html import Html, note
from .site import Site

MOST = 5
"""Largest number of skipped files listed by name."""


def remarks_on(site: Site, runs: Sequence[str], notes: Sequence[str]) -> list[Html]:
    """Remarks on rollout files that are still being read, and on those that were skipped."""
    pending = site.index.refresh(list(dict.fromkeys(runs)), 0.0).pending
    lines = [note(f"Still reading {pending:,} files; what is below grows until then.")] if pending else []
    lines += [note(words, kind="warn") for words in notes[:MOST]]
    return lines + ([note(f"{len(notes) - MOST:,} more files were skipped.", kind="warn")] if len(notes) > MOST else [])
