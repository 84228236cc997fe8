"""A killed and resumed run ends exactly as an undisturbed one."""

import shutil
import signal

import pytest

from tests.e2e.runs import assert_same_run, finished, kill_after, metrics, run, weights, write_config
from vlrl.store import RunFolder, checkpoint

pytestmark = pytest.mark.slow


def test_kill_and_resume_is_exact(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = ("steps=8", "save.every=2", "eval.every=4", "rollout.prompts_per_step=2")
    finished(config, whole, *words)
    assert kill_after(config, broken, 3, *words) == -signal.SIGKILL
    assert kill_after(config, broken, 6, *words) == -signal.SIGKILL  # once more, from the resumed run
    assert "resuming from" in finished(config, broken, *words).stdout
    assert_same_run(broken, whole, 8)
    assert [m["step"] for m in metrics(broken)] == list(range(8))
    assert [e["step"] for e in metrics(whole, "eval.jsonl")] == [0, 4, 8]


def test_lora_resume_is_exact_with_dropout(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen2_5_vl"], "algo: {kl_coef: 0.05}")
    words = ("steps=6", "save.every=2", "eval.every=0", "model.lora.rank=4", "model.lora.dropout=0.1",
             "rollout.updates=2", "rollout.minibatches=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(config, whole, *words).returncode == 0
    kill_after(config, broken, 3, *words)
    assert run(config, broken, *words).returncode == 0
    assert_same_run(broken, whole, 6)


def test_ctrl_c_saves_and_says_how_to_go_on(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    folder = tmp_path / "run"
    assert kill_after(config, folder, 3, "save.every=0", how=signal.SIGINT) == 130
    saved = [p.name for p in (folder / "checkpoints").glob("step-*")]
    assert len(saved) == 1 and RunFolder(folder).last_heartbeat()["state"] == "interrupted"
    assert "resuming from" in finished(config, folder, "steps=6", "save.every=0", "train.schedule=cosine").stdout
    assert [m["step"] for m in metrics(folder)] == list(range(6))
    over = run(config, folder, "steps=6", "save.every=0")
    assert over.returncode == 0 and len(metrics(folder)) == 6  # nothing is left to do


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_resume_on_another_number_of_processes(tiny_models, tmp_path, before, after):
    """Weights and curriculum are those of the checkpoint; the next step draws the same prompts and the same answers."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    task.write_text(task.read_text().replace('row={"id"', 'row={"category": "abc"[i % 3], "id"'))
    words = ("save.every=3", "eval.samples=0", "curriculum.name=sec", "rollout.group_size=2", "train.schedule=constant",
             "train.warmup=0")
    first, same, other = tmp_path / "first", tmp_path / "same", tmp_path / "other"
    finished(config, first, *words, "steps=3", processes=before)
    for folder, processes in ((same, before), (other, after)):
        shutil.copytree(first, folder)
        assert "resuming from" in finished(config, folder, *words, "steps=4", "save.keep=9", processes=processes).stdout
    assert weights(first, 3) == weights(other, 3)
    drawn = [{(r["group_id"], r["sample_id"], r["index"]): r["token_ids"] for r in RunFolder(f).rollouts(3).to_pylist()}
             for f in (same, other)]
    assert len(drawn[0]) == 8 and drawn[0] == drawn[1]
    assert metrics(first) == metrics(other)[:3]
    one, two = (checkpoint.load_state(f / "checkpoints" / "step-000004")["source"] for f in (same, other))
    assert one["drawn"] == two["drawn"] and (one["history"]["visits"] == two["history"]["visits"]).all()
    assert one["sampler"].keys() == two["sampler"].keys()
