"""The teacher of algo.distillation: checks that the teacher fits the policy, and loads the teacher's frozen model or
connects to the server that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.errors import ConfigError
from vlrl.models.families import sync_tilings
from vlrl.models.loading import adapter_base, load_model, loading_errors, resolve
from vlrl.models.policy import Policy
from vlrl.store.checkpoint import model_folder

_SERVED = Table({"connect": "vlrl.services.served_teacher:connect"})
_SEES = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""Settings of image processing that must be equal for policy and teacher, because the policy's processor prepares the
images of both models."""
_WAY = "choose a teacher of the policy's family and vocabulary, or set algo.distillation=null"


def setting_text(config: Config) -> str:
    """The setting algo.distillation.teacher and its value, for error messages."""
    return f"algo.distillation.teacher={_name(config)!r}"


def _name(config: Config) -> str:
    settings: Any = config.algo.distillation
    return settings.teacher or config.model.name


def check(config: Config) -> None:
    """Raises ConfigError if the teacher is missing, if its tokens or image processing differ from the policy's, or if
    algo.distillation.server could not load the teacher's weights. Reads configs and processors, but no weights."""
    settings: Any = config.algo.distillation
    if settings.server:
        folder(config)
    if _name(config) == config.model.name:
        return
    (kind, own), (other, theirs) = (_read(what, name) for what, name in (
        (f"model.name={config.model.name!r}", config.model.name), (setting_text(config), _name(config))))
    if kind != other:
        raise ConfigError(f"{setting_text(config)} has the model type {other}, but the policy (model.name="
                          f"{config.model.name!r}) has the type {kind}, so the teacher cannot read the policy's "
                          f"tokens and images: {_WAY}")
    known, words = own.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    if differ := sorted(word for word in {*known, *words} if known.get(word) != words.get(word)):
        raise ConfigError(f"{setting_text(config)} has a different vocabulary from the policy (model.name="
                          f"{config.model.name!r}): {len(differ)} tokens differ, such as {differ[0]!r}, whose id is "
                          f"{words.get(differ[0])} in the teacher and {known.get(differ[0])} in the policy: {_WAY}")
    for field in _SEES:
        here, there = (getattr(one.image_processor, field, None) for one in (own, theirs))
        if here != there:
            raise ConfigError(f"{setting_text(config)} processes images with {field}={there}, but the policy "
                              f"(model.name={config.model.name!r}) uses {here}: {_WAY}")


def _read(what: str, name: str) -> tuple[str, Any]:
    """Returns the model type and the processor of the model `name`; for an adapter, those of the base model. `what` is
    the name of the model in error messages."""
    from transformers import AutoConfig, AutoProcessor

    with loading_errors(what):
        name = model_folder(name)
        while base := adapter_base(name):
            name = base
        return (AutoConfig.from_pretrained(resolve(name), trust_remote_code=False).model_type,
                AutoProcessor.from_pretrained(resolve(name), trust_remote_code=False))


def folder(config: Config) -> Path:
    """The folder that holds the teacher's weights. Raises ConfigError if it does not hold a full model."""
    path = Path(resolve(model_folder(_name(config))))
    if not path.is_dir() or adapter_base(str(path)):
        raise ConfigError(f"{setting_text(config)} is {'an adapter' if path.is_dir() else 'not a folder'}, but a "
                          "server (algo.distillation.server) loads a full model from a folder that it can access too: "
                          "set algo.distillation.teacher to such a folder, which `vlrl export` writes, or set "
                          "algo.distillation.server=null")
    return path


def connect(config: Config, policy: Policy) -> Any:
    """Connects to the teacher behind algo.distillation.server. Returns a function (training rows, temperature) -> one
    array [T] float32 per row, the log-probabilities of the row's tokens. Called on every process."""
    from transformers import AutoConfig

    path = folder(config)
    vocabulary = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config().vocab_size
    return _SERVED["connect"](config.algo.distillation, path, vocabulary, policy, config.rollout.temperature)


def load(config: Config, policy: Policy) -> Any:
    """Loads and returns the teacher's frozen model, in the policy's compute dtype and unsharded on every process."""
    model = load_model(model_folder(_name(config)), policy.dtype, setting_text(config), device=policy.device)
    sync_tilings(model, policy.processor)
    return model.requires_grad_(False).eval().to(policy.device)


