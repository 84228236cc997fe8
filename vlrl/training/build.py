"""Builds the objects of a run from its config: those selected by name, and those read from disk."""

import contextlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from PIL import Image

from vlrl import curriculum
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.method import Run
from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.curriculum import horizon
from vlrl.distributed import comm
from vlrl.distributed.position import GRACE
from vlrl.engine.base import Engine
from vlrl.errors import ConfigError
from vlrl.models import policy, shards
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.models.reference import Reference
from vlrl.monitoring.metrics import Clock
from vlrl.progress import Progress, no_progress
from vlrl.rollout import partial
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource, Measure
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.scoring import score_all
from vlrl.task.services import LOGPROBS, SERVICES, drop_unserved_parts
from vlrl.task.subprocess_scorer import SubprocessScorer
from vlrl.training.advantages import Credit
from vlrl.training.build_engine import check_engine, engine_folder, make_engine
from vlrl.training.build_task import make_task, settle_coordinates
from vlrl.training.start import Start, training_samples
from vlrl.training.update import make_optimizer
from vlrl.types import Media, Sample

OFFERED = LOGPROBS
"""Names of the services that every run has; settings in `services.*` add more."""


@dataclass
class Parts:
    """The objects of a run that the training loop works with."""

    config: Config
    task: Task
    policy: Policy
    encode: Encoder
    prefetch: Prefetcher
    engine: Engine
    source: GroupSource
    credit: Credit
    optimizer: torch.optim.Optimizer
    algorithm: Algorithm
    clock: Clock
    scorer: SubprocessScorer | None = None
    warnings: Sequence[str] = ()
    """Problems of the first samples that do not stop a run; on the main process only."""


def make_accelerator(config: Config) -> Accelerator:
    """Returns accelerate's Accelerator, with device and trackers. Starts the process group if torchrun or accelerate
    launched the process. NCCL kills its process without a message to the other processes, so the timeout of NCCL is
    longer than that of the rank monitor."""
    check_trackers(config)
    check_launcher(os.environ)
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    folder, limit = config.run.dir, config.limits.collective_s
    timeout = timedelta(seconds=limit if on_cpu else limit + 2 * GRACE)
    backend = shards.backend(config, "cuda" if torch.cuda.is_available() else "cpu")
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", log_with=list(config.log.trackers) or None,
                              kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timeout)],
                              project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder))
    comm.watch(limit)
    return accelerator


def check_trackers(config: Config) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    for name in config.log.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.trackers={name!r}: the package {name} is not installed. Run: pip install {name}")


def check_launcher(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if WORLD_SIZE is greater than 1 but other environment variables of a launcher are missing."""
    size = environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if size not in ("", "1") and missing:
        raise ConfigError(f"WORLD_SIZE={size} in the environment says that there are several processes, but "
                          f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Start the "
                          "processes with torchrun or accelerate launch, which set all of these variables, or unset "
                          "WORLD_SIZE")


def assemble(config: Config, accelerator: Accelerator, checkpoint: Path | None = None,
             make_source: type[GroupSource] = GroupSource, algorithm: Algorithm | None = None,
             progress: Progress = no_progress, start: Start | None = None) -> Parts:
    """Builds all objects of a run. `checkpoint` is the folder whose weights replace those of model.name, or None.
    `make_source` makes the GroupSource. If `algorithm` is None, it is made from the config. `progress` is called to
    report slow work within a step. `start` has the task and samples if they have been checked already."""
    if config.asynchronous.max_staleness and make_source is GroupSource:
        make_source = _AHEAD["source"]
    generates, algorithm = make_source.generates, _algorithm(config, algorithm, make_source)
    if not comm.is_main():
        transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    seed_everything(config.seed)
    data = _read(config, algorithm, generates, start)
    with contextlib.ExitStack() as opened:
        scorer, environments, services = _make_helpers(config, data, generates, opened)
        warnings = _warnings(config, data, generates, services, checkpoint, start)
        model = policy.load(config, accelerator, checkpoint)
        settle_coordinates(data.task, config, model.family.coordinates)
        for process in filter(None, (scorer, environments)):
            process.set_convention(model.family.coordinates)
        clock, encode = Clock(), Encoder(model.processor, model.family, model.positions, config)
        if generates:
            warnings += comm.on_main(lambda: _CHECKS["opened"](data.task, data.samples, config, encode.opened)) or ()
        likelihoods = make_likelihoods(config, data.task, model, encode) if generates else None
        _keep_reference(config, model, algorithm, likelihoods)
        task = data.served()
        prefetch = Prefetcher(encode, task, config.data.workers)
        engine = _engine(config, model, encode, environments, make_source.overlaps_update, clock, opened)
        generator = RolloutGenerator(config, task, engine, clock, algorithm, scorer or score_all, likelihoods, services,
                                     algorithm.methods if generates else ())
        for method in generator.methods:
            method.start(Run(task, model, encode, data.samples, engine, generator.score, services))
        credit = Credit(algorithm, config, model, task)
        source = make_source(generator, encode, data.sampler, data.samples, prefetch, data.prompts,
                             _measures(data.sampler, model, config, task, prefetch), progress, credit.has_signal)
        parts = Parts(config, task, model, encode, prefetch, engine, source, credit, optimizer_of(model, config),
                      algorithm, clock, scorer, warnings)
        opened.pop_all()  # the caller closes them from now on
    return parts


@dataclass(frozen=True, eq=False)
class _RunData:
    task: Task
    samples: Sequence[Sample]
    offered: Sequence[str]
    """Names of the services that the task may call."""
    prompts: curriculum.Prompts
    sampler: Any
    """Sampler of the prompts, on the main process only."""

    def served(self) -> Task:
        """The task without the reward parts that have weight 0 and need a missing service. Raises ConfigError if a
        reward part with another weight needs a missing service."""
        return drop_unserved_parts(self.task, self.offered, self.samples)


def _algorithm(config: Config, algorithm: Algorithm | None, make_source: type[GroupSource]) -> Algorithm:
    """Returns the run's Algorithm: the argument, or else one made from the config. Raises ConfigError if the settings
    contradict each other or a package is missing."""
    check_engine(config)
    shards.check_installed(config)
    algorithm = algorithm or Algorithm(config)
    if algorithm.scores_pairs and make_source.generates:
        raise ConfigError(f"algo.loss={config.algo.loss.name} trains on pairs of answers from the data: start the "
                          "run with vlrl sft, or use a stage of kind sft")
    return algorithm


def _read(config: Config, algorithm: Algorithm, generates: bool, start: Start | None) -> _RunData:
    """Returns the task, its samples and the sampler of prompts. Raises ConfigError if there are no training samples, or
    if the config cannot train on them."""
    task = start.task if start else make_task(config)
    samples = start.samples if start else training_samples(task, config)
    partial.check(config, task, algorithm.requires, generates)
    offered = (*OFFERED, *config.services.given) if generates else [*SERVICES]
    drop_unserved_parts(task, offered, samples)  # raises before anything is loaded
    curriculum.check(config.curriculum, task)
    prompts = curriculum.Prompts.of(samples, config.seed, config.data.difficulty, config.rollout, task.knobs,
                                    task.stage_fields)
    prompts.buffer = config.data.shuffle_buffer if config.data.stream else None
    sampler = comm.on_main_alone(lambda: curriculum.make(config.curriculum, prompts, config.shares),
                                 "making the sampler")
    if config.asynchronous.max_staleness:
        comm.on_main(lambda: _AHEAD["check"](config, sampler))
    horizon.check(config.episode, task)
    partial.refuse_episodes(config, task)
    for method in algorithm.methods:
        method.check(task, samples, generates)
    return _RunData(task, samples, offered, prompts, sampler)


def _make_helpers(config: Config, data: _RunData, generates: bool, opened: contextlib.ExitStack
                  ) -> tuple[Any, Any, Any]:
    makers = ((make_scorer, generates), (make_environments, True), (make_services, generates))
    made = []
    for make, wanted in makers:
        made.append(make(config, data.task, data.served) if wanted else None)
        if made[-1]:
            opened.callback(made[-1].close)
    return made[0], made[1], made[2]


def _warnings(config: Config, data: _RunData, generates: bool, services: Any, checkpoint: Path | None,
              start: Start | None) -> list[str]:
    resumes = checkpoint is not None
    found = start.warnings if start and start.resumes == resumes else comm.on_main(
        lambda: _CHECKS["start"](data.served(), data.samples, config, scored=generates, goes_on=resumes),
        "checking data and task")
    return [*(found or ()), *((comm.on_main(services.warnings) or ()) if services else ())]


def _keep_reference(config: Config, model: Policy, algorithm: Algorithm, likelihoods: Any) -> None:
    """Copies the policy as the reference policy if the objective needs a reference, unless the service `likelihoods`
    has already made the copy. If algo.reference moves the reference, makes the copy updatable."""
    reads = likelihoods is not None and "reference_logprobs" in likelihoods.services
    if algorithm.needs_reference and not reads:
        model.keep_reference(config.model.name)
    if algorithm.moves_reference and (algorithm.needs_reference or reads):
        model.start_moving_reference()


def _engine(config: Config, model: Policy, encode: Encoder, environments: Any, apart: bool, clock: Clock,
            opened: contextlib.ExitStack) -> Engine:
    copies = apart and config.engine.name == "hf"  # copies the whole model, so before sharding
    if not copies:
        shard(model, encode, config)
    engine = make_engine(config, model, engine_folder(config), apart=apart, episodes=environments is not None)
    if environments:
        engine = _EPISODES["engine"](engine, encode, environments, config, Clock() if apart else clock)
    opened.callback(engine.close)
    if copies:
        shard(model, encode, config)
    return engine


_CHECKS = Table({"start": "vlrl.checks.preflight:check", "opened": "vlrl.checks.preflight:check_opened"})
_AHEAD = Table({
    "source": "vlrl.methods.asynchronous.source:AsyncGroupSource",
    "check": "vlrl.methods.asynchronous.source:check",
})
_SERVICES = Table({
    "logprobs": "vlrl.services.likelihoods:Likelihoods",
    "provided": "vlrl.services.service_set:provide",
})
_EPISODES = Table({
    "host": "vlrl.environments.host:Environments",
    "engine": "vlrl.environments.episodes:EpisodeEngine",
})
"""Classes for tasks with environments. host: runs environments in separate processes. engine: generates the actions of
episodes."""
_MEASURES = Table({"angle": "vlrl.methods.gain_rl.angle:Angles"})
"""Name of a measurement that a sampler of prompts may need -> class (policy, config, task, prefetch) whose instances
measure prompts with the policy."""


def _measures(sampler: curriculum.Sampler | None, *given: Any) -> dict[str, Measure]:
    """Returns the measurement that the sampler of prompts needs as {name: function}; {} if it needs none. `given`:
    arguments for the class in _MEASURES. Called on every rank, although only the main process has the sampler."""
    name = comm.broadcast(sampler.measures if isinstance(sampler, curriculum.MeasuringSampler) else "")
    return {name: _MEASURES[name](*given)} if name else {}


def make_scorer(config: Config, task: Task, ready: Callable[[], Task]) -> SubprocessScorer | None:
    """The scorer that runs the task's code in a separate process. None if limits.score_s is not set, or if the system
    is not Linux. `ready` returns the task with its services."""
    if not config.limits.score_s or sys.platform != "linux":
        return None
    return SubprocessScorer(_task_maker(config, task, ready), config.limits.score_s)


def make_environments(config: Config, task: Task, ready: Callable[[], Task]) -> Any:
    """The host that runs the task's environments in separate processes; None if the task has no environments. `ready`
    returns the task with its services."""
    return _EPISODES["host"](_task_maker(config, task, ready), config.environment) if has_environment(task) else None


def make_services(config: Config, task: Task, ready: Callable[[], Task]) -> Any:
    """The services that are configured under `services.*` and needed by the task; None if there are no such services.
    `ready` is not used."""
    return _SERVICES["provided"](config, task) if {*config.services.given} & {*task.needs} else None


def _task_maker(config: Config, task: Task, ready: Callable[[], Task]) -> Callable[[str], Task]:
    def make(convention: str) -> Task:
        settle_coordinates(task, config, convention)
        return ready()

    return make


def shard(model: Policy, encode: Encoder, config: Config) -> None:
    """Shards the policy with FSDP2 if train.sharding=fsdp2 and there are several processes. With every kind of
    sharding, also prepares the prompt of idle micro-batches (see _Idle)."""
    if shards.is_sharded(config):
        model.idle = encode(_Idle(), _Idle.sample)
    if shards.is_sharded(config, "fsdp2"):  # DeepSpeed shards the model in optimizer_of
        shards.KINDS["fsdp2"](model, model.idle, config.train)


def optimizer_of(model: Policy, config: Config) -> torch.optim.Optimizer:
    """Makes the optimizer of a policy. With ZeRO, this also shards the policy."""
    optimizer = make_optimizer(model, config)
    return shards.KINDS["zero"](model, optimizer, config) if shards.is_sharded(config, "zero2", "zero3") else optimizer


class _Idle(Task):
    """Task with a single sample, whose prompt fills idle micro-batches: a rank runs these if other ranks have more
    micro-batches; see packing.with_idle."""

    prompt = "."
    sample = Sample(id="idle", row={}, media=(Media(source=Image.new("RGB", (64, 64))),))


def make_likelihoods(config: Config, task: Task, model: Policy, encode: Encoder) -> Any:
    """The service that gives a task the log-probabilities of answers; None if the task does not need it. Copies the
    policy as the reference policy if the task uses the log-probabilities of the reference."""
    if not {*LOGPROBS} & {*task.needs}:
        return None
    likelihoods = _SERVICES["logprobs"](Reference(model, config), encode, task)
    if "reference_logprobs" in likelihoods.services:
        model.keep_reference(config.model.name)
    return likelihoods


def seed_everything(seed: int) -> None:
    """Seeds the global random generators. Anything that a resumed run must repeat does not use these, but separate
    generators seeded by name and step."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
