"""What a save would write is tried before the first step, what learned is what is saved and exported, and models that
would not end or hold NaN or inf give a message and no result."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests import others
from tests.conftest import SAMPLES
from tests.e2e.runs import write_config
from tests.helpers import Vowels, credited_groups, load, settings
from tests.tables import each
from vlrl.cli.main import main
from vlrl.config.loading import load as load_config
from vlrl.config.schema import ModelSettings
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError, VlrlError
from vlrl.models import families, loading
from vlrl.models.loading import skeleton
from vlrl.models.policy import Policy
from vlrl.store import checkpoint
from vlrl.store.files import file_sha256
from vlrl.tools.hub.export import export
from vlrl.training.update import make_optimizer, update

WORDS = ["steps=1", "eval.samples=0", "save.every=0", "rollout.max_new_tokens=4", "log.samples_every=0",
         "rollout.prompts_per_step=1", "rollout.group_size=2"]


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")


def sampling(folder: Path, **values) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.slow
def test_a_generation_config_that_cannot_be_saved_as_it_is(folder, tmp_path, caplog):
    file, saved = folder / "generation_config.json", tmp_path / "saved/generation_config.json"
    plain = file.read_text()
    for values, stays in (({"temperature": 0.6}, False), ({"top_p": 0.8, "top_k": 20}, False),
                          ({"do_sample": False, "min_p": 0.1}, False), ({"do_sample": True, "temperature": 0.6}, True)):
        file.write_text(plain)
        caplog.clear()
        load(settings(sampling(folder, **values)))[0].save(tmp_path / "saved")
        found = {k for k, v in json.loads(saved.read_text()).items() if v is not None}
        assert {"temperature", "top_p", "top_k", "min_p"} & found == ({"temperature"} if stays else set()), values
        assert stays or all(f"{k}=" in caplog.text for k in values if k != "do_sample")


@pytest.mark.parametrize("words", [[], ["model.lora.rank=2"], ["--dry-run"], ["file"]])
def test_what_cannot_be_saved_stops_a_run_at_its_start(folder, tmp_path, monkeypatch, capsys, words):
    """A processor, also of an adapter and in a dry run; and a checkpoints folder that is a file."""
    def save(*args, **more):
        raise TypeError("Object of type ndarray is not JSON serializable")

    config, run = write_config(tmp_path, folder), tmp_path / "run"
    if words == ["file"]:
        run.mkdir()
        (run / "checkpoints").write_text("")
    else:
        monkeypatch.setattr("transformers.ProcessorMixin.save_pretrained", save)
    assert main(["train", str(config), f"run.dir={run}", *WORDS, *(w for w in words if w != "file")]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "Traceback" not in said and ("checkpoints" if words == ["file"] else
                                        "its tokenizer and processor cannot be saved: TypeError: Object") in said
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()
    assert words == ["file"] or not list((run / "checkpoints").glob("*"))


def test_export_of_a_model_whose_generation_config_cannot_be_saved(folder, tmp_path):
    policy, _ = load(settings(folder))
    checkpoint.save(tmp_path, 1, policy.save, {}, keep=1)
    sampling(tmp_path / "step-000001", temperature=0.6)
    manifest = tmp_path / "step-000001/manifest.json"
    content = json.loads(manifest.read_text())
    file = tmp_path / "step-000001/generation_config.json"
    content["files"][file.name] = {"size": file.stat().st_size, "sha256": file_sha256(file)}
    manifest.write_text(json.dumps(content))
    assert export(tmp_path / "step-000001", tmp_path / "whole").folder.is_dir()


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


@each("target", ["q_proj", ["q_proj", "v_proj"], ["self_attn.o_proj"], "qkv", r".*layers\.[01]\.mlp\.(up|down)_proj"])
def test_layers_by_name_are_those_of_peft(tiny_models, target):
    folder = tiny_models["qwen3_vl"]
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    peft = get_peft_model(plain, LoraConfig(r=2, target_modules=target if isinstance(target, list) or "." in target
                                            else [target]))
    expected = {n for n, p in peft.named_parameters() if p.requires_grad}
    assert expected == {n for n, _ in policy_of(folder, target).trainable()}


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
    with pytest.raises(ConfigError, match=r"no usable chat template: (the template has not terminated|RecursionError)"):
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
