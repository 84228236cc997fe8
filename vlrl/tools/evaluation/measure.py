"""Evaluates a model on a config's task outside of a run, without locking or writing to a run folder: `vlrl eval`.

    for record, groups in measure(config, choose_model(config)):
        print(record["split"], record["reward/mean"])

Evaluations during a run use the same code, so a checkpoint gets the same metrics as in the run's eval.jsonl."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from vlrl.checks import preflight
from vlrl.config.engine import PLACES
from vlrl.config.schema import Config, LoraSettings
from vlrl.curriculum import horizon
from vlrl.distributed import comm
from vlrl.environments.episodes import EpisodeEngine
from vlrl.evaluation.evaluate import evaluate
from vlrl.models import loading, policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import Clock
from vlrl.progress import Progress, no_progress
from vlrl.rollout.partial import refuse_episodes
from vlrl.rollout.prefetch import Prefetcher
from vlrl.services.service_set import serving
from vlrl.store import checkpoint, plain
from vlrl.tools.evaluation.answers import EvalRuntime
from vlrl.training.build import make_accelerator, make_environments, make_likelihoods, seed_everything
from vlrl.training.build_engine import check_engine, make_engine
from vlrl.training.build_task import make_task, settle_coordinates
from vlrl.types import Group

_NOT_DATA = {"difficulty", "clip_cache_mib", "workers"}  # fields of the settings `data.*` that cannot change an answer


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model to evaluate: its name, the config with which it is loaded, and its checkpoint and training step."""

    name: str
    config: Config
    checkpoint: Path | None = None
    """The folder whose weights replace the weights of `config.model.name`; None to keep the weights of model.name."""
    step: int = 0  # number of training steps that the model has completed
    warnings: tuple[str, ...] = ()


def choose_model(config: Config, model: str | None = None, folder: Path | None = None) -> ModelChoice:
    """Returns the model to evaluate: the model `model` (Hub name or folder), or the checkpoint in `folder` (for a run
    folder, its newest checkpoint).

    If neither is given, the newest checkpoint of `run.dir` is used, or model.name if there is no checkpoint."""
    if model is not None:
        model = checkpoint.model_folder(model)
        return ModelChoice(name=model, config=_with_model(config, model))
    if folder is not None:
        selected = checkpoint.find(folder)
    else:
        selected = checkpoint.latest(Path(config.run.dir) / "checkpoints")
        if selected.path is None:
            return ModelChoice(name=config.model.name, config=_with_model(config, config.model.name),
                          warnings=selected.warnings)
    path = selected.path
    assert path
    step = selected.step if (path / checkpoint.MANIFEST).exists() else 0
    base = loading.adapter_base(str(path))
    full = config.model.lora.rank == 0
    if base == (None if full else config.model.name):  # as the run itself would load it
        return ModelChoice(name=str(path), config=config, checkpoint=path, step=step, warnings=selected.warnings)
    return ModelChoice(name=str(path), config=_with_model(config, str(path)), step=step, warnings=selected.warnings)


def model_facts(config: Config, chosen: ModelChoice) -> dict[str, Any]:
    """The settings that determine which weights generate the answers and how the model is loaded, as JSON."""
    engine = {} if config.engine.name == "hf" else {"engine": config.engine.model_dump(mode="json", exclude={*PLACES})}
    return {**config.model.model_dump(mode="json"), **engine, "name": chosen.config.model.name,
            "checkpoint": str(chosen.checkpoint or "") or None, "step": chosen.step}


def task_facts(config: Config, rollout: Sequence[str]) -> dict[str, Any]:
    """The settings that questions and scores depend on, as JSON. Of the section `rollout`, only the settings listed in
    the argument `rollout` are included."""
    dumped = config.model_dump(mode="json")
    return plain({"seed": config.seed, "task": dumped["task"], "tasks": dumped["tasks"], "episode": dumped["episode"],
                  "data": {name: value for name, value in dumped["data"].items() if name not in _NOT_DATA},
                  "rollout": {name: dumped["rollout"][name] for name in rollout},
                  "curriculum": {name: dumped["curriculum"][name] for name in ("part", "pass_at")}})


def _with_model(config: Config, name: str) -> Config:
    """The config with which the model `name` is loaded and evaluated: an adapter is merged into its base model, and the
    config's own LoRA and trainable parts are switched off."""
    changes: dict[str, Any] = {"name": name}
    if config.model.lora.rank:
        changes |= {"lora": LoraSettings(), "train": ()}
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def measure(config: Config, chosen: ModelChoice, progress: Progress = no_progress
            ) -> Iterator[tuple[dict[str, Any], list[Group]]]:
    """Evaluates the model on each of `eval.splits`.

    Yields for each split (the line for eval.jsonl, the groups that this process has evaluated). Each group has one
    answer; see evaluate.evaluate."""
    with open_runtime(chosen.config.model_copy(update={"eval": config.eval}), chosen, evaluates=True) as r:
        for split in r.config.eval.splits:
            yield evaluate(r.task, r.prefetch, r.engine, r.config, split, chosen.step, progress, r.likelihoods,
                           services=r.services)


def _scratch(config: Config) -> Path | None:
    """The folder in which an engine may store files; None for the system's temporary folder.

    It is never the run folder, because the run may be in progress. vLLM servers read weights only from engine.scratch
    and the parent folder of the run folder."""
    if config.engine.scratch:
        return Path(config.engine.scratch)
    if config.engine.name != "vllm_server":
        return None
    around = Path(config.run.dir).absolute().parent
    around.mkdir(parents=True, exist_ok=True)
    return around


@contextmanager
def open_runtime(config: Config, chosen: ModelChoice, evaluates: bool = False) -> Iterator[EvalRuntime]:
    """Context manager that loads the chosen model with the settings `config`, builds the config's task, and yields both
    in an EvalRuntime. With `evaluates`, the rows of eval.splits are checked first."""
    settings = config.model_copy(update={"log": config.log.model_copy(update={"trackers": ()})})
    check_engine(settings)
    accelerator = make_accelerator(settings)
    transformers.logging.disable_progress_bar()
    seed_everything(settings.seed)
    task = make_task(settings)
    horizon.check(settings.episode, task)
    refuse_episodes(settings, task)
    for warning in comm.on_main(lambda: preflight.check_splits(task, settings), "checking rows") if evaluates else ():
        if comm.is_main():
            print(f"warning: {warning}", file=sys.stderr)
    environments = make_environments(settings, task, lambda: task)
    with contextlib.ExitStack() as stack:
        if environments:
            stack.enter_context(contextlib.closing(environments))
        model = policy.load(settings, accelerator, chosen.checkpoint)
        settle_coordinates(task, settings, model.family.coordinates)
        if environments:
            environments.set_convention(model.family.coordinates)
        encode = Encoder(model.processor, model.family, model.positions, settings)
        likelihoods = make_likelihoods(settings, task, model, encode)
        folder = stack.enter_context(TemporaryDirectory(prefix="vlrl-engine-", dir=_scratch(settings)))
        engine = stack.enter_context(contextlib.closing(make_engine(settings, model, Path(folder) / "files")))
        if environments:
            engine = EpisodeEngine(engine, encode, environments, settings, Clock())
        engine.sync(model, chosen.step)
        prefetch = stack.enter_context(Prefetcher(encode, task, settings.data.workers))
        yield EvalRuntime(config=settings, task=task, prefetch=prefetch, engine=engine, likelihoods=likelihoods,
                    services=stack.enter_context(serving(settings, task)))
