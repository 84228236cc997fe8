"""What of a model learns: its parts by its structure, whatever their names, and never none of it."""

import pytest
import torch
import transformers

from tests.helpers import load, settings
from vlrl.config.schema import ModelSettings
from vlrl.errors import VlrlError
from vlrl.models.loading import skeleton


def trained(kind: str, *parts: str) -> set[str]:
    """Names of the modules that learn, two levels deep, of a small model of a type."""
    config = transformers.CONFIG_MAPPING[kind]()
    for part in (config, config.get_text_config(), config.vision_config, getattr(config, "audio_config", None)):
        for name in ("num_hidden_layers", "depth", "num_layers"):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 2)
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[-2:]
    model, _ = skeleton(ModelSettings(name="none", train=parts), config)
    return {".".join(n.split(".")[:2]) for n, p in model.named_parameters() if p.requires_grad}


def test_the_aligner_of_deepseek_vl():
    assert trained("deepseek_vl", "merger") == {"model.aligner"}


def test_the_projection_of_lighton_ocr():
    assert trained("lighton_ocr", "merger") == {"model.vision_projection"}
    assert trained("lighton_ocr", "language") == {"model.language_model"}


def test_the_resampler_of_ernie():
    assert trained("ernie4_5_vl_moe", "language") == {"model.language_model"}


def test_the_queries_of_blip():
    assert trained("instructblip", "merger") == {"query_tokens", "qformer.embeddings", "qformer.encoder",
                                                 "language_projection.weight", "language_projection.bias"}


def test_what_hears_does_not_learn_with_the_language():
    assert trained("qwen2_5_omni_thinker", "language") == {"model.embed_tokens", "model.layers", "model.norm",
                                                           "lm_head.weight"}


def test_nothing_that_learns_is_an_error(tiny_models):
    with pytest.raises(VlrlError, match=r"model\.train"):
        load(settings(tiny_models["qwen3_vl"], model={"name": str(tiny_models["qwen3_vl"]), "train": []}))
    assert torch.is_grad_enabled()
