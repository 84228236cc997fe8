"""`vlrl train --dry-run`: does and reports everything that training with a config would do before the first step.

`check(config)` makes the task and its data, renders and scores one sample as training would, measures prompt lengths
and computes the size of a step. Only the processor and the model's config are read, not the weights, and nothing is
written. Problems are collected in `DryRun.problems`; the report still contains all that does not depend on them."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vlrl import curriculum
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.method import AlgorithmStub, methods_of
from vlrl.algo.named import bind
from vlrl.algo.objective import Objective
from vlrl.algo.tables import ADVANTAGES
from vlrl.checks import preflight
from vlrl.config.algo import SUPERVISED
from vlrl.config.registry import failure, prints_aside
from vlrl.config.schema import Config
from vlrl.curriculum import horizon
from vlrl.environments.host import Environments
from vlrl.errors import ConfigError, DataError, TaskError, VlrlError
from vlrl.models import families, loading, packing, saving
from vlrl.models.loading import skeleton
from vlrl.models.model_config import family_convention
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.rewards.text import completion_for
from vlrl.rollout.generate import make_group
from vlrl.store import RunFolder, checkpoint
from vlrl.task import Task, task_oracle, task_samples
from vlrl.task.scoring import AnswerScore
from vlrl.tools.machine import memory, needs
from vlrl.tools.play import episodes as played_episodes
from vlrl.tools.play.episode_lengths import PLAYED, EpisodeLength, ObservationStats, counted, measure
from vlrl.tools.play.preview import (
    UNKNOWN,
    MediaFacts,
    SamplePreview,
    convention_of,
    preview_without_model,
    scored_oracle,
)
from vlrl.training import epochs, inert
from vlrl.training.build import check_trackers
from vlrl.training.build_engine import check_engine
from vlrl.training.build_task import make_task, settle_coordinates
from vlrl.training.resume import refuse_other_settings
from vlrl.types import Completion, Prompt, Sample

SAMPLES = 32  # number of prompts that are encoded to measure lengths


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """The size of one split of the task's data, and the id of its first sample."""

    name: str
    samples: int
    first: str  # Id of the split's first sample


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """The smallest, mean and largest length, in tokens, of `samples` prompts of the training split. `limit` is the
    largest allowed length."""

    samples: int
    least: int
    mean: float
    most: int
    limit: int
    visual: int  # largest number of visual tokens in a prompt
    rejected: tuple[str, ...] = ()  # the reason for each rejected prompt


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The amount of work in one step on one process, if every answer has rollout.max_new_tokens tokens."""

    prompts: int
    answers: int
    optimizer_steps: int
    micro_batches: int  # number of forward and backward passes in one pass over the answers
    tokens: int  # number of packed tokens in all micro-batches
    largest: int  # number of packed tokens in the largest micro-batch


@dataclass(kw_only=True)
class DryRun:
    """The report of a dry run. A field is None or empty if a problem prevents its computation."""

    run: str
    task: str
    model: str
    splits: list[SplitInfo] = field(default_factory=list)
    sample: SamplePreview | None = None
    lengths: PromptLengths | None = None
    step: StepWork | None = None
    length: list[str] = field(default_factory=list)
    """The length of the run in words, if it is given in epochs."""
    observed: ObservationStats | None = None
    """Sizes of the observations in the few episodes that were played; None for a task without an environment."""
    episode: EpisodeLength | None = None  # size of the longest episode that the settings allow
    parameters: tuple[int, int] | None = None
    """(number of trainable parameters, number of all parameters), with adapters included."""
    learns: str = ""  # description of which parts of the model are trainable
    memory: Any = None
    engine: str = ""
    """Description of the engine, with the memory that it takes in addition to the field `memory`; "" if the training
    model generates the answers itself."""
    inert: list[str] = field(default_factory=list)  # settings that have no effect; see vlrl.training.inert
    needs: list[str] = field(default_factory=list)
    """Requirements of the presets that the settings do not meet; see vlrl.tools.machine.needs."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """A context manager that catches a VlrlError raised in its block and adds the message to `problems`, once."""
        try:
            yield
        except VlrlError as error:
            if (message := str(error)) not in self.problems:  # both splits may be parts of one file
                self.problems.append(message)


@prints_aside()
def check(config: Config, samples: int = SAMPLES, tell: Callable[[str], None] = lambda what: None) -> DryRun:
    """Performs the dry run of a config and returns the report. Measures the lengths of `samples` training prompts.

    `tell(what)` is called before each part of the dry run, with a description of this part. Raises ConfigError only if
    the task cannot be made."""
    task = make_task(config)
    with played_episodes.environments(config, task) as host:  # forks, so before the model is built
        return _checked(config, task, host, samples, tell)


def problems_of(config: Config, rows: bool = True) -> list[str]:
    """Problems in a run's settings that can be found without the model and without rendering a prompt. With `rows`,
    also problems in the run's data."""
    task = make_task(config)
    report = DryRun(run="", task=config.task_name, model=config.model.name)
    _check_functions(config, report)
    if rows:
        with report.noting():
            epochs.length_of(config, task)
        _splits(config, task, report)
    return report.problems


def _check_functions(config: Config, report: DryRun) -> bool:
    """Adds a problem to the report for each function, tracker or engine named in the settings that cannot be used.
    Returns True if the report has no problem."""
    for named in (lambda: bind("algo.advantage", config.algo.advantage, ADVANTAGES),
                  lambda: Objective.of(config.algo), lambda: check_trackers(config), lambda: check_engine(config)):
        with report.noting():
            named()
    if not report.problems:
        with report.noting():
            Algorithm(config)
    return not report.problems


def _checked(config: Config, task: Task, host: Environments | None, samples: int,
             tell: Callable[[str], None]) -> DryRun:
    report = DryRun(run="", task=config.task_name, model=config.model.name, engine=_engine(config))
    with report.noting():
        config = epochs.with_length(config, epochs.length_of(config, task))
        report.length = list(epochs.length_lines(config))
    if _check_functions(config, report):
        with report.noting():
            report.inert = [str(one) for one in inert.find(config, task)]
    with report.noting():
        report.run = _run_state(config)
    if config.algo.loss.name in SUPERVISED:  # one answer per prompt
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 1})})
    tell("reading the data")
    splits = _splits(config, task, report)
    tell("reading the model's config and processor")
    encode, skeleton = None, None
    with report.noting():
        skeleton, encode = open_model(config, task, report)
        saving.try_writing(None, partial(saving.write_model, skeleton.config, encode.processor))
    train = splits.get("train", ())
    with report.noting():
        report.needs = [str(one) for one in needs.find(config, task, train[0] if train else None)]
    if train:
        tell("checking the first samples")
        with report.noting():
            report.warnings += preflight.check(task, train, config)
            report.warnings += preflight.check_opened(task, train, config, encode.opened if encode else "")
        tell("encoding prompts")
        for i in range(len(task.members)):  # a mixture begins with a sample of each task
            with report.noting(), _task_code(task.of(train[i])):
                shown = show(config, task.of(train[i]), _opened(config, host, train[i], i), encode)
                report.sample = report.sample or shown
        if encode:
            if host:
                tell("playing episodes")
                with report.noting(), _task_code(task):
                    report.observed = measure(config, task, host, counted(encode))
                    report.episode = report.observed.length(config.episode, config.rollout.max_new_tokens)
                samples = min(samples, PLAYED)
            with report.noting(), _task_code(task):
                spread = np.linspace(0, len(train) - 1, min(samples, len(train))).astype(int).tolist()
                _measure(config, task, [_opened(config, host, train[i], i) for i in dict.fromkeys(spread)], encode,
                         report)
    if skeleton is not None and report.lengths:
        tell("estimating memory")
        report.memory = memory.estimate(config, skeleton.config, report.lengths.most, report.lengths.visual,
                                        episode=report.episode)
        if config.engine.name != "hf":  # vLLM has a fixed share of memory, or another machine
            report.memory = replace(report.memory, cache=0, prefill=0, token=0)
    return report


# --- settings and data ------------------------------------------------------------------------------------------------


def _run_state(config: Config) -> str:
    """What `vlrl train` would do in the run folder, in words: start, start over, or resume."""
    folder = Path(config.run.dir)
    _check_writable(folder)
    newest = checkpoint.latest(folder / "checkpoints").path
    if config.resume == "must" and newest is None:
        raise ConfigError(f"resume=must, but {folder / 'checkpoints'} has no complete checkpoint. Use resume=auto.")
    if config.resume == "never" and folder.is_dir() and any(folder.iterdir()):
        return f"{folder}: starts over; the folder of the old run is renamed"
    if newest is None:
        return f"{folder}: a new run"
    refuse_other_settings(RunFolder(folder), config)
    return f"{folder}: resumes from {newest.name}"


def _engine(config: Config) -> str:
    settings = config.engine
    if settings.name == "vllm":
        return (f"vLLM in the training process: takes engine.memory={settings.memory:g} of a GPU (or of main "
                "memory, on a CPU) in addition to the memory above"
                f"{', but not during the update' if settings.sleep else ''}")
    if settings.name == "vllm_server":
        servers = ", ".join(settings.servers) or "those of `vlrl serve` on this machine"
        return f"vLLM servers: {servers}; not contacted by a dry run"
    return ""


def _check_writable(folder: Path) -> None:
    there = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not os.path.isdir(there):
        raise ConfigError(f"run.dir={str(folder)!r}: {there} is not a folder. Choose another run.dir.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={str(folder)!r}: {there} is not writable. Choose another run.dir, or make this "
                          "folder writable.")


def _splits(config: Config, task: Task, report: DryRun) -> dict[str, Sequence[Sample]]:
    """Returns split name -> samples, for the training split and the evaluated splits. Adds empty splits, and settings
    that do not fit the task or its data, to the problems in `report`."""
    out: dict[str, Sequence[Sample]] = {}
    for name in dict.fromkeys(("train", *(config.eval.splits if config.eval.samples else ()))):
        with report.noting():
            samples = task_samples(task, name)
            if len(samples) == 0:
                raise ConfigError(f"task '{task.name}' has no samples in split '{name}'")
            out[name] = samples
            report.splits.append(SplitInfo(name=name, samples=len(samples), first=samples[0].id))
    with report.noting():
        curriculum.check(config.curriculum, task)
        horizon.check(config.episode, task)
    if "train" in out:
        with report.noting():
            curriculum.make(config.curriculum, curriculum.Prompts.of(
                out["train"], config.seed, config.data.difficulty, config.rollout, task.knobs, task.stage_fields),
                            config.shares)
            for method in methods_of(AlgorithmStub(config)):
                method.check(task, out["train"], config.algo.loss.name not in SUPERVISED)
    return out


@contextlib.contextmanager
def _task_code(task: Task) -> Iterator[None]:
    """A context manager that turns any error raised by a task's own code into a TaskError that names file and line."""
    try:
        yield
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': {failure(error)}") from error


# --- with the model's config and processor ----------------------------------------------------------------------------


def open_model(config: Config, task: Task, report: DryRun | None = None) -> tuple[Any, Encoder]:
    """Returns (the model without weights, its encoder). Also sets the coordinates of `task` and, in `report`, the
    numbers of parameters."""
    model, family = skeleton(config.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if report:
        report.parameters = trained, sum(p.numel() for p in model.parameters())
        learns = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        report.learns = families.parameters_by_part(learns, family)
        report.warnings += filter(None, [families.unused_layers(learns, family, base.config)])
        if config.model.lora.rank:
            report.warnings += filter(None, [loading.ADAPTERS["several_parts"]([n for n, _ in learns], family,
                                                                               config.model.lora.target)])
    settle_coordinates(task, config, family.coordinates)
    processor = loading.load_processor(config.model, family)
    return base, Encoder(processor, family, lambda ids, types, mm: family.positions(base, ids, types, mm), config)


def preview(config: Config, task: Task, sample: Sample) -> SamplePreview:
    """Returns a preview of a sample as the config's model sees it. If the model is not on this machine, the preview
    shows the sample without the model's tokens and image sizes. Downloads nothing."""
    task = copy.copy(task)
    try:
        family_convention(config.model.name)
        return show(config, task, sample, open_model(config, task)[1])
    except (ConfigError, OSError, ImportError):
        return replace(preview_without_model(config.limits, task, sample), coordinates=UNKNOWN)


def show(config: Config, task: Task, sample: Sample, encode: Encoder | None) -> SamplePreview:
    """Returns a preview of one sample as the model sees it, with the perfect answer and its reward. `encode` is the
    model's encoder. If `encode` is None, the preview is made without the model."""
    sample = replace(sample, prompt=task.templates_for(sample)[0])
    if encode is None:
        return preview_without_model(config.limits, task, sample)
    prompt = encode(task, sample)
    group = make_group(task, sample, prompt, [], group_id="0", split="train", step=0)
    text = task_oracle(task, group.sample)
    oracle = None
    if text is not None:
        text = completion_for(text, prompt.opened)
        tokens = encode.answer_ids(text)
        given = Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32),
                           loss_mask=np.ones(len(tokens), bool), text=text, finish_reason="stop")
        (rollout,) = make_group(task, group.sample, prompt, [given], group_id="0", split="train", step=0).rollouts
        scored = AnswerScore(rollout.parts, rollout.reward, rollout.parsed, rollout.error)
        oracle = scored_oracle(task, text, len(tokens), scored, prompt.opened)
    sizes, tokens = dict(enumerate(prompt.processed_sizes)), dict(enumerate(prompt.visual_tokens))
    described = [MediaFacts(kind=m.kind, original=m.size, frames=len(m.frames), processed=sizes.get(i),
                            tokens=tokens.get(i))
                 for i, m in enumerate(prompt.media)]
    return SamplePreview(id=sample.id, text=prompt.text, tokens=len(prompt), media=tuple(described),
                 coordinates=convention_of(task, sample), target=group.target, oracle=oracle)


def _opened(config: Config, host: Environments | None, sample: Sample, n: int) -> Sample:
    shown = played_episodes.after_reset(config, host, sample, n) if host else sample
    if shown.reset_error:
        raise DataError(f"sample '{sample.id}': its environment failed: {shown.reset_error}")
    return shown


def _measure(config: Config, task: Task, samples: Iterable[Sample], encode: Encoder, report: DryRun) -> None:
    """Encodes the prompts. Adds to `report` their lengths, and the amount of work in a step with such prompts."""
    prompts, rejected = [], []
    for sample in samples:
        try:
            prompts.append(encode(task, replace(sample, prompt=task.template(sample, 0))))
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not config.data.quarantine:
                raise
            rejected.append(str(error))
    if not prompts:
        raise DataError(f"none of {len(rejected)} prompts can be used. The first problem: {rejected[0]}")
    lengths = [len(p) for p in prompts]
    report.lengths = PromptLengths(samples=len(prompts), least=min(lengths), mean=float(np.mean(lengths)),
                                   most=max(lengths),
                             limit=config.limits.prompt_tokens, rejected=tuple(rejected),
                             visual=max(sum(p.visual_tokens) for p in prompts))
    report.step = _step(config, prompts, report.episode.tokens if report.episode else config.rollout.max_new_tokens)


def _step(config: Config, prompts: Sequence[Prompt], tokens: int) -> StepWork:
    """The amount of work in a step in which every answer has `tokens` tokens. The prompts are repeated until there are
    rollout.prompts_per_step of them, and then packed into micro-batches as in training."""
    rollout, limit = config.rollout, config.train.tokens_per_batch
    drawn = [replace(p) for p in islice(cycle(prompts), rollout.prompts_per_step)]
    answers = [np.full(tokens, i) for i in range(rollout.group_size)]  # without a common beginning
    edges = [round(i * len(drawn) / rollout.minibatches) for i in range(rollout.minibatches + 1)]
    sizes: list[int] = []
    for start, end in pairwise(edges):
        each = [p for p in drawn[start:end] for _ in answers]
        sizes += packing.sizes(packing.pieces_of(each, answers * (end - start), limit), limit, config.train.packing)
    return StepWork(prompts=len(drawn), answers=len(drawn) * rollout.group_size, micro_batches=len(sizes),
                optimizer_steps=rollout.updates * rollout.minibatches, tokens=sum(sizes), largest=max(sizes))
