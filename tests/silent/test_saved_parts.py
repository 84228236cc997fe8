"""What learns is said, what learned is saved, and an exported model has every tensor of its base."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import others
from tests.helpers import credited_groups, load, settings
from vlrl.models import families
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
