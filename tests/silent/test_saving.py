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
