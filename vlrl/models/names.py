"""Checks `model.name` before torch is imported: whether it names a model folder, an adapter, a shipped model, or a
model that the Hub or its local cache has."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError, did_you_mean
from vlrl.models.families import HUB_NAMES
from vlrl.models.model_config import cached_file, embedded
from vlrl.store.files import read_json

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CONFIGS = ("config.json", "adapter_config.json")
_PATIENCE_S = 5.0
_TRUE = ("1", "on", "yes", "true")


def check_model(settings: ModelSettings) -> None:
    """Raises ConfigError if `model.name`, or the base model of the adapter that it names, cannot be a model: a folder
    without config.json, a path that does not exist, or a name that neither the Hub nor its local cache has. Weights
    and processor are not read."""
    name, what = settings.name, f"model.name={settings.name!r}"
    for depth in range(8):  # an adapter names its base model, which may be an adapter
        base = _base_of(name, what)
        if base is None:
            return
        if settings.lora.rank and depth == 0:
            raise ConfigError(second_adapter(settings, base))
        name, what = base, f"{what} is an adapter, but its base model {base!r}"


def second_adapter(settings: ModelSettings, base: str) -> str:
    """The message for `model.lora.rank` with a model that is itself an adapter of `base`."""
    return (f"model.lora.rank={settings.lora.rank}, but model.name={settings.name!r} is itself a LoRA adapter, and a "
            "second adapter cannot be saved on top of it. Continue the run that wrote the adapter (its run.dir, "
            f"resume=must), start from the adapter's base model (model.name={base}), or merge first: the same command "
            "with model.lora.rank=0 steps=0 and another run.dir saves the merged model in that folder.")


def _base_of(name: str, what: str) -> str | None:
    """Checks one name. Returns the name of the base model if `name` is an adapter, else None."""
    if name.startswith("embedded/"):
        name = str(embedded(name))
    if os.path.isdir(name):
        return _base_of_folder(Path(name), what)
    if os.path.exists(name):
        raise ConfigError(f"{what} is a file: give the folder that holds the model's config.json and weights")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{what}: {_no_hub_name(name)}")
    _check_hub_name(name, what)
    adapter = cached_file(name, "adapter_config.json")
    return (read_json(adapter) or {}).get("base_model_name_or_path") if adapter else None


def _base_of_folder(folder: Path, what: str) -> str | None:
    if not any((folder / name).is_file() for name in _CONFIGS):
        inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
        found = f" Did you mean '{folder / inner[0]}'?" if inner else ""
        raise ConfigError(f"{what}: this folder has no config.json, so it holds no model.{found} Give the folder that "
                          "save_pretrained wrote, with config.json, weights and processor")
    adapter = (read_json(folder / "adapter_config.json") or {}) if not (folder / "config.json").is_file() else {}
    return adapter.get("base_model_name_or_path") or None


def _no_hub_name(name: str) -> str:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local:
        return f"this folder does not exist (looked for {os.path.abspath(os.path.expanduser(name))})"
    owner = next((known for known in HUB_NAMES if known.partition("/")[2].lower() == name.lower()), "")
    near = f" Did you mean '{owner}'?" if owner else _similar(name)
    return (f"there is no folder of this name, and a model on the Hub has an owner and a name, as in "
            f"{HUB_NAMES[3]}.{near}")


def _check_hub_name(name: str, what: str) -> None:
    if any(cached_file(name, file) for file in _CONFIGS):
        return
    near = "" if name in HUB_NAMES else _similar(name)
    if _offline():
        raise ConfigError(f"{what} is not in the local Hub cache, there is no folder of this name, and HF_HUB_OFFLINE "
                          f"is set, so it cannot be downloaded.{near} Unset HF_HUB_OFFLINE, download the model first "
                          f"(hf download {name}), or give the folder of a saved model")
    status, trouble = _hub_status(name)
    if status in (401, 404):
        raise ConfigError(f"{what}: the Hub has no such model, or it is private, and there is no folder of this name."
                          f"{near} For a private model, log in with `hf auth login`")
    if status == 403:
        raise ConfigError(f"{what}: access to this model is restricted. Accept its terms at "
                          f"https://huggingface.co/{name} and log in with `hf auth login`")
    if trouble:
        raise ConfigError(f"{what} is not in the local Hub cache, there is no folder of this name, and the Hub cannot "
                          f"be reached ({trouble}).{near} Connect to the Hub, or give the folder of a saved model")


def _similar(name: str) -> str:
    """A suggestion for a misspelt name; owners are compared only if the name alone is not similar to a known one."""
    alone = {known.partition("/")[2].lower(): known for known in HUB_NAMES}
    words = get_close_matches(name.rpartition("/")[2].lower(), alone, n=1)
    return f" Did you mean '{alone[words[0]]}'?" if words else did_you_mean(name, HUB_NAMES)


def _offline() -> bool:
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _hub_status(name: str) -> tuple[int | None, str]:
    """Asks the Hub for the model's config.json (for an adapter, its adapter_config.json). Returns (HTTP status or None,
    why the Hub cannot be reached or "")."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    status = None
    for file in _CONFIGS:
        try:
            status = get_session().head(hf_hub_url(name, file), headers=build_hf_headers(),
                                        timeout=_PATIENCE_S).status_code
        except Exception as error:  # of requests or httpx, by version
            return None, " ".join(str(error).split()) or type(error).__name__
        if status != 404:
            break
    return status, ""
