"""Runs that generate beside the update: killed and resumed they are the same run, and two processes draw
what one does."""

import json
import shutil
import signal

import pytest

from tests.e2e.runs import assert_same_run, finished, kill_after, metrics, run, weights, write_config
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
STEPS = 7
ASYNC = ("extends=algorithms/decoupled_ppo.yaml", "rollout.minibatches=1", f"steps={STEPS}", "save.every=3",
         "eval.every=4", "log.samples_every=0")
CASES = {"one": ("async.max_staleness=1",),
         "three, refilled": ("async.max_staleness=3", "curriculum.keep=mixed", "curriculum.max_refills=1",
                             "rollout.group_size=2", "rollout.max_new_tokens=2"),
         "lora, greedy": ("async.max_staleness=1", "model.lora.rank=4", "model.lora.dropout=0.1",
                          "algo.advantage=remax", "rollout.minibatches=2", "rollout.updates=2")}


def rollouts(folder):
    return RunFolder(folder).rollouts().to_pylist()


@pytest.fixture(scope="module")
def plain(tiny_models, tmp_path_factory):
    """The config, and the folder of an undisturbed run of the case "one"."""
    folder = tmp_path_factory.mktemp("plain")
    config = write_config(folder, tiny_models["qwen3_vl"])
    finished(config, folder / "whole", *ASYNC, *CASES["one"])
    return config, folder / "whole"


@pytest.mark.parametrize("case", CASES)
def test_kill_and_resume_is_exact(plain, tmp_path, case):
    config, whole = plain
    broken, words = tmp_path / "broken", (*ASYNC, *CASES[case])
    if case != "one":
        whole = tmp_path / "whole"
        finished(config, whole, *words)
    assert kill_after(config, broken, 4, *words) == -signal.SIGKILL
    if case == "three, refilled":  # once more, from the resumed run
        assert kill_after(config, broken, 6, *words) == -signal.SIGKILL
    assert "resuming from" in finished(config, broken, *words).stdout
    assert_same_run(broken, whole, STEPS)
    ages = {(r["step"], r["step"] - r["policy_step"]) for r in rollouts(whole)}
    if case == "three, refilled":
        assert ages >= {(0, 0), (1, 1), (2, 2), (3, 3), (4, 1)} and max(age for _, age in ages) == 3
        assert any(m["curriculum/refills"] for m in metrics(whole))
    else:
        assert ages == {(step, min(step, 1)) for step in range(STEPS)}
    lines = metrics(whole)
    assert all(m["async/staleness_max"] <= 3 for m in lines)
    assert all(m["correction/weight"] != 1 and m["mismatch/kl"] > 1e-5 for m in lines[1:])


def test_weights_that_stay_give_the_run_without_it(tiny_models, tmp_path):
    """Nothing but the weights tells the two apart: the same draws, answers, rewards and evaluations."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = (*ASYNC, "train.lr=1e-30", "train.weight_decay=0", "steps=5")
    for name, more in (("off", "async.max_staleness=0"), ("on", "async.max_staleness=2")):
        finished(config, tmp_path / name, *words, more)
    columns = ("step", "group_id", "index", "sample_id", "completion", "token_ids", "parts", "reward", "advantage")
    found, other = ([[r[c] for c in columns] for r in rollouts(tmp_path / name)] for name in ("on", "off"))
    assert found == other
    scores = [[(e["step"], e["reward/mean"]) for e in metrics(tmp_path / name, "eval.jsonl")] for name in ("on", "off")]
    assert scores[0] == scores[1] and [step for step, _ in scores[0]] == [0, 4, 5]
    assert not (tmp_path / "off" / "timeline.jsonl").exists()


def test_the_timeline_shows_generation_beside_the_update(plain):
    _, whole = plain
    lines = [json.loads(line) for line in (whole / "timeline.jsonl").read_text().splitlines()]
    assert all(0 <= r["end"] - r["start"] < 300 and r["start"] > 1e9 for r in lines)
    ahead = {r["step"]: r for r in lines if r["phase"] == "ahead"}
    train = {r["step"]: r for r in lines if r["phase"] == "train"}  # the last span of a step: the update
    assert [*ahead] == [*range(1, STEPS)] and [*train] == [*range(STEPS)]
    for step, r in ahead.items():
        assert r["start"] < train[step - 1]["end"] and r["end"] < train[step]["start"]
    assert all(m["time/ahead_s"] > 0 for m in RunFolder(whole).metrics() if m["step"])


def test_two_processes_draw_what_one_does(tiny_models, tmp_path, staleness=2):
    """In the steps before sums in another order can show; and they go on from a checkpoint as if never stopped."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = (*ASYNC, f"async.max_staleness={staleness}", "steps=5", "save.every=2", "curriculum.keep=mixed",
             "curriculum.max_refills=1", "save.keep=9")
    assert run(config, tmp_path / "one", *words).returncode == 0
    for name in ("two", "parts"):
        done = finished(config, tmp_path / name, *words, processes=2)
        if name == "two":
            shutil.copytree(tmp_path / "two", tmp_path / "parts")
            for later in ("step-000004", "step-000005"):
                shutil.rmtree(tmp_path / "parts" / "checkpoints" / later)
    assert "resuming from" in done.stdout and weights(tmp_path / "two", 5) == weights(tmp_path / "parts", 5)
    def told(name, steps):
        return sorted((r["step"], r["group_id"], r["sample_id"], r["index"], r["completion"], r["policy_step"])
                      for r in rollouts(tmp_path / name) if r["step"] < steps)
    assert told("two", 2) == told("one", 2) and told("two", 5) == told("parts", 5)
    assert metrics(tmp_path / "two") == metrics(tmp_path / "parts")
    ages = {(r["step"], r["step"] - r["policy_step"]) for r in rollouts(tmp_path / "two")}
    assert ages >= {(step, 1 + (step - 1) % staleness) for step in range(1, 5)}


def test_an_error_in_the_thread_of_one_process_ends_all(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    fails = 'if answer.step == 2 and sample.id.endswith("9"):\n            return {"unknown": 1.0}\n'
    task.write_text(task.read_text().replace("        vowels = sum", f"        {fails}        vowels = sum"))
    done = run(config, tmp_path / "run", *ASYNC, *CASES["one"], "eval.samples=0", "curriculum.name=sequential",
               processes=2)
    assert done.returncode != 0 and done.stderr.count("error: ") >= 2, done.stderr
    assert [m["step"] for m in metrics(tmp_path / "run")] == [0, 1]
    assert "closed by peer" not in done.stderr and "gloo" not in done.stderr
