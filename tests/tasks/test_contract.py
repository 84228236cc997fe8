"""What every built-in task must do; see vlrl/task.py."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.config import DataSettings
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, builtin_names, check_parts, load

VARIANTS = {
    "grounding": [{"drawn": True, "count": 40}, {}],
    "classification": [{"thinking": "no_thinking"}, {"thinking": "thinking"}],
    "digits": [{"thinking": "both"}],
}
ROWS = {
    "grounding": [{"width": 90, "height": 60, "expression": "mug", "boxes": [{"box": [1, 2, 30.5, 40]}]},
                  {"width": 90, "height": 60, "expression": "mug", "boxes": []}],
    "classification": [{"label": "cat", "labels": ["cat", "dog"]}, {"label": "7"}],
}
CASES = [(name, i) for name in builtin_names() for i in range(len(VARIANTS.get(name, [{}])))]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
           "<|vision_end|>", "<|box_start|>", "<|box_end|>", "<think>", "</think>", "<answer>", "</answer>", "\0",
           "\ufffd"]
JUNK = ["", " ", "junk", "[1, 2, 3, 4]" * 100, "<answer>" * 50, "x" * 100_000, "[" * 100_000, "9" * 100_000,
        "<think></think><answer></answer>", "[nan, inf, -1, 1e999]", "None", "\u0663", *SPECIAL]
PIECES = [*SPECIAL, "[", "]", ",", "1", "23.5", "-", " ", "cat", "none"]


@cache
def case(name: str, variant: int, folder: str) -> tuple[Task, list]:
    """The task and up to 40 samples, each under every template."""
    task = load(name, VARIANTS.get(name, [{}])[variant])
    if name in ROWS and not getattr(task, "drawn", False):
        path = f"{folder}/{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": f"r{i}", **row}) + "\n" for i, row in enumerate(ROWS[name]))
        task.data = DataSettings(train=path, heldout=path)
    samples = task.samples("train")
    few = [samples[i] for i in range(min(len(samples), 40))]
    return task, [replace(s, prompt=template) for s in few for template in task.templates]


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def built(request, tmp_path_factory):
    return case(*request.param, str(tmp_path_factory.getbasetemp()))


def test_samples_are_unique_and_deterministic(built):
    task, _ = built
    for split in ("train", "heldout"):
        samples, again = task.samples(split), task.samples(split)
        ids = [samples[i].id for i in range(min(len(samples), 500))]
        assert len(ids) == len(set(ids)) > 0
        assert [m.kind for m in samples[0].media] == [m.kind for m in again[0].media]
        assert samples[len(samples) - 1].row == again[len(samples) - 1].row
        assert json.loads(json.dumps(samples[0].row)) == samples[0].row


def test_the_oracle_scores_the_maximum(built):
    task, samples = built
    best = sum(max(w, 0) for w in task.weights_at(0).values())
    for sample in samples:
        answer = task.oracle(sample)
        assert answer is not None
        parts = task.score(sample, parse_answer(answer))
        assert task.combine(parts, task.weights_at(0)) == pytest.approx(best)


def check(task, sample, text):
    answer = parse_answer(text)
    parts = task.score(sample, answer)
    check_parts(task, parts)
    assert all(value is None or 0 <= value <= 1 for value in parts.values())
    parsed = task.parse(sample, answer)
    json.dumps([parsed, task.target(sample), task.overlay(sample, parsed)], allow_nan=False)
    json.dumps(task.metrics(sample, answer, parts), allow_nan=False)
    return task.combine(parts, task.weights_at(0))


@pytest.mark.parametrize("text", JUNK, ids=lambda t: repr(t[:16]))
def test_junk_never_raises_and_stays_bounded(built, text):
    task, samples = built
    for sample in samples[:3]:
        check(task, sample, text)


@pytest.mark.parametrize("name", builtin_names())
@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_raises(tmp_path_factory, name, text):
    for variant in range(len(VARIANTS.get(name, [{}]))):
        task, samples = case(name, variant, str(tmp_path_factory.getbasetemp()))
        for sample in samples[:2]:
            check(task, sample, text)


def test_the_messages_show_every_media(built):
    task, samples = built
    for sample in samples[:3]:
        kinds = [part["type"] for message in task.messages(sample) for part in message["content"]]
        assert kinds == [*(m.kind for m in sample.media), "text"]
        assert "{" not in task.messages(sample)[-1]["content"][-1]["text"]


def test_importing_every_task_loads_no_torch():
    code = ("import sys, vlrl.types, vlrl.data, vlrl.media, vlrl.video, vlrl.coordinates, vlrl.scoring\n"
            "import vlrl.checkpoint, vlrl.rewards.boxes, vlrl.rewards.text\n"
            "from vlrl.task import builtin_names, load\n"
            "for name in builtin_names(): load(name)\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
