"""Runs whose rows are read one at a time: the same run as with all rows in memory, and each process reads its own."""

import json
import shutil
import signal

import pytest
from PIL import Image

from tests.e2e.runs import ENV, assert_same_run, finished, kill_after, metrics, run, weights
from vlrl.checks.preflight import FIRST, OTHERS
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
ROWS = 2 * OTHERS
"""More than a start looks at."""
TASK = '''
import os
from vlrl.task import Task

class Rows(Task):
    prompt = "How bright is {id}?"
    rewards = {"vowels": 1.0}

    def sample_from_row(self, row, root=None):
        sample = super().sample_from_row(row, root)
        with open(os.environ["READS"] + os.environ.get("RANK", "0"), "a") as file:
            file.write(sample.id + "\\\\n")
        return sample

    def score(self, sample, answer):
        return {"vowels": sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)}
'''.replace("\\\\", "\\")


@pytest.fixture
def made(tmp_path, tiny_models):
    """A function that writes rows, a task and a config."""
    for shade in range(4):
        Image.new("RGB", (64, 64), (60 * shade, 80, 120)).save(tmp_path / f"{shade}.png")

    def make(bad=(), count=60):
        rows = [{"id": f"r{i}", "image": f"{i % 4}.png"} for i in range(count)]
        for i in bad:
            rows[i]["image"] = "gone.png"
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "rows.py").write_text(TASK)
        config = tmp_path / "rows.yaml"
        config.write_text(f"""
steps: 5
task: {tmp_path}/rows.py:Rows
data: {{train: {tmp_path}/rows.jsonl, cache: {tmp_path}/cache, index: lazy, quarantine: true}}
model: {{name: {tiny_models["qwen3_vl"]}}}
rollout: {{prompts_per_step: 4, group_size: 2, max_new_tokens: 4}}
train: {{lr: 1.0e-3}}
eval: {{samples: 0}}
save: {{every: 3}}
""")
        return config
    return make


def reads(tmp_path, name, rank=0):
    return (tmp_path / f"{name}{rank}").read_text().split()


def test_one_row_at_a_time_is_the_same_run_and_goes_on_after_a_kill(made, tmp_path, monkeypatch):
    config = made(count=ROWS)
    for index in ("memory", "lazy"):
        monkeypatch.setitem(ENV, "READS", str(tmp_path / f"{index}-"))
        finished(config, tmp_path / index, f"data.index={index}", timeout=900)
    assert metrics(tmp_path / "lazy") == metrics(tmp_path / "memory")
    assert weights(tmp_path / "lazy", 5) == weights(tmp_path / "memory", 5)
    assert len(reads(tmp_path, "memory-")) == ROWS
    assert 5 * 4 <= len({*reads(tmp_path, "lazy-")}) <= 5 * 4 + FIRST + OTHERS
    config = made(bad=range(0, 60, 5))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(config, whole, timeout=900)
    rejected = [json.loads(line)["reason"] for line in (whole / "rejected.jsonl").read_text().splitlines()]
    assert rejected and all("rows.jsonl:" in reason and "gone.png" in reason for reason in rejected)
    assert kill_after(config, broken, 3, timeout=900) == -signal.SIGKILL
    assert run(config, broken, timeout=900).returncode == 0
    assert_same_run(broken, whole)


def test_a_process_reads_its_own_rows_alone(made, tmp_path, monkeypatch):
    config = made(count=ROWS)
    monkeypatch.setitem(ENV, "READS", str(tmp_path / "two-"))
    finished(config, tmp_path / "two", "steps=4", "curriculum=sequential", processes=2, timeout=900)
    assert {*reads(tmp_path, "two-", 1)} == {f"r{i}" for i in range(1, 16, 2)}
    checking = {*reads(tmp_path, "two-", 0)}  # the start's checks too
    assert {f"r{i}" for i in range(0, 16, 2)} <= checking and len(checking) <= 8 + FIRST + OTHERS


def drawn(folder):
    return {(row["step"], row["group_id"], row["sample_id"]) for row in RunFolder(folder).rollouts(
        columns=["step", "group_id", "sample_id"]).to_pylist()}


def test_a_stream_of_shards_goes_on_in_the_middle_of_one(made, tmp_path, monkeypatch):
    monkeypatch.setitem(ENV, "READS", str(tmp_path / "stream-"))
    config, whole, broken = made(), tmp_path / "whole", tmp_path / "broken"
    every = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    for n in range(3):
        (tmp_path / f"rows-{n}.jsonl").write_text("".join(every[20 * n:20 * n + 20]))
    words = (f"data.train={tmp_path}/rows-?.jsonl", "data.index=auto", "data.stream=true", "data.shuffle_buffer=7")
    finished(config, whole, *words, timeout=900)
    order = [int(id[1:]) for id in dict.fromkeys(row["sample_id"] for row in RunFolder(whole).rollouts().to_pylist())]
    assert order != sorted(order) and set(order) <= {*range(21)}  # near the beginning of the disk, in 3 buffers of 7
    assert kill_after(config, broken, 3, *words, timeout=900) == -signal.SIGKILL
    shutil.copytree(broken, tmp_path / "two")
    finished(config, broken, *words, timeout=900)
    assert_same_run(broken, whole)
    finished(config, tmp_path / "two", *words, processes=2, timeout=900)
    assert drawn(tmp_path / "two") == drawn(whole)
