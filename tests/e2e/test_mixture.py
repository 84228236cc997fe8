"""A run of two tasks: killed and resumed it is the same run, and two processes do what one does."""

import signal

import pytest

from tests.e2e.runs import assert_same_run, finished, kill_after, metrics, run, write_config
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow

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
