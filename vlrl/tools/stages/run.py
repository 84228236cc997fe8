"""Runs the stages of a config: supervised fine-tuning, RL, rounds of rejection sampling, merges of weights. Used by
`vlrl train` if the config has `stages`.

Each stage is a run in a subfolder of the run folder, named after the stage, and starts from the weights of the previous
stage. stages.json lists the finished stages. A killed run resumes inside its current stage, and ends with the same
weights as an uninterrupted run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from vlrl.config import differences, dump, stages_of, validate
from vlrl.config.schema import Config, StageEntry
from vlrl.distributed import comm
from vlrl.errors import ConfigError, RunError, VlrlError
from vlrl.models import loading
from vlrl.store import RunFolder, checkpoint, files
from vlrl.tools.hub.export import merged
from vlrl.tools.machine import dryrun, needs
from vlrl.tools.machine.dryrun import DryRun
from vlrl.tools.stages import rounds
from vlrl.tools.stages.extrapolate import extrapolate
from vlrl.tools.stages.stage_list import StageList, read_stages
from vlrl.training import loop, sft
from vlrl.training.build import make_accelerator
from vlrl.training.resume import refuse_other_settings
from vlrl.training.session import Session

Say = Callable[[str], None]


@dataclass(frozen=True)
class StagesResult:
    """How far the stages of a run got: whether all are finished, and the stage that ran last."""

    folder: Path
    finished: bool
    stage: str = ""
    model: str = ""  # the folder with the weights of the last finished stage


def train_stages(config: Config, say: Say = print) -> StagesResult:
    """Runs every unfinished stage, in order, and returns how far the stages got. Every process calls this function.
    `say` is called with lines for the user.

    Raises ConfigError before the first stage starts if the settings of any stage are wrong, and RunError if a finished
    stage was run with other settings."""
    make_accelerator(config)  # initialises the distributed processes
    stages = stages_of(config)
    with contextlib.ExitStack() as stack:
        comm.on_main(lambda: stack.enter_context(RunFolder(Path(config.run.dir)).lock(config.run.steal_lock)) and None,
                     "opening the run folder")
        known: StageList = comm.on_main(partial(_open_stages, config, stages), "checking the settings of all stages")
        model = config.model.name
        for one in needs.of_stages(config) if comm.is_main() else ():
            say(str(one))
        for stage, own in stages:
            own = _with_initial_model(stage, own, known, model)
            if not comm.on_main(partial(_is_finished, known, stage, own)):
                if comm.is_main():
                    say(f"stage {stage.name} ({stage.kind}) begins with {own.model.name}")
                if not _RUN[stage.kind](own, known, say):
                    return StagesResult(known.folder, False, stage.name, model)
                final = comm.on_main(partial(_final_model, stage, own), f"handing over the weights of {stage.name}")
                known = comm.on_main(partial(known.finished, stage.name, **_length(own), model=final))
            model = str(known.done[stage.name]["model"])
    return StagesResult(known.folder, True, stages[-1][0].name, model)


def _open_stages(config: Config, stages: Sequence[tuple[StageEntry, Config]]) -> StageList:
    """Opens or creates the run folder and returns its list of stages. Raises ConfigError if the settings of any stage
    are wrong, and RunError if the folder does not fit the setting `resume`."""
    folder = RunFolder(Path(config.run.dir))
    if config.resume == "never":
        files.move_to_backup(folder.path)
    known = read_stages(folder.path)
    if config.resume == "must" and known is None:
        raise RunError(f"resume=must, but {folder.path} contains no run with stages. Use resume=auto.")
    if known is None and (folder.path / "checkpoints").is_dir():
        raise RunError(f"{folder.path} contains a run without stages: choose another run.dir, or start over with "
                       "resume=never (the old run is kept in a folder next to the new run)")
    problems = [f"stage {stage.name}: {problem}" for (stage, own) in stages
                for problem in problems_of(config, stage, own)]
    if problems:
        raise ConfigError("\n".join(problems))
    names = {stage.name for stage, _ in stages}
    done = {name: result for name, result in (known.done if known else {}).items() if name in names}
    folder.create(dump(config), config.seed)
    return StageList(folder.path, [(stage.name, stage.kind) for stage, _ in stages], done).write()


def problems_of(config: Config, stage: StageEntry, stage_config: Config) -> list[str]:
    """Problems in the settings and data of `stage`, found before any stage has started. `stage_config` is the config of
    the stage, and `config` that of the whole run.

    Data rows that an earlier stage will write are not checked."""
    if stage.kind == "merge":
        return []
    try:
        if stage.kind == "rounds":
            rounds.check(stage_config)
        return dryrun.problems_of(_settings(stage, stage_config), rows=not _is_generated(config, stage_config))
    except VlrlError as error:
        return [str(error)]


def dry_run(config: Config, tell: Callable[[str], None]) -> list[tuple[StageEntry, DryRun | None, list[str]]]:
    """Checks every stage. Returns a tuple (stage, report of `vlrl train --dry-run`, problems) for each stage.

    The report is None if the settings have problems, for a merge, and for a stage whose data an earlier stage will
    write."""
    out: list[tuple[StageEntry, DryRun | None, list[str]]] = []
    for stage, own in stages_of(config):
        problems = problems_of(config, stage, own)
        if problems or stage.kind == "merge" or _is_generated(config, own):
            out.append((stage, None, problems))
            continue
        report = dryrun.check(_settings(stage, own), tell=lambda what, name=stage.name: tell(f"{name}: {what}"))
        out.append((stage, report, report.problems))
    return out


def _settings(stage: StageEntry, stage_config: Config) -> Config:
    """The config with which a stage runs: for kind `sft`, `stage_config` converted to supervised training."""
    return sft.supervised_config(stage_config) if stage.kind == "sft" else stage_config


def _is_generated(config: Config, stage_config: Config) -> bool:
    """Whether the data rows of a stage are written by an earlier stage of the run."""
    inside = Path(config.run.dir).absolute()
    files = (stage_config.data.train, stage_config.data.solutions)
    return any(name and Path(name).absolute().is_relative_to(inside) for name in files)


def _with_initial_model(stage: StageEntry, stage_config: Config, known: StageList, before: str) -> Config:
    """The config of a stage with model.name set to the stage's initial weights, as chosen by stage.begin. `known` lists
    the finished stages, and `before` is the model of the previous stage."""
    if stage.begin == "start":
        return stage_config
    name = before if stage.begin == "before" else str(known.done[stage.begin]["model"])
    return stage_config.model_copy(update={"model": stage_config.model.model_copy(update={"name": name})})


def _is_finished(known: StageList, stage: StageEntry, stage_config: Config) -> bool:
    """Whether a stage is finished, according to the list `known`. Raises RunError if the stage was run with other
    settings."""
    result = known.done.get(stage.name)
    if result is None:
        return False
    refuse_other_settings(RunFolder(Path(stage_config.run.dir)), _settings(stage, stage_config))
    name, wanted = ("steps", stage_config.steps) if stage_config.epochs is None else ("epochs", stage_config.epochs)
    return bool(float(result.get(name, 0)) >= wanted and Path(str(result.get("model"))).is_dir())


def _length(stage_config: Config) -> dict[str, float]:
    """The length of a finished stage: its steps, and its epochs if these are given."""
    if stage_config.epochs is None:
        return {"steps": stage_config.steps}
    done = RunFolder(Path(stage_config.run.dir)).last_heartbeat().get("steps", 0)
    return {"steps": done, "epochs": stage_config.epochs}


# --- the kinds --------------------------------------------------------------------------------------------------------


def _completed(session: Session) -> bool:
    return session.complete


def _rounds(stage_config: Config, known: StageList, say: Say) -> bool:
    comm.on_main(partial(_write_settings, stage_config))
    return rounds.train_rounds(stage_config, say, _initial_model(known))


def _merge(stage_config: Config, known: StageList, say: Say) -> bool:
    """Writes the merged model share * other + (1 - share) * before, where share is merge.share, `other` the model
    merge.other and `before` the model of the previous stage."""
    other = stage_config.merge.other
    if other in known.done:
        folder = Path(str(known.done[other]["model"]))
    else:
        folder = Path(loading.resolve(_initial_model(known))) if other == "start" else Path(other)

    def write() -> None:
        _write_settings(stage_config)
        out = Path(stage_config.run.dir) / "model"
        if not folder.is_dir():
            raise ConfigError(f"merge.other={other}: {str(folder)!r} is not a folder on this machine: name the folder "
                              "of a model")
        if not out.is_dir():
            extrapolate(folder, Path(loading.resolve(stage_config.model.name)), out, -stage_config.merge.share)

    comm.on_main(write, "merging weights")
    return True


def _initial_model(known: StageList) -> str:
    return str(yaml.safe_load(files.read_small(known.folder / "config.yaml"))["model"]["name"])


def _write_settings(stage_config: Config) -> None:
    """Writes the settings of a stage that has no training run of its own. Raises RunError if the stage was started with
    other settings."""
    folder = RunFolder(Path(stage_config.run.dir))
    if (folder.path / "config.yaml").exists():
        before = validate(yaml.safe_load(files.read_small(folder.path / "config.yaml")))
        if changed := differences(before, stage_config):
            raise RunError(f"{folder.path} contains a stage that was started with other settings:\n  "
                           + "\n  ".join(changed) + "\nRestore these settings, choose another run.dir, or start "
                           "over with resume=never (the old run is kept in a folder next to the new run).")
    folder.create(dump(stage_config), stage_config.seed)


_RUN: dict[str, Callable[[Config, StageList, Say], bool]] = {
    "sft": lambda own, known, say: _completed(sft.train(own)),
    "rl": lambda own, known, say: _completed(loop.train(own)), "rounds": _rounds, "merge": _merge}


def _final_model(stage: StageEntry, stage_config: Config) -> str:
    """The folder with the final weights of a stage, which the next stage starts from. If the stage trained an adapter,
    the adapter is merged into its base model first."""
    folder = Path(stage_config.run.dir)
    if stage.kind == "merge":
        return str(folder / "model")
    if stage.kind == "rounds":
        path = Path(rounds.last_model(stage_config))
    else:
        best = stage.hand_over == "best"
        weights = checkpoint.find(folder / "checkpoints" / "best" if best else folder).path
        assert weights
        path = weights
    return str(merged(path, folder))
