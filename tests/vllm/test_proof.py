"""Whether an engine samples from the policy: a second copy of the model stands for the engine."""

import copy

import numpy as np
import pytest
import torch

from tests.helpers import load, settings
from vlrl.engine.vllm.policy_weights import adapted_layers, merged_weight, saved_tensors, write_adapter, write_model
from vlrl.engine.vllm.sync_check import SyncCheck, counted_differences, trainer_logprobs
from vlrl.errors import TrainingError
from vlrl.models.sharding.fsdp import shard

PLANTED = {"language layer": "model.language_model.layers.2.self_attn.k_proj.weight",
           "vision tower": "model.visual.blocks.1.mlp.down_proj.weight", "merger": "model.visual.merger.mlp.2.weight",
           "tied head": "model.language_model.embed_tokens.weight", "norm": "model.language_model.norm.weight"}


class Copy:
    def __init__(self, policy):
        self.policy = copy.copy(policy)
        self.policy.model = copy.deepcopy(policy.model)

    def sync(self, policy, leave_out=()):
        with torch.no_grad():
            for (name, own), theirs in zip(self.policy.model.named_parameters(), policy.model.parameters(),
                                           strict=True):
                if name not in leave_out:
                    own.copy_(theirs)

    def read(self, prompt, answer):
        return trainer_logprobs(self.policy, prompt, answer)

    def pairs(self, policy):
        own = dict(self.policy.model.named_parameters())
        return [(name, p, own[name]) for name, p in policy.model.named_parameters()]


def perturb(policy, seed, by=0.05):
    """A step of some optimizer, in place; zeros (of a fresh adapter) move as numbers of 0.1 do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in policy.trainable():
            p += by * max(float(p.std()), 0.1) * torch.randn(p.shape, generator=generator)


@pytest.fixture
def parts(tiny_models):
    policy, encode = load(settings(tiny_models["qwen2_5_vl"]))
    return policy, SyncCheck.of(encode), Copy(policy)


def test_a_sync_is_proved_and_changes_nothing(parts):
    policy, proof, engine = parts
    for step in range(3):
        perturb(policy, step)
        engine.sync(policy)
        assert proof.check(policy, engine.read, lambda: engine.pairs(policy)) < 1e-6
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    proof.check(policy, engine.read, lambda: engine.pairs(policy))
    assert policy.model.training and policy.banned.numel()
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


def test_names_a_stale_weight(parts):
    policy, proof, engine = parts
    for seed, name in enumerate(PLANTED.values()):
        perturb(policy, seed)
        engine.sync(policy, leave_out=[name])
        with pytest.raises(TrainingError, match="not compute the trainer's log-probabilities") as error:
            proof.check(policy, engine.read, lambda: engine.pairs(policy))
        assert str(error.value).count("differs by") == 1 and name in str(error.value)
        assert "engine.proof" in str(error.value)
        engine.sync(policy)


def test_steps_too_small_for_the_answer_and_proofs_without_weights(parts):
    policy, proof, engine = parts
    perturb(policy, 0, by=1e-6)
    engine.sync(policy, leave_out=[PLANTED["language layer"]])
    with pytest.raises(TrainingError, match=r"layers\.2\.self_attn\.k_proj"):
        proof.check(policy, engine.read, lambda: engine.pairs(policy))
    assert proof.check(policy, engine.read) < 1e-4
    engine.sync(policy)
    perturb(policy, 0)
    engine.sync(policy, leave_out=[PLANTED["merger"]])
    with pytest.raises(TrainingError, match="vision tower or the merger"):
        proof.check(policy, engine.read)
    perturb(policy, 1)
    engine.sync(policy, leave_out=[PLANTED["language layer"]])
    with pytest.raises(TrainingError, match="in the language model"):
        proof.check(policy, engine.read)


def test_equal_weights_computed_otherwise(parts):
    policy, proof, engine = parts
    engine.sync(policy)
    with pytest.raises(TrainingError, match=r"All \d+ weights .* are equal"):
        proof.check(policy, lambda p, a: engine.read(p, a) + 0.01, lambda: engine.pairs(policy))
    with pytest.raises(TrainingError, match="by inf"):
        proof.check(policy, lambda p, a: np.full(len(a), np.nan))

    def off(prompt, answer):
        return engine.read(prompt, answer) + 0.01

    with pytest.raises(TrainingError, match=r"more than 0\.0001"):
        proof.check(policy, off)
    for loose in (SyncCheck(proof.prompt, proof.answer, 0.02),
                  SyncCheck(proof.prompt, proof.answer, dtype=torch.bfloat16)):
        assert 0.009 < loose.check(policy, off) < 0.011
    ours = torch.randn(8, 8)
    assert counted_differences([("w", ours, ours.bfloat16())])[1] == []
    theirs = ours.clone()
    theirs[3, 3] += 0.5
    ((name, gap, _),) = counted_differences([("same", ours, ours.clone()), ("w", ours, theirs)])[1]
    assert name == "w" and gap == pytest.approx(0.5)


def test_written_model_is_the_policy(tiny_models, tmp_path):
    """Names, tying and values, as from_pretrained reads them; with views of one memory split over files."""
    for family in ("qwen2_5_vl", "qwen3_vl", "smolvlm"):
        from transformers import AutoModelForImageTextToText

        policy, _ = load(settings(tiny_models[family]))
        perturb(policy, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vlrl.engine.vllm.policy_weights.SHARD", 2**20)
            write_model(policy, tmp_path / family)
        assert len(list((tmp_path / family).glob("model-*.safetensors"))) > 1, family
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / family, dtype=torch.float32)
        for (name, own), (other, theirs) in zip(policy.model.named_parameters(), again.named_parameters(), strict=True):
            assert name == other and torch.equal(own, theirs), family


@pytest.mark.parametrize("target", ["language", "vision_language"])
def test_merging_changes_nothing_of_the_policy(tiny_models, target):
    policy, _ = load(settings(tiny_models["qwen2_5_vl"], model={
        "name": str(tiny_models["qwen2_5_vl"]), "lora": {"rank": 4, "target": target}}))
    perturb(policy, 1, by=0.3)
    before = {n: t.clone() for n, t in policy.model.state_dict().items()}
    got = dict(saved_tensors(policy))
    after = policy.model.state_dict()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    whole = copy.deepcopy(policy.model).merge_and_unload()
    from transformers.core_model_loading import revert_weight_conversion
    expected = revert_weight_conversion(whole, dict(whole.named_parameters()))
    assert got.keys() == expected.keys() and all(torch.allclose(got[n], t, atol=1e-6) for n, t in expected.items())
    below = dict(saved_tensors(policy, merge=False))
    changed = {n for n in got if not torch.equal(got[n], below[n])}
    assert len(changed) == len(adapted_layers(policy))


def test_merging_dora(tiny_models):
    from peft import LoraConfig, get_peft_model

    policy, _ = load(settings(tiny_models["qwen3_vl"]))
    model = get_peft_model(policy.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True))
    policy.model = model
    perturb(policy, 1, by=0.3)
    layers = adapted_layers(policy)
    ours = {n: merged_weight(m, m.base_layer.weight) for n, m in layers.items()}
    whole = copy.deepcopy(model).merge_and_unload()
    assert len(ours) == 8
    for name, weight in ours.items():
        assert torch.allclose(weight, whole.get_submodule(name).weight, atol=1e-6)
        assert not torch.equal(weight, layers[name].base_layer.weight)


def test_adapters_and_four_bit_weights_are_written_as_what_they_stand_for(tiny_models, tmp_path):
    """trl#3466, #5975: an adapter merged into 4 bits was rounded, and answers came from another policy."""
    from safetensors.torch import load_file

    policy, _ = load(settings(tiny_models["qwen3_vl"], model={
        "name": str(tiny_models["qwen3_vl"]), "lora": {"rank": 4}}))
    perturb(policy, 1)
    write_adapter(policy, tmp_path / "ours")
    policy.save(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())
    assert (tmp_path / "ours/adapter_config.json").is_file()
    from vlrl.models.adapters import dequantized

    policy, _ = load(settings(tiny_models["qwen3_vl"], model={
        "name": str(tiny_models["qwen3_vl"]), "lora": {"rank": 4, "quantize": "nf4"}}))
    got = dict(saved_tensors(policy, merge=False))
    plain = dict(dequantized(copy.deepcopy(policy.base), torch.float32).named_parameters())
    plain = {n.replace(".base_layer.", "."): t for n, t in plain.items() if ".lora_" not in n}
    assert got.keys() == plain.keys() and all(torch.equal(got[n], t) for n, t in plain.items())


@pytest.mark.parametrize("rank", [0, 4])
def test_sharded_weights_come_whole(tiny_models, rank):
    """FSDP in a group of one process; its own types hide in no name."""
    from torch import distributed

    model = {"name": str(tiny_models["qwen3_vl"]), "lora": {"rank": rank, "target": "vision_language"}}
    policy, encode = load(settings(tiny_models["qwen3_vl"], model=model))
    perturb(policy, 1)
    whole = {n: t.clone() for n, t in saved_tensors(policy)}
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        shard(policy, SyncCheck.of(encode).prompt)
        assert any(hasattr(p, "full_tensor") for p in policy.model.parameters())
        for name, tensor in saved_tensors(policy):
            assert torch.equal(tensor, whole.pop(name)) and not hasattr(tensor, "full_tensor"), name
        assert not whole
    finally:
        distributed.destroy_process_group()
