"""Faults that users of other trainers have reported, tried here."""

import json
import signal

import pytest
from PIL import Image

from tests.e2e.runs import ROOT, kill_after, run
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
SMALL = ("steps=10", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=0",
         "save.every=4", "save.keep=9", "log.samples_every=0", "train.schedule=constant")
KINDS = {"stream": ("data.stream=true", "data.index=file", "data.shuffle_buffer=8"),
         "curriculum": ("curriculum.name=sec",), "mixture": ()}


def write(folder, kind):
    """A config with 40 rows of three categories; of a mixture two tasks with 20 each."""
    rows = []
    for i in range(40):
        Image.new("RGB", (64, 48), (5 * i, 90, 200)).save(folder / f"{i}.png")
        rows.append({"id": f"row-{i}", "image": f"{i}.png", "width": 64, "height": 48, "expression": "the circle",
                     "category": "abc"[i % 3], "boxes": [{"box": [1, 2, 30, 40]}]})
    parts = {"a": rows[:20], "b": rows[20:]} if kind == "mixture" else {"a": rows}
    for name, own in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)))
    task = (f"task: {{name: grounding, drawn: false}}\ndata: {{train: {folder}/a.jsonl}}" if kind != "mixture" else
            "task: null\ntasks:\n" + "\n".join(f"- {{name: grounding, label: {name}, drawn: false, data: {{train: "
                                                f"{folder}/{name}.jsonl}}}}" for name in parts))
    (folder / "own.yaml").write_text(f"extends: {ROOT}/configs/quickstart.yaml\n{task}\n")
    return folder / "own.yaml"


def drawn(folder):
    """The prompts of each step, in any order."""
    rows = RunFolder(folder).rollouts(columns=["step", "sample_id"]).to_pylist()
    return [sorted({row["sample_id"] for row in rows if row["step"] == step}) for step in range(10)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_resume_the_prompts_are_those_that_would_have_come(tmp_path, kind, processes):
    """EasyR1#319, rllm#39, open-instruct#1523: the data loader began anew, so the same prompts came again."""
    config, words = write(tmp_path, kind), (*SMALL, *KINDS[kind])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(config, whole, *words).returncode == 0
    assert kill_after(config, broken, 5, *words) == -signal.SIGKILL
    done = run(config, broken, *words, processes=processes)
    assert done.returncode == 0 and "going on from" in done.stdout, done.stderr
    assert drawn(broken) == drawn(whole)
    assert all(len(step) == 2 for step in drawn(whole))
    if kind == "stream":  # within one pass over the rows none comes twice
        assert len({id for step in drawn(whole) for id in step}) == 20
