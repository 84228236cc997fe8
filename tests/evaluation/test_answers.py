"""tools/evaluation/answers.py with a scripted engine: what is asked, kept and asked again."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from tests.rollout.test_group_source import BAD, Number, encode
from vlrl.config import validate
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.evaluation.evaluate import evaluate
from vlrl.models.processing import PromptTooLong
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task.interface import first_samples
from vlrl.tools.evaluation import answers as module
from vlrl.tools.evaluation.answers import EvalRuntime, draw_answers
from vlrl.tools.evaluation.rows import RowFile
from vlrl.tools.evaluation.settings import Grid
from vlrl.tools.evaluation.summary import summarise
from vlrl.types import Turn


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    BAD.clear()


class Noting(ScriptedEngine):
    def __init__(self, script):
        super().__init__(script)
        self.asked = []

    def generate(self, requests, done=None):
        self.asked += [(r.key, r.sampling.temperature, r.n) for r in requests]
        return super().generate(requests, done)


def ready(script=lambda prompt, i: prompt.text if i % 2 == 0 else "wrong", task=None, remote=False, **settings):
    config = validate({"task": "x", "model": {"name": "x"}, "seed": 3, "eval": {"samples": 10}, **settings})
    task = task or Number()
    task.name = "number"
    return EvalRuntime(config=config, task=task, prefetch=Prefetcher(encode, task, 0), engine=Noting(script),
                       remote=remote)


def asked(r, path, grid=None, splits=("heldout",)):
    settings = (grid or Grid()).settings(r.config)
    file = RowFile(path, {})
    told = []
    draw_answers(r, splits, settings, file, step=7, progress=lambda *words: told.append(words))
    return file, settings, told


def test_greedy_answers_are_those_of_a_run(tmp_path):
    r = ready()
    record, _ = evaluate(r.task, r.prefetch, r.engine, r.config, "heldout", 7)
    before, r.engine.asked = r.engine.asked, []
    file, (setting,), told = asked(r, tmp_path / "a.jsonl")
    assert r.engine.asked == before and told[-1] == ("answering", 10, 10)
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    for name, metric in found.metrics.items():
        assert (metric.mean, metric.low, metric.high) == tuple(
            record[key] for key in (name, f"{name}/ci95_low", f"{name}/ci95_high"))
    assert found.n == record["n"] == 10 and {"reward/mean", "correct_frac", "right"} < found.metrics.keys()
    class Words(Number):
        prompts = ("a {n}", "b {n}")

    seen = []
    r = ready(task=Words())
    r.prefetch.encode = lambda task, sample: seen.append(sample.prompt) or encode(task, sample)
    asked(r, tmp_path / "a.jsonl", Grid(wordings=2))
    assert seen == ["a {n}"] * 10 + ["b {n}"] * 10
    seen.clear()
    asked(r, tmp_path / "b.jsonl")
    assert seen == ["a {n}", "b {n}"] * 5


class Acting(Noting):
    """Answers by two actions, every other time by one."""

    def generate(self, requests, done=None):
        made = super().generate(requests, done)
        return [[replace(c, episode_id="e", turns=(Turn(start=0, end=1, text=c.text),) * (1 + i % 2)) for c in answers]
                for i, answers in enumerate(made)]


def test_turns_of_episodes_are_counted(tmp_path):
    r = replace(ready(), engine=Acting(lambda prompt, i: prompt.text))
    record, _ = evaluate(r.task, r.prefetch, r.engine, r.config, "heldout", 7)
    file, (setting,), _ = asked(r, tmp_path / "a.jsonl")
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    assert record["episode/turns_mean"] == found.metrics["episode/turns_mean"].mean == 1.5
    assert "episode/turns_mean" not in evaluate(r.task, r.prefetch, ready().engine, r.config, "heldout", 7)[0]


def test_rows_say_what_was_asked_and_how_it_went(tmp_path):
    r = ready()
    rows = asked(r, tmp_path / "a.jsonl", Grid(answers=2, seeds=(3, 4)))[0].rows()
    assert len(rows) == 10 * 2 * 2
    first, second = rows[:2]
    assert first["answer"] == first["parsed"] == first["target"] == "0" and second["answer"] == "wrong"
    assert (first["correct"], second["correct"]) == (True, False) and first["parts"] == {"right": 1.0}
    assert first["content"] == second["content"] != rows[2]["content"] and first["cluster"] == first["content"]
    assert first["prompt"] != rows[2]["prompt"] and first["sample"] == "heldout-0" and second["tokens"] == 5
    keys = [key for key, *_ in r.engine.asked]
    assert len(set(keys)) == 20 and all(len(key) == 3 for key in keys[:10]) and keys[10] == (*keys[0], 4)
    assert all(isinstance(row["tokens"], int) and np.isfinite(row["reward"]) for row in rows)
    assert {row["confidence"] for row in rows} == {None}
    file, *_ = asked(ready(lambda prompt, i: f"{prompt.text} <confidence>0.7</confidence>"), tmp_path / "b.jsonl")
    assert {row["confidence"] for row in file.rows()} == {0.7}


def test_what_is_there_is_not_asked_again(tmp_path):
    whole, *_ = asked(ready(), tmp_path / "whole.jsonl", Grid(answers=2))

    def dying(prompt, i):
        if prompt.text == "6":
            raise KeyboardInterrupt
        return prompt.text if i % 2 == 0 else "wrong"

    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        asked(ready(dying), path, Grid(answers=2))
    text = path.read_bytes()
    path.write_bytes(text[:-40])  # the last row of the first chunk is half there
    r = ready()
    file, _, told = asked(r, path, Grid(answers=2))
    assert len(r.engine.asked) == 10 and told[0] == ("answering heldout", 0, 20)
    assert file.rows() == whole.rows()
    r = ready()
    asked(r, path, Grid(answers=2))
    assert r.engine.asked == []


def test_samples_that_cannot_be_asked_are_left_out(tmp_path):
    BAD[3] = PromptTooLong("too long")
    file, (setting,), _ = asked(ready(), tmp_path / "a.jsonl")
    (left,) = [row for row in file.rows() if row.get("left_out")]
    assert left["number"] == 3 and left["left_out"] == "too long"
    found = summarise(Number(), file.rows(), setting, "heldout", first_samples(Number(), "heldout", 10))
    assert found.n == 9 and found.left_out == 1
    BAD[4] = DataError("broken")
    with pytest.raises(DataError, match="broken"):
        asked(ready(), tmp_path / "b.jsonl")
    BAD.clear()
    with pytest.raises(TrainingError, match=r"limits\.score_errors"):
        asked(ready(lambda *_: "-1"), tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="no samples in split"):
        empty = Number()
        empty.samples = lambda split: []
        asked(ready(task=empty), tmp_path / "d.jsonl")


class Failing(Noting):
    failing = ("1", "5")

    def generate(self, requests, done=None):
        return [[replace(c, tokens=c.tokens[:0], logprobs=c.logprobs[:0], loss_mask=c.loss_mask[:0], text="",
                         error="not answered: 500") if r.prompt.text in self.failing and i == 1 else c
                 for i, c in enumerate(row)] for r, row in zip(requests, super().generate(requests, done), strict=True)]


def test_answers_that_a_server_did_not_give_count_as_nothing_and_are_asked_again(tmp_path):
    r = ready(remote=True)
    engine = Failing(r.engine.script)
    r = replace(r, engine=engine)
    file, (setting,), _ = asked(r, tmp_path / "a.jsonl", Grid(answers=2))
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    assert found.unanswered == 2 and found.unscorable == 0 and found.n == 10
    assert found.metrics["correct_frac"].mean == pytest.approx((8 * 0.5 + 2) / 10)  # of the one that came
    assert found.metrics["pass@2"].mean == 1
    engine.asked, engine.failing = [], ()
    file, *_ = asked(r, tmp_path / "a.jsonl", Grid(answers=2))
    assert len(engine.asked) == 2 and not any(row.get("unanswered") for row in file.rows()) and len(file.rows()) == 20
