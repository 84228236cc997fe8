"""Where an adapter is added: parts of the model, or layers by name as other libraries take them."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from tests.helpers import load, settings
from vlrl.errors import ConfigError
from vlrl.models.policy import Policy


def policy_of(folder, target) -> Policy:
    return load(settings(folder, model={"name": str(folder), "lora": {"rank": 2, "target": target}}))[0]


@pytest.mark.parametrize("target", ["q_proj", ["q_proj", "v_proj"], ["self_attn.o_proj"], "qkv",
                                    r".*layers\.[01]\.mlp\.(up|down)_proj"])
def test_layers_by_name_are_those_of_peft(tiny_models, target):
    folder = tiny_models["qwen3_vl"]
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    peft = get_peft_model(plain, LoraConfig(r=2, target_modules=target if isinstance(target, list) or "." in target
                                            else [target]))
    expected = {n for n, p in peft.named_parameters() if p.requires_grad}
    assert expected == {n for n, _ in policy_of(folder, target).trainable()}


@pytest.mark.parametrize("target, says", [
    ("q_prj", r"model\.lora\.target='q_prj': no linear layer .* Did you mean 'q_proj'"),
    (["q_proj", "no_such"], r"target='no_such': no linear layer"), ("languages", "Did you mean 'language'"),
    ("lm_head", "lm_head takes no adapter"), ("(", "nor a valid regular expression"), ("", "no linear layer"),
    ([], "no linear layer")])
def test_names_of_no_layer(tiny_models, target, says):
    with pytest.raises(ConfigError, match=says):
        policy_of(tiny_models["qwen3_vl"], target)
