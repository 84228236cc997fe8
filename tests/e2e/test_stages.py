"""A run of several stages, killed in each of them and started again, ends as an undisturbed one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT, finished, metrics, run, weights, write_config
from vlrl.tools.stages.stage_list import read_stages

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
         "rollout.group_size=2", "store.media=none", "log.samples_every=0", "stages.4.steps=1")


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


@pytest.fixture(scope="module")
def undisturbed(tiny_models, tmp_path_factory):
    """The config, and the folder of a run of one process."""
    folder = tmp_path_factory.mktemp("stages")
    config = write_config(folder, tiny_models["qwen3_vl"], STAGES)
    finished(config, folder / "whole", *SMALL)
    return config, folder / "whole"


def test_kill_in_any_stage_is_exact(undisturbed, tmp_path):
    (config, whole), broken = undisturbed, tmp_path / "broken"
    for there in ("rl/metrics.jsonl", "own/round-01/answers.jsonl", "mean/config.yaml"):
        kill_when(config, broken, there)
    finished(config, broken, *SMALL)
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


NUMBERS = ("reward/mean", "loss", "grad_norm", "kl", "entropy", "guided/loss", "reward/std")


def start(config: Path, folder: Path, said: Path) -> list[forked.Process]:
    """Starts the run as two ranks."""
    with open(said, "w") as text:
        return [forked.Process([str(ROOT / "train.py"), str(config), f"run.dir={folder}", *SMALL], {**ENV, **env},
                               folder.parent, text, text) for env in forked.ranks(2)]


def kill_both_when(config: Path, folder: Path, there: str) -> None:
    """Starts two ranks and kills both once a file below their folder holds a whole line."""
    said = folder.parent / "said.txt"
    ranks, end = start(config, folder, said), time.monotonic() + 600
    while not ((folder / there).exists() and b"\n" in (folder / there).read_bytes()):
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < end, said.read_text()
        time.sleep(0.005)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    assert [rank.wait(60) for rank in ranks] == [-signal.SIGKILL] * 2


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint of a stage, or those that a merge wrote."""
    file = sorted([*folder.glob("checkpoints/step-*/*model.safetensors"), *folder.glob("model/*.safetensors")])[-1]
    return load_file(file)


def answers_of(folder: Path, number: int) -> list[dict]:
    lines = (folder / f"own/round-{number:02d}/answers.jsonl").read_text().splitlines()[1:]
    rows = [{k: v for k, v in json.loads(line).items() if isinstance(v, (str, int, bool))} for line in lines]
    return sorted(rows, key=lambda row: (row["number"], row["index"]))


def test_two_processes_give_what_one_gives_and_go_on_exactly(undisturbed, tmp_path):
    """All kinds of stages by one process and by two: the same draws, answers and figures, and weights but for rounding;
    two that are killed while a round draws end as two that are not, bit for bit."""
    (config, one), two, broken = undisturbed, tmp_path / "two", tmp_path / "broken"
    finished(config, two, *SMALL, processes=2, timeout=900)
    for stage in ("cold", "rl", "last"):
        for a, b in zip(metrics(one / stage), metrics(two / stage), strict=True):
            for name in [n for n in NUMBERS if a.get(n) is not None]:
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), (stage, name)
    for number in (1, 2):
        assert answers_of(one, number) == answers_of(two, number)
    for stage in ("cold", "rl", "own/round-02", "mean", "last"):
        a, b = saved(one / stage), saved(two / stage)
        assert a.keys() == b.keys()
        apart = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
        # a first step of Adam is lr x the gradient's sign, which rounding turns where the gradient is nearly 0
        assert apart.mean() < 2e-6 and (apart > 1e-4).float().mean() < 1e-3, stage
    kill_both_when(config, broken, "own/round-01/answers.jsonl")
    finished(config, broken, *SMALL, processes=2, timeout=900)
    for stage, step in (("cold", 2), ("rl", 2), ("last", 1)):
        assert weights(broken / stage, step) == weights(two / stage, step), stage
        assert metrics(broken / stage) == metrics(two / stage)
    assert [answers_of(broken, n) for n in (1, 2)] == [answers_of(two, n) for n in (1, 2)]
