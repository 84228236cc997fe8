"""What a save would write is tried before the first step, and what learned is what is saved."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import write_config
from tests.helpers import load, settings
from vlrl.cli.main import main
from vlrl.store import checkpoint
from vlrl.store.files import file_sha256
from vlrl.tools.hub.export import export

WORDS = ["steps=1", "eval.samples=0", "save.every=0", "rollout.max_new_tokens=4", "log.samples_every=0",
         "rollout.prompts_per_step=1", "rollout.group_size=2"]


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")


def sampling(folder: Path, **values) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize("values", [{"temperature": 0.6}, {"top_p": 0.8, "top_k": 20},
                                    {"do_sample": False, "min_p": 0.1}])
def test_a_generation_config_that_cannot_be_saved_as_it_is(folder, tmp_path, caplog, values):
    policy, _ = load(settings(sampling(folder, **values)))
    policy.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "min_p"} & {k for k, v in saved.items() if v is not None}
    assert all(f"{k}=" in caplog.text for k in values if k != "do_sample")


def test_a_generation_config_that_says_to_sample_stays(folder, tmp_path):
    policy, _ = load(settings(sampling(folder, do_sample=True, temperature=0.6)))
    policy.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/generation_config.json").read_text())["temperature"] == 0.6


def unsaved(monkeypatch):
    def save(*args, **more):
        raise TypeError("Object of type ndarray is not JSON serializable")

    monkeypatch.setattr("transformers.ProcessorMixin.save_pretrained", save)


@pytest.mark.parametrize("words", [[], ["model.lora.rank=2"]], ids=["full", "adapter"])
def test_a_processor_that_cannot_be_saved_stops_a_run_at_its_start(folder, tmp_path, monkeypatch, capsys, words):
    config = write_config(tmp_path, folder)
    unsaved(monkeypatch)
    assert main(["train", str(config), f"run.dir={tmp_path}/run", *WORDS, *words]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "its tokenizer and processor cannot be saved: TypeError: Object of type ndarray" in said
    assert not (tmp_path / "run/metrics.jsonl").exists() or not (tmp_path / "run/metrics.jsonl").read_text()
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_the_dry_run_tries_it_too(folder, tmp_path, monkeypatch, capsys):
    config = write_config(tmp_path, folder)
    unsaved(monkeypatch)
    assert main(["train", str(config), f"run.dir={tmp_path}/run", "--dry-run", *WORDS]) == 1
    assert "its tokenizer and processor cannot be saved" in " ".join("".join(capsys.readouterr()).split())


def test_a_checkpoints_folder_that_is_a_file(folder, tmp_path, capsys):
    config = write_config(tmp_path, folder)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("")
    assert main(["train", str(config), f"run.dir={tmp_path}/run", *WORDS]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "Traceback" not in said and "checkpoints" in said
    assert not (tmp_path / "run/metrics.jsonl").exists() or not (tmp_path / "run/metrics.jsonl").read_text()


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
