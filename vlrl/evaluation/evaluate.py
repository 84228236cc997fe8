"""Evaluates the policy on a split, with the same code for encoding, generation and scoring as training."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Engine, Request, reset_sample
from vlrl.errors import DataError
from vlrl.evaluation.stats import mean_ci
from vlrl.models.processing import PromptTooLong
from vlrl.progress import Progress, no_progress
from vlrl.rollout.generate import Likelihoods, Score, answer_of, groups_without_variants, make_group, sampling_of
from vlrl.rollout.overlap import parallel_map
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import Task
from vlrl.task.interface import first_samples
from vlrl.task.scoring import sample_metrics, score_all
from vlrl.task.services import RunServices
from vlrl.types import Group, Sample

_CHUNK = 64  # number of prompts that are encoded and answered together


def evaluate(task: Task, prefetch: Prefetcher, engine: Engine, config: Config, split: str, step: int,
             progress: Progress = no_progress,
             likelihoods: Likelihoods | None = None, score: Score = score_all,
             services: RunServices | None = None) -> tuple[dict[str, Any], list[Group]]:
    """Evaluates the policy on a split. Returns the line for eval.jsonl, and the groups of this process, each with a
    single answer.

    Every metric has `<metric>/ci95_low` and `<metric>/ci95_high` (bootstrap over samples). Decoding is greedy unless
    eval.temperature is set. `correct_frac` is the share of correct answers (Task.correct). Samples that cannot be
    encoded count as `rejected`, answers without a reward as `unscorable`; neither counts as wrong. `environment/errors`
    counts episodes whose environment failed, at the reset or later. Prompt variants are not used. For a mixture,
    samples of all tasks are taken in turn.

    prefetch: encodes the prompts. likelihoods: computes log-probabilities for tasks that ask for them; None leaves out
    the reward parts that need log-probabilities. score: scores the answers. services: the services of the run that
    `services.*` configures; None if there are none."""
    mine = list(enumerate(first_samples(task, split, config.eval.samples)))[comm.rank()::comm.world()]
    groups, rejected = comm.together(lambda: _draw_answers(task, prefetch, engine, config, split, step, mine, progress,
                                                           likelihoods, score, services))
    groups = comm.together(lambda: [_with_metrics(task, g) for g in groups])
    records = [r for part in comm.gather([_record(g) for g in groups]) for r in part]
    failed = sum(r["error"] is not None and not r["lost"] for r in records) / max(len(records), 1)
    lost = {"environment/errors": sum(r["lost"] for r in records)} if any(r["episode"] for r in records) else {}
    line = {"step": step, "split": split, "n": len(records), "rejected": int(comm.total(rejected)[0]),
            "unscorable": sum(r["reward"] is None for r in records), "score_errors": failed, **lost,
            **(services.metrics(split, step, times=False) if services else {}), **_metrics_by_task(task, records)}
    return line, groups


def _draw_answers(task: Task, prefetch: Prefetcher, engine: Engine, config: Config, split: str, step: int,
            samples: Sequence[tuple[int, Sample]], progress: Progress,
            likelihoods: Likelihoods | None, score: Score, services: RunServices | None) -> tuple[list[Group], int]:
    """Generates and scores one answer to each of the (number, sample) pairs. Returns the groups, each with one answer,
    and the number of rejected samples."""
    sampling = sampling_of(config.rollout, config.eval.temperature)
    stream = zlib.crc32(split.encode())
    groups: list[Group] = []
    rejected = 0
    chunks = [{(split, number): partial(reset_sample, engine, task, sample, stream, number)
               for number, sample in samples[start:start + _CHUNK]}
              for start in range(0, len(samples), _CHUNK)]
    for chunk, following in itertools.zip_longest(chunks, chunks[1:], fillvalue={}):
        progress(f"evaluating {split}", len(groups) + rejected, len(samples))
        prompts = []
        prefetch.begin(chunk)
        for (_, number), sample_of in chunk.items():
            try:
                prompts.append((number, *prefetch.take((split, number), sample_of)))
            except DataError as error:
                if not isinstance(error, PromptTooLong) and not config.data.quarantine:
                    raise
                rejected += 1
        prefetch.begin(following)
        requests = [Request(prompt=p, n=1, sampling=sampling, key=(1, stream, number), sample=sample)
                    for number, sample, p in prompts]
        completions = engine.generate(requests)
        known = (likelihoods(groups_without_variants(prompts, completions), split, step) if likelihoods
                 else [None] * len(prompts))

        def scored(i: int, prompts: Any = prompts, completions: Any = completions, known: Any = known) -> Group:
            number, sample, prompt = prompts[i]
            return make_group(task, sample, prompt, completions[i], group_id=f"{split}-{number:06d}", split=split,
                              step=step, likely=known[i], score=score, served=services)

        groups += parallel_map(services.threads if services else 1, scored, range(len(prompts)))
    return groups, rejected


def _with_metrics(task: Task, group: Group) -> Group:
    rollout, completion = group.rollouts[0], group.rollouts[0].completion
    answer = answer_of(completion, group.prompt, rollout.policy_step)
    metrics, error = sample_metrics(task, group.sample, answer, rollout.parts)
    return replace(group, rollouts=(replace(rollout, metrics=metrics, error=rollout.error or error),))


def _record(group: Group) -> dict[str, Any]:
    """Returns a dict with the fields of one sample and its answer, for Task.summarize. If the environment of the
    episode failed at its reset, length, truncated and turns are None."""
    rollout, completion = group.rollouts[0], group.rollouts[0].completion
    written: dict[str, Any] = dict.fromkeys(("length", "truncated", "turns"))
    if completion.begun:
        written = {"length": len(completion.tokens), "truncated": float(completion.truncated),
                   "turns": len(completion.actions) if completion.episode_id else None}
    return {"task": group.task, "sample": group.sample.row, "id": group.sample.id, "answer": completion.text,
            "parsed": rollout.parsed, "target": group.target, "parts": rollout.parts, "reward": rollout.reward,
            "correct": rollout.correct, **written, "error": rollout.error, "metrics": rollout.metrics,
            "episode": bool(completion.episode_id), "lost": completion.error is not None}


def _metrics_by_task(task: Task, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of all samples with equal weight: means with 95 % bounds, and those of Task.summarize. For a mixture
    also `<label>/<metric>` of each task, and its number of samples `<label>/n`."""
    out = _intervals(records)
    for label in task.labels:
        own = [r for r in records if r["task"] == label]
        out |= {f"{label}/n": len(own), **{f"{label}/{name}": value for name, value in _intervals(own).items()}}
    return out | task.summarize(records)


def _intervals(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {"reward/mean": [r["reward"] for r in records if r["reward"] is not None],
                                       "correct_frac": [float(r["correct"]) for r in records
                                                        if r["correct"] is not None],
                                       "completion/length_mean": [float(r["length"]) for r in records
                                                                  if r["length"] is not None],
                                       "completion/truncated_frac": [r["truncated"] for r in records
                                                                     if r["truncated"] is not None],
                                       "episode/turns_mean": [r["turns"] for r in records if r["turns"] is not None]}
    for record in records:
        for name, value in {**record["parts"], **record["metrics"]}.items():
            if value is not None and math.isfinite(value):
                columns.setdefault(name, []).append(float(value))
    out: dict[str, float] = {}
    for name, values in columns.items():
        if values:
            mean, low, high = mean_ci(values)
            out |= {name: mean, f"{name}/ci95_low": low, f"{name}/ci95_high": high}
    return out


def evaluation_line(record: Mapping[str, Any]) -> str:
    """Formats a line of eval.jsonl for the terminal."""
    labels = tuple(k.removesuffix("n") for k in record if k.endswith("/n"))
    words = [f"{k} {v:.3f} [{record[f'{k}/ci95_low']:.3f}, {record[f'{k}/ci95_high']:.3f}]"
             for k, v in record.items() if f"{k}/ci95_low" in record and not k.startswith("completion/")
             and (k.endswith("/reward/mean") or not k.startswith(labels))]
    left_out = f", {record['rejected']} left out" if record["rejected"] else ""
    left_out += f", {record['unscorable']} without a reward" if record["unscorable"] else ""
    return f"evaluation of {record['split']} at step {record['step']} (n={record['n']}{left_out}): {', '.join(words)}"
