"""A short run in this process: what it leaves in its folder."""

import json

import numpy as np
import pytest
import yaml
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.e2e.runs import metrics, write_config
from vlrl import config as configs
from vlrl import task as tasks
from vlrl.store import SCHEMA, RunFolder
from vlrl.training.loop import train

METRICS = """step reward/mean reward/std reward/vowels reward/short loss kl entropy clip_frac grad_norm lr
completion/length_mean completion/truncated_frac groups/zero_variance_frac mismatch/kl time/rollout_s time/score_s
time/train_s time/sync_s time/total_s tokens/prompt tokens/completion tokens_per_s memory/peak_gib
curriculum/epoch score_errors""".split()


def start(tmp_path, model, *words):
    path = write_config(tmp_path, model)
    return train(configs.load(path, [f"run.dir={tmp_path}/run", "steps=3", "log.samples_every=0", *words]))


@pytest.fixture(scope="module")
def whole(tiny_models, tmp_path_factory):
    """A run with evaluations, checkpoints and a tracker."""
    words = ("seed=1", "eval.every=2", "save.every=2", "log.trackers=[tensorboard]")
    return start(tmp_path_factory.mktemp("whole"), tiny_models["qwen3_vl"], *words)


def test_run_folder(whole):
    folder = whole.folder
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines] == [0, 1, 2] and not set(METRICS) - set(lines[0])
    evals = metrics(folder.path, "eval.jsonl")
    assert [(e["step"], e["split"], e["n"]) for e in evals] == [(0, "heldout", 8), (2, "heldout", 8), (3, "heldout", 8)]
    assert all(e["vowels/ci95_low"] <= e["vowels"] <= e["vowels/ci95_high"] for e in evals)
    assert [p.name for p in sorted(folder.checkpoints.iterdir())] == ["best.json", "step-000002", "step-000003"]
    best = max(evals[1:], key=lambda e: e["reward/mean"])
    assert json.loads((folder.checkpoints / "best.json").read_text())["step"] == best["step"]
    saved = configs.validate(yaml.safe_load((folder.path / "config.yaml").read_text()))
    assert saved.steps == 3 and saved.rollout.group_size == 4 and json.loads((folder.path / "env.json").read_text())
    assert folder.last_heartbeat()["state"] == "finished" and not (folder.path / "run.lock").exists()
    assert list(folder.path.rglob("events.out.tfevents*"))
    row, reader = folder.rollouts(2).to_pylist()[0], Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    assert reader.decode(row["token_ids"]) == row["completion"]


def test_rollouts(whole):
    folder = whole.folder
    names = sorted(p.name for p in (folder.path / "rollouts").iterdir())
    assert names == [f"step-{i:06d}-rank-00000.parquet" for i in range(3)]
    assert sorted(p.name for p in (folder.path / "eval-rollouts").iterdir()) == [
        f"step-{step:06d}-heldout-rank-00000.parquet" for step in (0, 2, 3)]
    table = folder.rollouts()
    assert table.schema.names == SCHEMA.names and table.num_rows == 3 * 4 * 4
    for row in table.to_pylist():
        n = len(row["token_ids"])
        per_token = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratio", "clipped")
        assert all(len(row[k]) == n for k in per_token)
        assert np.allclose(row["logprobs"], row["trainer_logprobs"], atol=2e-5)
        parts, weights = dict(row["parts"]), dict(row["weights"])
        assert row["reward"] == pytest.approx(sum(weights[k] * parts[k] for k in parts))
        assert row["policy_step"] == row["step"]
        (media,) = row["media"]
        assert (folder.path / "media" / f"{media['hash']}.png").is_file() and media["visual_tokens"] > 0
    groups = {}
    for row in table.to_pylist():
        groups.setdefault(row["group_id"], []).append(row["advantage"])
    assert all(len(g) == 4 and abs(sum(g)) < 1e-6 for g in groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_checkpoints_load_with_the_usual_libraries(tiny_models, tmp_path, whole, lora):
    model = tiny_models["qwen3_vl"]
    words = ("model.lora.rank=4", "model.train=[language]", "eval.samples=0")
    session = start(tmp_path, model, *words) if lora else whole
    saved = session.folder.checkpoints / "step-000003"
    loaded = AutoModelForImageTextToText.from_pretrained(model if lora else saved)
    loaded = PeftModel.from_pretrained(loaded, str(saved)) if lora else loaded
    ours = dict(session.parts.policy.model.named_parameters())
    assert len(AutoProcessor.from_pretrained(saved).tokenizer) == len(session.parts.policy.processor.tokenizer)
    for name, parameter in loaded.named_parameters():
        assert (parameter == ours[name]).all(), name


def test_same_seed_same_weights_whatever_is_measured_and_kept(tiny_models, tmp_path, whole):
    again = start(tmp_path, tiny_models["qwen3_vl"], "seed=1", "eval.samples=0", "store.media=none")
    assert not (again.folder.path / "media").exists() and RunFolder(again.folder.path).rollouts().num_rows == 48
    pairs = zip(*([p for _, p in session.parts.policy.trainable()] for session in (whole, again)), strict=True)
    assert all((a == b).all() for a, b in pairs)


@pytest.mark.slow
def test_other_weights_in_the_task_file_are_told_on_resume(tiny_models, tmp_path, monkeypatch, capsys):
    start(tmp_path, tiny_models["qwen3_vl"], "steps=1", "eval.samples=0")
    start(tmp_path, tiny_models["qwen3_vl"], "steps=1", "eval.samples=0")
    said = capsys.readouterr().out
    assert "warning" not in said and "inert" not in said  # the dry run names what is usual
    monkeypatch.setattr(tasks.load_class(f"{tmp_path}/shades.py"), "rewards", {"vowels": 1.0, "short": 0.5})
    start(tmp_path, tiny_models["qwen3_vl"], "steps=1", "eval.samples=0")
    assert "have other weights: short 0.1 -> 0.5" in capsys.readouterr().out
