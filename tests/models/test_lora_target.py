"""model.lora.target: presets, module names, ends of names and regular expressions give exactly the layers they name."""

import pytest
import torch

from tests.helpers import credited_groups, load, settings
from tests.tables import each
from vlrl.errors import ConfigError
from vlrl.models.adapters import check_target, several_parts
from vlrl.models.loading import skeleton
from vlrl.training.update import make_optimizer, update

LAYERS = range(4)
ATTENTION = [f"language_model.layers.{i}.self_attn" for i in LAYERS]


def lora(folder, target, **more):
    return {"model": {"name": str(folder), "lora": {"rank": 2, "target": target, **more}}}


def adapted(model):
    """Full names of the layers that have an adapter, as PEFT has made them."""
    return {name.removeprefix("base_model.model.model.") for name, module in model.named_modules()
            if hasattr(module, "lora_A")}


@each("target layers", [
    (["q_proj", "v_proj"], {f"{place}.{name}" for place in ATTENTION for name in ("q_proj", "v_proj")}),
    ("q_proj", {f"{place}.q_proj" for place in ATTENTION}),
    ("language_model.layers.0.self_attn.q_proj", {f"{ATTENTION[0]}.q_proj"}),
    (["merger.mlp.0", r".*layers\.[12]\..*o_proj"],
     {"visual.merger.mlp.0", f"{ATTENTION[1]}.o_proj", f"{ATTENTION[2]}.o_proj"}),
    ("down_proj", {*(f"language_model.layers.{i}.mlp.down_proj" for i in LAYERS),
                   "visual.blocks.0.mlp.down_proj", "visual.blocks.1.mlp.down_proj"}),
    (".*language_model.*down_proj", {f"language_model.layers.{i}.mlp.down_proj" for i in LAYERS}),
])
def test_exactly_the_named_layers_have_an_adapter(tiny_models, target, layers):
    model, family = skeleton(settings(tiny_models["qwen2_5_vl"], **lora(tiny_models["qwen2_5_vl"], target)).model)
    assert adapted(model) == layers
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * len(layers)
    said = several_parts(names, family, target)
    assert bool(said) == (target == "down_proj")
    if said:
        assert "down_proj names layers of language and vision" in said and "'.*language_model.*down_proj'" in said


def test_every_parameter_of_a_named_adapter_moves_and_no_other(tiny_models):
    folder = tiny_models["smolvlm"]  # q_proj is in its vision tower too
    config = settings(folder, **lora(folder, ["q_proj", "text_model.layers.3.mlp.down_proj"]))
    policy, encode = load(config)
    for name, parameter in policy.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)  # at 0 the other half has no gradient
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    update(policy, make_optimizer(policy, config), credited_groups(policy, encode, config), config, step=0)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, _ in policy.trainable()}
    layers = {name.rpartition(".lora_")[0] for name in moved}
    assert len(layers) == 4 + 2 + 1 and sum("vision_model" in name for name in layers) == 2


@each("target says", [
    ("q_prog", r"q_prog.*no linear layer of the model has that name.*Did you mean 'q_proj'.*down_proj.*v_proj"),
    (["q_proj", "lm_head"], "lm_head.*no linear layer.*lm_head takes no adapter"),
    ("layers.9.self_attn.q_proj", "no linear layer of the model has that name"),
    ("q_proj[", "neither a module name nor a valid regular expression"),
])
def test_an_unknown_name_is_an_error_before_weights_are_read(tiny_models, tmp_path, target, says):
    folder = tmp_path / "without weights"
    folder.mkdir(exist_ok=True)
    for file in tiny_models["qwen3_vl"].iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = settings(folder, **lora(folder, target))
    for check in (lambda: check_target(config.model), lambda: load(config)):
        with pytest.raises(ConfigError, match=f"model.lora.target=.*{says}"):
            check()
