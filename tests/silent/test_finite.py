"""Weights that hold NaN or inf: the tensor is named, and no result is given."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SAMPLES
from tests.e2e.runs import write_config
from tests.helpers import Vowels, load, settings
from vlrl.cli.main import main
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError, VlrlError


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")


def broken(folder, value, pick=lambda names: names[3], file="model.safetensors"):
    tensors = load_file(folder / file)
    name = pick(sorted(tensors))
    tensors[name].flatten()[5] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_model_with_such_a_value_is_not_loaded(folder, value):
    name = broken(folder, value)
    with pytest.raises(ConfigError, match=rf"{name.rpartition('.')[0].rpartition('.')[2]}.* NaN or inf in 1 of"):
        load(settings(folder))


@pytest.mark.parametrize("command", [["train"], ["eval"], ["train", "model.lora.rank=2"]])
def test_commands_name_the_tensor(folder, tmp_path, capsys, command):
    name = broken(folder, float("nan"))
    config = write_config(tmp_path, folder)
    words = ["steps=1", "eval.samples=2", "rollout.max_new_tokens=4"]
    assert main([command[0], str(config), f"run.dir={tmp_path}/run", *words, *command[1:]]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert name.split(".")[-2] in said and "NaN or inf" in said and "Traceback" not in said


def test_an_adapter_with_such_a_value(folder, tmp_path):
    policy, _ = load(settings(folder, model={"name": str(folder), "lora": {"rank": 2}}))
    policy.save(tmp_path / "adapter")
    broken(tmp_path / "adapter", float("nan"), file="adapter_model.safetensors")
    with pytest.raises(VlrlError, match=r"lora_.* NaN or inf"):
        load(settings(tmp_path / "adapter"))


def test_logits_that_are_not_finite_give_no_answer(folder):
    """Weights that break while a run goes on, and finite ones of which what is computed is not."""
    policy, encode = load(settings(folder))
    engine = HFEngine(policy, seed=0, batch_rollouts=4)
    prompt = encode(Vowels(), SAMPLES["text"])
    name, weight = next(found for found in policy.trainable() if found[0].endswith("language_model.norm.weight"))
    kept = weight.detach().clone()
    for value, says in ((float("nan"), f"{name} holds NaN"), (3e38, "all weights are finite")):
        for temperature in (0.0, 1.0):
            with torch.no_grad():
                weight.fill_(value)
            request = Request(prompt=prompt, n=2, sampling=Sampling(max_new_tokens=3, temperature=temperature))
            with pytest.raises(TrainingError, match=says):
                engine.generate([request])
    with torch.no_grad():
        weight.copy_(kept)
    assert len(engine.generate([request])[0]) == 2


def test_json_of_no_evaluation_is_written(folder, tmp_path, capsys):
    broken(folder, float("inf"))
    config = write_config(tmp_path, folder)
    assert main(["eval", str(config), "--json", "eval.samples=2"]) == 1
    out = capsys.readouterr().out.strip()
    assert not out or "splits" not in json.loads(out)
