"""The settings of a run that is given by a model name, data, a prompt and reward functions, instead of a config file.

    settings_of(model="Qwen/Qwen2.5-VL-3B-Instruct", data="rows.jsonl", reward="rewards.py:right", prompt="{question}")

They are a mapping that `vlrl.config.config_of` takes, and that `vlrl train --save-config` writes as a file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vlrl.config.base import Named
from vlrl.config.loading import Config, config_of, find_config, overridden, shipped_configs
from vlrl.config.merging import merge
from vlrl.config.plain import plain
from vlrl.config.registry import resolve
from vlrl.config.yaml_text import parse
from vlrl.data.row_fields import ground_truth
from vlrl.errors import ConfigError, VlrlError
from vlrl.services.extra_parts import PARTS
from vlrl.services.functions import RewardFunction
from vlrl.store.files import cache_folder
from vlrl.task import task_samples
from vlrl.task.part import ATTRIBUTE
from vlrl.tools.start.rows import rows_file
from vlrl.tools.start.source import named
from vlrl.training.build_task import make_task
from vlrl.types import Answer

HELDOUT_SHARE = 0.1
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TRIED = ("", "1", "<answer>1</answer>")
"""Completions with which a function is called once, to see whether it returns a dict."""


def settings_of(*, config: Any = None, model: Any = None, data: Any = None, reward: Any = None,
                prompt: str | None = None, heldout: Any = None, settings: Mapping[str, Any] | None = None
                ) -> dict[str, Any]:
    """Returns the settings of a run as nested dictionaries. `config` is what they are laid on: None, a path, a Config
    or a dictionary. `settings` override them.

    - model: a Hub name or folder; without a config, the embedded model is the default.
    - data, heldout: a file, a Hub name, or rows as Python objects (tools/start/rows.py). heldout may also be the share
    of the rows to hold out; without it and without a config, this is 0.1.
    - reward: a function or its location, a list of them, or {part: function}.
    - prompt: the template of the prompt, with columns in braces.

    Raises ConfigError for an argument of another form."""
    own = settings or {}
    cache = cache_folder(_at(own, "data", "cache") or "")
    tree: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    data, heldout = _splits(data, heldout)
    roots: list[str] = []
    if data is not None:
        rows["train"], roots = _source(data, "data", cache)
    elif heldout is not None and config is None:
        raise ConfigError("heldout is given, but data is not: name the training rows with data (--data)")
    if isinstance(heldout, (int, float)) and not isinstance(heldout, bool):
        rows |= {"heldout": "", "heldout_share": heldout} if config is not None else {"heldout_share": heldout}
    elif heldout is not None:
        rows["heldout"], more = _source(heldout, "heldout", cache)
        roots = list(dict.fromkeys([*roots, *more]))
    elif config is None and not _at(own, "data", "heldout"):
        rows["heldout_share"] = HELDOUT_SHARE
    if roots:
        rows["media_roots"] = roots
    task = _task(config, reward, prompt, own, cache)
    base = _base(config, model)
    tree |= {"model": {"name": str(model)}} if model is not None and not _is_preset(base, model) else {}
    tree |= {"task": task} if task else {}
    tree |= {"data": rows} if rows else {}
    if not _at(own, "run", "dir"):
        tree["run"] = {"dir": _folder(config, rows.get("train", ""), data, {"name": _chosen(own) or "", **task})}
    before = config_of(base, **own) if config is not None and reward is not None else None
    if before is not None and before.tasks:
        raise ConfigError(f"reward is given, and the config has several tasks ({before.task_name}): set task.parts of "
                          "each in the config, or select one task (task=LABEL)")
    known = plain(before.task)["parts"] if before is not None else []
    return _with_returns(merge(base, tree), known, own)


def with_task_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the location of its source in place of a task that is a class, or that is defined in a notebook
    or script (`__main__:Class`): as `task`, `task.name`, or the `name` in `task`."""
    cache = cache_folder(_at(settings, "data", "cache") or "")
    found = {name: _named_task(settings[name], cache) for name in ("task", "task.name") if name in settings}
    if isinstance(section := settings.get("task"), Mapping) and "name" in section:
        found["task"] = {**section, "name": _named_task(section["name"], cache)}
    return {**settings, **found}


def _named_task(task: Any, cache: Path) -> Any:
    if isinstance(task, str) and task.startswith("__main__:"):
        task = getattr(sys.modules["__main__"], task.partition(":")[2], task)
    return named(task, "task", cache)["name"] if isinstance(task, type) else task


def with_heldout(heldout: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name rows to evaluate on, given in any form of `settings_of`; {} if `heldout` is None."""
    if heldout is None:
        return {}
    name, roots = _source(heldout, "heldout", cache_folder(_at(settings, "data", "cache") or ""))
    return {"data.heldout": name, **({"data.media_roots": roots} if roots else {})}


def write_config(tree: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    """Writes the result of `settings_of`, overridden by `settings` (dotted names or nested), as a config file. Raises
    ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(f"--save-config {path}: the file exists already. Name another file, or delete it")
    written = overridden({k: v for k, v in tree.items() if k != "extends"}, settings)
    written = {**({"extends": tree["extends"]} if "extends" in tree else {}), **written}
    path.write_text(f"# vlrl train {path}\n" + yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=100),
                    encoding="utf-8")


def _at(tree: Mapping[str, Any], section: str, name: str) -> Any:
    inner = tree.get(section)
    return tree.get(f"{section}.{name}", inner.get(name) if isinstance(inner, Mapping) else None)


def _splits(data: Any, heldout: Any) -> tuple[Any, Any]:
    """Data and held-out rows; those of a datasets.DatasetDict are its splits."""
    if not isinstance(data, Mapping) or not data or not all(hasattr(one, "column_names") for one in data.values()):
        return data, heldout
    if "train" not in data:
        raise ConfigError(f"data: this DatasetDict has no split 'train', only {', '.join(data)}: pass one of them, "
                          f"e.g. data=dataset[{next(iter(data))!r}]")
    other = next((data[name] for name in ("validation", "val", "dev", "test") if name in data), None)
    return data["train"], other if heldout is None else heldout


def _source(source: Any, name: str, cache: Path) -> tuple[str, list[str]]:
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        hub = not os.path.exists(text) and _HUB.fullmatch(text) and not Path(text).suffix[1:].isalpha()
        return (f"{text}@train" if hub and name == "data" else f"{text}@test" if hub else text), []
    return rows_file(source, name, cache)


def _task(config: Any, reward: Any, prompt: str | None, own: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    chosen = _chosen(own)
    if config is None and chosen is None and reward is None:
        raise ConfigError("there is no reward: give reward=f (--reward file.py:f), a function of a completion and its "
                          "row, or a task that has rewards (task=grounding, --task grounding)")
    task: dict[str, Any] = {}
    if config is None and chosen is None:
        task["name"] = "rows"
    if prompt is not None:
        task["prompt"] = prompt
    if reward is not None:
        task["parts"] = _parts(reward, cache)
    return task


def _chosen(own: Mapping[str, Any]) -> str | None:
    return own.get("task.name") or (own["task"] if isinstance(own.get("task"), str) else _at(own, "task", "name"))


def _parts(reward: Any, cache: Path) -> list[Any]:
    if isinstance(reward, Mapping):
        found = [{**named(one, f"reward[{part!r}]", cache), "part": str(part)} for part, one in reward.items()]
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        found = [named(one, f"reward[{i}]", cache) for i, one in enumerate(reward)]
    else:
        found = [named(reward, "reward", cache)]
    if not found:
        raise ConfigError("reward is empty: give a function of a completion and its row")
    return [_short(one) for one in found]


def _short(entry: Mapping[str, Any]) -> Any:
    name = str(entry["name"])
    own = {k: v for k, v in entry.items() if k != "name" and (k, v) != ("part", name.rpartition(":")[2])}
    return {"name": name, **own} if own else name


def _base(config: Any, model: Any) -> dict[str, Any]:
    """The settings that a run is laid on: the config, or else the preset of its model."""
    if isinstance(config, (str, os.PathLike)):
        return {"extends": str(find_config(Path(config)))}
    if isinstance(config, Config):
        return plain(config)
    if config is not None:
        return dict(config)
    if model is None or str(model).startswith("embedded/"):
        return {"extends": "tiny.yaml"}
    own = next((name for name, of in _presets().items() if of == str(model)), None)
    near = next((name for name, of in _presets().items() if _series(of) == _series(str(model))), None)
    return {"extends": own or near} if own or near else {}


def _presets() -> dict[str, str]:
    """The shipped config of each model: its name below configs/ -> model.name. tiny.yaml is that of the embedded
    model."""
    paths = {path: f"models/{path.name}" if path.parent.name == "models" else path.name for path in shipped_configs()
             if path.parent.name == "models" or (path.name == "tiny.yaml" and path.parent.name == "configs")}
    return {name: str(_at(parse(path.read_text("utf-8")) or {}, "model", "name")) for path, name in paths.items()}


def _series(model: str) -> str:
    """The name of a model without organisation and size: "Qwen2.5-VL" of Qwen/Qwen2.5-VL-3B-Instruct."""
    return re.split(r"-\d[\d.]*[BM]\b", model.rpartition("/")[2], maxsplit=1)[0].lower()


def _is_preset(base: Mapping[str, Any], model: Any) -> bool:
    """Whether the settings that a run is laid on name its model."""
    return model == _presets().get(str(base.get("extends")))


def _folder(config: Any, file: str, data: Any, task: Mapping[str, Any]) -> str:
    if isinstance(config, (str, os.PathLike)):
        return str(Path("runs") / Path(config).stem)
    if isinstance(config, Config) and config.run.dir:
        return config.run.dir
    entries = [part if isinstance(part, str) else part.get("part", part["name"]) for part in task.get("parts", ())]
    words = [Path(file.partition("@")[0]).stem] if isinstance(data, (str, os.PathLike)) else []
    words += [entry.rpartition(":")[2] for entry in entries] or [str(task.get("name", "")).rpartition(":")[2]]
    return str(Path("runs") / (re.sub(r"[^\w.-]+", "-", "-".join(filter(None, words)))[:60] or "run"))


def _with_returns(tree: dict[str, Any], known: list[Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the option `returns` for each reward function that returns a dict, as one call of it with the
    first row shows, behind the `known` parts of the config. Whatever goes wrong is left to the checks at the start of
    the run, which name it."""
    task = tree.get("task")
    if not isinstance(task, Mapping) or not (parts := task.get("parts")):
        return tree
    found = parts
    with suppress(VlrlError):
        sample = task_samples(make_task(config_of(merge(tree, {"task": {"parts": known}}), **own)), "train")[0]
        found = [_returning(entry, sample) for entry in parts]
    return merge(tree, {"task": {"parts": [*known, *found]}})


def _returning(entry: Any, sample: Any) -> Any:
    part = Named.model_validate(entry)
    function = resolve("reward", part.name, PARTS)
    if "returns" in part.options or hasattr(function, ATTRIBUTE):
        return entry
    keys: list[str] = []
    try:
        own = RewardFunction("reward", part, function)
        for text in (*_TRIED, str(ground_truth(sample.row))):
            keys += own.keys_of(sample, Answer(text=text, final=text, n_tokens=1))
    except Exception:  # of the user's own code; the checks at the start call it again
        pass
    keys = list(dict.fromkeys(keys))
    options = {k: v for k, v in part.options.items() if k != "part"}
    return {"name": part.name, "returns": keys, **options} if keys else entry
