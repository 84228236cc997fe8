"""A run of several stages, killed in each of them and started again, ends as an undisturbed one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, metrics, run, weights, write_config
from vlrl.store.stage_list import read_stages

pytestmark = pytest.mark.slow

STAGES = """
stages:
  - {name: cold, kind: sft}
  - {name: rl, kind: rl, model: {lora: {rank: 4}}}
  - {name: own, kind: rounds, rounds: {count: 2, prompts: 6, answers: 4, least: 0.01, epochs: 1, choose: shortest}}
  - {name: mean, kind: merge, merge: {other: cold, share: 0.25}}
  - {name: last, kind: sft, begin: cold, steps: 1}
"""
SMALL = ("steps=2", "save.every=1", "eval.samples=2", "eval.every=1", "rollout.prompts_per_step=2",
         "rollout.group_size=2", "store.media=none", "log.samples_every=0")


def kill_when(config: Path, folder: Path, there: str) -> None:
    """Starts the run and kills it once a file below its folder holds a whole line."""
    with open(os.devnull, "w") as nowhere:
        process = forked.Process([str(ROOT / "train.py"), str(config), f"run.dir={folder}", *SMALL], ENV, folder.parent,
                                 nowhere, nowhere)
    end = time.monotonic() + 300
    while not ((folder / there).exists() and b"\n" in (folder / there).read_bytes()):
        assert process.poll() is None and time.monotonic() < end, there
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_kill_in_any_stage_is_exact(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"], STAGES)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = run(config, whole, *SMALL)
    assert done.returncode == 0, done.stderr
    for there in ("rl/metrics.jsonl", "own/round-01/answers.jsonl", "mean/config.yaml"):
        kill_when(config, broken, there)
    again = run(config, broken, *SMALL)
    assert again.returncode == 0, again.stderr
    for stage, step in (("cold", 2), ("rl", 2), ("last", 1)):
        assert weights(broken / stage, step) == weights(whole / stage, step), stage
        assert metrics(broken / stage) == metrics(whole / stage)
        assert metrics(broken / stage, "eval.jsonl") == metrics(whole / stage, "eval.jsonl")
    for folder in (whole, broken):
        assert [*read_stages(folder).done] == ["cold", "rl", "own", "mean", "last"]
    answers = [[json.loads(line) for line in (f / "own/round-02/answers.jsonl").read_text().splitlines()[1:]]
               for f in (whole, broken)]
    assert answers[0] == answers[1] and len(answers[0]) == 6 * 4
    kept = [json.loads(line) for line in (whole / "own/round-02/rows.jsonl").read_text().splitlines()]
    assert {row["number"] for row in kept} <= {*range(6, 12)} and all(row["reward"] >= 0.01 for row in kept)
    assert {row["model"] for row in kept} == {read_stages(whole / "own").done["round-01"]["model"]}
    nothing = run(config, whole, *SMALL)
    assert nothing.returncode == 0 and "begins with" not in nothing.stdout  # all is done
    other = run(config, whole, *SMALL, "stages.1.train.lr=0.5")
    assert other.returncode == 1 and "train.lr: 0.001 -> 0.5" in other.stderr


def test_nothing_begins_where_a_later_stage_is_wrong(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"], STAGES)
    for words, said in ((["stages.4.data.solutions=none.jsonl"], "stage last: data.solutions='none.jsonl'"),
                        (["stages.2.rounds.choose=besst"], "stage own: rounds.choose='besst'"),
                        (["stages.1.algo.loss=cizpo"], "stage rl: algo.loss='cizpo'")):
        done = run(config, tmp_path / "run", *SMALL, *words)
        assert done.returncode == 1 and said in done.stderr, done.stderr
        assert not (tmp_path / "run" / "cold").exists()
    dry = run(config, tmp_path / "run", *SMALL, *words, "--dry-run")
    assert dry.returncode == 1 and said.partition(": ")[2] in dry.stdout
