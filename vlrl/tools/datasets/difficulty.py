"""Measures the difficulty of each prompt of a split for a model: the share of correct answers, sampled as in training.

    scope = MeasurementScope(answers=8)
    measurements = measure(ready, scope, Path("rows.difficulty.part.jsonl"), facts(config, chosen, scope))

Results are appended to a temporary file next to the output, one line per chunk of prompts, so that a killed measurement
resumes. Chunks are fixed by index in the split, so neither a restart nor the number of processes changes answers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.data import write_rows
from vlrl.distributed import comm
from vlrl.engine.base import Request, reset_sample
from vlrl.errors import ConfigError, DataError
from vlrl.models.processing import PromptTooLong
from vlrl.progress import Progress
from vlrl.rollout.error_limits import check_errors
from vlrl.rollout.generate import groups_without_variants, make_group, sampling_of
from vlrl.store import plain
from vlrl.store.files import append_line, write_text
from vlrl.task import task_samples
from vlrl.tools.datasets.prompt_table import COLUMNS, MeasuredPrompt, MeasurementFiles, Summary, joined, plot, summary
from vlrl.tools.evaluation.measure import EvalRuntime, ModelChoice, model_facts, task_facts
from vlrl.tools.evaluation.rows import resume_lines
from vlrl.types import Group, Sample

_TOGETHER = 256  # maximum number of answers generated in one batch; determines the number of prompts per chunk
_STREAM = 7
"""First number in the keys of this module's random streams; training, evaluation and variants use other numbers."""
_ROLLOUT = ("max_new_tokens", "temperature", "stop", "thinking_budget", "thinking_end")


@dataclass(frozen=True, kw_only=True)
class MeasurementScope:
    """Which prompts are measured, and how many answers to each of them are sampled."""

    answers: int = 8
    split: str = "train"
    limit: int | None = None  # measure only this many prompts from the start of the split; None = all


def facts(config: Config, chosen: ModelChoice, scope: MeasurementScope) -> dict[str, Any]:
    """Everything that the answers depend on (model, settings, data), as JSON. A measurement that was interrupted
    resumes only if these facts are unchanged."""
    return {**task_facts(config, _ROLLOUT), "model": model_facts(config, chosen), "split": scope.split,
            "answers": scope.answers}


def measure(runtime: EvalRuntime, scope: MeasurementScope, part: Path, known: Mapping[str, Any], progress: Progress,
             samples: Sequence[Sample] | None = None) -> list[MeasuredPrompt]:
    """Measures the difficulty of the first `scope.limit` prompts of the split. Returns one MeasuredPrompt per prompt,
    in order. If a prompt could not be answered, its MeasuredPrompt holds the reason.

    Prompts whose results are in the file `part` are not answered again. `known` are the facts (see `facts`) that this
    file must contain. If given, `samples` replace the samples of the split. Each process answers its share, and all
    processes return the same results. Prompts that are too long are not answered, and with data.quarantine neither are
    prompts with bad data.

    Raises ConfigError if the split is empty or `part` belongs to another measurement, TrainingError if scoring fails
    too often (limits.score_errors)."""
    samples = task_samples(runtime.task, scope.split) if samples is None else samples
    if len(samples) == 0:
        raise ConfigError(f"task '{runtime.task.name}' has no samples in split '{scope.split}': choose another"
                          " --split")
    count, size = min(scope.limit or len(samples), len(samples)), max(1, _TOGETHER // scope.answers)
    chunks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    by_number: dict[int, MeasuredPrompt] = comm.on_main(lambda: open_part(part, known))
    left = [chunk for chunk in chunks if not all(number in by_number for number in chunk)]
    mine = [*left[comm.rank()::comm.world()], range(0), range(0)]
    for i in range(math.ceil(len(left) / comm.world())):  # in lockstep: a reference policy needs all processes at once
        progress(f"answering {scope.split}", sum(number in by_number for number in range(count)), count)
        groups, records = comm.together(partial(_answer_chunk, runtime, scope, samples, mine[i], mine[i + 1]))
        check_errors(groups, runtime.config.limits, f"prompts from number {left[i * comm.world()].start} on")
        shares = comm.gather(records)
        comm.on_main(partial(_append, part, shares))
        by_number |= {m.number: m for share in shares for m in share}
    progress(f"answering {scope.split}", count, count)
    return [by_number[number] for number in range(count)]


def _answer_chunk(runtime: EvalRuntime, scope: MeasurementScope, samples: Sequence[Sample], numbers: Sequence[int],
                  following: Sequence[int]) -> tuple[list[Group], list[MeasuredPrompt]]:
    config, prefetch = runtime.config, runtime.prefetch
    wanted, soon = ({n: partial(_sample, runtime, samples, n) for n in some} for some in (numbers, following))
    prompts, records = [], []
    prefetch.begin(wanted)
    for number, sample_of in wanted.items():
        try:
            prompts.append((number, *prefetch.take(number, sample_of)))
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not config.data.quarantine:
                raise
            records.append(MeasuredPrompt(number=number, id=_id(sample_of), left_out=str(error)))
    prefetch.begin(soon)
    sampling = sampling_of(config.rollout, config.rollout.temperature)
    requests = [Request(prompt=prompt, n=scope.answers, sampling=sampling, key=(_STREAM, number), sample=sample)
                for number, sample, prompt in prompts]
    completions = runtime.engine.generate(requests)
    values = (runtime.likelihoods(groups_without_variants(prompts, completions), scope.split, 0) if runtime.likelihoods
              else [None] * len(prompts))
    groups = [make_group(runtime.task, sample, prompt, answers, group_id=f"{scope.split}-{number:06d}",
                         split=scope.split, step=0, likely=known, served=runtime.services)
              for (number, sample, prompt), answers, known in zip(prompts, completions, values, strict=True)]
    records += [_record(number, group) for (number, *_), group in zip(prompts, groups, strict=True)]
    return groups, sorted(records, key=lambda m: m.number)


def _sample(runtime: EvalRuntime, samples: Sequence[Sample], number: int) -> Sample:
    """Sample number `number` as training first presents it: with the prompt template of the first use, and with the
    sample's environment reset."""
    sample = samples[number]
    sample = replace(sample, prompt=runtime.task.of(sample).template(sample, 0))
    return reset_sample(runtime.engine, runtime.task, sample, number, 0)


def _id(sample_of: Callable[[], Sample]) -> str:
    """The id of the sample that `sample_of` makes; "" if making the sample fails."""
    try:
        return sample_of().id
    except DataError:
        return ""


def _record(number: int, group: Group) -> MeasuredPrompt:
    sample = group.sample
    category = None if sample.category is None else str(sample.category)
    return MeasuredPrompt(number=number, id=sample.id, category=category, task=sample.task,
                          passed=tuple(r.correct for r in group.rollouts), rewards=tuple(group.rewards))


# --- the side file ----------------------------------------------------------------------------------------------------


def open_part(part: Path, known: Mapping[str, Any]) -> dict[int, MeasuredPrompt]:
    """Reads the results in the temporary file `part` of a measurement. Returns prompt index -> result. If the file is
    missing, it is created with the facts `known`.

    Raises ConfigError if the facts in the file differ from `known`, or if it is another kind of file."""
    lines = resume_lines(part, known, "a measurement", "file")
    try:
        records = [MeasuredPrompt(**{**m, "passed": tuple(m["passed"]), "rewards": tuple(m["rewards"])})
                   for line in lines for m in line.get("prompts", ())]
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{part} cannot be read ({error}). Delete this file to start over") from None
    return {m.number: m for m in records}


def _append(part: Path, shares: Sequence[Sequence[MeasuredPrompt]]) -> None:
    for share in shares:
        if share:
            append_line(part, json.dumps({"prompts": [asdict(m) for m in share]}))


# --- what is written --------------------------------------------------------------------------------------------------


def write(files: MeasurementFiles, rows: Sequence[Mapping[str, Any]], measurements: Sequence[MeasuredPrompt],
          known: Mapping[str, Any]) -> tuple[Summary, bool]:
    """Writes three files atomically: the rows with the measured columns, the facts `known` with the summary, and the
    plot. Then deletes the temporary file of the measurement.

    Returns (summary, joined). `joined` is True if the written rows are those of the data file, and False if they only
    have ids and the measured columns. Raises DataError if no prompt could be measured."""
    numbers = summary(measurements, known["answers"])
    if not numbers.measured:
        raise DataError(f"no prompt could be measured. The reason for the first prompt, {measurements[0].id!r}: "
                        f"{measurements[0].reason}")
    lines, whole = joined(rows, measurements)
    name = known["model"]["checkpoint"] or known["model"]["name"]
    plot(numbers, files.picture, f"{os.path.basename(name)}: {numbers.measured:,} prompts, {known['answers']} answers "
                                  "each")
    about = {"file": files.out.name, "columns": COLUMNS, "measured_with": known, **asdict(numbers)}
    write_text(files.about, json.dumps(plain(about), indent=1) + "\n")
    write_rows(files.out, lines)
    files.part.unlink(missing_ok=True)
    return numbers, whole
