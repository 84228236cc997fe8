"""Plain functions as reward parts: what each signature is called with, what may be returned, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlrl.checks.tasks import TaskSamples, task_findings
from vlrl.config import config_of
from vlrl.config.base import Named
from vlrl.data.coordinates import make
from vlrl.data.row_fields import ground_truth
from vlrl.errors import ConfigError, TaskError
from vlrl.rewards.text import parse_answer
from vlrl.services.functions import RewardFunction
from vlrl.task import task_samples
from vlrl.training.build_task import make_task
from vlrl.types import Sample

ROW = {"id": "7", "question": "2 + 2?", "answer": "4", "level": 3, "meta": {"level": 3}}
ANSWERS = [parse_answer("4", n_tokens=1), parse_answer("five", n_tokens=2)]
CHAT = {**ROW, "prompt": [{"role": "user", "content": "2 + 2?"}]}


def parts(function, row=ROW, answers=ANSWERS, **options):
    own = RewardFunction("task.parts.0", Named(name=f"rewards.py:{function.__name__}", **options), function)
    return own.parts(Sample(id="7", row=row), answers)


def plain(completion, row):
    assert "meta" not in row and row["level"] == 3
    return completion == row["answer"]


def columns(text, level, /, *, answer, bonus=0.0):
    return float(text == answer) + level + bonus


def second(text, anything):
    return anything["level"]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "known": data_source}


def easy_one(reward_input):
    return {"overall": float(reward_input["response"] == reward_input["ground_truth"]),
            "length": reward_input["response_length"]}


def easy(reward_inputs, format_weight=0.1):
    return [{"overall": r["response"] == r["ground_truth"], "format": format_weight} for r in reward_inputs]


def early(predicts, ground_truths):
    return [float(p == t) for p, t in zip(predicts, ground_truths, strict=True)]


def trl(completions, answer, **kwargs):
    assert kwargs["level"] == [3, 3] and len(kwargs["prompts"]) == 2
    return [c == a for c, a in zip(completions, answer, strict=True)]


def trl_chat(prompts, completions):
    assert prompts[1] == CHAT["prompt"]
    return [len(c[0]["content"]) for c in completions]


async def later(completion):
    return len(completion)


@pytest.mark.parametrize(("function", "row", "options", "expected"), [
    (plain, ROW, {}, [{"plain": True}, {"plain": False}]),
    (plain, ROW, {"part": "right"}, [{"right": True}, {"right": False}]),
    (columns, ROW, {"bonus": 0.5}, [{"columns": 4.5}, {"columns": 3.5}]),
    (second, ROW, {}, [{"second": 3}] * 2),
    (verl, {**ROW, "data_source": 8}, {"returns": ["score", "known"]}, [{"score": 1.0, "known": 8},
                                                                       {"score": 0.0, "known": 8}]),
    (easy_one, ROW, {"returns": ["overall", "length"]}, [{"overall": 1.0, "length": 1}, {"overall": 0.0, "length": 2}]),
    (easy, ROW, {"returns": ["overall", "format"], "format_weight": 0.2}, [{"overall": True, "format": 0.2},
                                                                          {"overall": False, "format": 0.2}]),
    (early, ROW, {}, [{"early": 1.0}, {"early": 0.0}]),
    (trl, ROW, {}, [{"trl": True}, {"trl": False}]),
    (trl_chat, CHAT, {}, [{"trl_chat": 1}, {"trl_chat": 4}]),
    (later, ROW, {}, [{"later": 1}, {"later": 4}]),
    (lambda completion: np.float32(0.5), ROW, {"part": "half"}, [{"half": 0.5}] * 2)])
def test_each_signature_gets_its_arguments(function, row, options, expected):
    assert parts(function, row, **options) == expected


def test_a_function_of_a_group_is_called_once():
    calls = []

    def trl(completions):
        calls.append(completions)
        return [1.0] * len(completions)

    parts(trl)
    assert calls == [["4", "five"]]


def test_boxes_are_converted_for_a_function():
    def area(completion, to_pixels):
        x1, y1, x2, y2 = to_pixels([0, 0, 500, 1000])
        return (x2 - x1) * (y2 - y1)

    def areas(completions, to_pixels):
        return [convert([0, 0, 500, 1000])[2] for convert in to_pixels]

    row = {**ROW, "width": 80, "height": 40}
    for function, expected in ((area, 40 * 40), (areas, 40)):
        own = RewardFunction("s", Named(name=f"f.py:{function.__name__}"), function)
        assert own.parts(Sample(id="7", row=row), ANSWERS, make("norm1000")) == [{function.__name__: expected}] * 2


def test_a_function_that_gets_boxes_in_other_units_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("def f(completion, row): return len(completion)\n"
                                   "def g(completion, row, to_pixels): return len(completion)\n")
    Image.new("RGB", (128, 128)).save("a.png")
    Path("rows.jsonl").write_text(json.dumps({"image": "a.png", "question": "Where?", "answer": "[10, 20, 70, 90]"}))
    for name, coordinates, said in (("f", "norm1000", True), ("g", "norm1000", False), ("f", "original", False)):
        config = config_of({"task": {"name": "rows", "parts": [f"r.py:{name}"], "coordinates": coordinates},
                            "model": {"name": "x"}, "data": {"train": "rows.jsonl"}})
        task = make_task(config)
        samples = TaskSamples(task, task_samples(task, "train"), config.limits)
        found = [f.message for f in task_findings(samples) if f.rule == "box/units"]
        assert bool(found) == said and (not said or "has no parameter `to_pixels`" in found[0])


@pytest.mark.parametrize(("body", "level"), [
    ("[1.0] * len(completions)", "error"), ("[1 / completions.count(c) for c in completions]", "warning"),
    ("[float(len(c)) for c in completions]", None)])
def test_a_constant_function_of_a_group_is_an_error(body, level, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(f"def f(completions, **columns): return {body}\n")
    Path("rows.jsonl").write_text(json.dumps({"question": "Where?", "answer": "here"}))
    config = config_of({"task": {"name": "rows", "parts": ["r.py:f"]}, "model": {"name": "x"},
                        "data": {"train": "rows.jsonl"}})
    task = make_task(config)
    samples = TaskSamples(task, task_samples(task, "train"), config.limits)
    assert [f.level for f in task_findings(samples) if f.rule == "constant"] == ([level] if level else [])


@pytest.mark.parametrize(("row", "truth"), [
    ({"answer": 4}, 4), ({"solution": "a", "label": "b"}, "a"), ({"reward_model": {"ground_truth": "x"}}, "x"),
    ({"ground_truth": None, "label": 0}, 0), ({}, None)])
def test_the_ground_truth_of_a_row(row, truth):
    assert ground_truth(row) == truth


def weights(function, returns):
    named = Named.model_validate({"name": "f.py:f", "returns": returns})
    return dict(RewardFunction("s", named, function).offer.weights)


def test_overall_is_the_reward():
    assert weights(easy, ["overall", "format"]) == {"overall": 1.0, "format": 0.0}
    assert weights(easy, ["accuracy", "format"]) == {"accuracy": 1.0, "format": 1.0}


@pytest.mark.parametrize(("function", "kind", "said"), [
    (lambda completions: [1.0], TaskError, "for 2 completions it returned"),
    (lambda completions: "ab", TaskError, "list with one value each"),
    (lambda completion: {"a": 1.0, "b": 2.0}, TaskError, r"returned a dict with the keys a, b: .*returns: \[a, b\]"),
    (lambda completion, row, missing: 1.0, TaskError, "the parameter 'missing', but the row has no such column"),
    (lambda completions, missing: [1, 1], TaskError, "the parameter 'missing'"),
    (lambda: 1.0, ConfigError, "takes no argument"),
    (lambda task, sample, answers, services: [], ConfigError, "does not declare its parts")])
def test_what_is_refused(function, kind, said):
    with pytest.raises(kind, match=said):
        parts(function)


def test_options_that_a_function_lacks_are_named():
    with pytest.raises(ConfigError, match=r"task\.parts\.0\.scale=2: the function rewards\.py:plain has no parameter"):
        parts(plain, scale=2)
    with pytest.raises(TaskError, match="every call must return the same keys"):
        parts(easy_one, returns=["overall"])
    with pytest.raises(TaskError, match="must return a dict with the keys a"):
        parts(later, returns=["a"])


@given(st.text(max_size=50), st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text())))
def test_no_text_and_no_row_makes_the_call_fail(text, row):
    def either(completion, row):
        return len(completion) + len(row)

    assert isinstance(parts(either, row, [parse_answer(text)])[0]["either"], int)
