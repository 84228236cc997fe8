"""The basis of an evaluation: its settings, and checksums of its samples. Metrics with a different basis are not
comparable, so eval.jsonl marks where the basis changes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.rollout.fingerprint import row_sum
from vlrl.types import Group


def evaluation_basis(groups: Sequence[Group], config: Config) -> dict[str, Any]:
    """Returns the field `measured` of a line of eval.jsonl, a dict with `rows`, `pictures` and all settings `eval.*`
    but patience, which changes no measurement.

    `rows` is a hexadecimal checksum of the samples of all processes, and `pictures` is a checksum of the media in their
    prompts. All processes must call this function together, each with its own groups."""
    own = [(g.sample.id, row_sum(g.sample.id, g.sample.row), [m.sha256 for m in g.prompt.media]) for g in groups]
    samples = sorted(sample for part in comm.gather(own) for sample in part)
    settings = {f"eval.{name}": value for name, value in config.eval.model_dump(
        mode="json", exclude={"patience"}).items()}
    return {"rows": _sum((id, row) for id, row, _ in samples), "pictures": _sum((id, m) for id, _, m in samples),
            **settings}


def changed_basis(now: Mapping[str, Any], split: str, before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the values that differ between `now`, the basis of this evaluation, and the basis of the
    last evaluation of the split. `before` are the lines of eval.jsonl so far.

    If eval.samples changed, only settings are named, because the samples then differ anyway."""
    known = (line["measured"] for line in reversed(before) if line.get("split") == split and "measured" in line)
    then = next(known, {})
    names = [name for name, value in now.items() if then.get(name, value) != value]
    return [name for name in names if name.startswith("eval.")] if "eval.samples" in names else names


def _sum(values: Any) -> str:
    return f"{zlib.crc32(repr([*values]).encode('utf-8', 'surrogatepass')):08x}"
