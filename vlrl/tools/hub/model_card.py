"""The card of a published model, written from the files of the run that trained it.

    model = PublishedModel(repo="org/name", exported=exported, run=RunFolder("runs/a"), step=80)
    text = card(model, PrivateWords.here(...), base)

Paths and names of this machine are redacted. The metadata block is written by huggingface_hub's ModelCardData. The body
is written here, because huggingface_hub's ModelCard would need jinja2, which vlrl does not require."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import ModelCard, ModelCardData

import vlrl
from vlrl.config import validate
from vlrl.config.schema import Config
from vlrl.data.samples import with_split
from vlrl.data.sources import hub
from vlrl.errors import VlrlError
from vlrl.monitoring.progress import duration
from vlrl.monitoring.trackers import flat_settings
from vlrl.store import RunFolder, checkpoint, comparable
from vlrl.store.files import read_json
from vlrl.store.run_folder import PINS
from vlrl.tools.experiments.report import Gain, gains, main_gains, signed
from vlrl.tools.hub.export import ExportedModel
from vlrl.tools.hub.model_usage import usage
from vlrl.tools.hub.redaction import PrivateWords
from vlrl.tools.run import Run, is_run
from vlrl.tools.tasks.rescore import stored_steps
from vlrl.training.build_task import make_task

CURVE = "reward.png"  # file name of the reward curve, an image next to the card
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_UNSAID = ("run.", "log.", "store.", "alerts.", "resume", "data.", "model.name", "services.judge.url",
           "services.judge.key_env", "services.judge.cache", "seed")
"""Prefixes of settings that are left out of the card's list of settings, because they do not influence the model or
appear elsewhere on the card."""
_MOST_COMMANDS = 4000  # characters of a command


@dataclass(frozen=True)
class Base:
    """The base model: the model with which training started."""

    name: str
    on_hub: bool
    licence: str | None
    through: tuple[str, ...] = ()
    """Names of the runs on this machine that led from the base model to the published model, the first run first."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """An exported model, and the run that trained it."""

    repo: str
    exported: ExportedModel
    run: RunFolder | None  # the run of the checkpoint; None if the checkpoint is not in a run folder
    step: int | None  # number of training steps that the checkpoint has completed

    @cached_property
    def config(self) -> Config | None:
        if self.run is None:
            return None
        try:
            return Run(self.run.path).config
        except VlrlError:
            return None


def base_of(name: str, through: tuple[str, ...] = ()) -> Base:
    """Returns the base model from which the model `name` was trained. If `name` belongs to a run on this machine, the
    search goes on with the model from which this run started. `through` collects the names of these runs."""
    if name.startswith("embedded/"):
        return Base(name, False, "apache-2.0", through)
    path = Path(name)
    if path.is_dir():
        folder = next((p for p in (path, path.parent.parent) if is_run(p)), None)
        known = validated(folder) if folder and len(through) < 8 else None
        if folder and known:
            return base_of(known.model.name, (folder.resolve().name, *through))
        return Base(path.resolve().name, False, _local_licence(path), through)
    return Base(name, bool(_HUB_NAME.fullmatch(name)), None, through)


def validated(folder: Path) -> Config | None:
    """The config in a run folder; None if it cannot be read."""
    try:
        return validate(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None


def card(subject: PublishedModel, private: PrivateWords, base: Base | None) -> str:
    """The card of the model `subject`, as Markdown with its metadata block. The words in `private` are redacted; `base`
    is None if the base model is unknown."""
    lines = usage(subject.repo, subject.exported, base.name if base else None, bool(base and base.on_hub))
    sections = [_intro(subject, base), lines, *_of_run(subject, private), _unknowns(subject, base)]
    return f"---\n{_metadata(subject, base).to_yaml()}\n---\n\n" + "\n\n".join(part for part in sections if part) + "\n"


def _metadata(subject: PublishedModel, base: Base | None) -> ModelCardData:
    adapter = subject.exported.adapter
    of_base: dict[str, Any] = {}
    if base and base.on_hub:
        of_base = {"base_model": base.name, "base_model_relation": "adapter" if adapter else "finetune"}
    return ModelCardData(
        library_name="peft" if adapter else "transformers", pipeline_tag="image-text-to-text",
        license=(base and base.licence) or "unknown", datasets=(subject.config and _hub_data(subject.config)) or None,
        tags=["vlrl", "reinforcement-learning", "vision-language"], **of_base)


def _intro(subject: PublishedModel, base: Base | None) -> str:
    done, config = subject.exported, subject.config
    what = "A LoRA adapter" if done.adapter else "A vision-language model"
    how = "" if config is None else f" by {_method(config)}"
    lines = [f"# {subject.repo.split('/')[1]}", "",
             f"{what} of {done.parameters:,} {done.dtype} parameters, trained{how} with vlrl {vlrl.__version__}.", "",
             "| | |", "|---|---|", f"| base model | {_base_words(base)} |",
             f"| licence of the base | {(base and base.licence) or 'unknown: see the page of the base model'} |"]
    if config is not None:
        lines += [f"| task | `{config.task_name}` |", f"| weights after step | {subject.step} of {config.steps} |"]
    return "\n".join(lines)


def _method(config: Config) -> str:
    loss, advantage = config.algo.loss.name, config.algo.advantage.name
    if loss == "supervised":
        return "supervised fine-tuning on given answers"
    return f"reinforcement learning with verifiable rewards (advantage `{advantage}`, loss `{loss}`)"


def _base_words(base: Base | None) -> str:
    if base is None:
        return "unknown"
    name = f"[{base.name}](https://huggingface.co/{base.name})" if base.on_hub else f"`{base.name}`"
    if base.name.startswith("embedded/"):
        name += ", a model of about 1 M parameters that comes with vlrl"
    elif not base.on_hub:
        name += ", a local model"
    return name + "".join(f", then the run `{run}`" for run in base.through)


# --- from the files of the run ----------------------------------------------------------------------------------------


def _of_run(subject: PublishedModel, private: PrivateWords) -> Iterator[str]:
    if subject.run is None or subject.config is None:
        return
    yield _results(subject, subject.run)
    yield f"## Reward\n\n![reward over the steps]({CURVE})\n\n{_rewards(subject.run, subject.step)}"
    yield f"## Data\n\n{_data(subject.run, subject.config, private)}{_template(subject.config, private)}"
    yield f"## Training\n\n{_training(subject.run, subject.config, subject.step, private)}"


def _results(subject: PublishedModel, run: RunFolder) -> str:
    rows = main_gains(gains(run, subject.step))
    if not rows:
        return "## Before and after\n\nNo evaluations."
    lines = ["## Before and after", "", "| split | metric | n | before | after | gain |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.split} | {r.metric} | {r.n} | {r.before} | {r.after} | "
              f"{signed(r.gain) if r.steps[0] < r.steps[1] else '–'} |" for r in rows]
    return "\n".join([*lines, "", " ".join(_remarks(subject, run, rows))])


def _remarks(subject: PublishedModel, run: RunFolder, rows: Sequence[Gain]) -> Iterator[str]:
    last, config = rows[0].steps[1], subject.config
    temperature = config.eval.temperature if config else None
    how = f"at temperature {temperature:g}" if temperature else "greedily"
    yield (f"Steps {rows[0].steps[0]} and {last}, sampled {how}. [low, high] is the 95 % bootstrap interval over the "
           "samples, of the gain over the same samples in pairs; it says nothing of the spread between seeds.")
    if last != subject.step:
        yield f"The weights published here are those after step {subject.step}, which was not evaluated."
    marked = checkpoint.best_record(run.checkpoints)
    tried = len({line["step"] for line in comparable(run.evals())
                 if line.get("step") and line.get("split") == marked.get("split")})
    if marked.get("step") == subject.step and tried > 1:
        yield (f"This checkpoint was chosen as the best of {tried} by `{marked.get('metric')}` on these same samples, "
               "so its figure is too high on average.")


def _rewards(run: RunFolder, step: int | None) -> str:
    """A Markdown table of the reward parts with their weights, and their means over the first and the last of the steps
    before `step` (None = all steps). If the run stored no rollouts, a sentence that says so."""
    weights = _weights(run, step)
    lines = run.metrics()[:step]
    count = max(1, min(10, len(lines) // 2))
    ends = slice(None, count), slice(-count, None)
    if not weights:
        return "The weights of its parts are unknown here: the run stored no rollouts."
    several = len(weights) > 1
    rows = ["| part | weight | first steps | last steps |", "|---|---|---|---|"]
    for task, parts in weights.items():
        for name, (first, last) in parts.items():
            weight = f"{last:g}" if first == last else f"{first:g} to {last:g}"
            key = f"{task}/reward/{name}" if several else f"reward/{name}"
            means = " | ".join(_mean(lines, key, end) for end in ends)
            rows.append(f"| {f'{task}: ' if several else ''}`{name}` | {weight} | {means} |")
    means = " | ".join(_mean(lines, "reward/mean", end) for end in ends)
    return "\n".join([*rows, f"| reward | | {means} |", "",
                      f"Means over the training completions of {count} steps, sampled at the training temperature."])


def _mean(lines: Sequence[Mapping[str, Any]], key: str, end: slice) -> str:
    values = [line[key] for line in lines[end] if isinstance(line.get(key), (int, float))]
    return f"{np.mean(values):.3f}" if values else "–"


def _weights(run: RunFolder, step: int | None) -> dict[str, dict[str, tuple[float, float]]]:
    """Task -> reward part -> (weight in the first stored step, weight in the last stored step). Only the rollouts of
    steps before `step` count (None = all steps)."""
    steps = [s for s in stored_steps(run, None) if step is None or s < step]
    weights: dict[str, dict[str, tuple[float, float]]] = {}
    for at in dict.fromkeys(steps[:1] + steps[-1:]):
        for row in run.rollouts(at, columns=["task", "weights"]).to_pylist():
            parts = weights.setdefault(row["task"], {})
            for name, weight in row["weights"] or ():
                parts[name] = parts.get(name, (weight, weight))[0], weight
    return weights


def _hub_data(config: Config) -> list[str]:
    names = with_split([config.data, *(entry.data for entry in config.tasks)])
    return list(dict.fromkeys(name.repo for text in names if (name := hub.parse_hub_name(text))
                              and not hub.is_local(text)))


def _data(run: RunFolder, config: Config, private: PrivateWords) -> str:
    pins = read_json(run.path / PINS) or {}
    rows = ["| task | split | source |", "|---|---|---|"]
    entries = [(entry.label, entry.data) for entry in config.tasks] or [(config.task_name, config.data)]
    for label, data in entries:
        for split in ("train", "heldout"):
            rows.append(f"| `{label}` | {split} | {_source(getattr(data, split, None), pins, private)} |")
    return "\n".join([*rows, "", f"`data.seed` is {config.data.seed}."])


def _source(text: str | None, pins: Mapping[str, Any], private: PrivateWords) -> str:
    if not text:
        return "samples generated by the task"
    name = hub.parse_hub_name(text)
    if name and not hub.is_local(text):
        commit = f" at commit `{pins[text]}`" if text in pins else ""
        return f"[{name}](https://huggingface.co/datasets/{name.repo}){commit}"
    return f"`{private.setting(Path(text).name)}`, a file that is not published here"


def _template(config: Config, private: PrivateWords) -> str:
    if config.tasks:
        return ""
    try:
        prompt = make_task(config).prompt
    except Exception:  # a task's own file, which may be gone or raise anything
        return ""
    if not isinstance(prompt, str) or not prompt:
        return ""
    return f"\n\nThe prompt of the task, with fields of the row in braces:\n\n```text\n{private.text(prompt)}\n```"


def _training(run: RunFolder, config: Config, step: int | None, private: PrivateWords) -> str:
    env = read_json(run.path / "env.json") or {}
    seconds = sum(line.get("time/total_s") or 0.0 for line in run.metrics()[:step])
    hardware = env.get("hardware") or {}
    machine = ", ".join(hardware.get("gpus") or ()) or f"{hardware.get('cpus', '?')} CPU cores"
    git = (env.get("git") or {}).get("commit")
    packages = ", ".join(f"{name} {version}" for name, version in (env.get("packages") or {}).items())
    lines = ["| | |", "|---|---|", f"| command | `{command(env.get('command'), private)}` |",
             f"| seeds | `seed={config.seed}`, `data.seed={config.data.seed}` |",
             f"| completions per step | {config.rollout.prompts_per_step} prompts, {config.rollout.group_size} each |",
             f"| time of the steps | {duration(seconds)} on {private.text(machine)} |",
             f"| versions | Python {env.get('python', 'unknown')}, {packages or 'packages unknown'} |",
             *([f"| commit of the working directory | `{git}`"
                f"{' with changes' if (env.get('git') or {}).get('changed_files') else ''} |"] if git else [])]
    settings = "\n".join(f"{name}: {value}" for name, value in _changed(config, private))
    return "\n".join([*lines, "", "Settings that differ from the defaults:", "", "```text", settings, "```"])


def command(words: Any, private: PrivateWords) -> str:
    """The command that started a run, given as its arguments `words`, with the private words, paths and network
    addresses removed; "unknown" if no arguments were recorded."""
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    if not words:
        return "unknown"
    name = Path(words[0]).name
    program = {"__main__.py": "vlrl", "ipykernel_launcher.py": "in a notebook", "-c": "python -c …"}.get(name, name)
    rest = [] if program in ("in a notebook", "python -c …") else [
        private.setting(word) for word in words[1:] if not word.startswith(("alerts.webhook", "services.judge.key"))]
    return " ".join([private.setting(program), *rest])[:_MOST_COMMANDS].replace("`", "'").replace("|", "\\|")


def _changed(config: Config, private: PrivateWords) -> Iterator[tuple[str, str]]:
    usual = flat_settings(validate({"task": config.task.name or "none", "model": {"name": "none"}}))
    for name, value in flat_settings(config).items():
        if not name.startswith(_UNSAID) and usual.get(name) != value:
            yield name, private.setting(str(value)).replace("\n", " ")


# --- unknowns ------------------------------------------------------------------------------------------------


def _unknowns(subject: PublishedModel, base: Base | None) -> str:
    lines = []
    if base is None or base.licence is None:
        lines.append("The licence of the base model, which applies to this model too.")
    if subject.config is None:
        lines.append("The run: its folder was not found with the weights, so data, reward, settings and results are "
                     "unknown.")
    else:
        lines += ["How far the result depends on the seed: this is one run.",
                  "Whether the base model has seen the held-out samples before."]
    lines += ["Safety, bias, other languages, and forgotten abilities: only the results above were measured.",
              "Rewards can be earned in unintended ways; read completions before using the model."]
    return "## What is not known\n\n" + "\n".join(f"- {line}" for line in lines)


def _local_licence(path: Path) -> str | None:
    try:
        card = ModelCard((path / "README.md").read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = card.data.to_dict().get("license")
    return licence if isinstance(licence, str) else None
