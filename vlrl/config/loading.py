"""Reads settings from YAML files with `extends:` and `key=value` overrides.

A config file contains only the differences from the defaults in schema.py. The file that `extends` names is read first;
it is a path relative to the config file, or the name of a config that comes with vlrl. In a list of files, later files
win. Paths are resolved by paths.py. `tasks.0.weight=2` sets a field of one list item. Items of `stages` may extend
files, too. In a config with several `tasks`, `task=LABEL` selects one task.

`load("configs/quickstart.yaml", ["steps=20", "train.lr=1e-4"])` returns a frozen Config; an unknown key is an error
with a suggestion. The resolved config is saved in the run folder."""

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

import vlrl
from vlrl.config.algo import SUPERVISED
from vlrl.config.base import Named
from vlrl.config.merging import merge
from vlrl.config.paths import resolve_paths
from vlrl.config.plain import plain
from vlrl.config.schema import LENGTH, SHORT, AlgoSettings, Config, CurriculumSettings, StageEntry, label_of, resumable
from vlrl.config.yaml_text import parse as _parse
from vlrl.errors import ConfigError, RunError, did_you_mean


def load(path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> Config:
    """Reads a config file. Applies the `key=value` overrides, then `settings` (setting -> value, with dotted names or
    nested), and returns the Config.

    An empty `run.dir` becomes `runs/<stem of the file>`. If `model.name` is a run folder, it becomes the newest
    checkpoint of that run. Raises ConfigError naming the setting, its value and the remedy."""
    path = find_config(path)
    tree = _overridden(_read(path), [*map(_split, overrides), *plain(settings or {}).items()])
    tree.setdefault("run", {})
    if isinstance(tree["run"], dict) and tree["run"].get("dir") in (None, ""):  # not false, a mistake
        tree["run"]["dir"] = str(Path("runs") / path.stem)
    return _with_stages(_with_model(validate(tree)))


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Parses `key=value` words: ["train.lr=1e-4"] -> {"train.lr": 1e-4}. Raises ConfigError for any other word."""
    return dict(map(_split, words))


def load_config(path: str | Path, /, *words: str, **settings: Any) -> Config:
    """Reads a config file, applies overrides and returns the Config.

    Overrides are strings ("train.lr=1e-5") or keyword arguments: steps=20, rollout={"group_size": 4}, or dotted names
    as **{"rollout.group_size": 4}. An empty `run.dir` becomes `runs/<stem of the file>`. Raises ConfigError naming the
    setting, its value and the remedy."""
    return load(path, words, settings)


def config_of(source: str | Path | Config | Mapping[str, Any], /, **settings: Any) -> Config:
    """Makes a Config from a path, a Config or nested dictionaries (with `extends`), and applies overrides as
    load_config does.

    An empty `run.dir` gets a default only if the source is a path. Raises ConfigError for invalid settings."""
    if isinstance(source, (str, os.PathLike)):
        return load(source, (), settings)
    if isinstance(source, Config):
        tree = plain(source)
    elif isinstance(source, Mapping):
        tree = plain(source)
        _refuse_two_lengths(tree)
        parents = tree.pop("extends", None)
        tree = _with_bases_of_stages(tree, Path(), "stages")
        tree = tree if parents is None else merge(_parents(Path(), parents, "extends", ()), tree)
    else:
        raise ConfigError(f"a config is a path, a Config or a dictionary of settings, not {type(source).__name__}")
    return _with_stages(_with_model(validate(_overridden(tree, list(plain(settings).items())))))


def _with_model(loaded: Config) -> Config:
    if not os.path.isdir(loaded.model.name) and not loaded.model.name.endswith("best"):
        return loaded
    from vlrl.store.checkpoint import model_folder
    name = model_folder(loaded.model.name)  # resolved now, so that a resumed run has the same initial weights
    return loaded.model_copy(update={"model": loaded.model.model_copy(update={"name": name})})


def _with_stages(loaded: Config) -> Config:
    """Returns the config `loaded` unchanged. Raises ConfigError if the settings of a stage are invalid."""
    stages_of(loaded)
    return loaded


def validate(tree: Mapping[str, Any]) -> Config:
    """Makes a Config from nested dictionaries. Raises ConfigError for unknown keys and invalid values."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        from vlrl.config.explain import explained
        raise ConfigError("\n".join(map(explained, error.errors()))) from None


def derived(config: Config, **sections: Any) -> Config:
    """Returns the config with the given sections replaced. The result is validated as if it were read from a file."""
    return validate(plain(config.model_copy(update=sections)))


def stages_of(config: Config) -> list[tuple[StageEntry, Config]]:
    """Returns (stage, its config) for each stage. The config consists of the settings of the run, overridden by the
    settings of the stage, and has a subfolder of the run folder as run.dir.

    All stages have the model.name of the run. If settings are invalid, raises ConfigError naming the stage."""
    base = {name: value for name, value in plain(config).items() if name != "stages"}
    out: list[tuple[StageEntry, Config]] = []
    for i, stage in enumerate(config.stages):
        folder = {"run": {"dir": str(Path(config.run.dir) / stage.name)}, "resume": "auto"}
        try:
            tree = merge(merge(base, stage.settings), folder)
            for name, factor in stage.times.items():
                tree = _override(tree, name, _multiplied(tree, name, factor))
            out.append((stage, _with_model(validate(tree))))
        except (ConfigError, RunError) as error:
            raise type(error)(f"stages.{i} ({stage.name}): {error}") from None
        _check_stage(out, f"stages.{i} ({stage.name})", config.model.name)
    return out


def _multiplied(tree: Mapping[str, Any], name: str, factor: float) -> float:
    """The value of the setting `name` in the settings `tree`, times `factor`. The product is rounded up if the value is
    an integer. Raises ConfigError if the value is not a number."""
    if name == "steps" and tree.get("epochs") is not None:
        raise ConfigError(f"times.steps={factor:g}: the length is epochs={tree['epochs']:g}. Use times={{epochs: "
                          f"{factor:g}}}")
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"times.{name}={factor:g}: {name} is {value!r}, not a number; choose a numeric setting, e.g. "
                          "times={rollout.max_new_tokens: 0.5}")
    return max(math.ceil(value * factor), 1) if isinstance(value, int) else value * factor


def _check_stage(stages: Sequence[tuple[StageEntry, Config]], where: str, model: str) -> None:
    """Raises ConfigError if the last of `stages` contradicts itself or an earlier stage. The message begins with
    `where`. `model` is the model.name of the run."""
    (stage, config), before = stages[-1], [one.name for one, _ in stages[:-1]]
    if config.model.name != model:
        raise ConfigError(f"{where}: model.name={config.model.name!r} differs from the run's model, {model!r}: each "
                          "stage starts from the weights of an earlier stage. Set model.name outside of stages; "
                          "begin=start starts a stage from the original model")
    if stage.begin not in ("before", "start", *before):
        raise ConfigError(f"{where}: begin={stage.begin!r} is not an earlier stage."
                          f"{did_you_mean(stage.begin, ['before', 'start', *before])} Known: "
                          f"{', '.join(['before', 'start', *before])}")
    if stage.kind == "merge":
        other = config.merge.other
        if not before:
            raise ConfigError(f"{where}: kind=merge averages the previous stage's weights with other weights, but "
                              "there is no previous stage. Insert a stage before this stage")
        if other not in ("start", *before) and not os.path.isdir(other):
            raise ConfigError(f"{where}: merge.other={other!r} is neither an earlier stage nor a folder."
                              f"{did_you_mean(other, ['start', *before])} Earlier stages: {', '.join(before)}")
        if other == before[-1]:
            raise ConfigError(f"{where}: merge.other={other!r} is the previous stage, which is merged anyway: set "
                              "merge.other to another stage, or to start")
    if stage.kind == "rounds" and config.tasks:
        raise ConfigError(f"{where}: kind=rounds supports a single task, but this config has several: select one of "
                          f"them ({', '.join(entry.label for entry in config.tasks)}) by setting tasks=null and "
                          "task=NAME")
    if stage.hand_over == "best" and not (config.save.best and config.eval.samples and config.eval.splits):
        raise ConfigError(f"{where}: hand_over=best needs evaluations and save.best: set eval.samples, eval.splits and "
                          "save.best, or remove hand_over=best")


def differences(old: Config, new: Config) -> list[str]:
    """Returns a line `name: old -> new` for each setting that differs between the configs and must not change when a
    run is resumed (all settings except schema.RESUMABLE)."""
    a, b = fixed_settings(old), fixed_settings(new)
    return [f"{k}: {_change(a.get(k), b.get(k))}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]


_WRITTEN = re.compile(r".*/source/[0-9a-f]{12}/(\w+)\.py:\w+|.*/rows/[0-9a-f]{16}\.(jsonl)")
"""Matches the file of a function or of rows that Python objects were written to, named by its content (tools/start)."""


def _change(old: Any, new: Any) -> str:
    """`old -> new`, and in words if the source of a function, or rows of Python objects, have changed."""
    both = zip(old, new, strict=False) if isinstance(old, list) and isinstance(new, list) else [(old, new)]
    for a, b in both:
        first, second = (_WRITTEN.fullmatch(v) if isinstance(v, str) else None for v in (a, b))
        if first and second and a != b and first.groups() == second.groups():
            what = "the rows have changed" if first[2] else f"the source of {first[1]} has changed"
            return f"{what}: {a} -> {b}"
    return f"{old!r} -> {new!r}"


def fixed_settings(config: Config) -> dict[str, Any]:
    """Dotted name -> value of each setting that must not change when the run is resumed."""
    return {k: v for k, v in _flatten(config.model_dump(mode="json")).items() if not resumable(k)}


def refuse_other_kind(old: Config, new: Config, folder: str | Path) -> None:
    """Raises RunError if the run in `folder` (config `old`) is supervised and the new one is RL, or the reverse."""
    before, now = ("a supervised run (vlrl sft)" if c.algo.loss.name in SUPERVISED else "an RL run (vlrl train)"
                   for c in (old, new))
    if before != now:
        raise RunError(f"{folder} contains {before}, but this is {now}. Choose another run.dir. To start from the "
                       f"weights of that run, set model.name={folder} run.dir={str(folder).rstrip('/')}-2. With "
                       "resume=never a new run starts here, and the old run is kept in a folder next to the new run.")


def describe() -> list[tuple[str, str, Any, str]]:
    """Returns (name, type as text, default, description) of every setting, in order; for `--settings` and the docs."""
    from vlrl.config.descriptions import describe as of_model
    return list(of_model(Config))


def find_config(name: str | Path) -> Path:
    """The path of a config file. This is `name` if there is such a file, the config.yaml of a run if `name` is its
    folder, else the config of this name that comes with vlrl.

    Raises ConfigError if no such config exists, or if several configs of vlrl have this name."""
    path = Path(name)
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        return path
    if os.path.isfile(path / "config.yaml") and os.path.isfile(path / "env.json"):  # a run folder
        return path / "config.yaml"
    if not os.path.exists(path) and (own := shipped(str(name))):
        return own
    if os.path.exists(path):
        kind = "a folder" if os.path.isdir(path) else "not a regular file"
        raise ConfigError(f"config {str(path)!r} is {kind}: name a YAML file, e.g. configs/quickstart.yaml")
    known = {p.name: f"configs/{_of_vlrl(p)}" for p in shipped_configs()}
    if os.path.isdir(path.parent):
        known |= {p.name: p.name for p in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.name, known, n=1)
    near = f" Did you mean '{known[close[0]]}'?" if close else ""
    raise ConfigError(f"config file {str(path)!r} does not exist.{near}")


def shipped(name: str) -> Path | None:
    """The path of a config that comes with vlrl; None if there is no such config.

    `name` is the path of the config in configs/ or the end of this path ("gui/gui_g1.yaml" or "gui_g1.yaml"). A preset
    is found without its group ("algorithms/gspo.yaml"). Raises ConfigError if several configs match."""
    name = os.path.normpath(name).removeprefix("configs/")
    place = vlrl.HOME / "configs" / name
    if os.path.isfile(place):
        return place
    from vlrl.config.presets import preset_file
    if found := preset_file(name):
        return found
    fitting = [path for path in shipped_configs() if f"/{_of_vlrl(path)}".endswith(f"/{name}")]
    if len(fitting) > 1:
        listed = " or ".join(map(_of_vlrl, fitting))
        raise ConfigError(f"{name!r} is the name of several configs of vlrl: write {listed}")
    return fitting[0] if fitting else None


def _of_vlrl(path: Path) -> str:
    return path.relative_to(vlrl.HOME / "configs").as_posix()


def shipped_configs() -> list[Path]:
    """The paths of all configs that come with vlrl, except the files for launchers such as accelerate."""
    return [path for path in sorted((vlrl.HOME / "configs").rglob("*.yaml"))
            if path.parent.name not in ("accelerate", "skypilot")]


def _read(path: Path, visited: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in visited:
        raise ConfigError(f"{path}: 'extends' is circular: a config cannot extend itself")
    try:
        tree = _parse(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read config {path}: it is not UTF-8. Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(tree, dict):
        kind = {"list": "a list", "str": "a text"}.get(type(tree).__name__, f"a {type(tree).__name__}")
        raise ConfigError(f"config {path} must contain settings as 'key: value', not {kind}")
    _refuse_two_lengths(tree, f"{path}: ")
    parents = tree.pop("extends", None)
    if "preset" in tree:
        from vlrl.config.presets import extract_preset
        tree = extract_preset(tree, path)
    tree = _with_bases_of_stages(resolve_paths(tree, path.parent), path.parent, f"{path}: stages")
    return tree if parents is None else merge(
        _parents(path.parent, parents, f"{path}: extends", (*visited, path.resolve())), tree)


def _with_bases_of_stages(tree: dict[str, Any], folder: Path, origin: str) -> dict[str, Any]:
    """Returns the settings `tree` of a file in `folder`. In its `stages`, each stage with `extends` is merged over the
    files that it extends. `origin` is the beginning of error messages."""
    if not isinstance(tree.get("stages"), list):
        return tree
    laid = [merge(_parents(folder, stage["extends"], f"{origin}.{i}.extends", ()),
                  {key: value for key, value in stage.items() if key != "extends"})
            if isinstance(stage, Mapping) and "extends" in stage else stage for i, stage in enumerate(tree["stages"])]
    return {**tree, "stages": laid}


def _parents(folder: Path, parents: Any, origin: str, visited: tuple[Path, ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for parent in parents if isinstance(parents, list) else [parents]:
        base = folder / str(parent)
        if not os.path.isfile(base):
            base = shipped(str(parent))
        if base is None:
            from vlrl.config.presets import moved_hint
            near = did_you_mean(str(parent), [p.name for p in [*folder.glob("*.yaml"), *shipped_configs()]])
            raise ConfigError(f"{origin}: {parent!r} does not exist. extends needs a path relative to the file that "
                              f"contains extends, or the name of a config of vlrl.{moved_hint(str(parent)) or near}")
        tree = merge(tree, _read(base, visited))
    return tree


def _split(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting: write key=value, e.g. train.lr=1e-6")
    try:
        return key, _parse(text) if text else ""
    except ValueError as error:
        raise ConfigError(f"{key}: cannot read the value {text!r}: {error}") from None


def overridden(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings with overrides applied, whose names are dotted or nested."""
    return _overridden(dict(tree), list(plain(settings).items()))


def _overridden(tree: dict[str, Any], given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_two_lengths(dict(given))
    for key, value in sorted(_names_first(given), key=lambda setting: setting[0].startswith("stages.")):
        tree = _override(tree, key, value)
        if isinstance(tree.get("stages"), list):
            tree = {**tree, "stages": [_stage_override(stage, key, value) for stage in tree["stages"]]}
    return tree


def _refuse_two_lengths(tree: Mapping[str, Any], origin: str = "") -> None:
    """Raises ConfigError if the settings, which a user has written in one place, set both `steps` and `epochs`.
    `origin` is the beginning of the message. config.yaml of a run may hold both, with `epoch_prompts`."""
    if tree.get("epochs") is not None and "steps" in tree and tree.get("epoch_prompts") is None:
        raise ConfigError(f"{origin}steps={tree['steps']!r} and epochs={tree['epochs']!r} both set the length of the "
                          "run: remove one of the two")
    for i, stage in enumerate(tree["stages"] if isinstance(tree.get("stages"), list) else ()):
        if isinstance(stage, Mapping):
            _refuse_two_lengths(stage, f"{origin}stages.{i}: ")


def _stage_override(stage: Any, key: str, value: Any) -> Any:
    """Returns the stage with the override key=value of the run applied to it, if the stage sets settings of the same
    section; otherwise the stage unchanged. Without this function, the stage would undo the override.

    With the override `extends`, a file that defines `stages` is not merged into a stage."""
    first = key.partition(".")[0]
    if not isinstance(stage, Mapping) or first in ("stages", *StageEntry.model_fields):
        return stage
    if key == "extends":
        laid = _parents(Path(), value, "extends", ())
        return stage if "stages" in laid else merge(stage, {k: v for k, v in laid.items() if k in stage})
    names = LENGTH if first in LENGTH else (first,)
    return _override(dict(stage), key, value) if any(name in stage for name in names) else stage


def _override(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if key == "extends":
        return merge(tree, _parents(Path(), value, "extends", ()))
    label = value if key in ("task", "task.name") and isinstance(value, str) else ""
    if label and tree.get("tasks"):
        return _select_task(tree, label)
    first, _, rest = key.partition(".")
    if (rest or isinstance(value, Mapping)) and first in SHORT and isinstance(tree.get(first), str):
        tree = {**tree, first: {"name": tree[first]}}
    given: Any = value
    for name in reversed(key.split(".")):
        given = {name: given}
    return merge(tree, given)


def _select_task(tree: dict[str, Any], wanted: str) -> dict[str, Any]:
    entries: list[Any] = tree["tasks"] if isinstance(tree["tasks"], list) else []
    given = [{"name": e} if isinstance(e, str) else e for e in entries if isinstance(e, (str, Mapping))]
    labels = {str(e.get("label") or label_of(str(e.get("name")))): e for e in given}
    if wanted not in labels:
        raise ConfigError(f"task={wanted!r}: this config has several tasks, and none has this "
                          f"label.{did_you_mean(wanted, labels)} Its labels: {', '.join(labels)}. To use another task, "
                          f"set tasks=null task={wanted}")
    task = {k: v for k, v in labels[wanted].items() if k not in ("label", "weight", "data")}
    rest = {k: v for k, v in tree.items() if k != "tasks"}
    data = labels[wanted].get("data")
    return merge({**rest, "task": task}, {"data": data} if data else {})


def _names_first(given: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the overrides with names before options. So `algo.loss.cap=5 algo.loss=cispo` works in any order,
    although a new name drops the options of the old name."""
    names = {f"{section}.{key}{end}" for section, model in (("algo", AlgoSettings), ("curriculum", CurriculumSettings))
             for key, info in model.model_fields.items() for end in ("", ".name") if info.annotation is Named}
    names |= {"extends", "curriculum", "curriculum.name", "engine", "engine.name"}
    return sorted(given, key=lambda setting: setting[0] not in names)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            out |= _flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out
