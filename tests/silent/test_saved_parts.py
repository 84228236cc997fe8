"""What learns is said, what learned is saved, and an exported model has every tensor of its base."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests import others
from tests.helpers import credited_groups, load, settings
from tests.tables import each
from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError, VlrlError
from vlrl.models import families
from vlrl.models.loading import skeleton
from vlrl.models.policy import Policy
from vlrl.store import checkpoint
from vlrl.tools.hub.export import export
from vlrl.training.update import make_optimizer, update


@pytest.mark.slow
@pytest.mark.parametrize("part", ["language", "merger", "vision"])
def test_the_saved_files_hold_what_is_said_to_learn(tiny_models, tmp_path, part):
    """OpenRLHF#1070, verl#1346: nobody knows whether the vision tower is trained, and saved files lack it."""
    folder = tiny_models["qwen3_vl"]
    config = settings(folder, model={"name": str(folder), "train": [part]})
    policy, encode = load(config)
    words = families.parameters_by_part(policy.trainable(), policy.family)
    assert words == f"{part} {sum(p.numel() for _, p in policy.trainable()):,}"
    update(policy, make_optimizer(policy, config), credited_groups(policy, encode, config), config, 0)
    policy.save(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and {policy.family.part_of(name) for name in changed} == {part}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 0}], ids=["adapter", "full"])
def test_an_exported_model_has_the_tensors_that_its_class_leaves_unread(tmp_path, lora):
    """Qwen-VL-Series-Finetune#259: merging an adapter into Qwen3.5 drops its `mtp.*` tensors without a word."""
    folder = others.build("qwen3_5", tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    head = {"mtp.fc.weight": torch.randn(8, 16), "mtp.norm.weight": torch.ones(8)}
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
    config = settings(folder, model={"name": str(folder), "lora": lora})
    policy, _ = load(config)
    checkpoint.save(tmp_path, 1, policy.save, {}, keep=1, settings=config.model_dump(mode="json"))
    done = export(tmp_path / "step-000001", tmp_path / "whole", dtype="float32")
    assert done.carried == ("mtp.fc.weight", "mtp.norm.weight")
    exported = {k: v for file in (tmp_path / "whole").glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == weights.keys() | head.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in (weights | head).items())
    load(settings(tmp_path / "whole"))


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


def test_parts_by_their_structure_and_names_of_no_layer(tiny_models):
    for kind, part, names in (
            ("deepseek_vl", "merger", "model.aligner"), ("lighton_ocr", "merger", "model.vision_projection"),
            ("lighton_ocr", "language", "model.language_model"),
            ("ernie4_5_vl_moe", "language", "model.language_model"),
            ("instructblip", "merger", "query_tokens qformer.embeddings qformer.encoder language_projection.weight "
                                       "language_projection.bias"),
            ("qwen2_5_omni_thinker", "language", "model.embed_tokens model.layers model.norm lm_head.weight")):
        assert trained(kind, part) == {*names.split()}, (kind, part)
    with pytest.raises(VlrlError, match=r"model\.train"):
        load(settings(tiny_models["qwen3_vl"], model={"name": str(tiny_models["qwen3_vl"]), "train": []}))
    assert torch.is_grad_enabled()
    for target, says in (
            ("q_prj", r"model\.lora\.target='q_prj': no linear layer .* Did you mean 'q_proj'"),
            (["q_proj", "no_such"], r"target='no_such': no linear layer"), ("languages", "Did you mean 'language'"),
            ("lm_head", "lm_head takes no adapter"), ("(", "nor a valid regular expression"), ("", "no linear layer"),
            ([], "no linear layer")):
        with pytest.raises(ConfigError, match=says):
            policy_of(tiny_models["qwen3_vl"], target)


def policy_of(folder, target) -> Policy:
    return load(settings(folder, model={"name": str(folder), "lora": {"rank": 2, "target": target}}))[0]


@each("target", ["q_proj", ["q_proj", "v_proj"], ["self_attn.o_proj"], "qkv",
                                    r".*layers\.[01]\.mlp\.(up|down)_proj"])
def test_layers_by_name_are_those_of_peft(tiny_models, target):
    folder = tiny_models["qwen3_vl"]
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    peft = get_peft_model(plain, LoraConfig(r=2, target_modules=target if isinstance(target, list) or "." in target
                                            else [target]))
    expected = {n for n, p in peft.named_parameters() if p.requires_grad}
    assert expected == {n for n, _ in policy_of(folder, target).trainable()}
