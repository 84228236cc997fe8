"""Text embeddings from a local model, used to compare texts by meaning. Imports torch and transformers when called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.errors import ConfigError

_BATCH = 32


def embed(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Unit vectors [texts, width] in float32. For a CLIP model they are its text features, else the mean over the last
    hidden states of a text's tokens, as in sentence encoders (1908.10084). Texts are truncated to the model's
    maximum length.

    Raises ConfigError for a folder without a model and tokenizer. Nothing is downloaded, and no code in the folder is
    executed."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ConfigError(f"--embedder {folder} must be a model folder with config.json, weights and tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"--embedder {folder} cannot be loaded: {error}") from error
    longest = min(tokenizer.model_max_length, _length(model.config))
    batches = []
    for start in range(0, len(texts), _BATCH):
        batch = tokenizer([*texts[start:start + _BATCH]], padding=True, truncation=True, max_length=longest,
                          return_tensors="pt")
        with torch.inference_mode():
            batches.append(_vectors(model, batch).float().numpy())
    vectors = np.concatenate(batches) if batches else np.zeros((0, 1), np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _vectors(model: Any, batch: Any) -> Any:
    if hasattr(model, "get_text_features"):
        given = model.get_text_features(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return getattr(given, "pooler_output", given)
    mask = batch["attention_mask"][:, :, None]
    return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)


def _length(config: Any) -> int:
    text = getattr(config, "text_config", None) or config
    return int(getattr(text, "max_position_embeddings", None) or 512)
