"""Merges settings: a config file over the file that it extends, overrides over a file, a stage over its run."""

from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from vlrl.config.algo import CLIPS
from vlrl.config.base import Named, Settings
from vlrl.config.engine import merge_engine
from vlrl.config.schema import LENGTH, AlgoSettings, Config, CurriculumSettings, EngineSettings
from vlrl.config.sections import model_of
from vlrl.errors import ConfigError


def merge(base: Mapping[str, Any], over: Mapping[str, Any], model: Any = Config) -> dict[str, Any]:
    """Returns the settings `base` overridden by `over`. Dictionaries are merged recursively, and all other values are
    replaced. A dictionary such as {"0": {...}} changes the items with these indices in a list. The names in
    `presets` accumulate. For a Named (a function with options), the curriculum and the engine, a new name drops the
    old options. `epochs` replaces `steps`, and `steps` replaces `epochs`.

    `model` is the pydantic model to which the settings belong."""
    out = _OLDER.get(model, lambda base, over: dict(base))(base, over)
    for key, value in over.items():
        old, kind = out.get(key), kind_of(model, key)
        is_section = isinstance(kind, type) and issubclass(kind, Settings)  # {} changes nothing; else it clears
        if kind is Named and isinstance(old, (str, Mapping)) and isinstance(value, (str, Mapping)):
            out[key] = _merge_named(old, value)
        elif kind is CurriculumSettings and isinstance(old, (str, Mapping)) and isinstance(value, (str, Mapping)):
            out[key] = _merge_curriculum(old, value)
        elif kind is EngineSettings and isinstance(old, (str, Mapping)) and isinstance(value, (str, Mapping)):
            out[key] = merge_engine(old, value)
        elif key == "presets" and model is Config and isinstance(old, list) and isinstance(value, list):
            out[key] = [*dict.fromkeys([*old, *value])]
        elif isinstance(old, list) and isinstance(value, Mapping) and value and all(map(_is_index, value)):
            out[key] = _merge_items(key, old, value)
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and (value or is_section):
            out[key] = merge(old, value, kind)
        else:
            out[key] = value
    return out


def _is_index(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal()


def _merge_items(key: str, old: list[Any], over: Mapping[str, Any]) -> list[Any]:
    out = list(old)
    for index, value in over.items():
        if int(index) >= len(out):
            raise ConfigError(f"{key}.{index}: {key} has {len(out)} item{'s' * (len(out) != 1)}, counted from 0")
        item: Any = {"name": out[int(index)]} if isinstance(out[int(index)], str) else out[int(index)]
        out[int(index)] = merge(item, value) if isinstance(item, Mapping) and isinstance(value, Mapping) else value
    return out


def _without_older_clip(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `base` of algo.* without the clip bounds that `over` sets too, under the same or the other
    name. algo.clip_low and algo.loss.clip_low are names of the same setting, and the later value counts."""
    out, later = dict(base), over.get("loss")
    for name in CLIPS:
        if over.get(name) is not None and isinstance(out.get("loss"), Mapping):
            out["loss"] = {k: v for k, v in out["loss"].items() if k != name}
        if isinstance(later, Mapping) and later.get(name) is not None:
            out.pop(name, None)
    return out


def _without_older_length(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `base` of a run without its length if `over` sets the length, by `steps` or by `epochs`."""
    replaced = over.get("epochs") is not None or "steps" in over
    return {key: value for key, value in base.items() if not (replaced and key in LENGTH)}


_OLDER: dict[Any, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    AlgoSettings: _without_older_clip, Config: _without_older_length}
"""Settings class -> function (base, over) that drops from `base` what `over` sets under another name."""


def _merge_named(old: str | Mapping[str, Any], over: str | Mapping[str, Any]) -> dict[str, Any]:
    before, after = ({"name": v} if isinstance(v, str) else dict(v) for v in (old, over))
    same = "name" not in after or after["name"] == before.get("name", after["name"])
    return {**before, **after} if same else after


def _merge_curriculum(old: str | Mapping[str, Any], over: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the curriculum settings `old` overridden by `over`. A new sampler drops the old sampler's options."""
    before, after = ({"name": v} if isinstance(v, str) else dict(v) for v in (old, over))
    default = CurriculumSettings().name
    if after.get("name", before.get("name", default)) != before.get("name", default):
        before = {key: value for key, value in before.items() if key in CurriculumSettings.model_fields}
    return merge(before, after, CurriculumSettings)


def kind_of(model: Any, key: str) -> Any:
    """The type of the setting `key` of the pydantic model `model`; for an optional setting, the type without None.
    Returns None if there is no such setting."""
    info = getattr(model, "model_fields", {}).get(key)
    if info is None:
        return None
    if (model := model_of(info)) is not None:
        return model
    kinds = [kind for kind in get_args(info.annotation) if kind is not NoneType]
    return kinds[0] if isinstance(info.annotation, UnionType) and len(kinds) == 1 else info.annotation
