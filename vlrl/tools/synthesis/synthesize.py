"""`vlrl data synthesize`: finds new training prompts that a model answers correctly sometimes but not always.

The prompts are proposed by a task (by exploring, from failures, or with its knobs), or written by a model behind a
server (prompt_writer.py).

    with explorers(config, search, where) as explore:                            # worker processes with the task
        candidates = propose_all(explore, search, files.candidates, known, progress)
    rows, counts = distinct(candidates, heldout, task)                           # without near duplicates
    accepted, refused = filter_rows(rows, measurements, search, counts)          # 0 < pass rate < 1

Finding tasks by exploring and filtering them by the current pass rate: MobileGUI-RL (arXiv 2507.05720). Making tasks
from failures and filtering them: WebRL (arXiv 2411.02337), which keeps tasks with a critic's value in [.05, .75]; here
the pass rate is used. For other recipes see parents.py."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.data import json_line, make_sample, write_rows
from vlrl.distributed import comm
from vlrl.errors import DataError
from vlrl.progress import Progress
from vlrl.store import plain
from vlrl.store.files import append_line, write_text
from vlrl.tools.datasets import difficulty
from vlrl.tools.datasets.prompt_table import COLUMNS, MeasuredPrompt
from vlrl.tools.evaluation.measure import ModelChoice, open_runtime, task_facts
from vlrl.tools.evaluation.rows import resume_lines
from vlrl.tools.synthesis.near_duplicates import HeldOutRows, SignatureReader, distinct
from vlrl.tools.synthesis.prompt_writer import Files, PromptWriter, WriterSettings
from vlrl.tools.synthesis.proposals import Candidate, Explore, Search, explorers
from vlrl.tools.synthesis.row_export import MediaLocation
from vlrl.training.build_task import make_task
from vlrl.types import Row

FIELDS = {"generator": "how the prompt was made", "parent": "id of the prompt that it was made from, or null",
          "verifier": "what checks an answer",
          **{name: COLUMNS[name] for name in COLUMNS if name != "difficulty_given"}}
"""Column that synthesis adds to rows -> its description."""


@dataclass(frozen=True, kw_only=True)
class SynthesisFiles:
    """Paths of the files of a synthesis: `out` has the kept rows, and the others are next to it."""

    out: Path

    def _with_ending(self, ending: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{ending}")

    @property
    def candidates(self) -> Path:
        """File of the candidates proposed so far; deleted when the synthesis is complete."""
        return self._with_ending("candidates.part.jsonl")

    def answers(self, rows: Sequence[Row]) -> Path:
        """File of the model's answers to these rows so far; deleted when the synthesis is complete."""
        digest = hashlib.sha256("".join(map(json_line, rows)).encode()).hexdigest()
        return self._with_ending(f"answers-{digest[:8]}.part.jsonl")

    @property
    def parts(self) -> list[Path]:
        """The temporary files, which are deleted when the synthesis is complete."""
        return [self.candidates, *self.out.parent.glob(f"{glob.escape(self.out.stem)}.answers-*.part.jsonl")]

    @property
    def replies(self) -> Files:
        """Files of the servers' replies. They are not deleted, because replies may have cost money."""
        return Files(written=self._with_ending("written.jsonl"), votes=self._with_ending("votes.jsonl"))

    @property
    def refused(self) -> Path:
        """File of the rows that were measured but not kept."""
        return self._with_ending("refused.jsonl")

    @property
    def about(self) -> Path:
        """File of the settings, and of the number of candidates that each filter passed."""
        return self._with_ending("about.json")


def facts(config: Config, search: Search) -> dict[str, Any]:
    """Everything that the candidates depend on, as JSON. A search resumes only if these facts are unchanged."""
    parents = "".join(json_line(plain(row)) for row in search.parents) + json.dumps(plain(search.variations))
    return {**task_facts(config, ()), "parents": hashlib.sha256(parents.encode()).hexdigest()}


GATES = {"found": ("nothing found", "failed", "not answered", "malformed"),
         "distinct": ("near a held-out row", "near-duplicate"),
         "verified": ("refused by the task", "no majority", "not all votes"), "measured": ("not measured",),
         "kept": ("never right", "always right", "outside the range", "beyond --keep")}
"""Name of a filter -> the reasons for which this filter removes candidates."""


# --- candidates -------------------------------------------------------------------------------------------------------


def propose_all(explore: Explore, search: Search, part: Path, known: Mapping[str, Any],
             progress: Progress) -> list[Candidate]:
    """All candidates in order. Candidates that are stored in the file `part` are not proposed again.

    Raises ConfigError if the task cannot propose prompts, or if `part` was written with other facts than `known`."""
    lines = resume_lines(part, known, "a search", "file")
    have = {line["candidate"]["number"]: Candidate(**line["candidate"]) for line in lines if "candidate" in line}
    what = "varying failed prompts" if search.parents else "exploring"
    left = [number for number in range(search.candidates) if number not in have]
    progress(what, search.candidates - len(left), search.candidates)
    for number, candidate in zip(left, explore(left), strict=True):
        append_line(part, json.dumps({"candidate": vars(candidate)}))
        have[number] = candidate
        progress(what, sum(n in have for n in range(search.candidates)), search.candidates)
    return [have[number] for number in range(search.candidates)]


# --- filters ---------------------------------------------------------------------------------------------------------


def verdict(measured: MeasuredPrompt, search: Search) -> str:
    """Why a prompt is not kept: "never right", "always right", "outside the range" or "not measured"; "" if kept."""
    right, scored = measured.counts
    if measured.reason is not None:
        return "not measured"
    if right in (0, scored):
        return "always right" if right else "never right"
    return "" if search.least <= right / scored <= search.most else "outside the range"


def filter_rows(rows: Sequence[Row], measurements: Sequence[MeasuredPrompt], search: Search, counts: Counter[str]
          ) -> tuple[list[Row], list[Row]]:
    """Returns (kept rows, other rows), each row with its measured columns. The other rows also have the reason in the
    column `refused`. Adds the number of rows per reason, and of kept rows, to `counts`.

    With search.keep only the rows with the lowest pass rates are kept, sorted by pass rate."""
    accepted, refused = list[Row](), list[Row]()
    for row, one in zip(rows, measurements, strict=True):
        why, whole = verdict(one, search), {**row, **one.columns()}
        counts[why or "kept"] += 1
        if why:
            refused.append({**whole, "refused": one.reason or why})
        else:
            accepted.append(whole)
    if search.keep is not None:
        accepted.sort(key=lambda row: row["pass_at_k"])
        if beyond := accepted[search.keep:]:
            counts["kept"] -= len(beyond)
            counts["beyond --keep"] += len(beyond)
            refused += [{**row, "refused": "beyond --keep"} for row in beyond]
    return accepted[:search.keep], refused


def gates(counts: Mapping[str, int]) -> dict[str, int]:
    """Name of a filter (found, distinct, verified, measured, kept) -> number of candidates that passed this filter and
    those before it. The key "candidates" has the number of all candidates."""
    left, out = sum(counts.values()), {"candidates": sum(counts.values())}
    for name, reasons in GATES.items():
        left -= sum(counts.get(reason, 0) for reason in reasons)
        out[name] = left
    return out


def write(files: SynthesisFiles, accepted: Sequence[Row], refused: Sequence[Row], counts: Mapping[str, int],
          known: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """Writes the rows and the record of the synthesis atomically, and deletes the temporary files.

    more: further results for the record. If no row is kept, raises DataError after the other files are written."""
    about = {"file": files.out.name, "columns": FIELDS, "made_with": known, "candidates": dict(counts),
             "gates": gates(counts),
             "kept_by_generator": dict(sorted(Counter(row["generator"] for row in accepted).items())), **(more or {})}
    write_text(files.about, json.dumps(plain(about), indent=1) + "\n")
    write_rows(files.refused, refused)
    if accepted:
        write_rows(files.out, accepted)
    for part in files.parts:
        part.unlink(missing_ok=True)
    if not accepted:
        summary = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise DataError(f"no candidate is kept ({summary}). Increase --candidates or --answers, use another "
                        f"checkpoint, or vary the prompts without a right answer: --failed {os.fspath(files.refused)}")


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """The result of a synthesis: the kept rows, the numbers of candidates by outcome, the number of failed requests,
    and the costs."""

    counts: dict[str, int]  # outcome -> number of candidates with this outcome
    rows: list[Row]
    unanswered: int = 0
    costs: dict[str, Any] = field(default_factory=dict)  # cost of the generator and of the teacher


def synthesize_prompts(config: Config, chosen: ModelChoice, search: Search, answers: int, files: SynthesisFiles,
                       progress: Progress, settings: WriterSettings | None = None) -> Synthesis:
    """Runs a synthesis. The task proposes candidates, or the generator of `settings` writes them. The chosen model
    answers each candidate `answers` times, and the rows that are kept are written. All processes must call this
    function; only the main process proposes candidates.

    Raises DataError if no row is kept, and the errors of servers (see PromptWriter)."""
    known, location = facts(config, search), MediaLocation.for_file(config, files.out)
    rows, counts, more = comm.on_main(lambda: _candidates(config, search, files, location, known, progress, settings),
                                      "proposing candidates")
    if not rows:
        raise DataError(f"none of {search.candidates:,} candidates is left to measure (" + ", ".join(
            f"{name} {count:,}" for name, count in counts.items()) + "). Increase --candidates")
    scope = difficulty.MeasurementScope(answers=answers, split="candidates")
    attempt_facts = {**difficulty.facts(config, chosen, scope), **known}
    with open_runtime(chosen.config, chosen) as prepared:
        samples = [make_sample(prepared.task, row, location.root) for row in rows]
        measurements = difficulty.measure(prepared, scope, files.answers(rows), attempt_facts, progress, samples)
    accepted, refused = filter_rows(rows, measurements, search, counts)
    comm.on_main(lambda: write(files, accepted, refused, counts, attempt_facts, more))
    return Synthesis(counts=dict(counts), rows=accepted, unanswered=more.get("unanswered", 0),
                     costs=more.get("cost", {}))


def _candidates(config: Config, search: Search, files: SynthesisFiles, location: MediaLocation,
                known: Mapping[str, Any], progress: Progress, settings: WriterSettings | None
                ) -> tuple[list[Row], Counter[str], dict[str, Any]]:
    """Returns three values: the rows to measure; reason -> number of removed candidates; and {"unanswered": number of
    failed requests, "cost": costs of the servers}, or {} if no generator writes the prompts."""
    task = make_task(config)
    writing = settings and PromptWriter(config=config, task=task, search=search, settings=settings, files=files.replies,
                                        location=location, known=known, progress=progress)
    if writing:
        candidates = writing.candidates()
    else:
        with explorers(config, search, location) as explore:
            candidates = propose_all(explore, search, files.candidates, known, progress)
    rows, counts = distinct(candidates, HeldOutRows.read(config, task, progress), task,
                            SignatureReader(config, task, location.root), search.parents if writing else ())
    if not writing:
        return [*rows.values()], counts, {}
    verified, refused = writing.verified(rows)
    return verified, counts + refused, {"unanswered": writing.unanswered, "cost": writing.costs}
