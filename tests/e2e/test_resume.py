"""Killed and resumed runs end exactly as undisturbed ones: of one task, of a mixture, and killed in random phases
(the long version: benchmarks/)."""

import shutil
import signal

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, assert_same_run, finished, kill_after, metrics, run, weights, write_config
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


SECOND = '''
class Brief(Shades):
    """The shorter the better; its samples have the ids of the other's."""
    rewards = {"brief": 1.0}

    def score(self, sample, answer):
        return {"brief": 1 / max(1, len(answer.text))}
'''


def test_a_mixture_resumes_and_runs_with_two_processes(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    task.write_text(task.read_text() + SECOND)
    text = config.read_text()
    config.write_text(text.replace(f"task: {task}:Shades", f"tasks: [{{name: '{task}:Shades', weight: 3}}, "
                                   f"{{name: '{task}:Brief', label: brief}}]"))
    words = ("steps=5", "save.every=1", "eval.every=3")  # one is whole when the next one is begun
    whole, broken, two = (tmp_path / name for name in ("whole", "broken", "two"))
    finished(config, whole, *words)
    assert kill_after(config, broken, 3, *words) == -signal.SIGKILL
    again = run(config, broken, *words)
    assert again.returncode == 0 and "resuming from" in again.stdout
    assert "now have other weights" not in again.stdout
    assert_same_run(broken, whole)
    assert [m["Shades/share"] for m in metrics(whole)] == [0.75] * 5
    assert {"brief/brief", "brief/reward/mean/ci95_low", "Shades/vowels"} <= metrics(whole, "eval.jsonl")[-1].keys()
    rows = RunFolder(whole).rollouts(0, columns=["task", "sample_id", "weights"]).to_pylist()
    assert {r["task"] for r in rows} == {"Shades", "brief"} == {r["sample_id"].partition("/")[0] for r in rows}
    finished(config, two, *words[1:], "steps=2", "train.schedule=constant", processes=2)
    drawn = [{(r["step"], r["group_id"], r["sample_id"]) for r in RunFolder(folder).rollouts(0).to_pylist()}
             for folder in (whole, two)]
    assert drawn[0] == drawn[1]
    for name in ("reward/mean", "Shades/reward/mean", "brief/reward/brief", "brief/share"):
        assert metrics(two)[0][name] == pytest.approx(metrics(whole)[0][name], rel=1e-3, abs=1e-5), name
    changed = run(config, whole, *words, "tasks.1.weight=2")
    assert changed.returncode != 0 and "tasks.1.weight: None -> 2.0" in changed.stderr


@pytest.mark.long
def test_three_kills(tmp_path):
    words = [str(ROOT / "benchmarks" / "kill_matrix.py"), "--kills", "3", "--seed", "8",
             "--out", str(tmp_path / "table.md")]
    done = forked.run(words, ENV, tmp_path, 1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed in") == 3 + 1 and "| all | 3 | 3 |" in (tmp_path / "table.md").read_text()
