"""Samples and scores the answers of an evaluation, for every sample, setting and seed, and stores them in a file.

    file = RowFile(folder / "answers.jsonl", facts)
    draw_answers(runtime, ("heldout",), settings, file, step=0, progress=progress)     # answers in the file are kept

Answers are scored as in training. With greedy decoding, or at the config's own seed, the answers are identical to those
of the evaluations during a run."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Engine, Request, reset_sample
from vlrl.errors import DataError
from vlrl.models.processing import PromptTooLong
from vlrl.progress import Progress
from vlrl.rewards.confidence import read_confidence
from vlrl.rollout.error_limits import check_errors
from vlrl.rollout.generate import Likelihoods, answer_of, groups_without_variants, make_group
from vlrl.rollout.overlap import parallel_map
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import Task
from vlrl.task.interface import first_samples
from vlrl.task.scoring import sample_metrics
from vlrl.task.services import RunServices
from vlrl.tools.evaluation.probes import NotApplicable, probe
from vlrl.tools.evaluation.rows import RowFile, cluster_hash, content_hash, prompt_hash
from vlrl.tools.evaluation.settings import EvalSetting
from vlrl.types import Answer, Completion, Group, Prompt, Rollout, Row, Sample

_TOGETHER = 256  # maximum number of answers generated in one batch
_CHUNK = 64
"""Maximum number of prompts that are answered in one batch; the same number as in the evaluations during a run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalRuntime:
    """The loaded task, engine and services that generate and score answers. They do not depend on a training run."""

    config: Config
    task: Task
    prefetch: Prefetcher
    engine: Engine
    likelihoods: Likelihoods | None = None
    services: RunServices | None = None
    remote: bool = False
    """Whether the engine is an external server. If so, failed requests count as unanswered, and a repeated evaluation
    requests only the missing answers, not all answers of a batch in which some are missing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Evaluation:
    """The evaluation of one split at one setting and seed."""

    runtime: EvalRuntime
    setting: EvalSetting
    seed: int
    split: str
    samples: Sequence[Sample]
    step: int

    def key(self, number: int) -> tuple[int, ...]:
        """The key of the random stream for sample `number`. With the config's own seed, it equals the key that
        evaluate.evaluate uses during a run."""
        own = () if self.seed == self.runtime.config.seed else (self.seed,)
        return 1, zlib.crc32(self.split.encode()), number, *own

    def sample(self, number: int) -> Sample:
        """Returns sample `number` with the probe and the prompt template of this evaluation's setting. If the sample
        has an environment, it is reset with the seed of the evaluation."""
        sample = sample_for_setting(self.runtime.task, self.setting, self.samples, number)
        return reset_sample(self.runtime.engine, self.runtime.task, sample, *self.key(number)[1:])

    def place(self, number: int) -> Row:
        """The fields split, setting, seed and number of a row, which identify the evaluation and the sample."""
        return {"split": self.split, "setting": self.setting.name, "seed": self.seed, "number": number}


def sample_for_setting(task: Task, setting: EvalSetting, samples: Sequence[Sample], number: int) -> Sample:
    """Sample number `number` with the probe and prompt template of a setting; its environment is not reset yet."""
    sample = probe(setting.probe, samples, number) if setting.probe else samples[number]
    if setting.wording is None:
        return sample
    templates = task.of(sample).templates_for(sample)
    return replace(sample, prompt=templates[setting.wording % len(templates)])


def draw_answers(runtime: EvalRuntime, splits: Sequence[str], settings: Sequence[EvalSetting], file: RowFile, step: int,
                 progress: Progress, instead: Sequence[Sample] | None = None) -> None:
    """Generates and scores the answers that are missing in `file`, and appends them to the file. Every process must
    call this function, and handles its share of the samples.

    The samples are the first eval.samples of each split, or `instead` if given. Prompts that are too long, samples that
    a probe does not apply to, and (with data.quarantine) bad rows are left out. `step`, the training step of the model,
    selects the weights of the reward parts. Raises ConfigError for an empty split, TrainingError if scoring or
    environments fail too often (limits.score_errors, limits.environment_errors)."""
    evaluations = [_Evaluation(runtime=runtime, setting=setting, seed=seed, split=split, samples=samples, step=step)
                   for split in splits
                   for samples in [instead or first_samples(runtime.task, split, runtime.config.eval.samples)]
                   for setting in settings for seed in setting.seeds]
    total = sum(len(a.samples) * a.setting.answers for a in evaluations)
    done = 0
    for one in evaluations:
        n = one.setting.answers
        for left in _rounds(one, file):
            what = f"answering {one.split}" + (f", {one.setting.name}, seed {one.seed}" if len(evaluations) > 1 else "")
            progress(what, done, total)
            mine = left[comm.rank()] if comm.rank() < len(left) else ()
            groups, rows = comm.together(partial(_draw_chunk, one, mine))
            where = f"evaluation of {one.split} ({one.setting.name})"
            check_errors(groups, runtime.config.limits, where)
            shares = comm.gather(rows)
            comm.on_main(partial(file.add, [row for share in shares for row in share]))
            done += n * sum(map(len, left))
        done = n * len(one.samples) + sum(len(a.samples) * a.setting.answers
                                          for a in evaluations[:evaluations.index(one)])
    progress("answering", total, total)


def _rounds(one: _Evaluation, file: RowFile) -> Iterator[list[Sequence[int]]]:
    """Yields lists of chunks of sample numbers, one chunk per process, until `file` has every answer of the evaluation
    `one`.

    The chunks are fixed by sample number. So neither a restart nor the number of processes changes which answers are
    generated in the same batch."""
    size = max(1, min(_CHUNK, _TOGETHER // one.setting.answers))
    have = comm.on_main(lambda: file.answered(one.setting.answers))
    known = [(one.split, one.setting.name, one.seed, number) in have for number in range(len(one.samples))]
    missing = [number for number, there in enumerate(known) if not there]
    if one.runtime.remote:
        left: list[Sequence[int]] = [missing[i:i + size] for i in range(0, len(missing), size)]
    else:
        chunks = [range(i, min(i + size, len(known))) for i in range(0, len(known), size)]
        left = [chunk for chunk in chunks if not all(known[number] for number in chunk)]
    world = comm.world()
    for i in range(math.ceil(len(left) / world)):
        yield left[i * world:(i + 1) * world]


def _draw_chunk(one: _Evaluation, numbers: Sequence[int]) -> tuple[list[Group], list[Row]]:
    runtime, setting = one.runtime, one.setting
    wanted = {number: partial(one.sample, number) for number in numbers}
    prompts: list[tuple[int, Sample, Prompt]] = []
    rows: list[Row] = []
    runtime.prefetch.begin(wanted)
    for number, sample_of in wanted.items():
        try:
            prompts.append((number, *runtime.prefetch.take(number, sample_of)))
        except DataError as error:
            if not isinstance(error, (PromptTooLong, NotApplicable)) and not runtime.config.data.quarantine:
                raise
            sample = one.samples[number]
            rows.append({**one.place(number), "sample": sample.id, "task": sample.task, "left_out": str(error)})
    requests = [Request(prompt=prompt, n=setting.answers, sampling=setting.sampling(runtime.config),
                        key=one.key(number), sample=sample) for number, sample, prompt in prompts]
    completions = runtime.engine.generate(requests)
    values = (runtime.likelihoods(groups_without_variants(prompts, completions), one.split, one.step)
              if runtime.likelihoods else [None] * len(prompts))
    drawn_of = [[(i, c) for i, c in enumerate(answers) if not (runtime.remote and c.error)] for answers in completions]

    def scored(i: int) -> Group:
        number, sample, prompt = prompts[i]
        return make_group(runtime.task, sample, prompt, [c for _, c in drawn_of[i]],
                          group_id=f"{one.split}-{number:06d}", split=one.split, step=one.step, likely=values[i],
                          served=runtime.services)

    scored_groups = parallel_map(runtime.services.threads if runtime.services else 1, scored, range(len(prompts)))
    groups = [group for group, drawn in zip(scored_groups, drawn_of, strict=True) if drawn]
    for (number, _, prompt), answers, drawn, group in zip(prompts, completions, drawn_of, scored_groups, strict=True):
        base = {**one.place(number), **question_fields(runtime.task, group.sample, prompt, group.target)}
        rows += [{**base, "index": i, **answer_fields(runtime.task, group, c, rollout)}
                 for (i, c), rollout in zip(drawn, group.rollouts, strict=True)]
        rows += [{**base, "index": i, "unanswered": True, "error": c.error} for i, c in enumerate(answers)
                 if runtime.remote and c.error]
    return groups, rows


def question_fields(task: Task, sample: Sample, prompt: Prompt, target: Any) -> Row:
    """The fields of an answers.jsonl row that identify the question: its id, target and hashes."""
    media = [m.sha256 for m in prompt.media]
    content = content_hash(sample.row, target, media)
    return {"sample": sample.id, "task": task.of(sample).name if task.labels else "", "content": content,
            "prompt": prompt_hash(prompt.text, media), "cluster": cluster_hash(media, content), "target": target,
            "size": list(prompt.media[0].size) if prompt.media else None}


def answer_fields(task: Task, group: Group, completion: Completion, rollout: Rollout) -> Row:
    """The fields of an answers.jsonl row that hold the answer and its scores."""
    answer = answer_of(completion, group.prompt, rollout.policy_step)
    metrics, problem = sample_metrics(task, group.sample, answer, rollout.parts)
    tokens = len(completion.tokens)
    return {"answer": completion.text if answer.turns else answer.text, "parsed": rollout.parsed,
            "parts": dict(rollout.parts),
            "reward": rollout.reward, "correct": rollout.correct, "metrics": dict(metrics),
            "confidence": _confidence(answer, rollout.parsed, metrics),
            "turns": len(answer.turns) or None,
            "tokens": tokens if tokens or not completion.text else None, "truncated": completion.truncated,
            "finish_reason": completion.finish_reason, "error": rollout.error or problem}


def _confidence(answer: Answer, parsed: Any, metrics: Mapping[str, float]) -> float | None:
    stated = parsed.get("confidence") if isinstance(parsed, Mapping) else None
    confidence = metrics.get("confidence", stated)
    confidence = read_confidence(answer.text) if confidence is None else confidence
    return float(confidence) if isinstance(confidence, (int, float)) and 0 <= confidence <= 1 else None
