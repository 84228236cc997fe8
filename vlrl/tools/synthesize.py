"""New training prompts that a task proposes, kept where a model is right at times: `vlrl data synthesize`.

    with explorers(config, search) as explore:                                   # processes that have the task
        found = proposed(explore, search, places.candidates, known, tell)        # by exploring, or from failures
    rows, counts = distinct(found, heldout_rows(config))                         # without near-duplicates
    kept, refused = gated(rows, measured(ready, ..., samples), search, counts)   # 0 < pass rate < 1

Tasks found by exploring and admitted by their live pass rate: MobileGUI-RL (arXiv 2507.05720). Tasks made from those at
which the model fails, and filtered again: WebRL (arXiv 2411.02337), there by a critic's value in [.05, .75], here by
the pass rate itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.data import json_line, make_sample, read_rows, write_rows
from vlrl.distributed import comm
from vlrl.errors import ConfigError, DataError
from vlrl.evaluation.rows import begun
from vlrl.store import plain
from vlrl.store.files import append_line, write_text
from vlrl.task import Task, task_samples
from vlrl.tools import difficulty
from vlrl.tools.explorers import Candidate, Explore, Row, Search, explorers
from vlrl.tools.measure import Chosen, ready, task_facts
from vlrl.tools.overlap import of_texts, text_of, words
from vlrl.tools.prompttable import COLUMNS, Measured, data_file

Tell = Callable[[str, int, int], None]
FIELDS = {"generator": "how the prompt was made", "parent": "id of the prompt that it was made from, or null",
          "verifier": "what checks an answer",
          **{name: COLUMNS[name] for name in COLUMNS if name != "difficulty_given"}}
"""What stands in each column that is added."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The files of a synthesis, around that of the rows that are kept."""

    out: Path

    def _beside(self, ending: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{ending}")

    @property
    def candidates(self) -> Path:
        """What was proposed so far, until the end."""
        return self._beside("candidates.part.jsonl")

    @property
    def answers(self) -> Path:
        """What was answered so far, until the end."""
        return self._beside("answers.part.jsonl")

    @property
    def refused(self) -> Path:
        """The rows that were measured and not kept."""
        return self._beside("refused.jsonl")

    @property
    def about(self) -> Path:
        """The settings, and how many candidates each gate let through."""
        return self._beside("about.json")


def facts(config: Config, search: Search) -> dict[str, Any]:
    """Returns what the candidates depend on, as JSON: a search goes on only where all of it is the same."""
    parents = "".join(json_line(plain(row)) for row in search.parents)
    return {**task_facts(config, ()), "parents": hashlib.sha256(parents.encode()).hexdigest()}


# --- candidates -------------------------------------------------------------------------------------------------------


def failed(source: Path, task: Task) -> tuple[Row, ...]:
    """Returns the rows of a file, or the training prompts of a run folder, whose pass rate is 0.

    A file has the column pass_at_k (`vlrl data difficulty`, or an earlier synthesis); a line of id and columns alone
    stands for the sample of that id. Raises ConfigError where there is none.
    """
    rows = _of_run(source) if source.is_dir() else read_rows(source, "canonical")
    never = {str(row["id"]): row for row in rows if "id" in row and row.get("pass_at_k") == 0}
    if not never:
        known = any(row.get("pass_at_k") is not None for row in rows)
        raise ConfigError(f"--failed {source}: none of its {len(rows):,} prompts has a pass rate of 0" if known else
                          f"--failed {source}: it has no column pass_at_k: name what `vlrl data difficulty` or `vlrl "
                          "data synthesize` wrote, or the folder of a run")
    bare = {name for name, row in never.items() if not {*row} - {"id", *COLUMNS}}
    if bare:
        own = {s.id: {**s.row, "id": s.id} for s in task_samples(task, "train") if s.id in bare}
        if lost := sorted(bare - {*own}):
            raise ConfigError(f"--failed {source}: {lost[0]!r} is no training sample of task '{task.name}': name the "
                              "config that it was measured with")
        never |= own
    return tuple(plain({k: v for k, v in row.items() if k not in COLUMNS}) for row in never.values())


def _of_run(folder: Path) -> list[Row]:
    """Returns id and pass rate of the prompts that a run drew."""
    path = folder / "prompts.parquet"
    try:
        table = pq.read_table(path, columns=["sample_id", "pass_rate"])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"--failed {folder}: {path.name} cannot be read ({failure(error)}): name the folder of a run "
                          "that has saved a checkpoint, or a file of rows") from None
    return [{"id": row["sample_id"], "pass_at_k": row["pass_rate"]} for row in table.to_pylist() if row["sample_id"]]


def proposed(explore: Explore, search: Search, part: Path, known: Mapping[str, Any], tell: Tell) -> list[Candidate]:
    """Returns the candidates in order; what `part` holds is not made again.

    Raises ConfigError where the task proposes nothing, or `part` is of another search.
    """
    lines = begun(part, known, "a search", "file")
    have = {line["candidate"]["number"]: Candidate(**line["candidate"]) for line in lines if "candidate" in line}
    what = "varying failed prompts" if search.parents else "exploring"
    left = [number for number in range(search.candidates) if number not in have]
    tell(what, search.candidates - len(left), search.candidates)
    for number, candidate in zip(left, explore(left), strict=True):
        append_line(part, json.dumps({"candidate": vars(candidate)}))
        have[number] = candidate
        tell(what, sum(n in have for n in range(search.candidates)), search.candidates)
    return [have[number] for number in range(search.candidates)]


def distinct(found: Sequence[Candidate], heldout: Sequence[Mapping[str, Any]] = ()) -> tuple[list[Row], Counter[str]]:
    """Returns the rows that are no near-duplicates, and a count of candidates by what became of them.

    A near-duplicate says the same words, or has half of its 13-grams in one other text: that of a held-out row, or of
    a candidate before it of the same category. The same id twice is one too.
    """
    rows, counts = list[Row](), Counter[str]()
    known: dict[Any, list[str]] = {}
    held = [text_of(row) for row in heldout]
    ids = {str(row.get("id")) for row in heldout}
    for one in found:
        if one.row is None:
            counts["nothing found" if one.reason == "nothing found" else "failed"] += 1
            continue
        text, same = text_of(one.row), known.setdefault(one.row.get("category"), [])
        if _alike(text, held):
            counts["near a held-out row"] += 1
        elif one.row["id"] in ids or _alike(text, same):
            counts["near-duplicate"] += 1
        else:
            rows.append(one.row)
            same.append(text)
            ids.add(one.row["id"])
    return rows, counts


def _alike(text: str, others: Sequence[str]) -> bool:
    own = words(text)
    whole = any(own and own == words(other) for other in others)
    return whole or bool(of_texts([(str(i), other, True) for i, other in enumerate(others)], [("", text, True)]))


def heldout_rows(config: Config) -> list[Row]:
    """Returns the rows of data.heldout; [] where the task makes its held-out samples."""
    file = data_file(config, "heldout")
    return read_rows(file, config.data.format) if file and file.is_file() else []


# --- the gate ---------------------------------------------------------------------------------------------------------


def verdict(measured: Measured, search: Search) -> str:
    """Returns why a prompt is not kept: "never right", "always right", "outside the range", "not measured"; ""
    where it is."""
    right, scored = measured.counts
    if measured.reason is not None:
        return "not measured"
    if right in (0, scored):
        return "always right" if right else "never right"
    return "" if search.least <= right / scored <= search.most else "outside the range"


def gated(rows: Sequence[Row], measurements: Sequence[Measured], search: Search, counts: Counter[str]
          ) -> tuple[list[Row], list[Row]]:
    """Returns the rows that are kept and those that are not, with columns, these with `refused`; counts both."""
    kept, refused = list[Row](), list[Row]()
    for row, one in zip(rows, measurements, strict=True):
        why, whole = verdict(one, search), {**row, **one.columns()}
        counts[why or "kept"] += 1
        if why:
            refused.append({**whole, "refused": one.reason or why})
        else:
            kept.append(whole)
    return kept, refused


def write(places: Places, kept: Sequence[Row], refused: Sequence[Row], counts: Mapping[str, int],
          known: Mapping[str, Any]) -> None:
    """Writes the rows and what they are, each file whole or not at all, and removes the side files.

    Raises DataError, after the refused rows were written, where none is kept.
    """
    about = {"file": places.out.name, "columns": FIELDS, "made_with": known, "candidates": dict(counts),
             "kept_by_generator": dict(sorted(Counter(row["generator"] for row in kept).items()))}
    write_text(places.about, json.dumps(plain(about), indent=1) + "\n")
    write_rows(places.refused, refused)
    if kept:
        write_rows(places.out, kept)
    for part in (places.candidates, places.answers):
        part.unlink(missing_ok=True)
    if not kept:
        told = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise DataError(f"no candidate is kept ({told}): ask for more with --candidates or --answers, take another "
                        f"checkpoint, or vary those that are never right: --failed {os.fspath(places.refused)}")


def synthesized(config: Config, chosen: Chosen, search: Search, answers: int, places: Places, tell: Tell
                ) -> tuple[dict[str, int], list[Row]]:
    """Looks for candidates, has the chosen model try each `answers` times, and writes what is kept. Returns candidates
    by what became of them, and the rows. All processes call it; the first one explores.
    """
    known = facts(config, search)

    def candidates() -> list[Candidate]:
        with explorers(config, search) as explore:
            return proposed(explore, search, places.candidates, known, tell)

    rows, counts = distinct(comm.on_main(candidates, "looking for candidates"), heldout_rows(config))
    if not rows:
        raise DataError(f"none of {search.candidates:,} candidates can be tried: "
                        + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    scope = difficulty.Scope(answers=answers, split="candidates")
    asked = {**difficulty.facts(config, chosen, scope), **known}
    with ready(chosen.config, chosen) as prepared:
        samples = [make_sample(prepared.task, row, places.out.parent) for row in rows]
        measurements = difficulty.measured(prepared, scope, places.answers, asked, tell, samples)
    kept, refused = gated(rows, measurements, search, counts)
    comm.on_main(lambda: write(places, kept, refused, counts, asked))
    return dict(counts), kept
