"""Checkpoints: saved completely or not at all, and read back bit for bit. They consist of safetensors and JSON, never
pickle.

    checkpoints/step-000050/        the model or adapter and its processor, as the policy writes them, and
        trainer_state.json          the trainer's state, its tensors replaced by names ...
        trainer_state.safetensors   ... of tensors in this file
        manifest.json               number of completed steps, the run's settings, size and sha256 of every other
                                    file, and the seconds that writing took
    checkpoints/best.json           the step of the best evaluation, and its line of eval.jsonl; see `mark_best`

A checkpoint is written under a temporary name, synced to the disk and renamed. So all older checkpoints stay intact if
the process is killed at any moment. The argument `folder` is always the checkpoints folder. Only one process (rank 0)
writes, one checkpoint at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vlrl.errors import RunError, VlrlError
from vlrl.store import trainer_state
from vlrl.store.files import file_sha256, fsync, is_disk_error, read_json, read_small, write_text
from vlrl.store.trainer_state import STATE, State

MANIFEST = "manifest.json"
BEST = "best"  # `checkpoints/best` names the checkpoint of the best evaluation, wherever a checkpoint can be named
_NAME = re.compile(r"step-(\d+)")


class NewestCheckpoint(NamedTuple):
    """The newest usable checkpoint, and warnings about newer checkpoints that are damaged."""

    path: Path | None
    warnings: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of completed steps; 0 if there is no checkpoint."""
        return step_of(self.path) if self.path else 0


def step_of(path: Path) -> int:
    """Returns the number of completed steps in a checkpoint folder's name. Raises RunError for any other name."""
    match = _NAME.fullmatch(path.name.removeprefix(".old-"))
    if not match:
        raise RunError(f"{path} is not a checkpoint: its name should be like step-000050")
    return int(match[1])


# --- saving -----------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, write: Callable[[Path], None], state: Mapping[str, Any] | State, keep: int,
         settings: Mapping[str, Any] | None = None) -> Path:
    """Saves the checkpoint after `step` completed steps and returns its path. Removes all but the `keep` newest
    checkpoints.

    `write(path)` writes the model's files into a folder. `state` is a trainer's state (trainer_state.py), either as a
    dictionary or as a `State`. `settings` are stored for `settings_of`. The best checkpoint is never removed.
    Checkpoints of later steps are removed, because they belong to an earlier run that was started over. Raises RunError
    if the disk is full or not writable; older checkpoints are then unchanged."""
    target, temporary = folder / f"step-{step:06d}", folder / f".tmp-step-{step:06d}-{os.getpid()}"
    begun = time.monotonic()
    try:
        _sweep(folder)
        temporary.mkdir(parents=True)
        write(temporary)
        trainer_state.write(temporary, state)
        _seal(temporary, step, begun, settings or {})
        _swap_in(temporary, target)
    except VlrlError:
        raise
    except Exception as error:
        if not is_disk_error(error):
            raise
        raise _failed(folder, target, temporary, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, step, keep)
    return target


def _seal(path: Path, step: int, begun: float, settings: Mapping[str, Any]) -> None:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = {str(f.relative_to(path)): {"size": f.stat().st_size, "sha256": file_sha256(f)} for f in files}
    for file in (*files, *(d for d in path.rglob("*") if d.is_dir())):
        fsync(file)
    manifest, seconds = path / MANIFEST, round(time.monotonic() - begun, 3)
    content = {"schema": 1, "step": step, "seconds": seconds, "settings": settings, "files": sizes}
    manifest.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for file in (manifest, path):
        fsync(file)


def _swap_in(temporary: Path, target: Path) -> None:
    """Renames a finished checkpoint from `temporary` to its final name `target`. An older checkpoint of the same step
    is renamed first, and remains valid until the new checkpoint has its name."""
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    best = best_record(folder).get("step")
    if best is not None and best > step:
        (folder / f"{BEST}.json").unlink()
    earlier = [path for path in all_checkpoints(folder) if step_of(path) <= step]
    whole = [path for path in earlier if not problems(path, full=False)]
    for path in all_checkpoints(folder):
        spared = path in whole[:keep] or step_of(path) == best
        if (not spared and path in whole) or step_of(path) > step:
            _remove(path)


def _sweep(folder: Path) -> None:
    for old in folder.glob(".old-step-*"):
        place = folder / old.name.removeprefix(".old-")
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, place)
    for temporary in folder.glob(".tmp-*"):
        shutil.rmtree(temporary, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_symlink():  # the target of the link belongs to the user
        path.unlink()
        return
    doomed = path.with_name(f".tmp-removed-{path.name}-{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # the next save removes the rest


def _failed(folder: Path, target: Path, temporary: Path, error: Exception) -> RunError:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    written, free = _size(temporary), shutil.disk_usage(there).free  # before the part that was written is removed
    shutil.rmtree(temporary, ignore_errors=True)
    previous, _ = latest(folder)
    whole = f"; the previous one takes {_size(previous):,}" if previous else ""
    remaining = f"The previous checkpoint {previous} is intact" if previous else "There is no earlier checkpoint"
    return RunError(f"cannot save checkpoint {target}: {getattr(error, 'strerror', None) or error}. {written:,} "
                    f"bytes of it were written, and {free:,} more are free{whole}. {remaining}. Free space (or lower "
                    "save.keep, or set run.dir elsewhere), then start the same command again: it resumes "
                    f"{'from there' if previous else 'from the start'}.")


def mark_best(folder: Path, step: int, record: Mapping[str, Any], keep: int) -> None:
    """Marks the checkpoint of `step` completed steps as the best. `record`: the line of eval.jsonl of its evaluation.
    The marked checkpoint is kept besides the `keep` newest, until another checkpoint is marked. Raises RunError if
    the disk is full."""
    write_text(folder / f"{BEST}.json", json.dumps({"step": step, **record}, indent=1) + "\n")
    newest = next(iter(all_checkpoints(folder)), None)
    _prune(folder, step_of(newest) if newest else step, keep)


def best_record(folder: Path) -> dict[str, Any]:
    """Returns the step and the evaluation of the best checkpoint, as written by `mark_best`; {} if none is marked."""
    best = read_json(folder / f"{BEST}.json") or {}
    return best if isinstance(best.get("step"), int) else {}


def write_speed(folder: Path) -> tuple[int, float] | None:
    """Returns (size in bytes, bytes per second while it was written) of the newest checkpoint whose manifest has both;
    None if there is none."""
    for path in all_checkpoints(folder):
        manifest = read_json(path / MANIFEST) or {}
        seconds, files = manifest.get("seconds"), manifest.get("files")
        if isinstance(seconds, (int, float)) and seconds > 0 and isinstance(files, dict):
            with suppress(KeyError, TypeError):  # damaged
                size = sum(entry["size"] for entry in files.values())
                return size, size / seconds
    return None


# --- finding ----------------------------------------------------------------------------------------------------------


def find(path: Path) -> NewestCheckpoint:
    """Returns the checkpoint that `path` names. Raises RunError if there is none or it is damaged.

    The path of a run folder names its newest complete checkpoint; `checkpoints/best` in a run folder names the
    checkpoint of the best evaluation; the path of a checkpoint or of a folder with weights names that folder."""
    if path.name == BEST and not os.path.lexists(path) and (path.parent / f"{BEST}.json").exists():
        path = path.parent / f"step-{best_record(path.parent).get('step', 0):06d}"
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise RunError(f"{str(path)!r} is not a folder: give a run folder, or a checkpoint in its checkpoints/")
    if (path / "checkpoints").is_dir():
        newest = latest(path / "checkpoints")
        if newest.path is None:
            raise RunError(f"{path / 'checkpoints'} has no complete checkpoint. {' '.join(newest.warnings)}".rstrip())
        return newest
    if (path / MANIFEST).exists():
        wrong = problems(path)
        if wrong:
            raise RunError(f"checkpoint {path} is damaged: {wrong[0]}. Use another checkpoint of the run.")
    elif not any(path.glob("*.safetensors")):
        raise RunError(f"{path} is neither a run folder nor a checkpoint: it has no checkpoints/ and no *.safetensors")
    return NewestCheckpoint(path)


def model_folder(name: str) -> str:
    """Returns the checkpoint folder that a model name stands for. For a run folder this is its newest checkpoint, for
    `checkpoints/best` the checkpoint of the best evaluation. Any other name is returned unchanged. Raises RunError
    if a run folder has no complete checkpoint."""
    run = os.path.isdir(os.path.join(name, "checkpoints"))
    best = name.endswith(f"{os.sep}{BEST}") and not os.path.lexists(name) and os.path.exists(f"{name}.json")
    return str(find(Path(name)).path) if run or best else name


def latest(folder: Path, full: bool = False) -> NewestCheckpoint:
    """Returns the newest complete checkpoint (path None if there is none), with a warning for each newer checkpoint
    that is damaged. Compares the size of each file with the manifest; with `full`, as before a resume, also the
    sha256 of each file. Does not write to the disk."""
    passed = []
    for path in all_checkpoints(folder):
        wrong = problems(path, full)
        if not wrong:
            return NewestCheckpoint(path, tuple(f"checkpoint {damaged} is damaged ({why}); falling back to the "
                                                "previous checkpoint" for damaged, why in passed))
        passed.append((path, wrong[0]))
    return NewestCheckpoint(None, tuple(f"checkpoint {damaged} is damaged ({why})" for damaged, why in passed))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints whose files exist and have the right sizes, ordered by step."""
    return [path for path in reversed(all_checkpoints(folder)) if not problems(path, full=False)]


def problems(path: Path, full: bool = True) -> list[str]:
    """Returns a checkpoint's defects: missing files, wrong sizes and, with `full`, wrong checksums. [] if complete."""
    try:
        manifest = json.loads(read_small(path / MANIFEST))
        entries = {path / name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    findings = [] if path / STATE in entries else [f"{MANIFEST} does not list {STATE}"]
    name = _NAME.fullmatch(path.name.removeprefix(".old-"))
    if name and manifest.get("step", int(name[1])) != int(name[1]):
        findings.append(f"{MANIFEST} belongs to step {manifest['step']}: rename the folder back")
    for file, (size, sha256) in entries.items():
        if not file.is_file():
            findings.append(f"{file.name} is missing")
        elif file.stat().st_size != size:
            findings.append(f"{file.name} has {file.stat().st_size:,} bytes instead of {size:,}")
        elif full and _readable_hash(file) != sha256:
            findings.append(f"{file.name} cannot be read, or its sha256 has changed since it was saved")
    return findings


def all_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoint folders, complete or not, newest first. If a save was killed after it had renamed the
    older checkpoint of the same step, the renamed folder is included."""
    paths = [p for p in folder.glob("step-*") if _NAME.fullmatch(p.name)]
    aside = [p for p in folder.glob(".old-step-*") if not (folder / p.name.removeprefix(".old-")).exists()]
    return sorted(paths + aside, key=step_of, reverse=True)


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the settings of the run that saved a checkpoint; {} if the checkpoint does not contain them."""
    settings = (read_json(path / MANIFEST) or {}).get("settings")
    return settings if isinstance(settings, dict) else {}


def _readable_hash(path: Path) -> str | None:
    try:
        return file_sha256(path)
    except OSError:
        return None


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# --- the trainer's state ----------------------------------------------------------------------------------------------


def load_state(path: Path, check: bool = True) -> dict[str, Any]:
    """Returns the trainer's state that was passed to `save`, with tensors on the CPU. Raises RunError for a damaged
    checkpoint. With `check`, first verifies the sha256 of every file, which is not needed right after `latest(folder,
    full=True)`."""
    wrong = problems(path) if check else []
    if wrong:
        raise RunError(f"checkpoint {path} is damaged: {'; '.join(wrong)}. Remove this checkpoint to resume from the "
                       "previous checkpoint, or set resume=never to start over.")
    try:
        return trainer_state.read(path)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"cannot read the trainer state of checkpoint {path}: {error}. Remove this checkpoint to resume "
                       "from the previous checkpoint, or set resume=never to start over.") from error
