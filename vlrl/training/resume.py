"""Finds the checkpoint from which a run resumes, or the reason why there is none, and the files that are missing in the
run folder.

A lost checkpoint is treated differently from a checkpoint that never existed: a folder is started over only if its
heartbeat says that no step was saved. Used on the main process."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from vlrl import config
from vlrl.config.schema import Config
from vlrl.errors import RunError
from vlrl.store import RunFolder, checkpoint, files
from vlrl.store.checkpoint import NewestCheckpoint

_WAY = "choose another run.dir, or start over with resume=never (the old run is moved to a folder next to run.dir)."


def find_checkpoint(folder: RunFolder, settings: Config) -> NewestCheckpoint:
    """Finds the checkpoint to resume from, with warnings about the checkpoint and the folder. Changes no file. Raises
    RunError if the folder belongs to a run with other settings, or if completed steps have no checkpoint."""
    latest = checkpoint.latest(folder.checkpoints, full=True)
    if latest.path is not None:
        before = refuse_other_settings(folder, settings)
        refuse_other_run(latest.path, settings)
        beyond = () if latest.step <= settings.steps else (
            f"the run has completed {latest.step} steps, more than steps={settings.steps}: nothing is trained. Raise "
            f"steps, {_WAY}",)
        return latest._replace(warnings=(*latest.warnings, *beyond, *_gone(folder, latest.step, before)))
    done = _completed(folder)
    if done and (settings.resume == "must" or not _never_saved(folder)):
        why = "; ".join(latest.warnings) or f"{folder.checkpoints} has none"
        raise RunError(f"resume={settings.resume}, but {folder.path} holds completed steps (at least {done}) but no "
                       f"complete checkpoint to resume from: {why}. Nothing was changed. Restore the checkpoint, "
                       f"{_WAY}")
    if settings.resume == "must":
        raise RunError(f"resume=must, but {folder.checkpoints} has no complete checkpoint. Start with resume=auto.")
    lost = len(folder.metrics())
    return latest._replace(warnings=(f"{_steps(range(lost))} of {folder.path} had not been saved when the run ended: "
                                     "it starts again with the first step",) if lost else ())


def _completed(folder: RunFolder) -> int:
    steps = [line.get("step", 0) + 1 for line in folder.metrics()]
    steps += [line.get("step", 0) for line in folder.evals()]
    steps += [covered.stop for _, covered, _ in folder.rollout_files("rollouts")]
    steps += [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(folder.checkpoints)]
    steps += [folder.last_heartbeat().get("step", 0), checkpoint.best_record(folder.checkpoints).get("step", 0)]
    return max((step for step in steps if isinstance(step, int)), default=0)


def _never_saved(folder: RunFolder) -> bool:
    left = checkpoint.all_checkpoints(folder.checkpoints) or checkpoint.best_record(folder.checkpoints)
    return not left and folder.last_heartbeat().get("saved") == 0


def refuse_other_settings(folder: RunFolder, settings: Config) -> Config:
    """Returns the settings stored in the run folder. Raises RunError if they differ from `settings` in a setting that
    must not change on resume, or if they cannot be read."""
    path = folder.path / "config.yaml"
    try:
        before = config.validate(yaml.safe_load(files.read_small(path)) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{folder.checkpoints} holds a checkpoint, but the settings of its run cannot be read "
                       f"from {path}: {error} Restore this file, or start over with resume=never.") from None
    config.refuse_other_kind(before, settings, folder.path)
    if changed := config.differences(before, settings):
        raise RunError(f"{folder.path} holds a run with other settings, so its checkpoint cannot be resumed:\n  "
                       + "\n  ".join(changed) + f"\nSet these settings back, {_WAY}")
    return before


def refuse_other_run(path: Path, settings: Config) -> None:
    """Raises RunError if the checkpoint `path` was saved by a run whose fixed settings differ from `settings`."""
    before, now = checkpoint.settings_of(path), config.fixed_settings(settings)
    changed = [f"{name}: {before[name]!r} -> {now[name]!r}" for name in now
               if name in before and before[name] != now[name]]
    if changed:
        raise RunError(f"checkpoint {path} belongs to another run:\n  " + "\n  ".join(changed) + "\nReplace this "
                       f"folder by the run's own checkpoint, remove it to continue from an earlier checkpoint, {_WAY}")


def _gone(folder: RunFolder, step: int, before: Config) -> Iterable[str]:
    stays = "Stop and restore it, or the run continues without it."
    if missing := sorted({*range(step)} - {line.get("step") for line in folder.metrics()}):
        yield f"metrics.jsonl has no line of {_steps(missing)}, which the checkpoint holds. {stays}"
    stored = {i for _, covered, _ in folder.rollout_files("rollouts") for i in covered}
    if before.store.rollouts and (missing := sorted({*range(step)} - stored)):
        yield f"rollouts/ has no file of {_steps(missing)}, which the checkpoint holds. {stays}"
    first = {line.get("split") for line in folder.evals() if line.get("step") == 0}
    if before.eval.samples and (splits := [split for split in before.eval.splits if split not in first]):
        yield (f"eval.jsonl has no evaluation of {', '.join(splits)} before the first step, so no gain over it is "
               f"shown. {stays}")


def _steps(missing: Sequence[int]) -> str:
    shown = f"{missing[0]}" if len(missing) == 1 else f"{missing[0]} to {missing[-1]}"
    return f"{len(missing)} completed steps ({shown})" if len(missing) > 1 else f"step {shown}"
