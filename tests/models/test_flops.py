"""Useful operations against PyTorch's own counter, and by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from tests.conftest import FAMILIES, SAMPLES, kinds_of, noise
from tests.helpers import Vowels, load
from vlrl.config import validate
from vlrl.models import flops
from vlrl.models.families import family_of
from vlrl.models.flops import Cost, Products
from vlrl.models.packing import pack, pieces_of
from vlrl.types import Media, Sample

HAND = Cost(language=Products(100), head=Products(10), merger=Products(6, trained=6), vision=Products(20, first=5),
            attention=8, sight=(3, 2), window=4, merge=4)
LEARNS = dataclasses.replace(HAND, language=Products(100, 100), head=Products(10, 10), vision=Products(20, 20, 5))


def counted(work):
    """Operations of the matrix products; those inside a fused attention are counted by some versions of torch alone."""
    with FlopCounterMode(display=False) as counter:
        work()
    return sum(n for name, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))


def test_by_hand():
    pairs = 3 * 4 / 2 + (2 * 3 + 3) + (1 * 3 + 1)  # prompt of 3, answers of 2 and 1
    sight = 3 * (8 * 8 + 4 * 4) + 2 * (8 * 4 + 4 * 4)  # pictures of 8 and 4 patches
    forward = 2 * (100 * 6 + 10 * 3 + 6 * 12 / 4 + 20 * 12) + 4 * (8 * pairs + sight)
    assert HAND.forward(3, [8, 4], [2, 1]) == forward
    assert HAND.of(3, [8, 4], [2, 1]) == forward + 2 * (100 * 6 + 10 * 3) + 8 * 8 * pairs + 4 * 6 * 12 / 4
    assert LEARNS.of(3, [8, 4], [2, 1]) == 3 * forward - 2 * 5 * 12  # pixels have no gradient
    assert HAND.tower([8, 4]) == 2 * (6 * 12 / 4 + 20 * 12) + 4 * sight
    assert HAND.decode(3, [2, 1]) == 2 * (100 + 10) * 3 + 4 * 8 * (pairs - 6)
    assert HAND.of(3, (), [2]) == HAND.forward(3, (), [2])  # the merger sees no picture
    frozen = dataclasses.replace(HAND, merger=Products(6))
    assert frozen.of(3, [8], [2]) == frozen.forward(3, [8], [2])
    language = dataclasses.replace(LEARNS, merger=Products(6), vision=Products(20, first=5))
    assert language.of(3, [8], [2]) == 3 * language.forward(3, (), [2]) + language.tower([8])
    assert LEARNS.of(9, [8], [4] * 8) == pytest.approx(8 * LEARNS.of(9, [8], [4]) - 7 * LEARNS.of(9, [8]))


MODELS = {"all": {"train": ["language", "merger", "vision"]}, "merger": {"train": ["merger"]},
          "lora": {"lora": {"rank": 4}}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_products_are_those_that_torch_counts(tiny_models, family):
    for learns, settings in MODELS.items() if family == "qwen3_vl" else [("all", MODELS["all"])]:
        policy, encode = load(validate({"task": "x", "model": {"name": str(tiny_models[family]), **settings}}))
        cost = dataclasses.replace(flops.cost_model(policy.model, policy.family), attention=0, sight=(0, 0))
        for kind in kinds_of(policy.family, ("two images", "video")):
            prompt, answers = encode(Vowels(), SAMPLES[kind]), [np.full(7, 300), np.full(12, 301)]
            (batch,) = pack(pieces_of([prompt, prompt], answers, 10**6), 10**6, policy.layout("shared"))
            sums = []
            forward = counted(lambda batch=batch, policy=policy, sums=sums:
                              sums.append(policy.logprobs(batch, 1.0).logprobs.sum()))
            backward = counted(sums[0].backward)
            group = len(prompt), flops.patches_of(prompt.mm, policy.base.config), [7, 12]
            assert forward == pytest.approx(cost.forward(*group), rel=0.01)
            # under an adapter the input of the first of these four layers needs no gradient
            assert backward == pytest.approx(cost.of(*group) - cost.forward(*group), rel=0.06 if learns == "lora" else
                                             0.01)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "smolvlm"])
def test_attention_is_what_torch_counts(tiny_models, family):
    model = AutoModelForImageTextToText.from_pretrained(tiny_models[family], attn_implementation="eager")
    policy, encode = load(validate({"task": "x", "model": {"name": str(tiny_models[family])}}))
    cost = flops.cost_model(model, policy.family)
    prompt = encode(Vowels(), Sample(id="1", media=(Media(source=noise(1, 112, 112)),), row={"q": "Where?"}))
    ids, patches = torch.from_numpy(prompt.ids)[None], flops.patches_of(prompt.mm, model.config)
    with torch.no_grad():
        all_ = counted(lambda: model(input_ids=ids, position_ids=torch.arange(len(prompt))[None], logits_to_keep=1,
                                     **prompt.mm))
    n = len(prompt)  # every pair is computed by this implementation, half of them for nothing
    useful = cost.forward(n, patches) + 2 * cost.head.weights + 4 * cost.attention * (n * n - n * (n + 1) / 2)
    assert all_ == pytest.approx(useful, rel=0.005)


def test_a_model_without_weights_will_do_and_experts_count_as_met(tiny_models):
    config = AutoConfig.from_pretrained(tiny_models["qwen3_vl"])
    with torch.device("meta"):
        empty = AutoModelForImageTextToText.from_config(config)
    loaded = AutoModelForImageTextToText.from_pretrained(tiny_models["qwen3_vl"])
    assert flops.cost_model(empty, family_of(config)) == flops.cost_model(loaded, family_of(config))
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "vocab_size": 16,
            "intermediate_size": 5}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 8,
              "deepstack_visual_indexes": []}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    assert flops.cost_model(model, family_of(config)).language.weights == 4 * 64 + 2 * 3 * 8 * 5
