"""Features of a frozen vision tower, computed once per image or video and cached for later steps.

With `model.feature_cache_mib` the encoder splits a prompt's media tensors into VisualInputs. The policy looks up their
features, or computes and caches them, and passes them to the model's forward as `mm_encoder_outputs`. Generation,
reference and update use the same features.

Each VisualInput passes through the tower alone. So its features depend neither on the rest of its batch nor on the
state of the cache. A resumed run, which starts with an empty cache, equals an uninterrupted run bit for bit."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlrl.config.schema import ModelSettings
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.families import Family
from vlrl.types import LoadedMedia

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class VisualInput:
    """Input of one pass of the vision tower: one image or video, or all images or all videos of a prompt if they cannot
    be separated. This is not a dataclass, so that `packing.to_device` does not move its tensors: most of them are
    never needed."""

    __slots__ = ("inputs", "key", "kind")

    def __init__(self, kind: str, key: bytes, inputs: Mapping[str, torch.Tensor]):
        self.kind, self.key, self.inputs = kind, key, inputs


@dataclass(frozen=True, eq=False)
class Features:
    """Output of the vision tower and merger for one VisualInput, without gradient."""

    output_class: type  # the model's class for the outputs of its vision tower
    pooled: tuple[torch.Tensor, ...]  # features of the visual tokens, [..., H], in the order of the text
    listed: bool  # whether the model expects a list of feature tensors, not one tensor
    deepstack: tuple[tuple[torch.Tensor, ...], ...] = ()
    """For each deepstack layer, further features of the same visual tokens. The language model adds these features to
    its hidden states."""

    def to(self, device: torch.device | str) -> Features:
        layers = tuple(tuple(t.to(device) for t in layer) for layer in self.deepstack)
        return replace(self, pooled=tuple(t.to(device) for t in self.pooled), deepstack=layers)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in itertools.chain(self.pooled, *self.deepstack))


class FeatureCache:
    """A cache of at most `limit` bytes of features in host memory. It drops the least recently used features first."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._entries: OrderedDict[bytes, Features] = OrderedDict()
        self._lookups = self._hits = 0

    def outputs(self, model: Any, visuals: Sequence[VisualInput]) -> dict[str, Any]:
        """The features of the given visuals (in the order of the text), as the argument `mm_encoder_outputs` of a
        forward pass. `model` is without PEFT's wrapper. Called under the policy's autocast."""
        by_kind: dict[str, list[Features]] = {}
        for visual in visuals:
            by_kind.setdefault(visual.kind, []).append(self._features(model, visual))
        return {kind: _concatenated(parts) for kind, parts in by_kind.items()}

    def metrics(self) -> dict[str, float]:
        """The hit rate over all ranks since the last call, as {metric: value}. Called on all ranks."""
        hits, lookups = comm.total(self._hits, self._lookups)
        self._lookups = self._hits = 0
        return {"feature_cache/hit_frac": hits / lookups if lookups else 0.0}

    def empty_copy(self) -> FeatureCache:
        """An empty cache with the same size limit."""
        return FeatureCache(self.limit)

    def __len__(self) -> int:
        return len(self._entries)

    def _features(self, model: Any, visual: VisualInput) -> Features:
        self._lookups += 1
        cached = self._entries.get(visual.key)
        if cached is not None:
            self._hits += 1
            self._entries.move_to_end(visual.key)
            return cached.to(model.device)
        features = _computed(model, visual)
        self._keep(visual.key, features.to("cpu"))
        return features

    def _keep(self, key: bytes, features: Features) -> None:
        self._entries[key] = features
        self.used += features.nbytes
        while self.used > self.limit:
            self.used -= self._entries.popitem(last=False)[1].nbytes


def make_cache(settings: ModelSettings, model: Any, family: Family) -> FeatureCache:
    """Makes a FeatureCache of model.feature_cache_mib MiB. Raises ConfigError for a model whose forward accepts no
    features."""
    if not family.known or "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"model.feature_cache_mib={settings.feature_cache_mib}: vlrl cannot pass features to "
                          f"a model of type '{family.model_type}'. Set model.feature_cache_mib=0.")
    return FeatureCache(settings.feature_cache_mib * 2**20)


def processor_hash(processor: Any) -> str:
    """Hash of the settings with which a processor turns images and videos into tensors."""
    units = [getattr(processor, name, None) for name in ("image_processor", "video_processor")]
    text = json.dumps([unit and unit.to_dict() for unit in units], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def visuals_of(family: Family, settings_hash: str, mm: Mapping[str, torch.Tensor],
               media: Sequence[LoadedMedia]) -> tuple[VisualInput, ...]:
    """Splits a prompt's media tensors `mm` into VisualInputs: one for each image and video if the processor returns
    patch grids, else one for all images and one for all videos. `media` are the prompt's media in order.
    `settings_hash` comes from processor_hash."""
    out = []
    for kind, pixels in _PIXELS.items():
        if pixels not in mm:
            continue
        if family.grids:
            grid, shown = _GRIDS[kind], [m for m in media if m.kind == kind]
            cut = mm[pixels].split(mm[grid].prod(-1).tolist())
            parts = [([m], {pixels: p, grid: g}) for m, p, g in zip(shown, cut, mm[grid].split(1), strict=True)]
        else:
            parts = [(media, {k: v for k, v in mm.items() if k.endswith("_videos") == (kind == "video")})]
        out += [VisualInput(kind, _key(kind, settings_hash, m, inputs), inputs) for m, inputs in parts]
    return tuple(out)


def _key(kind: str, settings_hash: str, media: Sequence[LoadedMedia], inputs: Mapping[str, torch.Tensor]) -> bytes:
    contents = [(m.kind, m.sha256, list(m.metadata.get("frames_indices", ()))) for m in media]
    shapes = {k: v.tolist() if k in _GRIDS.values() else list(v.shape) for k, v in inputs.items()}
    return hashlib.sha256(json.dumps([kind, settings_hash, contents, shapes], default=int).encode()).digest()


@torch.inference_mode(False)  # cached features may enter an autograd graph later
@torch.no_grad()
def _computed(model: Any, visual: VisualInput) -> Features:
    inputs = {k: v.to(model.device) for k, v in visual.inputs.items()}
    encode = model.get_image_features if visual.kind == "image" else model.get_video_features
    training = model.training
    model.eval()
    try:
        output = encode(**inputs, return_dict=True)
    finally:
        model.train(training)
    pooled, deepstack = output.pooler_output, getattr(output, "deepstack_features", None) or ()
    listed = not isinstance(pooled, torch.Tensor)
    return Features(type(output), tuple(pooled) if listed else (pooled,), listed,
                    tuple(tuple(layer) for layer in deepstack))


def _concatenated(parts: Sequence[Features]) -> Any:
    pooled: Any = tuple(t for p in parts for t in p.pooled)
    if not parts[0].listed:
        alike = len({t.shape[1:] for t in pooled}) == 1
        pooled = torch.cat(pooled) if alike else torch.cat([t.flatten(0, -2) for t in pooled])[None]
    layers = [tuple(itertools.chain(*layer)) for layer in zip(*(p.deepstack for p in parts), strict=True)]
    return parts[0].output_class(pooler_output=pooled, **({"deepstack_features": layers} if layers else {}))
