"""Model folders and configs that would not end, weights that hold NaN or inf: a message, and no result."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SAMPLES
from tests.e2e.runs import write_config
from tests.helpers import Vowels, load, settings
from vlrl.cli.main import main
from vlrl.config.loading import load as load_config
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError, VlrlError
from vlrl.models import loading
from vlrl.models.loading import skeleton


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")


@pytest.mark.parametrize("part, name", [("text_config", "num_hidden_layers"), ("vision_config", "depth")])
def test_a_model_of_too_many_layers(folder, part, name):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[part][name] = 100_000
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{part}.{name}=100000, but no model has more than 1,000"):
        skeleton(settings(folder).model)


@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{% for i in range(99999) %}{{ m() if i }}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ m() }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ (" + "(" * 5000 + "1" + ")" * 5000 + ") }}"],
    ids=["loops", "macros", "blocks", "brackets"])
def test_a_template_that_does_not_end_or_is_nested_too_deeply(folder, monkeypatch, template):
    monkeypatch.setattr(loading, "_TEMPLATE_S", 0.2)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"no usable chat template: (it has not terminated|RecursionError)"):
        load(settings(folder))


def bomb(width: int, depth: int) -> str:
    lines = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else 'a'] * width)}]" for i in range(depth)]
    return "\n".join([*lines, f"task: *x{depth - 1}"])


def test_aliases_that_stand_for_billions(tmp_path):
    for text, says in ((bomb(10, 8), "line .*its aliases .* more than 100,000 values"),
                       (bomb(2, 40), "more than 100,000"), ("task: &t [*t]", "an alias .* contains"),
                       ("task: &t {a: *t}", "an alias .* contains")):
        (tmp_path / "bomb.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_config(tmp_path / "bomb.yaml")
    (tmp_path / "a.yaml").write_text("extends: quickstart.yaml\neval: {samples: &n 3}\nsteps: *n\n")
    assert load_config(tmp_path / "a.yaml").steps == 3


def broken(folder, value, pick=lambda names: names[3], file="model.safetensors"):
    tensors = load_file(folder / file)
    name = pick(sorted(tensors))
    tensors[name].flatten()[5] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return name


def test_a_model_with_such_a_value_is_not_loaded_and_commands_name_the_tensor(folder, tmp_path, capsys):
    config, words = write_config(tmp_path, folder), ["steps=1", "eval.samples=2", "rollout.max_new_tokens=4"]
    for value in (float("nan"), float("inf"), -float("inf")):
        name = broken(folder, value).split(".")[-2]
        with pytest.raises(ConfigError, match=rf"{name}.* NaN or inf in 1 of"):
            load(settings(folder))
    for command in (["train"], ["eval"], ["train", "model.lora.rank=2"], ["eval", "--json"]):
        assert main([command[0], str(config), f"run.dir={tmp_path}/run", *words, *command[1:]]) == 1
        out, err = capsys.readouterr()
        said = " ".join((out + err).split())
        assert name in said and "NaN or inf" in said and "Traceback" not in said
    assert not out.strip() or "splits" not in json.loads(out)  # JSON of no evaluation is written


def test_logits_or_an_adapter_that_are_not_finite_give_no_answer(folder, tmp_path):
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
    policy, _ = load(settings(folder, model={"name": str(folder), "lora": {"rank": 2}}))
    policy.save(tmp_path / "adapter")
    broken(tmp_path / "adapter", float("nan"), file="adapter_model.safetensors")
    with pytest.raises(VlrlError, match=r"lora_.* NaN or inf"):
        load(settings(tmp_path / "adapter"))
