"""`services.clip`: cosine similarities of images and texts by a model that embeds both in one space (CLIP, SigLIP ...).

    clip = Clip(config.services.clip)
    clip([image, other], ["a cat", "a dog"])        # [2, 2] cosine similarities in [-1, 1]

Any transformers model with `get_image_features` and `get_text_features` can be used. Embeddings are cached, by a hash
of the image's pixels or by the text."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoProcessor

from vlrl.config.schema import Config
from vlrl.config.services import ClipSettings
from vlrl.data.media import as_rgb
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.loading import check_hub
from vlrl.task.services import ServiceContext


def of_run(config: Config, folder: Path) -> Clip:
    """Creates the service for a run. `folder` is not used, because the service stores nothing."""
    return Clip(config.services.clip)


class Clip:
    """The model services.clip.name in float32, on this process's GPU if it has one. Raises ConfigError if the model
    cannot be loaded, or does not embed images and texts."""

    def __init__(self, settings: ClipSettings):
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._batch = settings.batch or (32 if self.device.type == "cuda" else 1)
        self._model, self._processor = self._loaded(settings.name)
        text_config = getattr(self._model.config, "text_config", self._model.config)
        self._longest = int(getattr(text_config, "max_position_embeddings", 77))
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._pictures: dict[tuple[str, int], int] = {}  # (split, step) -> number of images compared

    concurrency = 1

    def at(self, context: ServiceContext) -> Callable[..., np.ndarray]:
        """Returns the service for one group: a function like `Clip.__call__`, which also counts the compared images
        under split and step of `context`."""
        return partial(self._counted, (context.split, context.step))

    def _counted(self, key: tuple[str, int], images: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        self._pictures[key] = self._pictures.get(key, 0) + len(images)
        return self(images, texts)

    def problem(self) -> str:
        return ""

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """The number of images compared for a split since the last call, in steps up to `step`, over all processes."""
        done = [key for key in self._pictures if key[0] == split and key[1] <= step]
        return {"clip/images": float(comm.total(sum(self._pictures.pop(key) for key in done))[0])}

    def close(self) -> None:
        pass

    def _loaded(self, name: str) -> tuple[Any, Any]:
        check_hub(name)
        try:
            model = AutoModel.from_pretrained(name, dtype=torch.float32)
            processor = AutoProcessor.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"services.clip.name={name!r} cannot be loaded ({str(error)[:300]}). Name a "
                              "folder, or a model of the hub such as openai/clip-vit-base-patch32") from None
        if not (hasattr(model, "get_image_features") and hasattr(model, "get_text_features")):
            raise ConfigError(f"services.clip.name={name!r} is a {type(model).__name__}, which does not embed images "
                              "and texts in one space. Name a model such as openai/clip-vit-base-patch32")
        return model.to(self.device).eval(), processor

    def __call__(self, images: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        """[images, texts] cosine similarities of PIL images and texts. The tokenizer truncates long texts."""
        pictures = [*map(as_rgb, images)]
        if not pictures or not texts:
            return np.zeros((len(pictures), len(texts)), np.float32)
        hashes = [hashlib.sha256(repr(p.size).encode() + p.tobytes()).hexdigest() for p in pictures]
        shown = self._embedded(hashes, pictures, self._of_pictures)
        said = self._embedded([f"text {text}" for text in texts], texts, self._of_texts)
        return shown @ said.T

    def _embedded(self, keys: Sequence[str], values: Sequence[Any],
                  embed: Callable[[Sequence[Any]], torch.Tensor]) -> np.ndarray:
        embeddings = {key: self._known[key] for key in keys if key in self._known}
        new = [(key, value) for key, value in dict(zip(keys, values, strict=True)).items() if key not in embeddings]
        for start in range(0, len(new), self._batch):
            some = new[start:start + self._batch]
            with torch.no_grad():
                rows = torch.nn.functional.normalize(embed([value for _, value in some]).float(), dim=-1)
            embeddings |= zip((key for key, _ in some), rows.cpu().numpy(), strict=True)
        for key, value in embeddings.items():
            self._known[key] = value
            self._known.move_to_end(key)
        while len(self._known) > self.settings.keep:
            self._known.popitem(last=False)
        return np.stack([embeddings[key] for key in keys])

    def _of_pictures(self, pictures: Sequence[Any]) -> torch.Tensor:
        inputs = self._processor(images=list(pictures), return_tensors="pt").to(self.device)
        return _tensor(self._model.get_image_features(**inputs))

    def _of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        # padded to the full length, as some models are trained; for others padding changes nothing
        inputs = self._processor(text=list(texts), return_tensors="pt", padding="max_length", truncation=True,
                                 max_length=self._longest).to(self.device)
        return _tensor(self._model.get_text_features(**inputs))


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.pooler_output
