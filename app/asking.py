"""Requests to the playground: a sample of a task, or an upload with a question, and the sampling settings. Imports no
torch.

Of a run's config only the settings for prompting and scoring are used. Code named by the config, and data outside of
RUNS_DIR and the current folder, require `Tasks(..., trust=True)`."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.config import validate
from vlrl.config.schema import Config
from vlrl.data import SPLITS, media
from vlrl.data.media import VideoSampling
from vlrl.store import plain
from vlrl.task import Task, builtin_names, load_class, task_messages, task_samples, task_target
from vlrl.task.combine import COMBINE
from vlrl.task.scoring import overlay_marks
from vlrl.tools.play.preview import message_text
from vlrl.training import build_task
from vlrl.types import LoadedMedia, Media, Sample

from . import AppError
from .library import Library

__all__ = ["IMAGES", "MOST_ANSWERS", "MOST_TOKENS", "SPLITS", "VIDEOS", "Ask", "SamplePreview", "Tasks", "run_of"]
MOST_ANSWERS, MOST_TOKENS, MOST_QUESTION = 64, 8192, 20_000
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
VIDEOS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")
"""Accepted file name suffixes of uploaded videos."""
_MODEL = ("dtype", "max_pixels", "min_pixels", "video_fps", "video_min_frames", "video_max_frames", "video_max_pixels",
          "video_min_pixels", "video_total_pixels")
_DATA = ("train", "heldout", "root", "format", "seed", "quarantine")
_WORDS = ("prompt", "prompts", "system", "name", "combine")
"""Task settings in which a colon does not name code, and settings that `own_code` checks in another way."""
_MOST_TASKS = 3


@dataclass(frozen=True)
class Ask:
    """A question to a model about a sample or an upload, and the sampling settings. Raises AppError if a number is out
    of range, or for an upload without a question."""

    model: str
    """One of the values that `models.listed` returns, a model folder, or a name on the Hugging Face Hub."""
    task: str
    """"run:<id>" for the task of a run, or the name of a built-in task."""
    split: str = "heldout"
    sample: str = "#0"
    """The id of a sample, or "#" followed by its index in the split."""
    upload: Path | None = None
    """An image or video to ask about instead of a sample."""
    question: str = ""
    """The question about the upload."""
    answers: int = 4
    temperature: float = 1.0
    """0 means greedy decoding; then only one answer is generated, since all would be equal."""
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (("answers", self.answers, 1, MOST_ANSWERS), ("seed", self.seed, 0, 2**32 - 1),
                                         ("temperature", self.temperature, 0, 10),
                                         ("most new tokens", self.max_new_tokens, 1, MOST_TOKENS)):
            if not least <= value <= most:
                raise AppError(f"{name} = {value}: give a number from {least} to {most:,}")
        if self.upload and not 0 < len(self.question.strip()) <= MOST_QUESTION:
            raise AppError(f"An upload needs a question of at most {MOST_QUESTION:,} characters.")


@dataclass(frozen=True, eq=False)
class SamplePreview:
    """A sample as the page shows it before the model is asked about it. `place` is the sample's index in the split."""

    place: int
    count: int
    """Number of samples in the split."""
    sample: Sample
    question: str
    """The prompt; the placeholder for the image or video is omitted if there is only one."""
    media: tuple[LoadedMedia, ...]
    target: Any
    marks: tuple[Any, ...] = ()
    """The marks (boxes, points ...) that Task.overlay returns for the target."""


class Tasks:
    """The tasks that the playground offers: built-in tasks and the tasks of a library's runs. `trust` permits code and
    data that a run names (see the module docstring). Not thread-safe, because task code may not be thread-safe."""

    def __init__(self, library: Library, trust: bool = False):
        self.library, self.trust = library, trust
        self._cache: dict[str, tuple[Task, dict[str, Sequence[Sample]]]] = {}

    def listed(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs of the tasks on offer: those of runs, without duplicates, then built-in tasks.
        """
        entries: dict[str, tuple[str, str]] = {}
        for run in self.library.runs():
            tree = self.tree(run.id)
            if tasks := tasks_of(tree):
                same = json.dumps(plain([tasks, _some(tree, "data", _DATA)]), sort_keys=True)
                entries.setdefault(same, (f"{title_of(tasks)}, as in run {run.id}", f"run:{run.id}"))
        return [*entries.values(), *((f"{name}, by its defaults", name) for name in builtin_names())]

    def tree(self, run: str) -> dict[str, Any]:
        """The settings of a run as nested dictionaries; {} if its config cannot be read."""
        tree: dict[str, Any] = {}
        for name, value in self.library.settings(run).items():
            *path, last = name.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    return {}
            place[last] = value
        if isinstance(tree.get("task"), str):
            tree["task"] = {"name": tree["task"]}
        return tree

    def usual(self, ask_task: str, model_run: str | None) -> tuple[int, float]:
        """Returns the default (max_new_tokens, temperature): the settings in the config of the task's run, or of the
        run `model_run` if the task is built-in. A missing or invalid setting is replaced by 64 or 1.0."""
        run = run_of(ask_task) or model_run
        given = _some(self.tree(run), "rollout", ("max_new_tokens", "temperature")) if run else {}
        tokens, heat = given.get("max_new_tokens", 64), given.get("temperature", 1.0)
        return (tokens if isinstance(tokens, int) and 0 < tokens <= MOST_TOKENS else 64,
                heat if isinstance(heat, (int, float)) and 0 <= heat <= 10 else 1.0)

    def config(self, ask: Ask, name: str, model_run: str | None = None) -> Config:
        """Builds the Config for prompting and scoring. Settings come from the task's run and from the run `model_run`
        of the model; all others have their defaults. `name` becomes model.name. Raises AppError if the settings name
        untrusted code or data, and ConfigError if they are invalid."""
        run = run_of(ask.task)
        if not (run or ask.task in builtin_names() or self.trust):
            raise AppError(f"Task {ask.task[:200]!r} is not in the list: choose a task from the list. Tasks from a "
                           "file or module are loaded only if the app was started with --trust-tasks.")
        tree = self.tree(run) if run else {}
        tasks = tasks_of(tree) if run else [_builtin(ask.task)]
        if not tasks:
            raise AppError(f"Run {run!r} names no task in its config.yaml: choose another task.")
        for task in tasks:
            own = {k: v for k, v in task.items() if k != "data"}
            self._check_trust(run, own, {**_some(tree, "data", _DATA), **_some(task, "data", _DATA)})
        own = self.tree(model_run) if model_run else tree
        rollout = {**_some(tree or own, "rollout", ("stop", "thinking_budget", "thinking_end")),
                   "prompts_per_step": 1, "group_size": max(2, ask.answers), "max_new_tokens": ask.max_new_tokens}
        budget = rollout.get("thinking_budget")
        if isinstance(budget, int) and budget >= ask.max_new_tokens:
            rollout["thinking_budget"] = None
        config = validate({
            **({"tasks": tasks} if "label" in tasks[0] else {"task": tasks[0]}),
            "data": {**_some(tree, "data", _DATA), "workers": 0},
            "model": {**_some(own, "model", _MODEL), "name": name}, "rollout": rollout,
            "engine": _some(own, "engine", ("batch_rollouts", "prefill_tokens")),
            "limits": _some(own, "limits", ("prompt_tokens",)), "eval": {"samples": 1}})
        return config.model_copy(update={"model": config.model.model_copy(update={"train": ()})})

    def _check_trust(self, run: str | None, task: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Raises AppError if the task settings `task` of a run name code, or if its data settings `data` name a path
        outside of RUNS_DIR and the current folder. Does nothing if all runs are trusted, or if `run` is None."""
        if self.trust or run is None:
            return
        way = "Start the app with --trust-tasks if you trust this run."
        if code := own_code(task):
            raise AppError(f"Run {run!r} refers to code of its user ({code[:200]}), which the inspector does not run. "
                           f"{way}")
        homes = (self.library.root, Path.cwd().resolve())
        for key in ("train", "heldout", "root"):
            given = str(data.get(key) or "")
            if given and not any(Path(given).resolve().is_relative_to(home) for home in homes):
                raise AppError(f"Run {run!r} reads data.{key}={given[:200]!r}, which is outside the folder of "
                               f"runs and the current folder, so the inspector does not open it. {way}")

    def find(self, config: Config, ask: Ask) -> tuple[Task, int, Sequence[Sample]]:
        """Loads the task of a config; returns the task, the index of the requested sample in its split, and all samples
        of the split. Raises AppError for an unknown sample, and VlrlError for an invalid task or data set."""
        task, splits = self._task(config)
        if ask.split not in splits:
            splits[ask.split] = task_samples(task, ask.split)
        samples, wanted = splits[ask.split], ask.sample.strip()
        if not len(samples):
            raise AppError(f"Task '{task.name}' has no samples in split {ask.split!r}.")
        if wanted.startswith("#") and wanted[1:].isdecimal() and len(wanted) < 20:
            if int(wanted[1:]) >= len(samples):
                raise AppError(f"There is no sample {wanted}: choose one of the {len(samples):,} samples of split "
                               f"{ask.split!r}, #0 to #{len(samples) - 1}.")
            return task, int(wanted[1:]), samples
        for place in range(len(samples)):
            if samples[place].id == wanted:
                return task, place, samples
        raise AppError(f"No sample of split {ask.split!r} has the id {wanted[:200]!r}. Write an id, such as "
                       f"{samples[0].id!r} of the first sample, or # and an index, such as #12.")

    def shown(self, config: Config, ask: Ask) -> SamplePreview:
        """Previews the requested sample, with its media loaded. Raises VlrlError if the sample cannot be read."""
        task, place, samples = self.find(config, ask)
        sample = _with_prompt(task, samples[place])
        own = config.model
        frames = VideoSampling(own.video_fps, own.video_max_frames, own.video_min_frames)
        loaded = tuple(media.load(m, config.limits, frames) for m in sample.media)
        words = message_text(task_messages(task, sample), "" if len(loaded) < 2 else "[{kind} {number}] ")
        marks = [plain(mark) for mark in overlay_marks(task, sample, None) or ()
                 if isinstance(mark, Mapping) and mark.get("role") == "target"]
        return SamplePreview(place, len(samples), sample, words, loaded, task_target(task, sample), tuple(marks))

    def messages(self, config: Config, ask: Ask) -> tuple[Task, Sample, list[dict[str, Any]]]:
        """Returns a copy of the task, the requested sample (or the upload as a sample), and its chat messages."""
        if ask.upload:
            task = copy.copy(self._task(config)[0].members[0])  # with several tasks, the first one parses the answers
            sample = Sample(id="upload", media=(_uploaded(ask.upload),), prompt=ask.question.strip())
            return task, sample, Task.messages(task, sample)  # the question as it is, without the task's template
        own, place, samples = self.find(config, ask)
        sample = _with_prompt(own, samples[place])
        return copy.copy(own), sample, task_messages(own, sample)

    def _task(self, config: Config) -> tuple[Task, dict[str, Sequence[Sample]]]:
        key = json.dumps([config.model_dump(mode="json", include={"task", "tasks", "data"}), config.model.name])
        if key not in self._cache:
            task = build_task.make_task(config)
            while len(self._cache) >= _MOST_TASKS:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = task, {}
        return self._cache[key]


def tasks_of(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a list with the settings of each task of a run, from the run's nested settings `tree`. [] if one of the
    tasks has no name, or if one of several tasks has no label."""
    several, one = tree.get("tasks"), tree.get("task")
    entries = several if isinstance(several, list) and several else [one]
    named = [t for t in entries if isinstance(t, dict) and isinstance(t.get("name"), str) and t["name"]]
    labelled = entries is not several or all(t.get("label") for t in named)
    return named if len(named) == len(entries) and labelled else []


def title_of(tasks: Sequence[Mapping[str, Any]]) -> str:
    """A short title for the task or tasks of a run: their labels or names, joined by " + "."""
    return " + ".join(str(t.get("label") or t["name"]) for t in tasks)[:60]


def run_of(task: str) -> str | None:
    """The run id in a "run:<id>" value; None if `task` is the name of a task."""
    return task.removeprefix("run:") if task.startswith("run:") else None


def own_code(task: Mapping[str, Any]) -> str:
    """The first task setting that may name code (`file.py:name` or `module:name`), as "task.KEY=VALUE"; "" if none."""
    name, combine = str(task.get("name")), str(task.get("combine", "auto"))
    if name not in builtin_names():
        return f"task.name={name}"
    if combine.partition(":")[0] not in (*COMBINE, "auto", "own"):
        return f"task.combine={combine}"
    if setting := next((f"task.{key}={task[key]}" for key in ("browser", "html") if task.get(key)), ""):
        return setting  # a program to start, or pages with scripts
    odd = (f"task.{key}={value}" for key, value in task.items() if key not in _WORDS and _has_colon(value))
    return next(odd, "")


def _has_colon(value: Any) -> bool:
    if isinstance(value, str):
        return ":" in value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_has_colon, values))


def _builtin(name: str) -> dict[str, Any]:
    drawn = name in builtin_names() and hasattr(load_class(name), "drawn")
    return {"name": name, **({"drawn": True} if drawn else {})}


def _uploaded(path: Path) -> Media:
    suffix = path.suffix.lower()
    if suffix not in IMAGES + VIDEOS:
        raise AppError(f"{path.name[:100]!r} is not an image or video with one of the suffixes "
                       f"{', '.join(IMAGES + VIDEOS)}")
    return Media(kind="video" if suffix in VIDEOS else "image", source=path)


def _with_prompt(task: Task, sample: Sample) -> Sample:
    return replace(sample, prompt=sample.prompt or task.of(sample).templates_for(sample)[0])


def _some(tree: Mapping[str, Any], section: str, keys: Sequence[str]) -> dict[str, Any]:
    settings = tree.get(section)
    return {k: settings[k] for k in keys if settings.get(k) is not None} if isinstance(settings, Mapping) else {}
